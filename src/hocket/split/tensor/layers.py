"""Split layers: each holds only this process's part of a layer's parameters, under the names of the whole layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.split.axis import Axis
from hocket.split.functions import copied, gathered, summed
from hocket.split.parts import Part


class ParameterSlicer:
    """Cuts parameters for one process and records each part's position; values are copied, never read, so meta tensors work."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.lies: dict[int, Part] = {}
        self._made: dict[tuple[int, Part], tuple[Tensor, nn.Parameter]] = {}

    def __call__(self, whole: Tensor, dim: int, blocks: int = 1) -> nn.Parameter:
        """This process's part along ``dim`` of each of ``blocks`` blocks; the same parameter twice gives the same part twice."""
        part = Part.even(whole, dim, self.axis.place, self.axis.size, blocks)
        if (id(whole), part) not in self._made:
            own = nn.Parameter(part.take(whole.detach()).contiguous(), whole.requires_grad)
            self._made[id(whole), part] = whole, own  # keeps the whole alive: its id must not be reused
            self.lies[id(own)] = part
        return self._made[id(whole), part][1]

    def forget_wholes(self) -> None:
        """Release the whole parameters."""
        self._made.clear()


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


class ColumnLinear(nn.Linear):
    """``Y_p = X A_p + b_p``: some of the outputs of a whole input. ``X`` is whole; its gradient is summed."""

    whole = True

    def __init__(self, linear: nn.Linear, cut: ParameterSlicer, blocks: int = 1) -> None:
        """The outputs consist of ``blocks`` consecutive blocks, such as query, key and value; each is split."""
        super().__init__(linear.in_features, linear.out_features // cut.axis.size, linear.bias is not None, device="meta")
        self.axis, self.enter = cut.axis, Entry(cut.axis)
        self.weight = cut(linear.weight, 0, blocks)
        if linear.bias is not None:
            self.bias = cut(linear.bias, 0, blocks)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x), self.weight, self.bias)


class GatheredLinear(ColumnLinear):
    """The classical intra-layer scheme: ``K/P`` neurons each, and all processes gather all outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(x), self.axis)


class RowLinear(nn.Linear):
    """``Y = Σ_p X_p A_p + b``: the input is split, as ``ColumnLinear`` returns it; the bias is added once, to the sum."""

    whole = True

    def __init__(self, linear: nn.Linear, cut: ParameterSlicer) -> None:
        super().__init__(linear.in_features // cut.axis.size, linear.out_features, linear.bias is not None, device="meta")
        self.axis = cut.axis
        self.weight = cut(linear.weight, 1)
        if linear.bias is not None:
            self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        check_split_input(x, self.in_features, self.axis)
        total = summed(F.linear(x, self.weight), self.axis)
        return total if self.bias is None else total + self.bias


class GatheredConv2d(nn.Conv2d):
    """The classical intra-layer scheme: ``K/P`` channels each, and all processes gather all channels."""

    whole = True

    def __init__(self, conv: nn.Conv2d, cut: ParameterSlicer) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels // cut.axis.size,
            conv.kernel_size,  # type: ignore[arg-type]
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            conv.dilation,  # type: ignore[arg-type]
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",
        )
        self.axis, self.enter = cut.axis, Entry(cut.axis)
        self.weight = cut(conv.weight, 0)
        if conv.bias is not None:
            self.bias = cut(conv.bias, 0)
        self.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(self.enter(x)), self.axis, dim=-3)


class SplitEmbedding(nn.Embedding):
    """``V/P`` rows of the vocabulary each: a process looks up its own tokens, and the sum over processes is the whole embedding."""

    whole = True

    def __init__(self, embedding: nn.Embedding, cut: ParameterSlicer) -> None:
        super().__init__(embedding.num_embeddings // cut.axis.size, embedding.embedding_dim, device="meta")
        self.axis, self.first = cut.axis, cut.axis.place * self.num_embeddings
        self.weight = cut(embedding.weight, 0)
        padding = embedding.padding_idx
        if padding is not None and 0 <= padding - self.first < self.num_embeddings:
            self.padding_idx = padding - self.first
        self.train(embedding.training)

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        foreign = (own < 0) | (own >= self.num_embeddings)
        found = F.embedding(own.masked_fill(foreign, 0), self.weight, self.padding_idx)
        return summed(found.masked_fill(foreign.unsqueeze(-1), 0.0), self.axis)


class SplitLogits(nn.Module):
    """The vocabulary projection: logits of this process's part of the vocabulary, gathered on all processes."""

    whole = True

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return gathered(F.linear(copied(x, self.axis), embedding), self.axis)


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
    return hooked or (isinstance(module, nn.Conv2d) and module.groups != 1) or any(not _plain(p) for p in module.parameters())


def _plain(parameter: nn.Parameter) -> bool:
    return type(parameter.data) is torch.Tensor
