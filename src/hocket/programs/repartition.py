"""Workers that become more or fewer: what each of them held, merged into what each of the new ones begins with.

The rule, for ``N`` workers that become ``M``:

- **What a worker holds** (weights, buffers, the optimiser's moments, DiLoCo's outer weights and velocity) becomes the mean over the
  ``N``, on all ``M``. A mean that was under way is taken first, and so is what exchanges of *weights* hold back (residuals of coded
  displacements, progress that ``keep=`` holds back): the mean model is that of workers that had exchanged everything.
- **What a worker owes** (error feedback's residuals of *gradients*, DGC's and DeMo's accumulators) is added up and shared out: each
  of the ``M`` owes one ``M``-th of the sum. The residuals of two workers that become one are added. (One worker, or one host under
  ``hierarchical``, exchanges nothing: what it owes waits until there are more.)
- **What only speeds a method up** (thresholds, bases of low rank, public copies, EDiT's statistics) begins anew from the above.

Means of equal values are these values, bit for bit: under ``bulk`` all replicas stay what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.cluster.virtual import VirtualCluster
from hocket.compression.base import State
from hocket.programs.collective import CollectiveProgram, real, wide
from hocket.programs.two_stage import program_for
from hocket.strategy import Strategy

_HELD = ("outer", "velocity")
"""What of an outer optimiser's state workers hold."""


@dataclass(frozen=True)
class Merged:
    """What the workers of a run hold and owe together, per bucket."""

    weights: list[Tensor]
    """The mean model's, ``[values]``."""
    owed: list[dict[str, Tensor]]
    """Sums over all workers, ``[values]``."""
    outer: list[dict[str, Tensor]]
    step: int
    exchanges: int
    discards: bool

    @property
    def owes(self) -> float:
        """The norm of all residuals and accumulators."""
        return float(sum(float(t.double().square().sum()) for sums in self.owed for t in sums.values())) ** 0.5


def mean_of(values: Tensor) -> Tensor:
    """The mean over the first dimension; of equal values that value, bit for bit.

    >>> mean_of(torch.tensor([[0.1, 1.0], [0.1, 3.0]])).tolist() == [torch.tensor(0.1).item(), 2.0]
    True
    """
    if not values.is_floating_point() and not values.is_complex():
        return values[0].clone()
    mean = values.mean(0, dtype=torch.float64 if values.is_floating_point() else None).to(values.dtype)
    return torch.where((values == values[0]).all(0), values[0], mean)


def joined(parts: Sequence[Any]) -> Any:
    """States of several processes as that of one which hosts all their rows: tensors one below the other.

    >>> joined([{"a": torch.zeros(1, 2), "step": 3}, {"a": torch.ones(2, 2), "step": 3}])["a"].tolist()
    [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return first if first.dim() == 0 or len(parts) == 1 else torch.cat(list(parts))
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        return [joined(items) for items in zip(*parts, strict=True)]
    return first


def merge(
    strategy: Strategy, layout: Layout, seed: int, states: Sequence[dict[str, Any]], weights: list[Tensor], host_size: int | None
) -> Merged:
    """Merge the workers of all ``states`` (:meth:`CollectiveProgram.state_dict`), whose weights are the rows of ``weights``."""
    workers = weights[0].shape[0]
    cluster = VirtualCluster(workers, host_size=host_size)
    program = program_for(strategy, layout, cluster, weights, seed)
    states = [{**state, "clock": None, "workers": [0, workers, workers]} for state in states]
    copies = ("weight_state",) if not program.channel.uniform else ()  # public copies have their rows elsewhere, and begin anew
    left_out = (*copies, "samples")  # of elastic runs, whose workers may stand at different places in the data
    whole = joined([{name: value for name, value in state.items() if name not in left_out} for state in states])
    program.load_state_dict({**{name: program.state_dict()[name] for name in copies}, **whole})
    held = _settled(program, weights)
    sizes = [real(rows).shape[1] for rows in held]
    contexts = [program.context(bucket) for bucket in range(len(sizes))]
    channel, compression = program.channel, strategy.compression
    for bucket, rows in enumerate(held):
        late = channel.weight_residuals(compression, program.weight_state[bucket], sizes[bucket], contexts[bucket])
        if late is not None:
            real(rows).add_(late)
    owed = [
        {name: rows.sum(0) for name, rows in channel.residuals(compression, state, size, context).items()}
        for state, size, context in zip(program.gradient_state, sizes, contexts, strict=True)
    ]
    outer = [{name: mean_of(state[name]) for name in _HELD if name in state} for state in program.outer_state]
    return Merged([mean_of(rows) for rows in held], owed, outer, program.step, program.exchanges, bool(whole.get("discards")))


def take_over(program: CollectiveProgram, weights: list[Tensor], merged: Merged) -> None:
    """Let all workers of ``program`` begin with what was merged, with ``weights`` as their rows."""
    cluster, strategy, layout = program.cluster, program.strategy, program.layout
    for rows, mean in zip(weights, merged.weights, strict=True):
        rows.copy_(mean.to(rows.device).expand_as(rows))
    fresh = program_for(strategy, layout, cluster, weights, program.seed)
    outer_state = [
        {**state, **{name: _rows(value, cluster) for name, value in held.items()}}
        for state, held in zip(fresh.outer_state, merged.outer, strict=True)
    ]
    weight_state = [
        fresh.channel.rebase(state, wide(outer["outer"].to(rows.dtype))) if "outer" in outer and fresh.channel.uniform else state
        for state, outer, rows in zip(fresh.weight_state, outer_state, weights, strict=True)
    ]
    gradient_state: list[State] = [
        fresh.channel.with_residuals({name: _rows(total / cluster.size, cluster) for name, total in sums.items()})
        for sums in merged.owed
    ]
    states = {"gradient_state": gradient_state, "weight_state": weight_state, "outer_state": outer_state}
    counters = {"step": merged.step, "exchanges": merged.exchanges, "discards": merged.discards, "landing": None, "sent": None}
    program.load_state_dict({**fresh.state_dict(), **states, **counters})


def _settled(program: CollectiveProgram, weights: list[Tensor]) -> list[Tensor]:
    """The weights with the result of an exchange under way, and with all that workers hold back of their progress."""
    if program._mixed is not None and program._sent is not None:
        begun = next(step for step in range(program.step, -1, -1) if program.strategy.exchanges_after(step))
        program._apply(weights, begun)
    elif program._mixed is not None and not program.strategy.sync.predicts:  # gradients under way are left out
        weights = program._landed()
    return [rows.clone() for rows in program.whole(weights)]


def _rows(value: Tensor, cluster: Cluster) -> Tensor:
    return value.to(cluster.device).expand(cluster.rows, -1).clone()
