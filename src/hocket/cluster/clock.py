"""The virtual clock: the time of each virtual worker on a described cluster (:class:`~hocket.cluster.spec.ClusterSpec`).

Each worker has its own time ``now`` and a network link that is free from time ``net`` on; both are float64 tensors ``[workers]`` on
the CPU.

- *Computing* a step takes ``step_s · samples / batch · slowdown · disturbance``: one third of it forward, two thirds backward.
  The backward pass produces gradients in proportion to parameters, in bucket order; updating the weights takes no time.
- *Work* that is launched goes through the networks in order, while workers compute. A ring of ``n`` workers starts with the last of
  them and takes ``2(n−1)(α + M/(n·B))``. Messages between pairs start when both sides have launched; links are full duplex, so a
  worker needs ``max(bytes in, bytes out) / B`` and a latency: one for small messages, which go all at once, and one for each
  partner's where they are large and go one after another (docs/decisions/11); sizes that vary are announced, for one more.
- Workers on one host talk over the host's link; an exchange is as slow as its slowest link. Links are not shared between workers.
- A worker *waits* for an exchange when it needs the result: it is idle until the exchange ends. The ledger splits this time.

None of this depends on the device or on real time: the same seed gives the same seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.cluster.ledger import parts
from hocket.cluster.message import PIECE_BYTES
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.step_times import StepTimes

if TYPE_CHECKING:
    from hocket.cluster.base import Subgroups

BACKWARD = 2 / 3
"""The share of a step's time that the backward pass takes."""
_BLOCK = 32


@dataclass(frozen=True)
class Link:
    """A full-duplex link: seconds before the first byte, bytes per second after it."""

    latency_s: float
    bandwidth: float

    def ring(self, sent_bytes: float, workers: int) -> float:
        """A ring of ``workers`` that send ``sent_bytes`` each, in ``2(n−1)`` steps.

        >>> Link(0.1, 100.0).ring(600, 4)
        6.6
        """
        return 2 * (workers - 1) * self.latency_s + sent_bytes / self.bandwidth

    def exchange(self, partners: Tensor, bytes_: Tensor, large: bool, announced: bool) -> Tensor:
        """Messages with so many partners, ``bytes_`` in the busier direction."""
        trips = (partners if large else partners.clamp(max=1)) + (partners > 0) * int(announced)
        return trips * self.latency_s + bytes_ / self.bandwidth


class Routes:
    """How the members of the subgroups reach each other: per link, from whom to whom (float64 ``[groups, size, size]``)."""

    def __init__(self, links: tuple[tuple[Link, Tensor], ...]) -> None:
        self.links = links
        self.size = links[0][1].shape[1]
        at = torch.arange(self.size)
        self._hops = [mask[:, at, at.roll(-1)].amax(1) for _, mask in links]  # which links a ring in member order uses

    def ring(self, sent_bytes: float) -> Tensor:
        """Seconds of a ring, by group: as slow as its slowest hop."""
        times = [used * link.ring(sent_bytes, self.size) for (link, _), used in zip(self.links, self._hops, strict=True)]
        return times[0] if len(times) == 1 else torch.maximum(*times)

    def exchange(self, sizes: Tensor, announced: bool) -> Tensor:
        """Seconds by group when member ``i`` sends ``sizes[group, i, k]`` bytes to member ``k``."""
        large = float(sizes.max()) > PIECE_BYTES
        times = []
        for link, mask in self.links:
            moved = sizes * mask
            busier = torch.maximum(moved.sum(1), moved.sum(2))
            times.append(link.exchange(mask.sum(2), busier, large, announced).amax(1))
        return torch.stack(times).amax(0)


def meet(times: Tensor, heard: Tensor) -> Tensor:
    """The latest of ``times[…, worker]`` among each worker, its sources (``heard[slot, worker]``) and its receivers.

    >>> meet(torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([[1, 1, 2]])).tolist()
    [[5.0, 5.0, 2.0]]
    """
    latest = torch.maximum(times, times[:, heard].amax(1))
    hearing = times.unsqueeze(1).expand(-1, heard.shape[0], -1).flatten(1)
    return latest.scatter_reduce_(1, heard.reshape(1, -1).expand(times.shape[0], -1), hearing, "amax")


