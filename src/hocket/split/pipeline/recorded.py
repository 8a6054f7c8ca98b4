"""The units of a model that ``torch.fx`` cannot trace, found by running it on a sample.

What crosses a border is read from autograd's graph: in the recorded run every output of a unit is a leaf, and the leaves before a
border that the inputs of units behind it, or the model's output, are computed from are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hocket.errors import HocketError
from hocket.split.inputs import Inputs, alike, arguments, first_tensor, joined, map_samples, outputs
from hocket.split.parts import evaluating
from hocket.split.pipeline.probe import MEASURES, MEMORY, TRIALS, estimate, seconds
from hocket.split.pipeline.trace import Units, Wire
from hocket.split.pipeline.units import Call, Leaf, RecordedStage, forwards, refuse_reentrant, units_of


def recorded(model: nn.Module, sample: Inputs, measure: str) -> Units:
    """The units of ``model`` in the order in which they ran."""
    if measure not in MEASURES:
        raise HocketError(f"Units are measured by {' or '.join(MEASURES)}; got '{measure}': use flops.")
    run = _run(model, sample, measure)
    more = _run(model, map_samples(sample, lambda t: torch.cat([t, t[:1]])), None)
    calls, batch = run.calls, len(first_tensor(sample))
    if [c.name for c in calls] != [c.name for c in more.calls]:
        raise HocketError(f"{type(model).__name__} calls its modules in another order for each batch, so it cannot be cut.")
    _find_trained(run)
    wires = {
        (i, j): Wire.between(f"{i}: {c.name}, {j}", batch, value, more.calls[i].leaves[j], c.trained and value.requires_grad)
        for i, c in enumerate(calls)
        for j, value in enumerate(c.leaves)
        if isinstance(value, Tensor)
    }
    crossing = [_crossing(run, border) for border in range(len(calls) + 1)]
    able = [0 < border < len(calls) and bool(leaves) for border, leaves in enumerate(crossing)]
    unused = [m for m in units_of(model).values() if all(m is not c.module for c in calls)]

    shapes = _Shapes(model, wires)

    def stage(start: int, end: int) -> nn.Module:
        leave, others = (crossing[end], []) if able[end] else ([], unused)
        return RecordedStage(model, calls, range(start, end), wires, shapes, crossing[start], leave, others)

    return Units(
        [c.name for c in calls],
        [sum(p.numel() for p in c.module.parameters()) for c in calls],
        [c.cost for c in calls],
        [tuple(wires[leaf] for leaf in leaves) if able[border] else () for border, leaves in enumerate(crossing)],
        able,
        {c.name: i + 1 for i, c in enumerate(calls)},
        run.output,
        stage,
        lambda stages: _check_stages(model, sample, stages),
    )


def _check_stages(model: nn.Module, sample: Inputs, stages: Sequence[nn.Module]) -> None:
    """Refuse stages whose output is not that of the model: a value may pass from unit to unit where autograd does not see it."""
    wanted = outputs(model, sample)
    if wanted is None:
        return
    values: Any = ()
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        for stage in stages:
            values = stage(sample, *values)
    if not alike(tree_leaves(joined([values], [1])), wanted):
        raise HocketError(
            f"{type(model).__name__} cannot be cut: its stages give another output than the whole, because one module's output "
            "reaches another in a way that has no gradient."
        )


class _Shapes:
    """The shapes of all outputs of units for a batch, by the names of their wires: found by a run without values, once for each
    combination of the shapes of inputs; where that is not possible, as in the recorded runs."""

    def __init__(self, model: nn.Module, wires: Mapping[Leaf, Wire]) -> None:
        self.model, self.wires = model, wires
        self._state = _Recorder(model, True, None).state()  # stages will keep only the weights of their own units
        self._known: dict[tuple[Any, ...], dict[str, tuple[int, ...]]] = {}

    def __call__(self, x: Inputs) -> dict[str, tuple[int, ...]]:
        args, kwargs = arguments(x)
        given = [*enumerate(args), *sorted(kwargs.items())]
        key = tuple((name, tuple(value.shape) if isinstance(value, Tensor) else None) for name, value in given)
        if key not in self._known:
            self._known[key] = self._find(x)
        return self._known[key]

    def _find(self, x: Inputs) -> dict[str, tuple[int, ...]]:
        with suppress(Exception), evaluating(self.model):  # a unit depends on values
            calls = _Recorder(self.model, True, None)(x, self._state).calls
            return {wire.name: tuple(calls[i].leaves[j].shape) for (i, j), wire in self.wires.items()}
        return {wire.name: wire.shape(len(first_tensor(x))) for wire in self.wires.values()}


def _crossing(run: _Recorder, border: int) -> list[Leaf]:
    read = set().union(*(c.reads for c in run.calls[border:]), run.reads)
    return sorted(leaf for leaf in read if leaf[0] < border)


def _find_trained(run: _Recorder) -> None:
    for c in run.calls:
        own = any(p.requires_grad for p in c.module.parameters())
        c.trained = own or any(run.calls[i].trained for i, _ in c.reads)


# --- the recorded run --------------------------------------------------------------------------------------------------------


def _run(model: nn.Module, sample: Inputs, measure: str | None) -> _Recorder:
    """A run in which units compute shapes alone, if that is possible and seconds are not asked for."""
    unborn = any(p.is_meta for p in model.parameters())
    if measure != "seconds":
        with suppress(Exception):  # a unit depends on values
            return _Recorder(model, True, measure)(sample)
    if unborn:
        raise HocketError(
            f"{type(model).__name__} cannot be run without values, on which its forward or measure='seconds' depends: build it "
            "with its weights, or use measure='flops'."
        )
    runs = [_Recorder(model, False, measure)(sample) for _ in range(TRIALS if measure == "seconds" else 1)]
    for k, c in enumerate(runs[0].calls):
        c.cost = min(run.calls[k].cost[0] for run in runs), min(run.calls[k].cost[1] for run in runs)
    return runs[0]


@dataclass
class _Recorder:
    """Runs a model and notes the calls of its units; ``fake``: units run on the meta device and return zeros."""

    model: nn.Module
    fake: bool
    measure: str | None
    calls: list[Call] = field(default_factory=list)
    output: Any = None
    reads: set[Leaf] = field(default_factory=set)
    """The leaves that the model's output is computed from."""
    _leaf_of: dict[int, tuple[Leaf, Tensor]] = field(default_factory=dict)
    _inside: bool = False

    def __call__(self, sample: Inputs, state: Mapping[str, Tensor] | None = None) -> _Recorder:
        """``state``: the tensors of units, unless they are those of the model."""
        units = units_of(self.model)
        state = self.state() if state is None else state
        self._own = {id(tensor): name for name, tensor in reversed(list(state.items()))}
        kernel = nullcontext() if self.measure == "seconds" else sdpa_kernel(SDPBackend.MATH)  # only plain products are counted
        self._device = first_tensor(sample).device
        with torch.random.fork_rng(), torch.enable_grad(), kernel, forwards(units, self._noted):
            output = functional_call(self.model, dict(state), *arguments(sample))
        self.reads = self._sources(output)
        self.output = tree_map_only(Tensor, _without_values, output)
        return self

    def state(self) -> dict[str, Tensor]:
        used: dict[Tensor, Tensor] = {}
        found = {f"{name}.{key}": tensor for name, m in units_of(self.model).items() for key, tensor in _tensors_of(m)}
        for tensor in found.values():  # one that is tied stays one
            used.setdefault(tensor, self._used(tensor))
        return {name: used[tensor] for name, tensor in found.items()}

    def _used(self, tensor: Tensor) -> Tensor:
        if self.fake:
            return _without_values(tensor).requires_grad_(tensor.requires_grad)
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    def _noted(self, name: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a part of another unit
                return original(*args, **kwargs)
            refuse_reentrant()
            reads = self._sources((args, kwargs))
            args, kwargs = tree_map_only(Tensor, self._entered, (args, kwargs))
            self._inside = True
            cost, output = self._timed(module, original, args, kwargs)
            self._inside = False
            leaves, spec = tree_flatten(output)
            kept = [_without_values(v).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in leaves]
            self.calls.append(Call(name, module, cost, spec, kept, reads))
            return tree_unflatten([self._left(v, (len(self.calls) - 1, j)) for j, v in enumerate(leaves)], spec)

        return forward

    def _entered(self, value: Tensor) -> Tensor:
        entered = value.detach().to("meta") if self.fake else value.detach()
        return entered.requires_grad_(value.requires_grad)

    def _left(self, value: Any, leaf: Leaf) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = torch.zeros(value.shape, dtype=value.dtype, device=self._device) if self.fake else value.detach()
        value.requires_grad_(value.is_floating_point())
        self._leaf_of[id(value)] = leaf, value  # keeps it alive: its id must not be reused
        return value.clone() if value.requires_grad else value  # a leaf cannot be changed in place

    def _timed(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> tuple[tuple[float, float], Any]:
        output: Any = None

        def ahead() -> None:
            nonlocal output
            output = forward(*args, **kwargs)

        def back() -> None:
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            wanted = [t for t in (*given, *module.parameters()) if t.requires_grad]
            if outputs and wanted:
                torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)

        if self.measure is None:
            ahead()
            return (0.0, 0.0), output
        if self.measure == "seconds":
            return (seconds(ahead), seconds(back)), output
        computed = estimate(ahead, 0)
        moved = sum(t.nbytes for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor))
        return (computed + moved / MEMORY, estimate(back, 2 * moved)), output

    def _sources(self, values: Any) -> set[Leaf]:
        """The outputs of units that ``values`` are computed from."""
        found, seen = set[Leaf](), set[Any]()
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor):
                continue
            if id(tensor) in self._leaf_of:
                found.add(self._leaf_of[id(tensor)][0])
            waiting = [tensor.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                variable = getattr(node, "variable", None)
                if id(variable) in self._leaf_of:
                    found.add(self._leaf_of[id(variable)][0])
                elif id(variable) in self._own:
                    raise HocketError(
                        f"{type(self.model).__name__} reads '{self._own[id(variable)]}' outside of its module, so the model cannot "
                        "be cut: use the module, or share its weight with another one."
                    )
                waiting += [following for following, _ in node.next_functions]
        return found


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
