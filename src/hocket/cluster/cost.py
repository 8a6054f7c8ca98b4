"""What exchanges cost on a described cluster: few terms, each an equation, which add up.

A worker reaches another at one of three *distances*: on the same host, on another host, behind another switch. Each has links of
its own kind (:class:`Level`): what stays on a host uses the host's inner link, what leaves it the network's, what leaves its switch
the switch's trunk too. At each level

    seconds = trips·α + messages·o + load/B,      load = max(in, out) + h·min(in, out)

``α`` is the latency, ``o`` the cost of a message beside its bytes (LogP's overhead, Culler 1993), ``B`` the bandwidth, ``h`` 0 for
full and 1 for half duplex. ``in`` and ``out`` are the bytes of a worker or, where several share a link (those of a host its
network link, those behind a switch its trunk), of all of them together.

*Messages between pairs* make one trip where they are small and go all at once, one per partner where they are large; the slowest
level decides. *By way of others* (:mod:`hocket.cluster.relay`) small messages among ``n`` workers make ``R`` trips, each with fewer
messages: the terms add up over the trips, which have about ``R·(n^(1/R) − 1)`` messages instead of ``n − 1``. A *ring* of ``n``
workers goes on in ``2(n−1)`` steps: what it brings has passed as many hops, each with the delay of its own link, while the most
loaded link carries one piece after another: ``2(n−1)·mean(α + o) + max(load/B)``. With ``o = h = 0`` and equal links of one's own
that is the ``2(n−1)(α + M/(n·B))`` of the literature.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from hocket.cluster.base import Subgroups

DISTANCES = 3
"""The same host, another host, another switch."""


@dataclass(frozen=True)
class Level:
    """Links of one kind, which carry what goes over ``distances``."""

    name: str
    distances: tuple[int, ...]
    latency_s: float
    bandwidth: float
    message_s: float = 0.0
    half_duplex: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of collectives, of messages between pairs, and of large ones, which go in pieces."""
    owner: Tensor | None = None
    """Which link each worker uses, int64 ``[workers]``; None: each has its own."""

    @property
    def delay_s(self) -> float:
        """Of one message without bytes."""
        return self.latency_s + self.message_s

    def busy(self, traffic: Traffic, kind: int = 0) -> Tensor:
        """How long the link of each worker carries bytes: float64 ``[workers]``; ``kind`` is that of :attr:`half_duplex`."""
        out, into = (traffic.at(self.distances, way) for way in (1, 2))
        if self.owner is not None:
            out, into = (torch.zeros_like(b).index_add_(0, self.owner, b)[self.owner] for b in (out, into))
        load = torch.maximum(out, into)
        if half := self.half_duplex[kind]:
            load = load + half * torch.minimum(out, into)
        return load / self.bandwidth


@dataclass(frozen=True)
class Traffic:
    """Messages, bytes out and bytes in of each worker by distance: float64 ``[3, distances, workers]``."""

    counts: Tensor

    def at(self, distances: tuple[int, ...], kind: int) -> Tensor:
        return self.counts[kind, distances[0]] if len(distances) == 1 else self.counts[kind, list(distances)].sum(0)