class Clock:
    """The time of ``workers`` virtual workers on the cluster ``spec``; see the module's docstring.

    >>> clock = Clock(ClusterSpec(step_s=1.0, slowdown=(1, 4)), 2)
    >>> clock.compute(0)
    >>> clock.now.tolist()
    [1.0, 4.0]
    """

    def __init__(self, spec: ClusterSpec, workers: int, seed: int = 0) -> None:
        self.spec, self.workers, self.seed = spec, workers, seed
        self.step_s = spec.step_s or 0.0
        """Seconds of an undisturbed step on a whole mini-batch; the training sets it where the spec does not."""
        self.now = torch.zeros(workers, dtype=torch.float64)
        self.net = self.now.clone()
        self._factors = spec.factors(workers)
        self._block, self._disturbances = -1, self._factors  # disturbances of so many steps at once, slowdown included
        self._net_link = Link(spec.latency_s, spec.bandwidth)
        self._host_link = Link(spec.host_latency_s, spec.host_bandwidth)
        self._host_of = torch.arange(workers) // (spec.host_size or 1)
        self._routes: dict[Subgroups, Routes] = {}
        self._step = self.now.clone()  # what the last step took
        self.steps = StepTimes(workers)
        """What all steps took."""
        self._first: Tensor | None = None  # the first launch of the exchange in flight, if there is one
        self._late = self.now.clone()  # the latest launch among those it goes through
        self._begun = self.now.clone()
        self._sums = torch.zeros(3, workers, dtype=torch.float64)  # wait, transfer and hidden transfer since then

    # --- computing ---------------------------------------------------------------------------------------------------------

    def compute(self, step: int, share: Tensor | float = 1.0) -> None:
        """Every worker computes the gradients of step ``step`` on ``share`` of a whole mini-batch."""
        block = step // _BLOCK
        if block != self._block:
            steps = range(block * _BLOCK, (block + 1) * _BLOCK)
            self._block, self._disturbances = block, self.spec.disturbances(self.workers, steps, self.seed) * self._factors
        self._step = self._disturbances[step % _BLOCK] * (self.step_s * share)
        self.now = self.now + self._step
        self.steps.add(self._step)

    # --- exchanging --------------------------------------------------------------------------------------------------------

    def launch(self, produced: float = 1.0) -> None:
        """Launch an exchange: now, or when the last backward pass has ``produced`` this share of the gradients."""
        launch = self.now - (1 - produced) * BACKWARD * self._step
        self._late = launch if self._first is None else torch.maximum(self._late, launch)
        self._first = launch if self._first is None else self._first
        self.net = torch.maximum(self.net, launch)

    def ring(self, sent_bytes: float, subgroups: Subgroups) -> None:
        """A ring all-reduce in each group, ``sent_bytes`` by every worker; its members end together."""
        if subgroups.size > 1:
            self._together(subgroups, self._routes_of(subgroups).ring(sent_bytes))

    def summed(self, sent_bytes: float, subgroups: Subgroups) -> None:
        """A mean on summation servers: pushed and fetched in pieces, both directions at once, all links equally loaded."""
        if subgroups.size > 1:
            self._together(subgroups, self._net_link.latency_s * 2 + torch.tensor([sent_bytes / self._net_link.bandwidth]))

    def all_to_all(self, sizes: Tensor, subgroups: Subgroups, announced: bool) -> None:
        """All-to-all in each group: ``sizes`` ``[workers · size]`` bytes, to each member of the group in turn."""
        if subgroups.size > 1:
            sent = sizes.view(self.workers, subgroups.size)[subgroups.members].to(torch.float64)
            self._together(subgroups, self._routes_of(subgroups).exchange(sent, announced))

    def all_gather(self, sizes: Tensor, subgroups: Subgroups, announced: bool) -> None:
        """All-gather in each group: ``sizes`` ``[workers]`` bytes, to every other member."""
        if subgroups.size > 1:
            sent = sizes[subgroups.members].to(torch.float64).unsqueeze(2).expand(-1, -1, subgroups.size)
            self._together(subgroups, self._routes_of(subgroups).exchange(sent, announced))

    def neighbor_exchange(self, sizes: Tensor, sources: Tensor, announced: bool) -> None:
        """Messages of ``sizes`` ``[workers]`` bytes from ``sources[slot, worker]`` (−1: none) to each worker."""
        if not sources.shape[0]:
            return
        own = torch.arange(self.workers)
        heard = torch.where(sources < 0, own, sources)
        moved = sizes.to(torch.float64)[heard]
        here = self._host_of[heard] == self._host_of
        away = heard != own
        large = float(sizes.max()) > PIECE_BYTES
        cost = torch.zeros_like(self.net)
        for link, used in ((self._net_link, ~here), (self._host_link, here & away)):
            if link is self._host_link and self.spec.host_size is None:
                continue
            counts = torch.stack([used.to(torch.float64), moved * used])  # messages and bytes, [2, slots, workers]
            outward = counts.new_zeros(2, self.workers).index_add_(1, heard.flatten(), counts.flatten(1))
            partners, bytes_ = torch.maximum(counts.sum(1), outward)
            cost = torch.maximum(cost, link.exchange(partners, bytes_, large, announced))
        starts, self._late = meet(torch.stack([self.net, self._late]), heard)
        self.net = starts + cost

    def wait(self) -> None:
        """Every worker needs the result of the exchange in flight: it is idle until the exchange has ended."""
        if self._first is None:
            return
        self._sums = self._sums + torch.stack(parts(self._first, self._late, self.now, self.net))
        self.now = torch.maximum(self.now, self.net)
        self._first = None

    def _together(self, subgroups: Subgroups, cost: Tensor) -> None:
        """The members of each group start with the last of them and end together."""
        latest = torch.stack([self.net, self._late])[:, subgroups.members].amax(2)
        latest[0] += cost
        self.net, self._late = latest[:, subgroups.group_of]

    def _routes_of(self, subgroups: Subgroups) -> Routes:
        if subgroups not in self._routes:
            hosts = self._host_of[subgroups.members]
            same = hosts.unsqueeze(2) == hosts.unsqueeze(1)
            apart = ~torch.eye(subgroups.size, dtype=torch.bool)
            found = ((self._net_link, ~same), (self._host_link, same & apart))
            self._routes[subgroups] = Routes(tuple((link, mask.to(torch.float64)) for link, mask in found if bool(mask.any())))
        return self._routes[subgroups]

    # --- reading and keeping -----------------------------------------------------------------------------------------------

    def take(self) -> Tensor:
        """Seconds, wait, transfer and hidden transfer of each worker since the last call: float64 ``[workers, 4]``."""
        taken = torch.stack([self.now - self._begun, *self._sums], 1)
        self._begun, self._sums = self.now, torch.zeros_like(self._sums)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The state of all workers (tensors that are never changed in place)."""
        return {**{name.lstrip("_"): getattr(self, name) for name in _STATE}, "steps": self.steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name.lstrip("_")])
        if "steps" in state:
            self.steps.load_state_dict(state["steps"])


_STATE = ("now", "net", "_step", "_first", "_late", "_begun", "_sums")
