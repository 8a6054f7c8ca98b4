"""The virtual clock: the time of each virtual worker on a described cluster (:class:`~hocket.cluster.spec.ClusterSpec`).

Each worker has its own time ``now`` and a network link that is free from time ``net`` on; both are float64 tensors ``[workers]`` on
the CPU.

- *Computing* a step takes ``load + step_s · samples / batch · slowdown · disturbance``: loading the mini-batch, then one third of
  the rest forward, two thirds backward. The backward pass produces gradients in proportion to parameters, in bucket order, unless
  the spec says when they are ``ready``.
  The optimiser's *update* takes ``update · values · slowdown``.
- *Work* that is launched goes through the networks in order, while workers compute. Each exchange begins with what the worker
  itself has to do for it (``exchange``, and ``a + b·values`` to encode and decode), times its slowdown. A ring starts with the last
  of its members, messages between pairs start when both sides have launched; :mod:`hocket.cluster.cost` says how long they take.
- Where the spec has a ``contention``, computing and an exchange that go on at the same time delay each other: workers without a
  core to spare take ``max(c, x) + h·min(c, x)`` for both.
- A worker *waits* for an exchange when it needs the result: it is idle until the exchange ends. The ledger splits this time.

None of this depends on the device or on real time: the same seed gives the same seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.cluster.cost import Network
from hocket.cluster.ledger import parts
from hocket.cluster.message import PIECE_BYTES
from hocket.cluster.spec import ClusterSpec, log_normal
from hocket.cluster.step_times import StepTimes
from hocket.noise import fold, uniform

if TYPE_CHECKING:
    from hocket.cluster.base import Subgroups

_BLOCK = 32


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
        spec.check_workers(workers)
        self.spec, self.workers, self.seed = spec, workers, seed
        self.step_s = spec.step_s or 0.0
        """Seconds of an undisturbed step on a whole mini-batch; the training sets it where the spec does not."""
        self.now = torch.zeros(workers, dtype=torch.float64)
        self.net = self.now.clone()
        self._factors = spec.factors(workers)
        self._block, self._disturbances = -1, self._factors  # disturbances of so many steps at once, slowdown included
        self.network = Network(spec, workers)
        self._step = self.now.clone()  # what the last step took
        self.steps = StepTimes(workers)
        """What all steps took."""
        self._first: Tensor | None = None  # the first launch of the exchange in flight, if there is one
        self._late = self.now.clone()  # the latest launch among those it goes through
        self._begun = self.now.clone()
        self._sums = torch.zeros(3, workers, dtype=torch.float64)  # wait, transfer and hidden transfer since then
        self._busy: list[tuple[float, Tensor, Tensor]] = []  # parts of the exchange in flight: contention, begin and end
        self._exchanges = 0

    # --- computing ---------------------------------------------------------------------------------------------------------

    def compute(self, step: int, share: Tensor | float = 1.0) -> None:
        """Every worker computes the gradients of step ``step`` on ``share`` of a whole mini-batch."""
        block = step // _BLOCK
        if block != self._block:
            steps = range(block * _BLOCK, (block + 1) * _BLOCK)
            self._block, self._disturbances = block, self.spec.disturbances(self.workers, steps, self.seed) * self._factors
        fixed = min(self.spec.fixed_s, self.step_s)
        self._step = self._disturbances[step % _BLOCK] * (fixed + (self.step_s - fixed) * share)
        self.now = self.now + self._step
        self.steps.add(self._step)
        if self.spec.load_s:
            self.now = self.now + self.spec.load_s * self._factors * share

    def update(self, values: int) -> None:
        """Every worker's optimiser updates ``values`` weights."""
        if self.spec.update_s:
            self.now = self.now + self.spec.update_s * values * self._factors

    # --- exchanging --------------------------------------------------------------------------------------------------------

    def launch(self, produced: float = 1.0) -> None:
        """Launch an exchange: now, or when the last backward pass has ``produced`` this share of the gradients."""
        launch = self.now - self.spec.unready(produced) * self._step
        self._late = launch if self._first is None else torch.maximum(self._late, launch)
        self._first = launch if self._first is None else self._first
        self.net = torch.maximum(self.net, launch)
        if self.spec.exchange_s:
            self._own_part(self.spec.exchange_s)

    def code(self, methods: Sequence[str], values: float) -> None:
        """Every worker encodes and decodes ``values`` values for the exchange in flight (:meth:`ClusterSpec.coding_s`)."""
        if coding_s := self.spec.coding_s(methods, values):
            self._own_part(coding_s)

    def _own_part(self, seconds: float) -> None:
        """What each worker itself does for the exchange in flight."""
        begun, self.net = self.net, self.net + seconds * self._factors
        self._note(self.spec.contention, begun)

    def apply(self, methods: Sequence[str], values: float) -> None:
        """Every worker copies ``values`` weights to and from an exchange, or gathers gradients, in line with its computing."""
        if seconds := self.spec.coding_s(methods, values):
            self.now = self.now + seconds * self._factors

    def ring(self, sent_bytes: float, subgroups: Subgroups) -> None:
        """A ring all-reduce in each group, ``sent_bytes`` by every worker; its members end together."""
        if subgroups.size > 1:
            self._together(subgroups, self.network.ring(sent_bytes, subgroups))

    def summed(self, sent_bytes: float, subgroups: Subgroups) -> None:
        """A mean on summation servers, all links equally loaded."""
        if subgroups.size > 1:
            self._together(subgroups, self.network.summed(sent_bytes))

    def all_to_all(self, sizes: Tensor, subgroups: Subgroups, announced: bool) -> None:
        """All-to-all in each group: ``sizes`` ``[workers · size]`` bytes, to each member of the group in turn."""
        if subgroups.size > 1:
            groups = self.network.groups(subgroups)
            traffic = groups.each_to_each(sizes.view(self.workers, -1).to(torch.float64))
            large = float(sizes.max()) > PIECE_BYTES
            self._together(subgroups, groups.slowest(self.network.exchange(traffic, large, announced)))

    def all_gather(self, sizes: Tensor, subgroups: Subgroups, announced: bool) -> None:
        """All-gather in each group: ``sizes`` ``[workers]`` bytes, to every other member."""
        if subgroups.size > 1:
            groups = self.network.groups(subgroups)
            traffic, large = groups.each_to_all(sizes.to(torch.float64)), float(sizes.max()) > PIECE_BYTES
            self._together(subgroups, groups.slowest(self.network.exchange(traffic, large, announced)))

    def neighbor_exchange(self, sizes: Tensor, sources: Tensor, announced: bool) -> None:
        """Messages of ``sizes`` ``[workers]`` (or ``[slots, workers]``) bytes from ``sources[slot, worker]`` (−1: none) to each
        worker."""
        if sources.shape[0]:
            self.pairs(*self.priced_pairs(sizes, sources, announced))

    def priced_pairs(self, sizes: Tensor, sources: Tensor, announced: bool) -> tuple[Tensor, Tensor]:
        """Whom each worker hears and the seconds of it, which the same messages at another time have, too."""
        heard = torch.where(sources < 0, self.network.own, sources)
        traffic = self.network.from_sources(sizes.to(torch.float64), heard)
        return heard, self.network.exchange(traffic, float(sizes.max()) > PIECE_BYTES, announced)

    def pairs(self, heard: Tensor, cost: Tensor) -> None:
        """Messages from ``heard[slot, worker]`` to each worker, which take it ``cost`` ``[workers]`` seconds."""
        starts, self._late = meet(torch.stack([self.net, self._late]), heard)
        self.net = starts + cost * self._disturbed()
        pairs = self.spec.pairs_contention
        self._note(self.spec.link_contention if pairs is None else pairs, starts)

    def wait(self) -> None:
        """Every worker needs the result of the exchange in flight: it is idle until the exchange has ended."""
        if self._first is None:
            return
        self._contend()
        self._sums = self._sums + torch.stack(parts(self._first, self._late, self.now, self.net))
        self.now = torch.maximum(self.now, self.net)
        self._first = None

    def _note(self, contention: float, begun: Tensor) -> None:
        """A part of the exchange in flight goes on from ``begun`` until its end so far."""
        if contention:
            self._busy = [*self._busy, (contention, begun, self.net)]

    def _contend(self) -> None:
        """Exchange and computing delay each other while both go on: ``max(c, x) + h·min(c, x)`` instead of ``max(c, x)``."""
        if self._busy:
            delay = torch.stack([h * (torch.minimum(end, self.now) - begun).clamp(min=0.0) for h, begun, end in self._busy]).sum(0)
            self.now, self.net, self._busy = self.now + delay, self.net + delay, []

    def _together(self, subgroups: Subgroups, cost: Tensor) -> None:
        """The members of each group start with the last of them and end together."""
        latest = torch.stack([self.net, self._late])[:, subgroups.members].amax(2)
        begun = latest[0][subgroups.group_of]
        latest[0] += cost * self._disturbed()
        self.net, self._late = latest[:, subgroups.group_of]
        self._note(self.spec.link_contention, begun)

    def _disturbed(self) -> float:
        """The factor of the links' jitter on the next exchange."""
        if not self.spec.link_jitter:
            return 1.0
        self._exchanges += 1
        u, v = uniform(torch.tensor([fold(self.seed, self._exchanges, 0x11E7)]), 2)[0].to(torch.float64)
        return float(log_normal(u, v, self.spec.link_jitter))

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
            if name.lstrip("_") in state:
                setattr(self, name, state[name.lstrip("_")])
        if "steps" in state:
            self.steps.load_state_dict(state["steps"])


_STATE = ("now", "net", "_step", "_first", "_late", "_begun", "_sums", "_busy", "_exchanges")