class Network:
    """The links of ``workers`` workers on the cluster ``spec``."""

    def __init__(self, spec: ClusterSpec, workers: int) -> None:
        self.spec, self.workers = spec, workers
        at = torch.arange(workers)
        self.own = at
        self.host = at // (spec.host_size or 1)
        self.switch = torch.zeros_like(at) if spec.trunk_hosts is None else self.host // spec.trunk_hosts
        shared = spec.shared_links and spec.host_size is not None
        pairs = spec.half_duplex if spec.pairs_half_duplex is None else spec.pairs_half_duplex
        pieces = pairs if spec.pieces_half_duplex is None else spec.pieces_half_duplex
        duplex = (spec.message_s, (spec.half_duplex, pairs, pieces))
        self.net = Level("links", (1, 2), spec.latency_s, spec.bandwidth * spec.links, *duplex, owner=self.host if shared else None)
        self.levels = [self.net]
        if spec.host_size is not None:
            self.levels.append(Level("host", (0,), spec.host_latency_s, spec.host_bandwidth))
        if spec.trunk_hosts is not None:
            latency = spec.latency_s + spec.trunk_latency_s
            self.levels.append(Level("trunk", (2,), latency, spec.trunk_bandwidth, *duplex, owner=self.switch))
        self._groups: dict[Subgroups, Groups] = {}
        self._rings: dict[tuple[Subgroups, float], Tensor] = {}

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """How far workers ``a`` are from workers ``b``: 0, 1 or 2."""
        if len(self.levels) == 1:
            return torch.ones((), dtype=torch.int64).expand(torch.broadcast_shapes(a.shape, b.shape))
        near = self.host[a] == self.host[b] if self.spec.host_size is not None else a == b
        return torch.where(near, 0, torch.where(self.switch[a] == self.switch[b], 1, 2))

    def groups(self, subgroups: Subgroups) -> Groups:
        if subgroups not in self._groups:
            self._groups[subgroups] = Groups(self, subgroups)
        return self._groups[subgroups]

    def ring(self, sent_bytes: float, subgroups: Subgroups) -> Tensor:
        """A ring all-reduce in each group, ``sent_bytes`` by every worker: seconds by group."""
        key = (subgroups, sent_bytes)
        if key not in self._rings:
            groups = self.groups(subgroups)
            distance = self.distance(self.own, groups.following)
            counts = torch.zeros(3, DISTANCES, self.workers, dtype=torch.float64)
            counts[1, distance, self.own] = sent_bytes
            counts[2, distance, groups.following] = sent_bytes
            busy = torch.stack([level.busy(Traffic(counts)) for level in self.levels]).amax(0)
            delay = torch.zeros(DISTANCES, dtype=torch.float64)
            for level in self.levels:
                delay[list(level.distances)] = level.delay_s
            hops = delay[distance][subgroups.members].mean(1)
            self._rings[key] = 2 * (subgroups.size - 1) * hops + groups.slowest(busy)
        return self._rings[key]

    def summed(self, sent_bytes: float) -> Tensor:
        """A mean on summation servers: pushed and fetched in pieces, both directions at once: ``2(α + o) + load/B``."""
        counts = torch.zeros(3, DISTANCES, self.workers, dtype=torch.float64)
        counts[1:, 1] = sent_bytes
        return 2 * self.net.delay_s + self.net.busy(Traffic(counts)).max()

    def exchange(self, traffic: Traffic, large: bool, announced: bool) -> Tensor:
        """Messages between pairs: seconds of each worker; sizes that are ``announced`` take one more trip."""
        found = []
        for level in self.levels:
            messages = traffic.at(level.distances, 0)
            trips = (messages if large else messages.clamp(max=1.0)) + float(announced)
            seconds = level.busy(traffic, 2 if large else 1) + messages * level.message_s + trips * level.latency_s
            found.append(torch.where(messages > 0, seconds, 0.0))
        return found[0] if len(found) == 1 else torch.stack(found).amax(0)

    def from_sources(self, sizes: Tensor, heard: Tensor) -> Traffic:
        """The traffic of messages of ``sizes`` ``[workers]`` (or ``[slots, workers]``) from ``heard[slot, worker]`` (itself: none)
        to each worker."""
        slots = heard.shape[0]
        away = (heard != self.own).to(torch.float64)
        moved = torch.stack([away, sizes.expand_as(heard).gather(1, heard) * away]).view(2, -1)  # messages and bytes, slot by slot
        distance = self.distance(heard, self.own).reshape(-1)
        received = distance * self.workers + self.own.repeat(slots)
        sent = distance * self.workers + heard.reshape(-1)
        into, out = (moved.new_zeros(2, DISTANCES * self.workers).index_add_(1, at, moved) for at in (received, sent))
        counts = torch.stack([torch.maximum(into[0], out[0]), out[1], into[1]])
        return Traffic(counts.view(3, DISTANCES, self.workers))


class Groups:
    """Where the members of each group of the subgroups are, seen from each other."""

    def __init__(self, network: Network, subgroups: Subgroups) -> None:
        self.network, self.subgroups = network, subgroups
        group, host, switch = subgroups.group_of, network.host, network.switch
        hosts, switches = int(host.max()) + 1, int(switch.max()) + 1
        self._parts = [(group * hosts + host).unique(return_inverse=True)[1]] if network.spec.host_size is not None else [None]
        self._parts += [(group * switches + switch).unique(return_inverse=True)[1], group]
        members = subgroups.members
        self.following = torch.empty_like(group)
        self.following[members.flatten()] = members.roll(-1, 1).flatten()
        self._peers = self._by_distance(torch.ones(network.workers, dtype=torch.float64))

    def _by_distance(self, sizes: Tensor) -> Tensor:
        """The sum of ``sizes`` over the other members at each distance: ``[distances, workers]``."""
        sums = [sizes]
        for part in self._parts:
            sums.append(sizes if part is None else sizes.new_zeros(int(part.max()) + 1).index_add_(0, part, sizes)[part])
        return torch.stack([b - a for a, b in pairwise(sums)])

    def slowest(self, seconds: Tensor) -> Tensor:
        """Each group ends with its slowest member: ``[groups]``."""
        return seconds[self.subgroups.members].amax(1)

    def each_to_all(self, sizes: Tensor) -> Traffic:
        """Every worker sends ``sizes`` ``[workers]`` bytes to each other member of its group."""
        return Traffic(torch.stack([self._peers, self._peers * sizes, self._by_distance(sizes)]))

    def each_to_each(self, sizes: Tensor) -> Traffic:
        """Worker ``i`` sends ``sizes[i, k]`` bytes to its group's k-th member."""
        network, subgroups = self.network, self.subgroups
        first = sizes.flatten()[:1]
        if bool((sizes == first).all()):
            return self.each_to_all(first.expand(network.workers))
        targets = subgroups.members[subgroups.group_of]
        moved = torch.where(targets == network.own.unsqueeze(1), 0.0, sizes)
        distance = network.distance(network.own.unsqueeze(1), targets)
        out = moved.new_zeros(network.workers, DISTANCES).scatter_add_(1, distance, moved).t()
        into = moved.new_zeros(DISTANCES * network.workers)
        into.index_add_(0, (distance * network.workers + targets).flatten(), moved.flatten())
        return Traffic(torch.stack([self._peers, out, into.view(DISTANCES, -1)]))
