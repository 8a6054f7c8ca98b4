"""An observer of the shards: it asks for the state of the job and for the weights after an epoch, and reports dead workers."""

import math
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.programs.base import Address, Program, Task, Until, event
from hocket.programs.server.push_encoder import Slices
from hocket.programs.server.wire import OBSERVER, read_figures
from hocket.transport.frame import Envelope, Kind

_LONG_S = 1e6
_OTHERS_S = 2.0
"""Once shard 0 has reached the end of an epoch, the others have so long to reach it, too."""
_ANSWER_S = 5.0
_AGAIN_S, _AGAIN_MOST_S = 5.0, 120.0
"""Shard 0 is asked again after so long, then after twice as long, and so on: an answer may have large weights and a slow link."""


@dataclass(frozen=True)
class GlobalWeights:
    """The weights of all shards: rows ``[1, values]`` per bucket, and the workers' mean buffers."""

    rows: list[Tensor]
    buffers: Tensor | None
    figures: dict[str, Any]
    """Where the job stood, as shard 0 saw it."""
    lost: int
    """Mini-batches lost, on the shard that has lost most."""


class ShardObserver(Program):
    """Sees the shards of ``slices``; it takes no part in the training."""

    peer_kind = "Shard"

    def __init__(self, layout: Layout, slices: Slices) -> None:
        super().__init__()
        self.layout, self.slices = layout, slices
        self.statuses: dict[int, dict[str, Any] | None] = {}
        """The answers to the last :meth:`ask_status`, by shard; None where a shard has no weights yet."""
        self.heard: set[int] = set()
        """Shards that have said anything since whoever reads this emptied it."""
        self.found: GlobalWeights | None = None
        """What the last :meth:`fetch` has found; None where a shard did not answer in time."""
        self._parts: dict[int, Envelope] = {}
        self._numbers = count(1)
        self._status = self._fetched = -1
        """The numbers of the last requests."""

    @event
    def tell(self, now: float, **order: Any) -> None:
        """Send an order to all shards, without waiting for the answer."""
        self._order(0, order)

    @event
    def ask_status(self, now: float) -> None:
        self.statuses, self._status = {}, next(self._numbers)
        self._order(self._status, {"order": "status"})

    @event
    def fetch(self, epoch: int, now: float, waits: bool = True, timeout_s: float | None = None) -> Task:
        """Fetch the weights after an epoch (from 1; 0: as they are now) from all shards; a fetch under way is given up.

        Without ``waits`` the weights as they are now will do, where the epoch has not come to its end.
        """
        self._task = None
        return self._fetch(epoch, waits, timeout_s)

    def _fetch(self, epoch: int, waits: bool, timeout_s: float | None) -> Task:
        self.found, self._parts, self._fetched = None, {}, next(self._numbers)
        ends, pause = math.inf if timeout_s is None else self.now + timeout_s, _AGAIN_S
        while not self._parts:  # a message may be lost with a connection
            self._ask([0], epoch, _LONG_S if waits else 0.0)
            yield Until(lambda: bool(self._parts), min(self.now + pause, ends))
            if not self._parts and self.now >= ends:
                return
            pause = min(2 * pause, _AGAIN_MOST_S)
        self._ask(range(1, self.slices.shards), epoch, _OTHERS_S)
        yield Until(lambda: len(self._parts) == self.slices.shards, self.now + _OTHERS_S + _ANSWER_S)
        if len(self._parts) == self.slices.shards:
            self.found = self._joined()

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, int)
        self.heard.add(sender)
        if message.kind == Kind.REFUSAL and message.number in (0, self._status, self._fetched):
            raise HocketError(f"{self.describe_peer(sender)}: {message.metadata.get('sentence')}")
        if message.kind == Kind.ANSWER and message.number == self._status:
            self.statuses[sender] = read_figures(message.tensors) if message.tensors else None
        if message.kind == Kind.REPLY and message.number == self._fetched:
            self._parts[sender] = message

    def _order(self, number: int, order: dict[str, Any]) -> None:
        for place in range(self.slices.shards):
            self._send(place, Envelope(Kind.ORDER, OBSERVER, number=number, metadata=order))

    def _ask(self, places: range | list[int], epoch: int, within_s: float) -> None:
        metadata = {"epoch": epoch, "within_s": within_s if epoch else 0.0}
        for place in places:
            self._send(place, Envelope(Kind.FETCH, OBSERVER, number=self._fetched, metadata=metadata))

    def _joined(self) -> GlobalWeights:
        rows = [bucket.empty(1).cpu() for bucket in self.layout.buckets]
        for place, part in self._parts.items():
            for b, row in enumerate(rows):
                self.slices.put(b, place, part.tensors[b], row[0])
        first = self._parts[0]
        buffers = first.tensors[-2].clone() if first.metadata.get("buffers") else None
        figures = {place: read_figures(part.tensors) for place, part in self._parts.items()}
        return GlobalWeights(rows, buffers, figures[0], max(int(figure.get("lost", 0)) for figure in figures.values()))
