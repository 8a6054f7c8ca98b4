"""All workers as rows in this process: no sockets, the same bytes and the same results as real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Team
from hocket.cluster.message import Message, ordered_mean, ring_bytes


class VirtualCluster(Cluster):
    """``size`` virtual workers on one device.

    >>> cluster = VirtualCluster(4)
    >>> cluster.mean(torch.tensor([[1.0], [2.0], [3.0], [6.0]]), cluster.everybody).flatten().tolist()
    [3.0, 3.0, 3.0, 3.0]
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", host_size: int | None = None, timed: bool = False) -> None:
        super().__init__(size, range(size), torch.device(device), timed)
        self._host_size = host_size or size

    @property
    def host_size(self) -> int:
        return self._host_size

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        result = work()
        return lambda: result

    def mean(self, rows: Tensor, team: Team) -> Tensor:
        self._count_mean(rows, team)
        if team.whole:
            return rows.copy_(ordered_mean(rows).expand_as(rows))
        for group in team.members:
            index = group.to(rows.device)
            rows[index] = ordered_mean(rows[index]).expand(team.size, -1)
        return rows

    def hear(self, message: Message, sources: Tensor) -> Message:
        self._count_messages(message, self._copies_heard(sources))
        own = torch.arange(self.size).expand_as(sources)
        return message.select(torch.where(sources < 0, own, sources).flatten())

    def scatter(self, message: Message, team: Team) -> Message:
        self._count_messages(message, self._to_others(team))
        place = team.place_of.unsqueeze(1)
        senders = team.members[team.group_of]  # [workers, size]: who sends to worker i, in group order
        return message.select((senders * team.size + place).flatten())

    def share(self, message: Message, team: Team) -> Message:
        self._count_messages(message, team.size - 1)
        return message.select(team.members.flatten())

    def any(self, flags: Tensor) -> Tensor:
        self.ledger.sent += ring_bytes(flags.shape[1], self.size)
        return flags.any(0)

    def collect(self, values: Tensor) -> Tensor:
        return values

    def broadcast(self, rows: Tensor) -> None:
        rows.copy_(rows[:1].expand_as(rows).clone())
