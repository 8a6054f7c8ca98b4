"""``hocket.probe``: measures this machine or, under a launcher, the whole cluster, and describes it as a cluster file.

What is measured is what the cost model has a term for, with the code that trainings use:

- *steps*: forward and backward pass of the model on a mini-batch, and the optimiser's update, on all workers at once, under a job
  that never exchanges; the fastest worker's median is ``step``, the others' are ``slowdown``; ``jitter`` is the deviation of the
  logarithm.
- *codes*: a worker's part of a coded exchange, on one row that stands for all workers, so that nothing travels
  (:mod:`hocket.cluster.one_row`); two sizes give ``a + b·values``.
- *links*, with several workers: an exchange of nothing gives ``exchange``, which is left out of all others; the mean of all (a
  ring), small and large, gives the delay of a hop ``α + o`` and ``B``; messages to one and to two neighbours part ``α`` from
  ``o``; longer ones between neighbours give ``h``, how far two directions disturb each other, sent whole and in pieces.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket import compression
from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.message import PIECE_BYTES, Message, framed, ring_bytes
from hocket.cluster.one_row import OneRowCluster
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.spec_file import text_of
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram
from hocket.strategy import Strategy
from hocket.train.checks import Factory, layout_for, optimizer_for
from hocket.train.job import Job
from hocket.train.runtimes.collective import CollectiveRuntime

LIMIT_S = 60.0
MOST_VALUES = 4_000_000
"""Codes are timed on so many values at most."""
_SMALL, _FIRST, _MOST_BYTES, _LONG_S = 64, 1 << 18, 1 << 25, 0.15
CODES = (
    "cast(bf16)", "qsgd(4)", "bins(2)", "ternary", "sign", "natural", "threshold(keep=0.05)", "topk(0.01)", "randomk(0.01)",
    "lowrank(2)", "dgc(0.01)", "demo",
)  # fmt: skip
assert {code.partition("(")[0] for code in CODES} == set(compression.METHODS) - {"none"}


@dataclass(frozen=True)
class Probe:
    """What was found: the cluster, and how it was found."""

    spec: ClusterSpec
    about: dict[str, str]

    def text(self) -> str:
        """The cluster file."""
        return f"# {self.about['']}\n{text_of(self.spec, {k: v for k, v in self.about.items() if k})}"


def probe(
    model: nn.Module,
    loss: Any,
    batch: tuple[Tensor, Tensor],
    cluster: Cluster,
    *,
    optimizer: Factory = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    codes: Sequence[str] = CODES,
    name: str = "probed",
    limit_s: float = LIMIT_S,
) -> Probe:
    """Measure the workers of ``cluster``, one per process, within about ``limit_s`` seconds; all processes must call it."""
    if cluster.rows > 1:
        raise HocketError(f"A probe measures processes with one worker each, not {cluster.rows} virtual workers; use a launcher.")
    steps, update_s = _steps(model, loss, batch, optimizer, cluster, limit_s / 6)
    everyone = cluster.all_gather_metrics(torch.tensor([steps], dtype=torch.float64))
    medians = everyone.median(1).values
    step_s = float(medians.min())
    found: dict[str, Any] = {"name": name, "step_s": step_s, "update_s": update_s, "workers": None}
    slow = (medians / step_s).tolist()
    found["slowdown"] = tuple(round(s, 3) for s in slow) if max(slow) > 1.02 else (1.0,)
    found["jitter"] = round(float(_deviation(everyone / medians.unsqueeze(1))), 4)
    own = [_code(code, model, max(2, cluster.size), limit_s / 3 / len(codes)) for code in codes]
    costs = cluster.all_gather_metrics(torch.tensor([own], dtype=torch.float64).view(1, -1)).mean(0).view(-1, 2).tolist()
    names = [code.partition("(")[0] for code in codes] if codes is CODES else codes
    found["coding"] = {name: tuple(cost) for name, cost in zip(names, costs, strict=True)}
    if cluster.size > 1:
        found |= _links(cluster, limit_s / 3)
    return Probe(ClusterSpec(**found), _about(model, batch, cluster))


def _about(model: nn.Module, batch: tuple[Tensor, Tensor], cluster: Cluster) -> dict[str, str]:
    parameters = sum(p.numel() for p in model.parameters())
    what = f"{type(model).__name__} of {parameters:,} parameters, batch {len(batch[0])}"
    who = f"{cluster.size} worker{'s' * (cluster.size > 1)}, {cluster.backend or 'one process'}, {cluster.device.type}"
    return {
        "": f"Measured by hocket probe: {who}; torch {torch.__version__}.",
        "compute.step": what,
        "compute.slowdown": "by worker, beside the fastest",
        "compute.update": "per parameter",
        "coding": "per exchange, and per value",
    }


# --- computing ---------------------------------------------------------------------------------------------------------------


def _steps(
    model: nn.Module, loss: Any, batch: tuple[Tensor, Tensor], factory: Factory, cluster: Cluster, limit_s: float
) -> tuple[list[float], float]:
    """Seconds of each of some steps without their update, and of the update per parameter."""
    optimizer, (x, y) = optimizer_for(factory, list(model.parameters())), batch
    job = Job(model, optimizer, Strategy.parse(f"local({10**9})"), CollectiveRuntime(cluster.for_job()))
    steps: list[float] = []
    updates: list[float] = []
    ends = time.perf_counter() + limit_s
    for turn in range(42):
        begun = _now(x)
        optimizer.zero_grad()
        try:
            loss(model(x), y).backward()
        except Exception as error:  # whatever a user's model raises
            raise HocketError(f"The model cannot be measured on this batch: {type(error).__name__}: {error}.") from None
        between = _now(x)
        optimizer.step()
        if turn > 1:  # the first two warm up
            steps.append(between - begun)
            updates.append(_now(x) - between)
        if len(steps) >= 5 and time.perf_counter() > ends:
            break
    job.detach()
    steps = (steps + [statistics.median(steps)] * 40)[:40]  # as many on all workers
    return steps, statistics.median(updates) / sum(p.numel() for p in model.parameters())


def _now(like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


def _deviation(ratios: Tensor) -> Tensor:
    """Of the logarithms, without the largest twentieth: those are stragglers."""
    logs = ratios.log().flatten().sort().values
    return logs[: max(2, int(len(logs) * 0.95))].std()


# --- codes -------------------------------------------------------------------------------------------------------------------


def _code(code: str, model: nn.Module, workers: int, limit_s: float) -> tuple[float, float]:
    """``a`` and ``b`` of ``a + b·values``."""
    sgd: Factory = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731 - codes with momentum refuse another
    strategy = Strategy.parse(f"bulk + {code} + exchange=gradients")
    whole = min(sum(p.numel() for p in model.parameters()), MOST_VALUES)
    device = next(model.parameters()).device
    times = [(n, _exchange(strategy, _cut(model, n), sgd, workers, device, limit_s / 2)) for n in (max(1, whole // 8), whole)]
    (small, short), (large, long) = times
    each = max(0.0, (long - short) / max(1, large - small))
    return max(0.0, long - each * large), each


def _cut(model: nn.Module, values: int) -> nn.Module:
    """A module with the first parameters of ``model``, as many as have ``values`` values."""
    cut, left = nn.Module(), values
    for k, p in enumerate(model.parameters()):
        rows = p.shape[0] if p.dim() else 1
        keep = p.shape if p.numel() <= left else (max(1, rows * left // p.numel()), *p.shape[1:])
        cut.register_parameter(f"p{k}", nn.Parameter(torch.empty(keep)))
        left -= math.prod(keep)
        if left <= 0:
            break
    return cut


def _exchange(strategy: Strategy, module: nn.Module, factory: Factory, workers: int, device: torch.device, limit_s: float) -> float:
    """The median time of one worker's part of an exchange of gradients."""
    module = module.to(device)
    layout = layout_for(module, factory(list(module.parameters())), strategy)
    cluster = OneRowCluster(workers, device)
    program = CollectiveProgram(strategy, layout, cluster, [b.empty(1) for b in layout.buckets])
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(1, b.size, generator=generator).to(device) for b in layout.buckets]
    weights = [b.empty(1) for b in layout.buckets]
    times: list[float] = []
    ends = time.perf_counter() + limit_s
    while len(times) < 3 or (len(times) < 9 and time.perf_counter() < ends):
        gradients = [n.clone() for n in noise]
        begun = _now(noise[0])
        for b, rows in enumerate(gradients):
            program.gradient_ready(b, rows)
        program.gradients_done()
        times.append(_now(noise[0]) - begun)
        program.after_update(weights)
    return statistics.median(times[1:])


