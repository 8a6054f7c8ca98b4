"""``hocket.probe``: measures this machine or, under a launcher, the whole cluster, and describes it as a cluster file.

What is measured is what the cost model has a term for, with the code that trainings use:

- *steps*: forward and backward pass of the model on a mini-batch, and the optimiser's update, under a job that never exchanges
  (:mod:`hocket.prediction.probe_steps`). All workers begin each step together, so that those that share cores do so as in a
  training. Workers that are clearly slower have a ``slowdown``; ``jitter`` is the width that makes the slowest as late as it was.
- *codes*: a worker's own part of an exchange (encode, decode, mix), on one row that stands for all workers, so that nothing travels
  (:mod:`hocket.cluster.one_row`); two sizes give ``a + b·values``.
- *contention*: how much longer a step takes beside an exchange, and beside a worker's own part of one, than the longer of both.
- *links*, with several workers: an exchange of nothing gives ``exchange``, which is left out of all others; the mean of all (a
  ring), small and large, gives the delay of a hop ``α + o`` and ``B``; messages to one and to two neighbours part ``α`` from
  ``o``; longer ones between neighbours give ``h``, how far two directions disturb each other, sent whole and in pieces.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
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
from hocket.prediction.probe_servers import server_costs
from hocket.prediction.probe_steps import Steps, common_times, deviation, now
from hocket.programs.collective import CollectiveProgram
from hocket.strategy import Strategy
from hocket.train.checks import Factory, layout_for

LIMIT_S = 60.0
MOST_VALUES = 4_000_000
"""Codes are timed on so many values at most."""
_SMALL, _LEAST, _MOST_BYTES = 64, 1 << 14, 1 << 25
CODES = (
    "cast(bf16)", "qsgd(4)", "bins(2)", "ternary", "sign", "natural", "threshold(keep=0.05)", "topk(0.01)", "randomk(0.01)",
    "lowrank(2)", "dgc(0.01)", "demo",
)  # fmt: skip
assert {code.partition("(")[0] for code in CODES} == set(compression.METHODS) - {"none"}
MIXING = ("gossip", "local", "diloco")
"""What workers do for an exchange without a code: mix, copy weights, make an outer step."""


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
    servers: bool = True,
) -> Probe:
    """Measure the workers of ``cluster``, one per process, within about ``limit_s`` seconds; all processes must call it.

    ``servers=False`` leaves out what pushes to servers cost, for which processes have to start.
    """
    if cluster.rows > 1:
        raise HocketError(f"A probe measures processes with one worker each, not {cluster.rows} virtual workers; use a launcher.")
    steps = Steps(model, loss, batch, optimizer, cluster, limit_s / 6)
    found: dict[str, Any] = {"name": name, "update_s": steps.update_s, "workers": None, **steps.found(), "ready": steps.ready()}
    names = [code.partition("(")[0] for code in codes] if codes is CODES else list(codes)
    if codes is CODES and cluster.size > 1:
        codes, names = (*codes, *MIXING), [*names, *MIXING]
    own = [_code(code, model, max(2, cluster.size), limit_s / 3 / len(codes)) for code in codes]
    costs = cluster.all_gather_metrics(torch.tensor([own], dtype=torch.float64).view(1, -1)).mean(0).view(-1, 2).tolist()
    coding = found["coding"] = {name: tuple(cost) for name, cost in zip(names, costs, strict=True)}
    if cluster.size > 1:
        values = sum(p.numel() for p in model.parameters())
        found |= _links(cluster, limit_s / 4, values)
        dearest = max(zip(codes, costs, strict=True), key=lambda pair: pair[1][0] + pair[1][1] * min(values, MOST_VALUES))[0]
        found |= steps.contention(found["bandwidth"], Coder(dearest, model, cluster.size, min(values, MOST_VALUES)))
        found["alone_s"] = steps.alone(found["step_s"], limit_s / 24)
        if servers:
            few, all_ = (_cut(model, n) for n in (max(1, values // 8), min(values, MOST_VALUES)))
            of_servers = server_costs(cluster, few, all_, optimizer, limit_s / 24)
            coding["server"] = of_servers.pop("own")
            found |= of_servers
        found["servers_on_workers"] = True  # there a job starts its shards
        coding["gradients"] = (steps.gathering(limit_s / 24), 0.0)
    steps.close()
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


# --- codes -------------------------------------------------------------------------------------------------------------------


def _code(code: str, model: nn.Module, workers: int, limit_s: float) -> tuple[float, float]:
    """``a`` and ``b`` of ``a + b·values``; ``code`` may name a topology too: ``gossip + topk(0.01)``."""
    whole = min(sum(p.numel() for p in model.parameters()), MOST_VALUES)
    times = [(n, _mean_time(Coder(code, model, workers, n), limit_s / 2, model)) for n in (max(1, whole // 8), whole)]
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


class Coder:
    """One worker's part of an exchange of so many values of ``model``, each time it is called."""

    def __init__(self, code: str, model: nn.Module, workers: int, values: int) -> None:
        sgd: Factory = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731 - codes with momentum refuse another
        text = f"{code}(1)" if code in MIXING[1:] else f"bulk + {code}" + " + exchange=gradients" * ("gossip" not in code)
        strategy, device = Strategy.parse(text), next(model.parameters()).device
        module = _cut(model, values).to(device)
        layout = layout_for(module, sgd(list(module.parameters())), strategy)
        cluster = OneRowCluster(workers, device)
        self._program = CollectiveProgram(strategy, layout, cluster, [b.empty(1) for b in layout.buckets])
        generator = torch.Generator().manual_seed(0)
        self._noise = [torch.randn(1, b.size, generator=generator).to(device) for b in layout.buckets]
        self._gradients, self._weights = [n.clone() for n in self._noise], [b.empty(1) for b in layout.buckets]

    def refresh(self) -> None:
        """Fresh gradients: an exchange overwrites them."""
        for own, fresh in zip(self._gradients, self._noise, strict=True):
            own.copy_(fresh)

    def __call__(self) -> None:
        for b, rows in enumerate(self._gradients):
            self._program.gradient_ready(b, rows)
        self._program.gradients_done()
        self._program.before_update(self._weights)
        self._program.after_update(self._weights)


