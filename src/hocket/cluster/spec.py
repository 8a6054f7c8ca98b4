"""The description of a cluster for virtual time: what its workers, links, hosts and switches are, and what an hour costs.

    [compute]
    flops = "50G"                 # of one worker, per second; or step = "20ms", whatever the model
    fixed = "2ms"                 # of a step, whatever the number of samples
    slowdown = [1, 1, 1, 4]       # worker i takes so many times as long (repeated over all workers)
    jitter = 0.1                  # every step's time varies by a log-normal factor of this width
    stragglers = 0.01             # this share of all steps …
    straggle = 10                 # … takes so many times as long
    update = "0.5ns"              # the optimiser's update, per value
    load = "2ms"                  # loading a mini-batch, as far as it does not happen meanwhile
    exchange = "0.2ms"            # what a worker itself needs for one exchange of one bucket
    contention = 0.5              # how far coding delays computing at the same time; 0: a core to spare; above 1: caches too
    alone = "11ms"                # a step while the other workers, with whom it shares cores, stand still (of a host, or all)
    ready = [[0.1, 0.5], [1, 1]]  # which share of the gradients is there after which share of a step; else two thirds are backward
    memory = "16GB"               # of one worker

    [coding]                      # to encode and decode a value once; a method left out takes the default (:data:`CODING`)
    topk = "20ns"
    sign = ["0.1ms", "3ns"]       # per exchange, and per value
    gradients = ["0.2ms", "0s"]   # what a step takes more that exchanges gradients, the exchange left out
    server = ["0.3ms", "1ns"]     # a worker's own part of a push and its answer

    [link]                        # of each worker and of each server, in each direction
    bandwidth = "1Gbit"           # per second
    latency = "0.1ms"
    message = "20us"              # what each message costs beside its bytes
    duplex = "full"               # or "half": what comes in and what goes out share the bandwidth; or a share of it, 0 to 1
    pairs = "half"                # the same of messages between two workers, where it differs …
    pieces = 0.2                  # … and of large ones, which go in pieces
    jitter = 0.1                  # every exchange's time varies by a log-normal factor of this width
    contention = 0.1              # how far bytes in flight delay computing, and computing delays them …
    pairs_contention = 0.05       # … the same of messages between two workers, where it differs
    shared = true                 # the workers of a host share its link …
    count = 2                     # … or so many of them

    [host]                        # workers that share a host, if they do
    size = 4
    bandwidth = "50Gbit"
    latency = "10us"

    [servers]
    place = "workers"             # shards run on the workers' machines, in turn; without it, on machines of their own
    message = "0.2ms"             # what a shard needs to handle a worker's message, one after another, with its update …
    byte = "0.5ns"                # … and each byte that it receives or sends

    [trunk]                       # hosts behind one switch, and what joins it with the others
    hosts = 16
    oversubscription = 4          # or bandwidth = "100Gbit"
    latency = "2us"

    [cluster]
    workers = 64                  # how many it holds

    [checkpoints]                 # evaluations included: training stands still so long, and so often
    every = "30min"
    takes = "20s"

    [failures]
    every = "30d"                 # of one worker, on average
    restart = "5min"
    elastic = "1s"                # runs are elastic: a failure costs all workers this pause and a step, not a restart

    [storage]                     # where training data lie, for `hocket predict --sample-bytes`
    bandwidth = "10Gbit"          # of all workers together
    latency = "5ms"               # of each open
    cache = "200GB"               # what a host keeps of what it has read

    [price]
    hour = 2.5                    # of one worker
    currency = "USD"

    [sources]                     # where figures are from: by table, or by key
    link = "measured by hocket probe"
    "link.latency" = "assumed"

Presets (:mod:`hocket.cluster.presets`) are such files by name. The seconds of a virtual run are a prediction for the cluster that
is described. The equations stand in :mod:`hocket.cluster.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.noise import bits, fold, uniform

BACKWARD = 2 / 3
"""The share of a step's time that the backward pass takes, where nothing else is known."""
REFERENCE_FLOPS = 50e9
"""The speed of the worker on which :data:`CODING` was measured: one CPU core."""
CODING: dict[str, tuple[float, float]] = {
    "cast": (92e-6, 0.47e-9), "qsgd": (111e-6, 0.57e-9), "bins": (134e-6, 1.8e-9), "ternary": (122e-6, 1.0e-9),
    "sign": (139e-6, 1.6e-9), "natural": (111e-6, 0.52e-9), "threshold": (356e-6, 4.2e-9), "topk": (195e-6, 4.3e-9),
    "randomk": (173e-6, 1.1e-9), "lowrank": (277e-6, 6.2e-9), "dgc": (213e-6, 5.9e-9), "demo": (748e-6, 15e-9),
}  # fmt: skip
"""Seconds per exchange and per value of one coded exchange between four workers, on one CPU core with compiled codes, error
feedback included (``python benchmarks/codes.py --defaults``). A worker of other ``flops`` needs as many times less per value."""


