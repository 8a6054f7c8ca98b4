"""Cut a model into stages, so that the slowest stage is as fast as possible.

A stage computes, forward and backward, and sends: activations over its end, gradients over its beginning. In a filled pipe the
shorter of the two mostly overlaps with the longer, so a stage's time is taken as ``max + EXPOSED · min``. The best cuts are found
by dynamic programming over all places where only tensors cross. Parameters keep their names. One that is used in several stages is
*tied*: each of these stages holds a copy, and the copies' gradients are to be summed before a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.errors import HocketError, nearest
from hocket.split.inputs import Inputs, first_tensor
from hocket.split.parts import all_names
from hocket.split.pipeline.recorded import recorded
from hocket.split.pipeline.trace import Units, Wire, hides_blocks, trace
from hocket.split.pipeline.traced import traced
from hocket.split.pipeline.units import units_of

BANDWIDTH = 1.25e9
"""The default bytes per second between two stages: 10 Gbit/s."""
EXPOSED = 0.25
"""The share of the shorter one, computing or sending, that does not overlap: pipes also fill and drain."""
BATCH_STATISTICS = (
    "Batch statistics (BatchNorm) are those of each micro-batch, not of the whole batch, and running statistics follow the "
    "micro-batches in order: one micro-batch gives exactly what one process computes."
)


@dataclass(frozen=True)
class Row:
    name: str
    parameters: int
    forward_s: float
    backward_s: float
    crossing_bytes: int
    """The bytes that would cross a cut after it, in one direction, for the sample."""
    can_cut: bool
    stage: int


@dataclass(frozen=True)
class Cut:
    """A model in stages."""

    stages: list[nn.Module]
    wires: list[tuple[Wire, ...]]
    """``wires[k]`` is what crosses from stage ``k`` to ``k + 1``."""
    output: Any
    """The model's own output: a wire where that is one tensor, else tensors without values or None."""
    tied: dict[str, tuple[int, ...]]
    """Parameters of several stages."""
    names: dict[str, str]
    """A parameter's first name, for each of its names."""
    rows: list[Row]
    measure: str
    batch: int
    batch_statistics: bool

    def explain(self) -> str:
        """The table of units: what each costs, what would cross a cut after it, and its stage."""
        lines: list[tuple[str, ...]] = [("unit", "parameters", "forward ms", "backward ms", "kB after it", "stage")]
        lines += [_line(row.name, [row], row.crossing_bytes if row.can_cut else None, row.stage) for row in self.rows]
        for k in range(len(self.stages)):
            sent = sum(w.num_bytes(self.batch) for w in self.wires[k]) if k < len(self.wires) else None
            lines.append(_line(f"stage {k}", [row for row in self.rows if row.stage == k], sent, k))
        widths = [max(len(line[c]) for line in lines) for c in range(6)]
        text = [f"{line[0]:<{widths[0]}}  " + "  ".join(f"{line[c]:>{widths[c]}}" for c in range(1, 6)) for line in lines]
        rule = "─" * len(text[0])
        text = [text[0], rule, *text[1 : len(self.rows) + 1], rule, *text[len(self.rows) + 1 :]]
        how = "measured here" if self.measure == "seconds" else "estimated from operations and bytes"
        text.append(f"For {self.batch} sample{'s' * (self.batch != 1)}; times are {how}.")
        for name, held in self.tied.items():
            text.append(f"{name} is held by stages {', '.join(map(str, held))}; its gradients are summed.")
        return "\n".join(text + [BATCH_STATISTICS] * self.batch_statistics)


def _line(name: str, rows: Sequence[Row], crossing_bytes: int | None, stage: int) -> tuple[str, ...]:
    count, *seconds = (sum(getattr(row, key) for row in rows) for key in ("parameters", "forward_s", "backward_s"))
    times = (f"{s * 1e3:.3f}" for s in seconds)
    return name, f"{count:,}", *times, "–" if crossing_bytes is None else f"{crossing_bytes / 1e3:,.1f}", str(stage)