def _mean_time(coder: Coder, limit_s: float, model: nn.Module) -> float:
    """The mean of several times, the slowest left out."""
    like = next(model.parameters())
    times: list[float] = []
    ends = time.perf_counter() + limit_s
    while len(times) < 4 or (len(times) < 14 and time.perf_counter() < ends):
        coder.refresh()
        begun = now(like)
        coder()
        times.append(now(like) - begun)
    return statistics.fmean(sorted(times[1:])[: max(1, len(times) - 2)])


# --- links -------------------------------------------------------------------------------------------------------------------


def _links(cluster: Cluster, limit_s: float, values: int) -> dict[str, Any]:
    """Latency, bandwidth, cost of a message, duplex and jitter of the links, from exchanges of Hocket's own, as large as the model:
    what a link carries depends on the size, and on a slow one long transfers lose packets."""
    size, per_host = cluster.size, cluster.host_size
    hosts = 1 < per_host < size and size % per_host == 0
    groups = Subgroups.across(size, per_host) if hosts else cluster.world
    found = _link(cluster, groups, limit_s / (2 if hosts else 1), values)
    if not hosts:
        return found
    inner = _link(cluster, Subgroups.blocks(size, per_host), limit_s / 2, values)
    delay_s = inner["latency_s"] + inner["message_s"]
    # All workers of a host have just used its link at once, so that each has its part of it.
    return {**found, "host_size": per_host, "host_bandwidth": inner["bandwidth"], "host_latency_s": delay_s}


def _link(cluster: Cluster, groups: Subgroups, limit_s: float, values: int) -> dict[str, Any]:
    n, each_s = groups.size, limit_s / 8
    cluster.create_groups(groups)
    nothing = statistics.median(common_times(cluster, lambda: None, each_s))

    def ring(count: int) -> list[float]:
        rows = torch.zeros(1, count, device=cluster.device)
        return common_times(cluster, lambda: cluster.mean(rows, groups), each_s)

    small = max(0.0, statistics.median(ring(_SMALL)) - nothing)
    whole = max(_LEAST, min(values, _MOST_BYTES // 4))
    count = min(_LEAST, whole)
    while (took := statistics.median(times := ring(count))) < each_s / 8 and count < _MOST_BYTES // 4:
        if count >= whole and took > 3 * (small + nothing):  # beyond the model's size only to tell bytes from latency
            break
        count = min(4 * count, whole if count < whole else _MOST_BYTES // 4)
    bandwidth = ring_bytes(4 * count, n) / max(took - small - nothing, 1e-9)
    hop = small / (2 * (n - 1))
    one, two = (statistics.median(_neighbours(cluster, groups, _SMALL, k, each_s)) for k in (1, 2))
    message_s = min(max(0.0, two - one), hop) if n > 2 else 0.0

    def half(count: int) -> float:
        partners = min(2, n - 1)
        took = statistics.median(_neighbours(cluster, groups, count, partners, each_s, together=False)) - nothing
        trips = partners if 4 * count > PIECE_BYTES else 1
        alone = partners * framed(4 * count) / bandwidth
        return round(min(1.0, max(0.0, (took - trips * (hop - message_s) - partners * message_s) / alone - 1)), 3)

    return {
        "exchange_s": nothing,
        "latency_s": hop - message_s,
        "message_s": message_s,
        "bandwidth": bandwidth,
        "pairs_half_duplex": half(min(PIECE_BYTES // 8, whole)),
        "pieces_half_duplex": half(max(count, PIECE_BYTES // 2)),
        "link_jitter": round(float(deviation(torch.tensor(times) / took)), 4) if len(times) > 2 else 0.0,
    }


def _neighbours(
    cluster: Cluster, groups: Subgroups, count: int, partners: int, limit_s: float, together: bool = True
) -> list[float]:
    """Messages from one or both neighbours in the group to each worker."""
    place, group = groups.place_of, groups.group_of
    shifts = (1, -1)[:partners]
    sources = torch.stack([groups.members[group, (place + s) % groups.size] for s in shifts])
    message = Message((torch.zeros(1, count, device=cluster.device),))
    return common_times(cluster, lambda: cluster.neighbor_exchange(message, sources), limit_s, together=together)
