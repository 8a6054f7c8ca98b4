"""One worker's row that stands for all of them: what a strategy costs on any number of workers, without their values.

Every worker is thought to send what this one sends, so that the clock has the time of all of them and the ledger the bytes of one.
What this worker hears is what it sent. On the ``meta`` device rows have sizes and no values: that is how ``hocket.predict`` runs a
strategy's own code on thousands of workers. On a CPU or a GPU a worker really does its part of an exchange, and nothing travels:
that is how ``hocket.probe`` times encoding and decoding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Subgroups
from hocket.cluster.clock import Clock
from hocket.cluster.message import Message
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import ClockedCluster


class OneRowCluster(ClockedCluster):
    """Worker 0 of ``size`` workers.

    >>> cluster = OneRowCluster(4096, spec=ClusterSpec(step_s=1.0, bandwidth=1e6))
    >>> rows = cluster.mean(torch.empty(1, 1000, device="meta"), cluster.world)
    >>> cluster.ledger.bytes_sent.tolist(), len(cluster.clock.net)
    ([2874690], 4096)
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str = "meta",
        host_size: int | None = None,
        spec: ClusterSpec | None = None,
        seed: int = 0,
        replays: bool = False,
    ) -> None:
        """``replays``: work of a name that was submitted before is the same again, so that only the clock has to hear of it."""
        described = None if spec is None else spec.host_size
        super().__init__(size, range(1), torch.device(device), False, host_size or described)
        self.ledger.sent_varying = torch.zeros_like(self.ledger.sent)
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._known: dict[str, tuple[list[tuple[str, tuple[Any, ...]]], Tensor, Any]] = {}
        self._name = ""
        if spec is not None:
            self.clock = Clock(spec, size, seed)
        if replays:
            self.on_submit = self._submitted

    def _submitted(self, name: str) -> None:
        self._name = name

    def start(self, work: Callable[[], Any], name: str = "") -> Callable[[], Any]:
        if self._name not in self._known:
            before, self._calls = self.ledger.bytes_sent, []
            result = work()
            if not self._name:
                return lambda: result
            self._known[self._name] = self._calls, self.ledger.bytes_sent - before, result
        else:
            calls, sent, result = self._known[self._name]
            self.ledger.sent += sent
            for verb, arguments in calls:
                getattr(self.clock, verb)(*arguments)
        return lambda: result

    def _on_clock(self, verb: str, *arguments: Any) -> None:
        if verb == "neighbor_exchange" and self.clock is not None and arguments[1].shape[0]:
            verb, arguments = "pairs", self.clock.priced_pairs(*arguments)  # found once, however often the work is done again
        super()._on_clock(verb, *arguments)
        self._calls.append((verb, arguments))

    def _of_all(self, sizes: Tensor) -> Tensor:
        return sizes[:1].cpu().expand(self.size)

    def mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        self._priced_mean(rows, subgroups)
        return rows

    def reduce_on_servers(self, servers: int, rows: Tensor) -> Tensor:
        self._priced_sum(rows, servers)
        return rows

    def neighbor_exchange(self, message: Message, sources: Tensor) -> Message:
        self._priced_messages(message, self._copies_heard(sources), sources, "neighbor_exchange")
        if len(message.parts) == 1 and message.lengths is None and message.parts[0].is_floating_point():
            return Message((message.parts[0].expand(sources.shape[0], -1),))  # values that are received are not copied again
        return _repeated(message, sources.shape[0])

    def all_to_all(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        # To each member a message of the same size, as in an all-gather.
        if radix := self._radix(message, subgroups, False, usual_bytes):
            self._priced_relay(message, subgroups, radix, False)
        else:
            self._priced_messages(message, subgroups.others(self.workers), subgroups, "all_gather")
        return message

    def all_gather(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        if radix := self._radix(message, subgroups, True, usual_bytes):
            self._priced_relay(message, subgroups, radix, True)
        else:
            self._priced_messages(message, subgroups.size - 1, subgroups, "all_gather")
        return _repeated(message, subgroups.size)

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        self._priced_flags(flags)
        return flags.any(0)

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        self._priced_broadcast(rows, source)
        return rows


def _repeated(message: Message, times: int) -> Message:
    """The message as heard from so many others."""
    return Message(
        tuple(p.repeat(times, 1) for p in message.parts), None if message.lengths is None else message.lengths.repeat(times, 1)
    )
