"""The computation of one stage: the forward of a micro-batch, and its backward, whole or in halves; and its messages.

A whole backward adds to the parameters' gradients. In halves, the first computes the gradients of the stage's inputs and
of the output of each unit with parameters; the second computes the parameters' gradients from these, unit by unit. Nothing is
computed twice, except inside a unit that contains several layers: both halves compute its inner gradients. The first half computes
the gradients of parameters that several units of a stage use.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from hocket.split.axis import Axis
from hocket.split.inputs import Inputs, first_tensor
from hocket.split.pipeline.trace import Wire
from hocket.split.pipeline.units import RecordedStage, pruned

LossFunction = Callable[[Any, Any], Tensor]
Way = Literal["ahead", "back"]
Key = tuple[int, Way, int]
"""A border (border ``k`` lies between stages ``k`` and ``k + 1``), a direction, and a micro-batch."""
_MICROBATCHES, _WIRES = 1 << 10, 1 << 5
"""Tags repeat beyond these; messages of one tag arrive in order."""


@dataclass
class _Kept:
    """What the backward of a micro-batch needs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    marks: list[Tensor]
    weights: dict[str, Tensor] | None
    grads: Sequence[Tensor] = ()


class Stage:
    """A part of a model, and the micro-batches between their forward and backward.

    ``enter`` and ``leave`` are the tensors that cross its borders. ``halves``: backwards are computed in halves. ``stash``: a
    backward uses the weights of its forward, although the stage may have been updated since; it sets gradients, others add to them.
    """

    def __init__(
        self, module: nn.Module, enter: Sequence[Wire], leave: Sequence[Wire], halves: bool = False, stash: bool = False
    ) -> None:
        self.enter, self.leave, self.halves, self.stash = tuple(enter), tuple(leave), halves, stash
        self.module, self._owned, self._shared = _marked(module) if halves else (module, [], [])
        self._reads_batch = isinstance(module, RecordedStage) or not enter
        self._kept: dict[int, _Kept] = {}
        self._halved: dict[int, list[tuple[Tensor, list[nn.Parameter], Tensor]]] = {}
        self._weights: dict[str, Tensor] | None = None

    def forward(
        self, microbatch: int, x: Inputs, values: Sequence[Tensor], finish: Callable[[Any], Tensor] | None = None
    ) -> list[Tensor]:
        """Outputs for the next stage, from the batch and what the previous stage sent; with ``finish`` (the last stage) the loss
        that it computes from the output."""
        inputs = [v.detach().requires_grad_(w.grad) for v, w in zip(values, self.enter, strict=True)]
        weights, read = self._newest() if self.stash else None, self._read(x, inputs)
        given = self.module(*read) if weights is None else functional_call(self.module, weights, read)
        given, marks = given if self.halves else (given, [])
        outputs = self._left(given) if finish is None else [finish(given)]
        self._kept[microbatch] = _Kept(inputs, outputs, list(marks), weights)
        return [out.detach() for out in outputs]

    def only_forward(self, x: Inputs, values: Sequence[Tensor], last: bool) -> list[Any]:
        """Outputs, with nothing kept."""
        given = self.module(*self._read(x, values))
        given = given[0] if self.halves else given
        return [given] if last else self._left(given)

    def expected(self, x: Inputs, wires: Sequence[Wire]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shapes and types of what crosses a border of this stage for a batch."""
        shapes = self.module.shapes(x) if isinstance(self.module, RecordedStage) else {}
        return [(shapes.get(wire.name, wire.shape(len(first_tensor(x)))), wire.dtype) for wire in wires]

    def _read(self, x: Inputs, values: Sequence[Tensor]) -> tuple[Any, ...]:
        return (x, *values) if self._reads_batch else tuple(values)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that require one; the parameters' gradients are added to ``p.grad``."""
        kept = self._kept.pop(microbatch)
        outputs, coming = self._wanted(kept, grads)
        if outputs:
            torch.autograd.backward(outputs, coming)
        if kept.weights is not None:
            parameters = dict(self.module.named_parameters())
            for name, weight in kept.weights.items():
                parameters[name].grad, weight.grad = weight.grad, None
        return [_or_zeros(v.grad, v) for v, w in zip(kept.inputs, self.enter, strict=False) if w.grad]

    def backward_input(self, microbatch: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """The first half: gradients of the inputs. Where no input requires one, the second half computes everything."""
        kept = self._kept[microbatch]
        wanted = [v for v, w in zip(kept.inputs, self.enter, strict=False) if w.grad]
        if not wanted:
            kept.grads = grads
            return []
        del self._kept[microbatch]
        outputs, coming = self._wanted(kept, grads)
        owned = [(m, ps) for m, ps in zip(kept.marks, self._owned, strict=True) if isinstance(m, Tensor) and m.requires_grad]
        leaves = [*wanted, *(m for m, _ in owned), *self._shared]
        found = torch.autograd.grad(outputs, leaves, coming, retain_graph=True, allow_unused=True)
        at_marks, at_shared = found[len(wanted) : len(wanted) + len(owned)], found[len(wanted) + len(owned) :]
        _add(self._shared, at_shared)
        self._halved[microbatch] = [(m, ps, g) for (m, ps), g in zip(owned, at_marks, strict=True) if g is not None]
        return [_or_zeros(g, v) for g, v in zip(found, wanted, strict=False)]

    def backward_weight(self, microbatch: int) -> None:
        """The second half: gradients of the parameters."""
        if microbatch in self._kept:
            self.backward(microbatch, self._kept[microbatch].grads)
            return
        for mark, parameters, grad in self._halved.pop(microbatch):
            _add(parameters, torch.autograd.grad(mark, parameters, grad, allow_unused=True))

    def _left(self, given: Sequence[Tensor]) -> list[Tensor]:
        # Under autocast a value may have another dtype than the agreed one.
        return [t.to(w.dtype) for t, w in zip(given, self.leave, strict=True)]

    def _wanted(self, kept: _Kept, grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs that have a gradient, and these gradients; a loss needs none."""
        if not self.leave:
            return [out for out in kept.outputs if out.requires_grad], None
        outputs = [out for out, wire in zip(kept.outputs, self.leave, strict=True) if wire.grad]
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        return [out for out, _ in pairs], [grad for _, grad in pairs]

    # --- stashed weights -----------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> int:
        """How many versions of its weights the stage keeps at the moment, its newest included."""
        return len({id(w) for w in (self._weights, *(kept.weights for kept in self._kept.values())) if w is not None})

    def updated(self) -> None:
        """The parameters have changed; micro-batches in flight keep the weights that they had."""
        self._weights = None

    def _newest(self) -> dict[str, Tensor]:
        """The newest weights, in a copy that later updates do not change; the last stage, whose backward comes next, needs none."""
        if self._weights is None:
            own = self.module.named_parameters()
            copies = ((name, p, p.detach().clone() if self.leave else p.detach()) for name, p in own)
            self._weights = {name: copy.requires_grad_(p.requires_grad) for name, p, copy in copies}
        return self._weights


def _marked(module: nn.Module) -> tuple[nn.Module, list[list[nn.Parameter]], list[nn.Parameter]]:
    """The stage with the outputs of its units with parameters as a second output; their parameters; parameters of several units."""
    if isinstance(module, RecordedStage):
        return module.marked()
    assert isinstance(module, fx.GraphModule)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    used = {node: _parameters(module, node) for node in module.graph.nodes if node.op.startswith("call_")}
    count = Counter(p for parameters in used.values() for p in parameters)
    owned = {node: own for node, ps in used.items() if (own := [p for p in ps if count[p] == 1])}
    output = next(n for n in module.graph.nodes if n.op == "output").args[0]
    graph.output((fx.map_arg(output, lambda n: copies[n]), tuple(copies[n] for n in owned)))
    return fx.GraphModule(module, graph), list(owned.values()), [p for p, times in count.items() if times > 1]


def _parameters(module: fx.GraphModule, node: fx.Node) -> list[nn.Parameter]:
    """The trainable parameters of a unit."""
    own = list(module.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    read = [operator.attrgetter(str(n.target))(module) for n in node.all_input_nodes if n.op == "get_attr"]
    return [p for p in dict.fromkeys(own + [v for v in read if isinstance(v, nn.Parameter)]) if p.requires_grad]


def _add(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def held(stages: Sequence[nn.Module]) -> nn.Module:
    """A module of all that these stages use; ``named_parameters``, ``state_dict`` and ``train`` are as in the whole model.

    >>> whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> [name for name, _ in held([fx.symbolic_trace(whole)]).named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    if len(stages) == 1:
        return stages[0]
    if isinstance(stages[0], RecordedStage):
        return pruned(stages[0].model[0], set().union(*(s.kept for s in stages if isinstance(s, RecordedStage))))
    root = nn.Module()
    for op in ("call_module", "get_attr"):
        for stage, node in [(s, n) for s in stages if isinstance(s, fx.GraphModule) for n in s.graph.nodes if n.op == op]:
            *parents, last = str(node.target).split(".")
            module = root
            for name in parents:
                if not hasattr(module, name):
                    module.add_module(name, nn.Module())
                module = getattr(module, name)
            if op == "get_attr" and hasattr(module, last):
                continue
            value = operator.attrgetter(str(node.target))(stage)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                module.register_buffer(last, value)
            else:
                setattr(module, last, value)
    return root


@dataclass
class StageComm:
    """A process's messages to and from neighbouring stages: activations ahead, gradients back.

    All are sent and received in the background, from and to host memory (Gloo supports nothing else).
    """

    axis: Axis
    device: torch.device
    _coming: dict[Key, list[tuple[Tensor, Any]]] = field(default_factory=dict)
    _leaving: dict[Key, list[tuple[Tensor, Any]]] = field(default_factory=dict)
    _here: dict[Key, list[Tensor]] = field(default_factory=dict)

    def send(self, border: int, way: Way, microbatch: int, values: Sequence[Tensor]) -> None:
        """Start sending. The tensors must not be changed afterwards."""
        key, to = (border, way, microbatch), (border + (way == "ahead")) % self.axis.size
        if to == self.axis.place:
            self._here[key] = list(values)
            return
        whole = [value.contiguous().cpu() for value in values]
        self._leaving.setdefault(key, []).extend((v, self.axis.send(v, to, _tag(key, i))) for i, v in enumerate(whole))

    def expect(self, border: int, way: Way, microbatch: int, tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Start receiving; does nothing when that was done before."""
        key, source = (border, way, microbatch), (border + (way == "back")) % self.axis.size
        if key in self._coming or source == self.axis.place:
            return
        into = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in tensors]
        self._coming[key] = [(t, self.axis.receive(t, source, _tag(key, i))) for i, t in enumerate(into)]

    def take(self, border: int, way: Way, microbatch: int) -> list[Tensor]:
        """Wait for an expected message; its tensors."""
        key = (border, way, microbatch)
        if key in self._here:
            return self._here.pop(key)
        coming = self._coming.pop(key)
        for _, work in coming:
            self.axis.wait(work)
        return [value.to(self.device) for value, _ in coming]

    def sent(self, border: int, way: Way, microbatch: int) -> None:
        """Release a message that has arrived."""
        for _, work in self._leaving.pop((border, way, microbatch), []):
            self.axis.wait(work)

    def settle(self) -> None:
        """Wait until all messages have been sent."""
        for key in list(self._leaving):
            self.sent(*key)


def _tag(key: Key, wire: int) -> int:
    border, way, microbatch = key
    return ((border * 2 + (way == "back")) * _MICROBATCHES + microbatch % _MICROBATCHES) * _WIRES + wire
