"""The computation of one stage: the forward of a micro-batch, and its backward, whole or in halves.

A whole backward adds to the parameters' gradients. In halves, the first computes the gradients of the stage's inputs and
of the output of each unit with parameters; the second computes the parameters' gradients from these, unit by unit. Nothing is
computed twice, except inside a unit that contains several layers: both halves compute its inner gradients. The first half computes
the gradients of parameters that several units of a stage use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from hocket.split.pipeline.trace import Wire

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass
class _Kept:
    """What the backward of a micro-batch needs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    marks: list[Tensor]
    grads: list[Tensor] | None = None


class Stage:
    """A part of a model, and the micro-batches between their forward and backward."""

    def __init__(self, module: fx.GraphModule, enter: Sequence[Wire], leave: Sequence[Wire], halves: bool = False) -> None:
        """``enter`` and ``leave`` are the tensors that cross its borders; ``halves``: whether backwards are computed in halves."""
        self.enter, self.leave, self.halves = tuple(enter), tuple(leave), halves
        self.module, self._owned, self._shared = _marked(module) if halves else (module, [], [])
        self._kept: dict[int, _Kept] = {}
        self._halved: dict[int, list[tuple[Tensor, list[nn.Parameter], Tensor]]] = {}

    def forward(self, microbatch: int, values: Sequence[Tensor], finish: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Outputs for the next stage; with ``finish`` (the last stage) the loss that it computes from the output."""
        inputs = (
            [v.detach().requires_grad_(w.grad) for v, w in zip(values, self.enter, strict=True)] if self.enter else list(values)
        )
        given = self.module(*inputs)
        given, marks = given if self.halves else (given, [])
        # Under autocast a value may have another dtype than the agreed one.
        outputs = [t.to(w.dtype) for t, w in zip(given, self.leave, strict=True)] if finish is None else [finish(given)]
        self._kept[microbatch] = _Kept(inputs, outputs, list(marks))
        return [out.detach() for out in outputs]

    def only_forward(self, values: Sequence[Tensor], last: bool) -> list[Tensor]:
        """Outputs, with nothing kept."""
        given = self.module(*values)
        given = given[0] if self.halves else given
        return [given] if last else [t.to(w.dtype) for t, w in zip(given, self.leave, strict=True)]

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that require one; the parameters' gradients are added to ``p.grad``."""
        kept = self._kept.pop(microbatch)
        outputs, grads_ = self._wanted(kept, grads)
        if outputs:
            torch.autograd.backward(outputs, grads_)
        return [_or_zeros(v.grad, v) for v, w in zip(kept.inputs, self.enter, strict=False) if w.grad]

    def backward_input(self, microbatch: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """The first half: gradients of the inputs. Where no input requires one, the second half computes everything."""
        kept = self._kept[microbatch]
        wanted = [v for v, w in zip(kept.inputs, self.enter, strict=False) if w.grad]
        if not wanted:
            kept.grads = list(grads)
            return []
        del self._kept[microbatch]
        outputs, grads_ = self._wanted(kept, grads)
        owned = [(m, ps) for m, ps in zip(kept.marks, self._owned, strict=True) if isinstance(m, Tensor) and m.requires_grad]
        marks = [m for m, _ in owned]
        found = torch.autograd.grad(
            outputs, [*wanted, *marks, *self._shared], grads_, retain_graph=True, allow_unused=True, materialize_grads=False
        )
        for parameter, grad in zip(self._shared, found[len(wanted) + len(marks) :], strict=True):
            _add(parameter, grad)
        at_marks = found[len(wanted) : len(wanted) + len(marks)]
        self._halved[microbatch] = [(m, ps, g) for (m, ps), g in zip(owned, at_marks, strict=True) if g is not None]
        return [_or_zeros(g, v) for g, v in zip(found, wanted, strict=False)]

    def backward_weight(self, microbatch: int) -> None:
        """The second half: gradients of the parameters."""
        if microbatch in self._kept:
            self.backward(microbatch, self._kept[microbatch].grads or [])
            return
        for mark, parameters, grad in self._halved.pop(microbatch):
            for parameter, own in zip(parameters, torch.autograd.grad(mark, parameters, grad, allow_unused=True), strict=True):
                _add(parameter, own)

    def _wanted(self, kept: _Kept, grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs that have a gradient, and these gradients; a loss needs none."""
        if not self.leave:
            return [out for out in kept.outputs if out.requires_grad], None
        return [out for out, wire in zip(kept.outputs, self.leave, strict=True) if wire.grad], list(grads)


def _marked(module: fx.GraphModule) -> tuple[fx.GraphModule, list[list[nn.Parameter]], list[nn.Parameter]]:
    """The stage with the outputs of its units with parameters as a second output; their parameters; parameters of several units."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    used = {node: _parameters(module, node) for node in module.graph.nodes if node.op.startswith("call_")}
    count: dict[nn.Parameter, int] = {}
    for parameters in used.values():
        for p in parameters:
            count[p] = count.get(p, 0) + 1
    owned = {node: [p for p in ps if count[p] == 1] for node, ps in used.items()}
    owned = {node: ps for node, ps in owned.items() if ps}
    output = next(n for n in module.graph.nodes if n.op == "output").args[0]
    graph.output((fx.map_arg(output, lambda n: copies[n]), tuple(copies[n] for n in owned)))
    return fx.GraphModule(module, graph), list(owned.values()), [p for p, times in count.items() if times > 1]


def _parameters(module: fx.GraphModule, node: fx.Node) -> list[nn.Parameter]:
    """The trainable parameters of a unit."""
    own = list(module.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []
    named = [module.get_parameter(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr" and _is_parameter(module, n)]
    return [p for p in dict.fromkeys(own + named) if p.requires_grad]


def _is_parameter(module: fx.GraphModule, node: fx.Node) -> bool:
    return str(node.target) in dict(module.named_parameters(remove_duplicate=False))


def _add(parameter: nn.Parameter, grad: Tensor | None) -> None:
    if grad is not None:
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
