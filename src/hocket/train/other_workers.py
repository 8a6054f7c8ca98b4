"""A run that goes on with more or fewer workers, real or virtual: see :mod:`hocket.programs.repartition` for the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.programs.repartition import Merged, joined, mean_of, merge
from hocket.strategy import Strategy
from hocket.train.checks import Factory
from hocket.train.stacked import StackedOptimizer

State = dict[str, Any]


@dataclass(frozen=True)
class OneForAll:
    """The merged state with which every worker begins."""

    merged: Merged
    buffers: dict[str, Tensor]
    moments: dict[str, dict[str, Any]]
    """The optimiser's state by parameter name."""


def one_for_all(
    states: Sequence[State],
    model: nn.Module,
    optimizer: Factory | torch.optim.Optimizer,
    strategy: Strategy,
    layout: Layout,
    seed: int,
    host_size: int | None,
) -> OneForAll:
    """Merge the workers in ``states`` (``state_dict()`` of all processes' replicas, in their order).

    ``optimizer`` makes that of one worker, or is it, where every process has one worker.
    """
    weights = [torch.cat(rows) for rows in zip(*(_weights(state, layout) for state in states), strict=True)]
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(list(model.parameters()))
    names = optimizer_names(model, made)
    rows = [row for state in states for row in _moments(state, model, optimizer, names, layout)]
    if strategy.keeps_replicas_equal:
        rows = rows[:1]  # under ZeRO-1 the first has all
    merged = merge(strategy, layout, seed, [state["job"] for state in states], weights, host_size)
    return OneForAll(merged, _buffers(states, model), mean_moments(rows))


def of_weights(weights: dict[str, Tensor], layout: Layout) -> OneForAll:
    """The mean model alone: the states of strategies and optimisers begin anew."""
    rows = [torch.cat([weights[s.name].reshape(-1) for s in b.slots]) for b in layout.buckets]
    none: list[dict[str, Tensor]] = [{} for _ in rows]
    return OneForAll(Merged(rows, none, none, 0, 0, False), weights, {})


def _weights(state: State, layout: Layout) -> list[Tensor]:
    """The rows of one process, per bucket."""
    if "weights" in state:
        return list(state["weights"])
    return [torch.cat([state["model"][s.name].reshape(-1) for s in b.slots]).unsqueeze(0) for b in layout.buckets]


def stacked_buffers(states: Sequence[State]) -> dict[str, Tensor]:
    """The buffers of processes with one worker each, as rows."""
    return joined([{name: buffer.unsqueeze(0) for name, buffer in state["buffers"].items()} for state in states])


def _buffers(states: Sequence[State], model: nn.Module) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_buffers()]
    own = [
        state["buffers"] if "buffers" in state else {n: state["model"][n].unsqueeze(0) for n in names if n in state["model"]}
        for state in states
    ]
    return {name: mean_of(rows) for name, rows in joined(own).items()}


def _moments(
    state: State, model: nn.Module, optimizer: Factory | torch.optim.Optimizer, names: Sequence[str], layout: Layout
) -> list[dict[str, dict[str, Any]]]:
    """The optimiser's state of each worker of one process, by parameter name."""
    saved = state["optimizer"]
    if "optimizers" not in saved:  # one worker
        return [{names[int(index)]: dict(entries) for index, entries in saved["state"].items()}]
    assert not isinstance(optimizer, torch.optim.Optimizer), "rows are made by what makes their optimisers"
    weights = [w.clone() for w in state["weights"]]
    grads = [torch.zeros_like(w) for w in weights]
    order = [n for n, _ in model.named_parameters()]
    stacked = StackedOptimizer(optimizer, layout, weights, grads, saved["granularity"], names=order)
    stacked.load_state_dict(saved)
    return stacked.by_row()


def optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimiser's parameters in the order of its ``state_dict``."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def mean_moments(rows: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The mean over all workers that have a parameter's state."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        having = [row[name] for row in rows if name in row]
        found[name] = {key: _mean([entries[key] for entries in having if key in entries]) for key in having[0]}
    return found


def _mean(values: list[Any]) -> Any:
    return mean_of(torch.stack(values)) if isinstance(values[0], Tensor) else values[0]


def load_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, dict[str, Any]], names: Sequence[str] = ()
) -> None:
    """Let one worker's optimiser go on from the state of parameters by name; ``names`` are those of its parameters, in the order of
    its ``state_dict``, where they are not the model's own."""
    names = names or optimizer_names(model, optimizer)
    groups, at = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(at, at + len(group["params"])))
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        at += len(numbers)
    optimizer.load_state_dict({"state": {k: moments[n] for k, n in enumerate(names) if n in moments}, "param_groups": groups})
