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
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.errors import HocketError, nearest
from hocket.split.parts import all_names
from hocket.split.pipeline import probe
from hocket.split.pipeline.trace import Wire, affine, in_place, scopes, title, trace

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

    stages: list[fx.GraphModule]
    wires: list[tuple[Wire, ...]]
    """``wires[k]`` is what crosses from stage ``k`` to ``k + 1``."""
    output: Wire | None
    """The model's own output, where that is one tensor."""
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
    sample: Tensor,
    stages: int,
    measure: str = "flops",
    points: Sequence[str] | None = None,
    bandwidth: float = BANDWIDTH,
) -> Cut:
    """Cut ``model`` into that many stages.

    Args:
        model: Any model that ``torch.fx`` can trace, on any device, also ``meta``.
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
    graph, batch = trace(model), len(sample)
    work = [node for node in graph.nodes if node.op.startswith("call_")]
    known = probe.study(model, graph, sample, measure)
    crossing = [_crossing(work, i) for i in range(len(work) + 1)]
    able = [_can_cut(model, work, i, crossing[i], known.values) for i in range(len(work) + 1)]
    wires = [_wires(nodes, known, batch) if able[i] else () for i, nodes in enumerate(crossing)]
    ahead = [sum(w.num_bytes(batch) for w in lines) / bandwidth for lines in wires]
    back = [sum(w.num_bytes(batch) * w.grad for w in lines) / bandwidth for lines in wires]
    if points is None:
        bounds = _agreed(_best(model, [sum(known.costs[n]) for n in work], ahead, back, able, stages), measure, sample.device)
    else:
        bounds = _given(model, work, points, stages, able)
    ranges = list(pairwise([0, *bounds, len(work)]))
    parts = []
    for a, b in ranges:
        sizes = {n: (known.values[n], known.more[n]) for n in crossing[a] if not isinstance(known.values[n], Tensor)}
        parts.append(_stage(model, graph, work[a:b], wires[a], sizes, wires[b], batch))
    rows = []
    for i, node in enumerate(work):
        own = model.get_submodule(str(node.target)).parameters() if node.op == "call_module" else ()
        moved, stage = sum(w.num_bytes(batch) for w in wires[i + 1]), sum(b <= i for b in bounds)
        rows.append(Row(title(node), sum(p.numel() for p in own), *known.costs[node], moved, able[i + 1], stage))
    names, held = all_names(model), dict[str, list[int]]()
    for k, part in enumerate(parts):
        for name in {names[n] for n, _ in part.named_parameters(remove_duplicate=False)}:
            held.setdefault(name, []).append(k)
    tied = {name: tuple(held[name]) for name in sorted(held) if len(held[name]) > 1}
    out = next(n for n in graph.nodes if n.op == "output").args[0]
    output = next(iter(_wires([out], known, batch)), None) if isinstance(out, fx.Node) else None
    statistics = any(isinstance(m, _BatchNorm) for m in model.modules())
    return Cut(parts, [wires[b] for b in bounds], output, tied, names, rows, measure, batch, statistics)


# --- where a cut can be ----------------------------------------------------------------------------------------------------


def _crossing(work: list[fx.Node], border: int) -> list[fx.Node]:
    """The nodes before a border whose values are used behind it, in order. Attributes of the model are available on both sides."""
    before, behind = set(work[:border]), set(work[border:])
    early = [n for n in work[0].graph.nodes if n in before or n.op == "placeholder"]
    return [n for n in early if any(user in behind or user.op == "output" for user in n.users)]


def _can_cut(model: nn.Module, work: list[fx.Node], border: int, crossing: list[fx.Node], values: probe.Values) -> bool:
    """Only tensors may cross, and none that a unit behind the border overwrites. Sizes need not cross: tensors determine them."""
    if not 0 < border < len(work):
        return False
    written = {n for node in work[border:] if in_place(node, model) for n in node.all_input_nodes}
    tensors = [n for n in crossing if isinstance(values[n], Tensor)]
    plain = all(isinstance(values[n], int | torch.Size | Tensor) for n in crossing)
    return bool(tensors) and plain and not written.intersection(tensors)


def _wires(nodes: list[fx.Node], known: probe.Found, batch: int) -> tuple[Wire, ...]:
    values = known.values
    return tuple(Wire.between(n.name, batch, values[n], known.more[n]) for n in nodes if isinstance(values[n], Tensor))


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


def _given(model: nn.Module, work: list[fx.Node], points: Sequence[str], stages: int, able: list[bool]) -> list[int]:
    if len(points) != stages - 1:
        raise HocketError(f"{stages} stages need {stages - 1} points to cut at; got {len(points)}: {', '.join(points) or 'none'}.")
    last = {name: i for i, node in enumerate(work) for name in scopes(node) if name}
    bounds = []
    for name in points:
        if name not in last:
            hint = nearest(name, last) or f": its modules are {', '.join(list(last)[:12])}{', …' * (len(last) > 12)}."
            raise HocketError(f"'{name}' is not a module of {type(model).__name__} to cut after{hint}")
        bounds.append(last[name] + 1)
        if not able[bounds[-1]]:
            raise HocketError(
                f"{type(model).__name__} cannot be cut after '{name}': values other than unchanged tensors would cross there."
            )
    if sorted(set(bounds)) != bounds:
        raise HocketError(f"Points to cut at must be in the order of the model, each once; got {', '.join(points)}.")
    return bounds


# --- the stages ------------------------------------------------------------------------------------------------------------


def _stage(
    model: nn.Module,
    graph: fx.Graph,
    work: list[fx.Node],
    enter: Sequence[Wire],
    sizes: dict[fx.Node, tuple[Any, Any]],
    leave: Sequence[Wire],
    batch: int,
) -> fx.GraphModule:
    """A module of the units ``work``. It takes what ``enter`` names, computes ``sizes`` anew, and returns what ``leave`` names as a
    tuple; the first stage takes the model's input, the last one returns its output."""
    part = fx.Graph()
    old = {node.name: node for node in graph.nodes}
    first = next(n for n in graph.nodes if n.op == "placeholder")
    new: dict[fx.Node, Any] = {old[name]: part.placeholder(name) for name in [wire.name for wire in enter] or [first.name]}
    entered = {new[old[wire.name]]: wire for wire in enter}
    new |= {node: _size(entered, *pair, batch) for node, pair in sizes.items()}

    def mapped(node: fx.Node) -> Any:
        if node not in new:  # an attribute of the model
            new[node] = part.node_copy(node, mapped)
        return new[node]

    for node in work:
        new[node] = part.node_copy(node, mapped)
    if leave:
        part.output(tuple(new[old[wire.name]] for wire in leave))
    else:
        part.output(fx.map_arg(next(n for n in graph.nodes if n.op == "output").args[0], mapped))
    return fx.GraphModule(model, part, f"{type(model).__name__}Stage")


def _size(entered: dict[fx.Node, Wire], value: Any, next_value: Any, batch: int) -> Any:
    """A number or a shape, multiples of the batch size plus constants, from the size of a tensor that enters the stage."""
    if not isinstance(value, int):
        return tuple(_size(entered, a, b, batch) for a, b in zip(value, next_value, strict=True))
    slope, constant = affine(value, next_value, batch)
    grown = [(n, d, dim) for n, wire in entered.items() for d, dim in enumerate(wire.dims) if dim[0]]
    if not slope or not grown:
        return constant
    node, d, (own_slope, own_constant) = grown[0]
    tensor: Any = fx.Proxy(node)
    return ((tensor.size(d) - own_constant) // own_slope * slope + constant).node