UNCODED = frozenset({"gossip", "weights", "gradients", "server"})
"""What a ``[coding]`` table may name beside codes: the mixing of messages as they are, the copying of weights to and from an
exchange (by the name of the synchronisation, such as ``diloco``, or ``weights``), what hooks and buckets of gradients take, and a
worker's own part of a push. They cost nothing where they are not named."""


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster; see the module's docstring. Bandwidths are bytes per second."""

    name: str = "custom"
    flops: float = REFERENCE_FLOPS
    step_s: float | None = None
    slowdown: tuple[float, ...] = (1.0,)
    jitter: float = 0.0
    stragglers: float = 0.0
    straggle: float = 1.0
    bandwidth: float = math.inf
    latency_s: float = 0.0
    host_size: int | None = None
    host_bandwidth: float = math.inf
    host_latency_s: float = 0.0
    update_s: float = 0.0
    load_s: float = 0.0
    exchange_s: float = 0.0
    memory_bytes: float = math.inf
    coding: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    """By method (``topk``, or ``topk(0.01)``): seconds per exchange and per value; ``other`` is for all that are not named."""
    message_s: float = 0.0
    half_duplex: float = 0.0
    """0: full duplex, 1: half; between them, the share of the lesser direction that the greater one has to wait for."""
    pairs_half_duplex: float | None = None
    pieces_half_duplex: float | None = None
    link_jitter: float = 0.0
    shared_links: bool = False
    links: int = 1
    trunk_hosts: int | None = None
    trunk_bandwidth: float = math.inf
    trunk_latency_s: float = 0.0
    workers: int | None = None
    checkpoint_every_s: float = math.inf
    checkpoint_s: float = 0.0
    failure_every_s: float = math.inf
    restart_s: float = 0.0
    price: float = 0.0
    currency: str = "USD"
    storage_bandwidth: float = math.inf
    storage_latency_s: float = 0.0
    cache_bytes: float = 0.0
    contention: float = 0.0
    """How far what a worker does for an exchange delays its computing meanwhile, and the reverse: 0 not at all, 1 wholly, more
    where they also take each other's caches."""
    link_contention: float = 0.0
    """The same of bytes in flight."""
    pairs_contention: float | None = None
    servers_on_workers: bool = False
    """Whether shard ``s`` runs on the machine of worker ``s`` (modulo the workers), as jobs start them."""
    fixed_s: float = 0.0
    """Of a step's seconds, those that do not depend on the number of samples."""
    alone_s: float | None = None
    """A step while the workers that share its cores stand still; ``step_s`` is with all of them."""
    ready: tuple[tuple[float, float], ...] = ()
    """Pairs: a share of the gradients, in the order of buckets, and the share of a step after which it is there."""
    server_message_s: float = 0.0
    """What a shard needs for each message of a worker, update included, beside its bytes. Without it an update as a worker's."""
    server_byte_s: float = 0.0
    """The same for each byte of tensors that it receives or sends."""
    elastic_pause_s: float | None = None
    """How long all workers of an elastic run stand still for one failure: a new group without the lost worker, another with its
    successor. None: runs are not elastic."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Where figures are from, by ``table`` or ``table.key`` of the file."""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "host_bandwidth", "trunk_bandwidth", "memory_bytes", "storage_bandwidth", *_EVERY):
            self._at_least(name, 0.0, above=True)
        if self.step_s is not None:
            self._at_least("step_s", 0.0, above=True)
        for name in _NOT_NEGATIVE:
            self._at_least(name, 0.0)
        for name in _SHARES:
            if (getattr(self, name) or 0.0) > 1:
                raise HocketError(f"cluster: {name} = {getattr(self, name):g} is a share; it lies between 0 and 1.")
        if not self.straggle >= 1 or self.straggle == math.inf:
            raise HocketError(
                f"cluster: straggle = {self.straggle:g}: a straggling step is never faster than others; give a "
                "factor of at least 1."
            )
        if not self.slowdown or not all(0 < s < math.inf for s in self.slowdown):
            raise HocketError(f"cluster: slowdown = {list(self.slowdown)} needs at least one number, all of them above 0.")
        steps = [(0.0, 0.0), *self.ready]
        if any(not 0 <= a <= b <= 1 for pair in pairwise(steps) for a, b in zip(*pair, strict=True)):
            raise HocketError(
                f"cluster: ready = {[list(r) for r in self.ready]}: give pairs of shares between 0 and 1, each pair larger than "
                "the one before."
            )

    def _at_least(self, name: str, low: float, above: bool = False) -> None:
        value = getattr(self, name)
        if value is not None and not (value > low if above else value >= low):
            raise HocketError(f"cluster: {name} = {value:g} must be {'above' if above else 'at least'} {low:g}.")

    # --- computing ---------------------------------------------------------------------------------------------------------

    def seconds(self, flops: float) -> float:
        """One undisturbed step of ``flops`` floating point operations, of a worker without slowdown."""
        return self.step_s if self.step_s is not None else flops / self.flops

    def unready(self, produced: float) -> float:
        """Which share of a step is left when the backward pass has ``produced`` this share of the gradients.

        >>> ClusterSpec().unready(0.25), ClusterSpec(ready=((0.1, 0.5), (0.9, 0.75), (1.0, 1.0))).unready(0.5)
        (0.5, 0.375)
        """
        if not self.ready:
            return (1 - produced) * BACKWARD
        points = [(0.0, self.ready[0][1]), *self.ready, (1.0, 1.0)]
        (a, begun), (b, ended) = next(pair for pair in pairwise(points) if pair[1][0] >= produced - 1e-6)
        return 1 - (ended if b <= a else begun + (ended - begun) * (min(produced, b) - a) / (b - a))

    def crowding(self, computing: int, workers: int) -> float:
        """How many times as long a step takes while ``computing`` of the ``workers`` that share cores compute as with all of them.

        >>> spec = ClusterSpec(step_s=1.0, alone_s=0.5)
        >>> [spec.crowding(k, 4) for k in (1, 2, 3, 4)], ClusterSpec().crowding(1, 4)
        ([0.5, 0.5, 0.75, 1.0], 1.0)
        """
        if self.alone_s is None or self.step_s is None:
            return 1.0
        return min(1.0, max(self.alone_s / self.step_s, computing / workers))

    def coding_s(self, methods: Sequence[str], values: float) -> float:
        """One coded exchange of ``values`` values: ``a + b·values``, of the first of ``methods`` that is known.

        ``methods`` go from the exact to the general, such as ``["topk(0.01)", "topk"]``.

        >>> spec = ClusterSpec(coding={"topk": (1e-3, 2e-9)})
        >>> spec.coding_s(["topk(0.01)", "topk"], 1e6), round(ClusterSpec(flops=5e12).coding_s(["cast"], 1e8), 6)
        (0.003, 0.000562)
        """
        others = () if set(methods) & UNCODED else ("other",)
        for method in (*methods, *others):
            if method in self.coding:
                fixed, each = self.coding[method]
                return fixed + each * values
        fixed, each = next((CODING[method] for method in methods if method in CODING), (0.0, 0.0))
        return fixed + each * values * REFERENCE_FLOPS / self.flops

    def factors(self, workers: int) -> Tensor:
        """How many times as long each worker takes as the fastest kind: float64 ``[workers]``.

        >>> ClusterSpec(slowdown=(1, 4)).factors(3).tolist()
        [1.0, 4.0, 1.0]
        """
        return torch.tensor(self.slowdown, dtype=torch.float64).repeat(-(-workers // len(self.slowdown)))[:workers]

    def disturbance(self, workers: int, step: int, seed: int = 0) -> Tensor:
        """The factor of jitter and stragglers on step ``step`` of each worker: a function of the arguments and the spec.

        >>> ClusterSpec(stragglers=1.0, straggle=3).disturbance(2, 5).tolist()
        [3.0, 3.0]
        """
        return self.disturbances(workers, range(step, step + 1), seed)[0]

    def disturbances(self, workers: int, steps: range, seed: int = 0) -> Tensor:
        """The same for several steps at once, which is faster than step by step: float64 ``[steps, workers]``."""
        factor = torch.ones(len(steps), workers, dtype=torch.float64)
        if not self.jitter and not self.stragglers:
            return factor
        keys = bits(torch.tensor([fold(seed, step, 0xC10C) for step in steps]), workers).to(torch.int64)
        u = uniform(keys.flatten(), 3).to(torch.float64).view(len(steps), workers, 3)
        if self.jitter:
            factor = log_normal(u[..., 0], u[..., 1], self.jitter)
        return torch.where(u[..., 2] < self.stragglers, factor * self.straggle, factor)

    def slowed(self, slowdown: Sequence[float]) -> ClusterSpec:
        """The same cluster with these workers slow."""
        return replace(self, slowdown=tuple(float(s) for s in slowdown))

    # --- a whole run -------------------------------------------------------------------------------------------------------

    def check_workers(self, workers: int) -> None:
        """Refuse more workers than the cluster holds."""
        if self.workers is not None and workers > self.workers:
            raise HocketError(f"The cluster {self.name} holds {self.workers} workers, not {workers}; use at most {self.workers}.")

    def pauses(self, workers: int, together: bool = True, elastic_step_s: float | None = None, replica: int = 1) -> float:
        """How many times as long a run takes with its checkpoints and failures: ``(1 + C/I) / (1 − L/F)``.

        ``C`` is what a checkpoint takes and ``I`` the time between two, ``F`` the time between two failures of one worker. What is
        lost, ``L``, is ``n·(R + I/2)``: each of ``n`` failures stops all workers for the restart and for what was done since the
        last checkpoint (Young 1974). Where workers do not step ``together`` it is ``R``: a failure stops one, and nothing is done
        again. In an elastic run, a step of which takes ``elastic_step_s``, it is ``n·(P + s) + R``: the pause and the step in
        progress of all, and the restart of one (times the processes of a ``replica``, which are lost together).

        >>> ClusterSpec(failure_every_s=1e6, restart_s=100, checkpoint_every_s=1800).pauses(100)
        1.1111111111111112
        >>> round(ClusterSpec(failure_every_s=1e5, restart_s=100, elastic_pause_s=8.0).pauses(99, elastic_step_s=2.0), 4)
        1.011
        """
        standing = self.checkpoint_s / self.checkpoint_every_s
        lost = self.restart_s
        if together and self.elastic_pause_s is not None and elastic_step_s is not None:
            lost = workers * (self.elastic_pause_s + elastic_step_s) + replica * self.restart_s
        elif together:
            lost = workers * (lost + (self.checkpoint_every_s / 2 if self.checkpoint_every_s < math.inf else 0.0))
        share = lost / self.failure_every_s
        return math.inf if share >= 1 else (1 + standing) / (1 - share)

    def cost(self, workers: int, seconds: float) -> float:
        """What ``workers`` workers cost for so long."""
        return self.price * workers * seconds / 3600

    # --- files -------------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str | Path | ClusterSpec) -> ClusterSpec:
        """A preset's name or a TOML file.

        >>> ClusterSpec.parse("1gbit").bandwidth
        125000000.0
        """
        from hocket.cluster.spec_file import read  # it makes specs

        return text if isinstance(text, ClusterSpec) else read(text)

    @classmethod
    def of(cls, content: Mapping[str, Any], name: str = "custom", where: str = "cluster") -> ClusterSpec:
        """From the tables of a file.

        >>> ClusterSpec.of({"link": {"bandwidth": "100Mbit", "latency": "1ms"}}).latency_s
        0.001
        """
        from hocket.cluster.spec_file import spec_of

        return spec_of(content, name, where)

    def describe(self) -> dict[str, Any]:
        """Plain data for run.json; of what not every description has, only what this one has."""
        usual = {f.name: f.default for f in fields(self)}
        kept = {k: v for k, v in vars(self).items() if k in _ALWAYS or (v not in (None, {}) and v != usual[k] and k != "sources")}
        return {k: _plain(v) for k, v in kept.items()}


_EVERY = ("alone_s", "checkpoint_every_s", "failure_every_s", "links", "host_size", "trunk_hosts", "workers")
_NOT_NEGATIVE = (
    "jitter", "stragglers", "latency_s", "host_latency_s", "update_s", "load_s", "exchange_s", "message_s", "half_duplex",
    "pairs_half_duplex", "pieces_half_duplex", "link_jitter", "contention", "link_contention", "pairs_contention", "fixed_s",
    "trunk_latency_s", "checkpoint_s", "restart_s", "elastic_pause_s", "price", "storage_latency_s", "cache_bytes",
    "server_message_s", "server_byte_s",
)  # fmt: skip
_SHARES = ("stragglers", "link_contention", "pairs_contention", "half_duplex", "pairs_half_duplex", "pieces_half_duplex")
_ALWAYS = (
    "name", "flops", "step_s", "slowdown", "jitter", "stragglers", "straggle", "bandwidth", "latency_s", "host_size",
    "host_bandwidth", "host_latency_s",
)  # fmt: skip


def log_normal(u: Tensor, v: Tensor, width: float) -> Tensor:
    """Log-normal factors of mean 1 from uniform ``u`` and ``v``: ``exp(σz − σ²/2)``."""
    normal = torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * math.pi * v)
    return torch.exp(width * normal - width**2 / 2)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: list(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else None if value == math.inf else value
