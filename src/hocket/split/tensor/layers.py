"""Split layers: each holds only this process's part of a layer's parameters, under the names of the whole layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.split.axis import Axis, copied, gathered, summed
from hocket.split.parts import Part


class ParameterSlicer:
    """Cuts parameters for one process and records each part's position; values are copied, never read, so meta tensors work."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.lies: dict[int, Part] = {}
        self._made: dict[tuple[int, Part], tuple[Tensor, nn.Parameter]] = {}

    def __call__(self, whole: nn.Parameter, dim: int, blocks: int = 1) -> nn.Parameter:
        """This process's part along ``dim`` of each of ``blocks`` blocks; the same parameter twice gives the same part twice."""
        if self.axis.size == 1:
            return whole
        part = Part.even(whole, dim, self.axis.place, self.axis.size, blocks)
        if (id(whole), part) not in self._made:
            own = nn.Parameter(part.take(whole.detach()).contiguous(), whole.requires_grad)
            self._made[id(whole), part] = whole, own  # keeps the whole alive: its id must not be reused
            self.lies[id(own)] = part
        return self._made[id(whole), part][1]

    def rename(self, model: nn.Module) -> None:
        """Modules that give a parameter another name get the part that was made of it."""
        parts = {id(whole): own for whole, own in self._made.values()}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in parts and not isinstance(module, SplitLayer):
                    module._parameters[name] = parts[id(parameter)]


class Entry:
    """The entry of a whole tensor into one or several split layers: it is copied once, so that its gradient is summed once."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.layers, self._left = axis, 1, 0
        self._given: Tensor | None = None
        self._copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x is not self._given or self._copy is None:
            self._given, self._copy, self._left = x, copied(x, self.axis), self.layers
        entered, self._left = self._copy, self._left - 1
        if not self._left:
            self._given = self._copy = None
        return entered


class SplitLayer(nn.Module):
    """A layer like another one, with this process's part of its parameters."""

    whole = True

    def __init__(self, layer: nn.Module, cut: ParameterSlicer, dims: dict[str, int], blocks: int = 1) -> None:
        """``dims``: along which dimension parameters are split, by name; others stay whole. Along it they consist of ``blocks``
        consecutive blocks, such as query, key and value; each is split."""
        vars(self).update(vars(layer), _modules=dict(layer._modules))
        for own in ("forward", "_compiled_call_impl"):  # set on the layer itself, they would compute with the whole one
            vars(self).pop(own, None)
        self._parameters = {
            name: cut(p, dims[name], blocks) if p is not None and name in dims else p for name, p in layer._parameters.items()
        }
        self.axis, self.enter = cut.axis, Entry(cut.axis)


def transposed(module: nn.Module) -> bool:
    """Whether a layer is a Linear whose weight is stored as ``[inputs, outputs]``: the Conv1D of GPT-2 in transformers."""
    weight = module._parameters.get("weight")  # read past a tracer
    return type(module).__name__ == "Conv1D" and weight is not None and [*weight.shape] == [module.nx, module.nf]


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or transposed(module)


def features(linear: nn.Module) -> tuple[int, int]:
    """The widths of inputs and outputs."""
    inputs, outputs = (linear.nx, linear.nf) if transposed(linear) else (linear.in_features, linear.out_features)
    return int(inputs), int(outputs)  # type: ignore[arg-type]


class SplitLinear(SplitLayer, nn.Linear):
    """A Linear split along one dimension of its weight, however that is stored."""

    def __init__(self, linear: nn.Module, cut: ParameterSlicer, dims: dict[str, int], blocks: int = 1) -> None:
        """``dims`` are those of a weight ``[outputs, inputs]``."""
        flipped = transposed(linear)
        super().__init__(linear, cut, {**dims, "weight": dims["weight"] ^ flipped}, blocks)
        self.in_features, self.out_features = features(linear)
        self.transposed = flipped

    def matrix(self) -> Tensor:
        return self.weight.T if self.transposed else self.weight


