"""The cost of each unit of a model: seconds measured on a sample, or estimated from its floating-point operations.

The estimate runs the units on the meta device, where tensors have shapes and no values: it is the same on all processes and takes
almost no time. It is ``operations / FLOPS + bytes touched / MEMORY``.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from hocket.errors import HocketError
from hocket.split.pipeline.trace import in_place

FLOPS = 5e10
"""Operations per second that an estimate assumes."""
MEMORY = 5e9
"""Bytes per second that an estimate assumes for reading and writing."""
TRIALS = 3
"""Times a unit is run when seconds are measured; the fastest counts."""
MEASURES = ("flops", "seconds")


Values = dict[fx.Node, Any]
"""The output of each node."""
Costs = dict[fx.Node, tuple[float, float]]
"""Seconds of each unit for the sample, forward and backward."""


@dataclass(frozen=True)
class Found:
    """The outputs of a model's units for the sample, mostly only shapes without values; those with one more sample; the costs."""

    values: Values
    more: Values
    costs: Costs


def study(model: nn.Module, graph: fx.Graph, sample: Tensor, measure: str) -> Found:
    """The output and the cost of each unit."""
    if measure not in MEASURES:
        raise HocketError(f"Units are measured by {' or '.join(MEASURES)}; got '{measure}': use flops.")
    tensors = [sample, *model.parameters(), *model.buffers()]
    if measure == "seconds" and any(t.is_meta for t in tensors):
        raise HocketError("A model on the meta device cannot be run, so seconds cannot be measured: use measure='flops'.")
    fake, more = _Probe(model, graph, fake=True), torch.cat([sample, sample[:1]])
    try:
        found = fake.study(sample, more, measure)
    except Exception as error:  # a unit depends on values
        if any(t.is_meta for t in tensors):
            raise HocketError(
                f"{type(model).__name__} cannot be cut without values, on which its forward depends: build it with its weights."
            ) from error
        found = _Probe(model, graph, fake=False).study(sample, more, measure)
    return found if measure == "flops" else replace(found, costs=_Probe(model, graph, fake=False).walk(sample, measure)[1])


class _Probe:
    """Runs a graph unit by unit, ``fake`` on the meta device; each is cut off from the others, so that its backward runs alone."""

    def __init__(self, model: nn.Module, graph: fx.Graph, fake: bool) -> None:
        self.model, self.graph, self.fake = model, graph, fake
        self.device = torch.device("meta") if fake else nullcontext()
        state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
        self.state = {name: self._own(value) for name, value in state.items()}

    def _own(self, value: Tensor) -> Tensor:
        """A tensor like ``value`` that may be written to."""
        if self.fake:
            copy = torch.empty(value.shape, dtype=value.dtype, device="meta")
        else:
            copy = value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()
        return copy.requires_grad_(value.requires_grad)

    def study(self, sample: Tensor, more: Tensor, measure: str) -> Found:
        values, costs = self.walk(sample, measure if measure == "flops" else None)
        return Found(values, self.walk(more)[0], costs)

    def walk(self, sample: Tensor, measure: str | None = None) -> tuple[Values, Costs]:
        values: Values = {}
        found: Costs = {}
        # Attention by plain products: only these are counted.
        kernel = nullcontext() if measure == "seconds" else sdpa_kernel(SDPBackend.MATH)
        with self.device, torch.random.fork_rng(), torch.enable_grad(), kernel:
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    values[node] = self._own(sample)
                elif node.op == "get_attr":
                    attribute = operator.attrgetter(str(node.target))(self.model)
                    values[node] = self.state.get(str(node.target), tree_map_only(Tensor, self._own, attribute))
                elif node.op != "output":
                    values[node] = tree_map_only(Tensor, _apart, self._run(node, values))
                    if measure is not None:
                        found[node] = self._cost(node, values, measure)
        return values, found

    def _run(self, node: fx.Node, values: Values, leaves: list[Tensor] | None = None) -> Any:
        writes = in_place(node, self.model)

        def given(n: fx.Node) -> Any:
            if n.op == "get_attr":
                return values[n]
            value = tree_map_only(Tensor, _apart, values[n])
            if leaves is not None:
                leaves.extend(t for t in _tensors(value) if t.requires_grad)
            return tree_map_only(Tensor, Tensor.clone, value) if writes else value

        args, kwargs = fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return functional_call(self.model.get_submodule(str(node.target)), self._state_of(node), args, kwargs)

    def _state_of(self, node: fx.Node) -> dict[str, Tensor]:
        prefix = f"{node.target}."
        return {name.removeprefix(prefix): value for name, value in self.state.items() if name.startswith(prefix)}

    def _cost(self, node: fx.Node, values: Values, measure: str) -> tuple[float, float]:
        weights = [v for v in self._state_of(node).values() if v.requires_grad] if node.op == "call_module" else []
        weights += [values[n] for n in node.all_input_nodes if n.op == "get_attr" and values[n].requires_grad]
        output: Any = None
        leaves: list[Tensor] = []

        def forward() -> None:
            nonlocal output
            leaves.clear()
            output = self._run(node, values, leaves)

        def backward() -> None:
            outputs = [t for t in _tensors(output) if t.requires_grad]
            if outputs and leaves + weights:
                torch.autograd.grad(outputs, leaves + weights, [torch.ones_like(t) for t in outputs], allow_unused=True)

        num_bytes = sum(t.nbytes for n in (node, *node.all_input_nodes) for t in _tensors(values[n]))
        if measure == "flops":
            return estimate(forward, num_bytes), estimate(backward, 2 * num_bytes)
        trials = [(seconds(forward), seconds(backward)) for _ in range(TRIALS)]
        return min(f for f, _ in trials), min(b for _, b in trials)


def estimate(work: Callable[[], Any], num_bytes: int) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / FLOPS + num_bytes / MEMORY


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _apart(value: Tensor) -> Tensor:
    """The same values without their history; whether they require a gradient is kept."""
    return value.detach().requires_grad_(value.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]