# --- links -------------------------------------------------------------------------------------------------------------------


def _links(cluster: Cluster, limit_s: float) -> dict[str, Any]:
    """Latency, bandwidth, cost of a message, duplex and jitter of the links, from exchanges of Hocket's own."""
    size, per_host = cluster.size, cluster.host_size
    hosts = 1 < per_host < size and size % per_host == 0
    groups = Subgroups.across(size, per_host) if hosts else cluster.world
    found = _link(cluster, groups, limit_s / (2 if hosts else 1))
    if not hosts:
        return found
    inner = _link(cluster, Subgroups.blocks(size, per_host), limit_s / 2)
    delay_s = inner["latency_s"] + inner["message_s"]
    # All workers of a host have just used its link at once, so that each has its part of it.
    return {**found, "host_size": per_host, "host_bandwidth": inner["bandwidth"], "host_latency_s": delay_s}


def _link(cluster: Cluster, groups: Subgroups, limit_s: float) -> dict[str, Any]:
    n, each_s = groups.size, limit_s / 8
    cluster.create_groups(groups)
    nothing = statistics.median(_times(cluster, lambda: None, each_s))

    def ring(count: int) -> list[float]:
        rows = torch.zeros(1, count, device=cluster.device)
        return _times(cluster, lambda: cluster.mean(rows, groups), each_s)

    small = max(0.0, statistics.median(ring(_SMALL)) - nothing)
    count = _FIRST // 4
    while (took := statistics.median(times := ring(count))) < min(_LONG_S, each_s / 4) and 4 * count < _MOST_BYTES:
        count *= 4
    bandwidth = ring_bytes(4 * count, n) / max(took - small - nothing, 1e-9)
    hop = small / (2 * (n - 1))
    one, two = (statistics.median(_neighbours(cluster, groups, _SMALL, k, each_s)) for k in (1, 2))
    message_s = min(max(0.0, two - one), hop) if n > 2 else 0.0

    def half(count: int) -> float:
        partners = min(2, n - 1)
        took = statistics.median(_neighbours(cluster, groups, count, partners, each_s)) - nothing
        trips = partners if 4 * count > PIECE_BYTES else 1
        alone = partners * framed(4 * count) / bandwidth
        return round(min(1.0, max(0.0, (took - trips * (hop - message_s) - partners * message_s) / alone - 1)), 3)

    return {
        "exchange_s": nothing,
        "latency_s": hop - message_s,
        "message_s": message_s,
        "bandwidth": bandwidth,
        "pairs_half_duplex": half(PIECE_BYTES // 8),
        "pieces_half_duplex": half(max(count, PIECE_BYTES // 2)),
        "link_jitter": round(float(_deviation(torch.tensor(times) / took)), 4) if len(times) > 2 else 0.0,
    }


def _neighbours(cluster: Cluster, groups: Subgroups, count: int, partners: int, limit_s: float) -> list[float]:
    """Messages from one or both neighbours in the group to each worker."""
    place, group = groups.place_of, groups.group_of
    shifts = (1, -1)[:partners]
    sources = torch.stack([groups.members[group, (place + s) % groups.size] for s in shifts])
    message = Message((torch.zeros(1, count, device=cluster.device),))
    return _times(cluster, lambda: cluster.neighbor_exchange(message, sources), limit_s)


def _times(cluster: Cluster, work: Callable[[], Any], limit_s: float, most: int = 9) -> list[float]:
    """How long some exchanges take, each as long as on its slowest worker: the same list on all workers, who end together."""
    flags = torch.zeros(1, 1, dtype=torch.bool)
    times: list[float] = []
    for turn in range(most):
        _once(cluster, lambda: cluster.all_reduce_any(flags))  # all begin together
        own = _once(cluster, work)
        slowest = float(cluster.all_gather_metrics(torch.tensor([[own]], dtype=torch.float64)).max())
        if turn:  # the first one warms up
            times.append(slowest)
        if len(times) > 2 and sum(times) > limit_s:
            break
    return times


def _once(cluster: Cluster, work: Callable[[], Any]) -> float:
    exchange = cluster.exchange()
    begun = time.perf_counter()
    exchange.submit(work, name="probe")
    exchange.wait()
    if cluster.device.type == "cuda":
        torch.cuda.synchronize(cluster.device)
    return time.perf_counter() - begun
