"""All workers as rows in this process: no sockets, the same bytes and the same results as real processes.

On a described cluster (a :class:`~hocket.cluster.spec.ClusterSpec`) they have a clock, and every collective takes the time it
would take there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.clock import Clock
from hocket.cluster.flags import with_flags
from hocket.cluster.message import LENGTH_BYTES, Message, framed, on_wire, ordered_mean, ring_bytes, summed_bytes
from hocket.cluster.relay import gather_trips, payloads, scatter_trips, sources
from hocket.cluster.spec import ClusterSpec


class ClockedCluster(Cluster):
    """Workers of which this process knows all: every verb counts its bytes and, on a described cluster, takes its time."""

    def code(self, methods: Sequence[str], values: int) -> None:
        self._on_clock("code", methods, values)

    def apply(self, methods: Sequence[str], values: int) -> None:
        if self.clock is not None:
            self.clock.apply(methods, values)

    def _priced_mean(self, rows: Tensor, subgroups: Subgroups) -> None:
        self._count_mean(rows, subgroups)
        self._on_clock("ring", ring_bytes(rows.shape[1] * rows.element_size(), subgroups.size), subgroups)

    def _priced_sum(self, rows: Tensor, servers: int) -> None:
        payload = rows.shape[1] * rows.element_size()
        own, theirs = summed_bytes(payload, self.size, servers)
        self.ledger.sent += own + servers * theirs // self.size  # what servers send is counted for the workers that they serve
        self._on_clock("summed", own, self.world)

    def _priced_flags(self, flags: Tensor) -> None:
        sizes = torch.full((self.size,), framed(flags.shape[1]))
        for trip in self._flag_trips:
            self.ledger.sent += len(trip.shifts) * framed(flags.shape[1])
            self._on_clock("neighbor_exchange", sizes, sources(trip, self.world), False)

    def _priced_broadcast(self, rows: Tensor, source: int) -> None:
        self._count_broadcast(rows, source)
        if self.clock is not None:
            heard = torch.full((1, self.size), source)
            heard[0, source] = -1
            sizes = torch.full((self.size,), framed(rows.shape[1] * rows.element_size()))
            self._on_clock("neighbor_exchange", sizes, heard, False)

    def _priced_messages(self, message: Message, copies: Tensor | int, where: Tensor | Subgroups, verb: str) -> None:
        """Messages that go where the table of sources, or the subgroups, say; ``verb`` is the clock's."""
        sizes = self._count_messages(message, copies)
        if self.clock is not None:
            self._on_clock(verb, self._of_all(sizes), where, message.lengths is not None)

    def _priced_relay(self, message: Message, subgroups: Subgroups, radix: int, gather: bool) -> None:
        """An all-gather or an all-to-all by way of others."""
        varying, trips = message.lengths is not None, (gather_trips if gather else scatter_trips)(subgroups.size, radix)

        def find() -> tuple[list[Tensor], Tensor]:
            blocks = self._of_all(message.payload_bytes())
            blocks = blocks if len(blocks) == self.size else blocks.view(self.size, -1)
            found = payloads(trips, blocks, subgroups, varying)
            sizes = [on_wire(payload + LENGTH_BYTES if varying else payload, varying) for payload in found]
            return sizes, torch.cat(sizes)[:, self.workers.start : self.workers.stop].sum(0)

        key = ("relay", self.workers, message.fixed_bytes, message.rows, radix, gather)
        sizes, own = find() if varying else subgroups.table(key, find)
        self._count_sent(own, varying)
        if self.clock is not None:
            for trip, each in zip(trips, sizes, strict=True):
                self._on_clock("neighbor_exchange", each, sources(trip, subgroups), varying)

    def _on_clock(self, verb: str, *arguments: Any) -> None:
        """Let the clock, if there is one, take the time of what it calls ``verb``."""
        if self.clock is not None:
            getattr(self.clock, verb)(*arguments)

    def _of_all(self, sizes: Tensor) -> Tensor:
        """The sizes of all workers' messages, given those of the workers hosted here."""
        return sizes.cpu()

    def start(self, work: Callable[[], Any], name: str = "") -> Callable[[], Any]:
        result = work()
        return lambda: result

    def all_gather_metrics(self, values: Tensor) -> Tensor:
        return values


class VirtualCluster(ClockedCluster):
    """``size`` virtual workers on one device.

    >>> cluster = VirtualCluster(4)
    >>> cluster.mean(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), cluster.world).flatten().tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        host_size: int | None = None,
        timed: bool = False,
        spec: ClusterSpec | None = None,
        seed: int = 0,
    ) -> None:
        """``timed``: measure this process's seconds; ``spec``: use those of the virtual clock, with disturbances from ``seed``."""
        described = None if spec is None else spec.host_size
        super().__init__(size, range(size), torch.device(device), timed and spec is None, host_size or described)
        if spec is not None:
            self.clock = Clock(spec, size, seed)
            self.ledger.predict, self.ledger.steps = self.clock.take, self.clock.steps

    def mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        self._priced_mean(rows, subgroups)
        if subgroups.whole:
            return rows.copy_(ordered_mean(rows).expand_as(rows))
        for group in subgroups.members:
            index = group.to(rows.device)
            rows[index] = ordered_mean(rows[index]).expand(subgroups.size, -1)
        return rows

    def reduce_on_servers(self, servers: int, rows: Tensor) -> Tensor:
        self._priced_sum(rows, servers)
        return rows.copy_(ordered_mean(rows).expand_as(rows))

    def neighbor_exchange(self, message: Message, sources: Tensor) -> Message:
        self._priced_messages(message, self._copies_heard(sources), sources, "neighbor_exchange")
        own = torch.arange(self.size).expand_as(sources)
        return message.select(torch.where(sources < 0, own, sources).flatten())

    def all_to_all(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        if radix := self._radix(message, subgroups, False, usual_bytes):
            self._priced_relay(message, subgroups, radix, False)
        else:
            self._priced_messages(message, subgroups.others(self.workers), subgroups, "all_to_all")

        def find() -> Tensor:
            place = subgroups.place_of.unsqueeze(1)
            senders = subgroups.members[subgroups.group_of]  # [workers, size]: who sends to worker i, in group order
            return (senders * subgroups.size + place).flatten().to(self.device)

        return message.select(subgroups.table(("dealt", self.device), find))

    def all_gather(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        if radix := self._radix(message, subgroups, True, usual_bytes):
            self._priced_relay(message, subgroups, radix, True)
        else:
            self._priced_messages(message, subgroups.size - 1, subgroups, "all_gather")
        if subgroups.whole:
            return message
        return message.select(subgroups.table(("members", self.device), lambda: subgroups.members.flatten().to(self.device)))

    def all_gather_flagged(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        """Flags count as bytes of the message. All of them are here, so nobody waits for the device to read them."""
        flags = self.waiting_flags
        if flags is None or not subgroups.whole:
            return self.all_gather(message, subgroups, usual_bytes)
        self.waiting_flags, self.agreed_flags = None, flags.any(0)
        self.all_gather(with_flags(message, flags), subgroups, usual_bytes)
        return message

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        self._priced_flags(flags)
        return flags.any(0)

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """Every row becomes worker ``source``'s, in place.

        >>> cluster = VirtualCluster(3)
        >>> cluster.broadcast(torch.tensor([[1.0], [2.0], [3.0]]), source=1).flatten().tolist(), cluster.ledger.sent.tolist()
        ([2.0, 2.0, 2.0], [0, 708, 0])
        """
        self._priced_broadcast(rows, source)
        return rows.copy_(rows[source].clone().expand_as(rows))