class ColumnLinear(SplitLinear):
    """``Y_p = X A_p + b_p``: some of the outputs of a whole input. ``X`` is whole; its gradient is summed."""

    def __init__(self, linear: nn.Module, cut: ParameterSlicer, blocks: int = 1) -> None:
        super().__init__(linear, cut, {"weight": 0, "bias": 0}, blocks)
        self.out_features //= self.axis.size

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x), self.matrix(), self.bias)


class GatheredLinear(ColumnLinear):
    """The classical intra-layer scheme: ``K/P`` neurons each, and all processes gather all outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(x), self.axis)


class RowLinear(SplitLinear):
    """``Y = Σ_p X_p A_p + b``: the input is split, as ``ColumnLinear`` returns it; the bias is added once, to the sum."""

    def __init__(self, linear: nn.Module, cut: ParameterSlicer) -> None:
        super().__init__(linear, cut, {"weight": 1})
        self.in_features //= self.axis.size

    def forward(self, x: Tensor) -> Tensor:
        check_split_input(x, self.in_features, self.axis)
        total = summed(F.linear(x, self.matrix()), self.axis)
        return total if self.bias is None else total + self.bias


class GatheredConv2d(SplitLayer, nn.Conv2d):
    """The classical intra-layer scheme: ``K/P`` channels each, and all processes gather all channels."""

    def __init__(self, conv: nn.Conv2d, cut: ParameterSlicer) -> None:
        super().__init__(conv, cut, {"weight": 0, "bias": 0})
        self.out_channels //= self.axis.size

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(self.enter(x)), self.axis, dim=-3)


class SplitEmbedding(SplitLayer, nn.Embedding):
    """``V/P`` rows of the vocabulary each: a process looks up its own tokens, and the sum over processes is the whole embedding."""

    def __init__(self, embedding: nn.Embedding, cut: ParameterSlicer) -> None:
        super().__init__(embedding, cut, {"weight": 0})
        self.num_embeddings //= self.axis.size
        self.first = self.axis.place * self.num_embeddings
        padding = -1 if self.padding_idx is None else self.padding_idx - self.first
        # padding_idx stays that of the whole: reset_parameters() fills the whole embedding.
        self.own_padding = padding if 0 <= padding < self.num_embeddings else None

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        foreign = (own < 0) | (own >= self.num_embeddings)
        found = F.embedding(own.masked_fill(foreign, 0), self.weight, self.own_padding)
        return summed(found.masked_fill(foreign.unsqueeze(-1), 0.0), self.axis)


class SplitLogits(SplitLayer):
    """The vocabulary projection: logits of this process's part of the vocabulary, gathered on all processes."""

    def __init__(self, logits: nn.Module, cut: ParameterSlicer) -> None:
        super().__init__(logits, cut, {})

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return gathered(F.linear(copied(x, self.axis), embedding), self.axis)


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` wherever ``model`` has it, at the same place in its parent, so that names and their order stay."""
    if model is old:
        raise HocketError(f"The model is a single {type(old).__name__}, which cannot replace itself: wrap it in nn.Sequential.")
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def check_split_input(x: Tensor, width: int, axis: Axis) -> None:
    """Refuse an input that is not split as the plan states."""
    if x.shape[-1] != width:
        raise HocketError(
            f"A layer split by 'rows' or 'rotate' reads {width} of {width * axis.size} inputs on each process, but got "
            f"{x.shape[-1]}: plan 'columns' for the layer before it, or 'gather' for this one."
        )


def spared(module: nn.Module) -> bool:
    """Whether a layer has hooks or options that a split layer would ignore, such as max_norm."""
    hooked = bool(module._forward_pre_hooks or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
    if isinstance(module, nn.Embedding):
        return hooked or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    grouped = isinstance(module, nn.Conv2d) and module.groups != 1
    return hooked or grouped or any(type(p.data) is not torch.Tensor for p in module.parameters())
