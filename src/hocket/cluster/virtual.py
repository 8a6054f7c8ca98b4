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
from hocket.cluster.message import Message, framed, ordered_mean, ring_bytes, summed_bytes
from hocket.cluster.spec import ClusterSpec


class ClockedCluster(Cluster):
    """Workers of which this process knows all: every verb counts its bytes and, on a described cluster, takes its time."""

    def code(self, methods: Sequence[str], values: int) -> None:
        self._on_clock("code", methods, values)

    def _priced_mean(self, rows: Tensor, subgroups: Subgroups) -> None:
        self._count_mean(rows, subgroups)
        self._on_clock("ring", ring_bytes(rows.shape[1] * rows.element_size(), subgroups.size), subgroups)

    def _priced_sum(self, rows: Tensor, servers: int) -> None:
        payload = rows.shape[1] * rows.element_size()
        own, theirs = summed_bytes(payload, self.size, servers)
        self.ledger.sent += own + servers * theirs // self.size  # what servers send is counted for the workers that they serve
        self._on_clock("summed", own, self.world)

    def _priced_flags(self, flags: Tensor) -> None:
        sent_bytes = ring_bytes(flags.shape[1], self.size)
        self.ledger.sent += sent_bytes
        self._on_clock("ring", sent_bytes, self.world)

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

    def all_to_all(self, message: Message, subgroups: Subgroups) -> Message:
        self._priced_messages(message, self._to_others(subgroups), subgroups, "all_to_all")
        place = subgroups.place_of.unsqueeze(1)
        senders = subgroups.members[subgroups.group_of]  # [workers, size]: who sends to worker i, in group order
        return message.select((senders * subgroups.size + place).flatten())

    def all_gather(self, message: Message, subgroups: Subgroups) -> Message:
        self._priced_messages(message, subgroups.size - 1, subgroups, "all_gather")
        return message.select(subgroups.members.flatten())

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
