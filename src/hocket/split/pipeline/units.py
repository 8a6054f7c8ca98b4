"""Stages of a model that ``torch.fx`` cannot trace: each runs the model's own forward, in which only its own units compute.

Units are the outermost modules with parameters, around and in the model's lists of blocks: embeddings, each block, a last norm, a
head. The model's own code between them is part of every stage, and all stages read the same batch: positions, masks and rotary
tables are computed anew, not sent. Units before a stage return what was received, or zeros where nothing behind the border reads
it; the first unit behind it ends the forward pass.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from hocket.errors import HocketError
from hocket.split.inputs import Inputs, call, first_tensor
from hocket.split.pipeline.trace import BLOCKS, Wire

Leaf = tuple[int, int]
"""A tensor in the output of a unit: the number of the call, and its place in the output."""


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules with parameters that are blocks of a list, or contain none.

    >>> units_of(nn.ModuleDict({"token": nn.Embedding(3, 4), "blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})).keys()
    dict_keys(['token', 'blocks.0', 'blocks.1'])
    """
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        for name, child in module.named_children():
            if isinstance(module, BLOCKS) or not any(isinstance(m, BLOCKS) for m in child.modules()):
                if any(True for _ in child.parameters()):
                    found.setdefault(child, f"{prefix}{name}")
            else:
                waiting.append((f"{prefix}{name}.", child))
    return {name: module for module, name in found.items()}


@dataclass
class Call:
    """One call of a unit."""

    name: str
    module: nn.Module
    cost: tuple[float, float]
    spec: TreeSpec
    leaves: list[Any]
    """What its output consists of, tensors without values."""
    reads: set[Leaf]
    trained: bool = True
    """Whether a gradient comes back to its output."""


Route = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
"""Another forward for a module of that name with that forward."""


@contextmanager
def forwards(units: dict[str, nn.Module], route: Route) -> Iterator[None]:
    """Inside, the modules have other forwards."""
    before = {module: vars(module).get("forward") for module in units.values()}
    for name, module in units.items():
        module.forward = route(name, module, module.forward)
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:
                module.forward = own


class _Ended(BaseException):
    """The last unit of a stage has run; no handler of the model's own code may catch it."""


class RecordedStage(nn.Module):
    """The units between two borders of a recorded model; its modules are the model's own, under their names in it."""

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Call],
        span: range,
        wires: Mapping[Leaf, Wire],
        shapes: Callable[[Inputs], Mapping[str, tuple[int, ...]]],
        enter: Sequence[Leaf],
        leave: Sequence[Leaf],
        unused: Sequence[nn.Module] = (),
    ) -> None:
        """``span``: the calls that are made here; ``shapes``: those that ``wires`` have for a batch; ``enter`` and ``leave``: what
        crosses its borders; ``unused``: what else is held here."""
        super().__init__()
        self.calls, self.span, self.wires, self.shapes, self.enter, self.leave = calls, span, wires, shapes, enter, leave
        self.own = [calls[i].module for i in span]
        self.kept = {id(m) for m in (*self.own, *unused)}
        self.model = (model,)  # kept out of this module's children
        self.marking = False
        held = pruned(model, self.kept)
        self._modules, self._parameters, self._buffers = held._modules, held._parameters, held._buffers

    def forward(self, x: Inputs, *values: Tensor) -> Any:
        """What leaves the stage, as a tuple; from the last stage the model's output. ``values`` are those that enter."""
        made: dict[Leaf, Any] = dict(zip(self.enter, values, strict=True))
        trains = torch.is_grad_enabled() and self.own[0].training
        marks: list[Any] = []
        model, count, inside = self.model[0], itertools.count(), False
        shapes = self.shapes(x) if self.span.start else {}
        for module in around(model, units_of(model).values()):
            module.training = self.own[0].training

        def routed(name: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return original(*args, **kwargs)
                i = next(count)
                self._check(i, name)
                if trains:
                    refuse_reentrant()
                if i >= self.span.stop:
                    raise _Ended
                if i < self.span.start:
                    return self._stand_in(i, made, shapes, first_tensor(x).device)
                inside = True
                output = original(*args, **kwargs)
                inside = False
                made.update(((i, j), _sent(leaf, (i, j) in self.leave)) for j, leaf in enumerate(tree_leaves(output)))
                marks.append(output)
                return output

            return forward

        try:
            with forwards(units_of(model), routed):
                given = call(model, x)
        except _Ended:
            given = tuple(made[leaf] for leaf in self.leave)
        return (given, marks) if self.marking else given

    def _check(self, i: int, name: str) -> None:
        if i >= len(self.calls) or self.calls[i].name != name:
            wanted = "the end" if i >= len(self.calls) else f"'{self.calls[i].name}'"
            raise HocketError(
                f"{type(self.model[0]).__name__} called '{name}' where it called {wanted} for hocket.Pipeline(sample=…), by which "
                "it was cut: give inputs of the same kinds, such as the same keys."
            )

    def _stand_in(self, i: int, made: Mapping[Leaf, Any], shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> Any:
        """The output of a unit before this stage: what was received, and zeros for what nobody reads."""
        c = self.calls[i]

        def found(j: int, leaf: Any) -> Any:
            if (i, j) in made or not isinstance(leaf, Tensor):
                return _sent(made.get((i, j), leaf), True)
            return torch.zeros(shapes[self.wires[i, j].name], dtype=leaf.dtype, device=device)

        return tree_unflatten([found(j, leaf) for j, leaf in enumerate(c.leaves)], c.spec)

    def marked(self) -> tuple[nn.Module, list[list[nn.Parameter]], list[nn.Parameter]]:
        """The stage with the outputs of its units as a second output; their parameters; all others."""
        self.marking = True
        used = [[p for p in m.parameters() if p.requires_grad] for m in self.own]
        count = Counter(p for parameters in used for p in parameters)
        single = [self.calls[i].spec.is_leaf() for i in self.span]
        owned = [[p for p in ps if alone and count[p] == 1] for ps, alone in zip(used, single, strict=True)]
        listed = {id(p) for ps in owned for p in ps}
        return self, owned, [p for p in self.parameters() if p.requires_grad and id(p) not in listed]


def pruned(module: nn.Module, kept: Collection[int]) -> nn.Module:
    """A module of the units ``kept`` (their ids) and of all that is in no unit, under the same names."""
    units = {id(m) for m in units_of(module).values()}

    def branch(part: nn.Module) -> nn.Module:
        copy = nn.Module()
        copy._parameters, copy._buffers = part._parameters, part._buffers
        copy._non_persistent_buffers_set = part._non_persistent_buffers_set
        for name, child in part._modules.items():
            if child is None or id(child) in units:
                if child is not None and id(child) in kept:
                    copy._modules[name] = child
            elif any(id(m) in units for m in child.modules()):
                copy._modules[name] = branch(child)
            else:
                copy._modules[name] = child
        return copy

    return branch(module)


def around(model: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    """The modules that contain units."""
    inner = {id(m) for m in units}
    return [m for m in model.modules() if id(m) not in inner and any(id(part) in inner for part in m.modules())]


def _sent(value: Any, copied: bool) -> Any:
    """A value that the model may change in place without changing what was received, or is sent."""
    return value.clone() if copied and isinstance(value, Tensor) else value


def refuse_reentrant() -> None:
    """Refuse to compute in a checkpoint of PyTorch's reentrant kind: it has no graph, and runs again in the backward pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise HocketError("A model with reentrant checkpointing cannot be cut; use checkpoint(…, use_reentrant=False).")
        frame = frame.f_back