def cut_model(
    model: nn.Module,
    sample: Inputs,
    stages: int,
    measure: str = "flops",
    points: Sequence[str] | None = None,
    bandwidth: float = BANDWIDTH,
) -> Cut:
    """Cut ``model`` into that many stages.

    Args:
        model: Any model that ``torch.fx`` can trace, on any device, also ``meta``; or any with lists of blocks, which is then run
            once on the sample.
        sample: Inputs of about the size of a micro-batch.
        stages: How many; an interleaved schedule needs several for each process.
        measure: ``flops`` estimates what units cost, alike on all processes; ``seconds`` measures it. Then all processes of the job
            must call this together: process 0 decides for all.
        points: Names of modules after which to cut, instead of the best places.
        bandwidth: Bytes per second between two stages.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> [[name for name, _ in stage.named_parameters()] for stage in cut_model(model, torch.zeros(2, 8), 2).stages]
    [['0.weight', '0.bias'], ['2.weight', '2.bias', '4.weight', '4.bias']]
    """
    if stages < 1:
        raise HocketError(f"A model is cut into at least one stage; got {stages}.")
    units, batch = _units(model, sample, measure), len(first_tensor(sample))
    ahead = [sum(w.num_bytes(batch) for w in lines) / bandwidth for lines in units.wires]
    back = [sum(w.num_bytes(batch) * w.grad for w in lines) / bandwidth for lines in units.wires]
    if points is None:
        best = _best(model, [sum(cost) for cost in units.costs], ahead, back, units.able, stages)
        bounds = _agreed(best, measure, first_tensor(sample).device)
    else:
        bounds = _given(model, units, points, stages)
    parts = [units.stage(a, b) for a, b in pairwise([0, *bounds, len(units.names)])]
    units.check(parts)
    rows = []
    for i, (name, count) in enumerate(zip(units.names, units.parameters, strict=True)):
        moved, stage = sum(w.num_bytes(batch) for w in units.wires[i + 1]), sum(b <= i for b in bounds)
        rows.append(Row(name, count, *units.costs[i], moved, units.able[i + 1], stage))
    names, held = all_names(model), dict[str, list[int]]()
    for k, part in enumerate(parts):
        for name in {names[n] for n, _ in part.named_parameters(remove_duplicate=False)}:
            held.setdefault(name, []).append(k)
    tied = {name: tuple(held[name]) for name in sorted(held) if len(held[name]) > 1}
    statistics = any(isinstance(m, _BatchNorm) for m in model.modules())
    return Cut(parts, [units.wires[b] for b in bounds], units.output, tied, names, rows, measure, batch, statistics)


def _units(model: nn.Module, sample: Inputs, measure: str) -> Units:
    """Those of a trace; where that sees no blocks, those found by running the model."""
    if not isinstance(sample, Tensor):
        return recorded(model, sample, measure)
    try:
        graph = trace(model)
    except HocketError:
        if len(units_of(model)) < 2:
            raise
        return recorded(model, sample, measure)
    return recorded(model, sample, measure) if hides_blocks(model, graph) else traced(model, graph, sample, measure)


# --- which cuts are best ---------------------------------------------------------------------------------------------------


def _best(model: nn.Module, costs: list[float], ahead: list[float], back: list[float], able: list[bool], stages: int) -> list[int]:
    """The borders whose slowest stage is fastest; among equal ones those that send the fewest bytes.

    ``ahead[i]`` and ``back[i]`` are the seconds in which what crosses border ``i`` is sent, activations and gradients.
    ``best[i]`` is, for the stages so far, the slowest one's time and all that is sent when they end before unit ``i``.
    """
    places = [i for i, ok in enumerate(able) if ok]
    if len(places) < stages - 1:
        raise HocketError(
            f"{type(model).__name__} has {len(places)} place{'s' * (len(places) != 1)} to cut, too few for {stages} stages: use at "
            f"most {len(places) + 1}, or a deeper model."
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ends = [0, *places, len(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for k in range(stages):
        last = k == stages - 1
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for end in [len(costs)] if last else ends[1:-1]:
            options = [
                (max(slowest, _together(sums[end] - sums[start], ahead[end] + back[start])), sent + ahead[end], [*borders, end])
                for start, (slowest, sent, borders) in best.items()
                if start < end
            ]
            if options:
                reached[end] = min(options)
        best = reached
    return best[len(costs)][2][:-1]


def _together(computing: float, sending: float) -> float:
    return max(computing, sending) + EXPOSED * min(computing, sending)


def _agreed(bounds: list[int], measure: str, device: torch.device) -> list[int]:
    """Process 0's decision where measurements differ from process to process."""
    if measure != "seconds" or not dist.is_initialized() or not bounds:
        return bounds
    common = torch.tensor(bounds, device=device)
    dist.broadcast(common, 0)
    return [int(b) for b in common]


def _given(model: nn.Module, units: Units, points: Sequence[str], stages: int) -> list[int]:
    if len(points) != stages - 1:
        raise HocketError(f"{stages} stages need {stages - 1} points to cut at; got {len(points)}: {', '.join(points) or 'none'}.")
    last = units.borders
    bounds = []
    for name in points:
        if name not in last:
            hint = nearest(name, last) or f": its modules are {', '.join(list(last)[:12])}{', …' * (len(last) > 12)}."
            raise HocketError(f"'{name}' is not a module of {type(model).__name__} to cut after{hint}")
        bounds.append(last[name])
        if not units.able[bounds[-1]]:
            raise HocketError(
                f"{type(model).__name__} cannot be cut after '{name}': values other than unchanged tensors would cross there."
            )
    if sorted(set(bounds)) != bounds:
        raise HocketError(f"Points to cut at must be in the order of the model, each once; got {', '.join(points)}.")
    return bounds
