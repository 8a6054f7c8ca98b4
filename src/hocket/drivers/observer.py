"""An observer of the shards: it asks where the job stands and for the weights after an epoch, and reports dead workers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.programs.server.slices import Slices
from hocket.programs.server.wire import OBSERVER
from hocket.transport import Caller, Envelope, Keys, Kind


class Observer:
    """Asks the shards for status and weights, and tells them which workers are dead; it takes no part in the training."""

    def __init__(
        self, addresses: Sequence[str], job: bytes, layout: Layout, slices: Slices, most_bytes: int, keys: Keys | None
    ) -> None:
        self.layout, self.slices = layout, slices
        self.callers = [Caller(a, job, keys, b"o" + secrets.token_bytes(8), most_bytes) for a in addresses]
        self._number = 0
        self._requested: int | None = None
        self._received: Envelope | None = None
        self.lost = 0
        """Mini-batches lost, when the weights were last fetched, on the shard that has lost most."""

    def tell(self, **order: Any) -> None:
        """Give all shards an order; nobody waits for the answer."""
        for caller in self.callers:
            caller.send(Envelope(Kind.ORDER, OBSERVER, metadata=order), 0.0)

    def status(self, timeout_s: float) -> dict[str, Any] | None:
        """Where the job stands, as shard 0 sees it."""
        self.request_status()
        return self.receive_status(timeout_s)

    def request_status(self) -> None:
        """Ask shard 0 where the job stands; :meth:`receive_status` has the answer."""
        self._number += 1
        self.callers[0].send(Envelope(Kind.ORDER, OBSERVER, number=self._number, metadata={"order": "status"}), 0.0)

    def receive_status(self, timeout_s: float) -> dict[str, Any] | None:
        """The answer to :meth:`request_status`; None when it does not come in time."""
        answer = self._receive(0, self._number, timeout_s)
        return None if answer is None else answer.metadata.get("figures")

    def request_weights(self, epoch: int, waits: bool = True) -> None:
        """Ask shard 0 for the weights after an epoch (from 1; 0: as they are now); :meth:`receive_weights` has its part.

        Without ``waits`` the weights as they are now will do, where the epoch has not come to its end.
        """
        self._number += 1
        self._requested, self._received = self._number, None
        metadata = {"epoch": epoch, "within_s": 1e6 if epoch and waits else 0.0}
        self.callers[0].send(Envelope(Kind.FETCH, OBSERVER, number=self._number, metadata=metadata), 0.0)

    def receive_weights(self, timeout_s: float) -> Envelope | None:
        """Shard 0's part of the weights that were requested last; None when it does not come in time."""
        if self._requested is None:
            return None
        found, self._received = self._received or self._receive(0, self._requested, timeout_s), None
        return found

    def global_weights(self, first: Envelope, epoch: int, within_s: float = 2.0) -> tuple[list[Tensor], Tensor | None] | None:
        """The weights ``[1, values]`` per bucket and the mean buffers, given shard 0's part; None when a shard does not answer."""
        parts = [first]
        for place in range(1, len(self.callers)):
            self._number += 1
            metadata = {"epoch": epoch, "within_s": within_s if epoch else 0.0}
            self.callers[place].send(Envelope(Kind.FETCH, OBSERVER, number=self._number, metadata=metadata), 0.0)
            found = self._receive(place, self._number, within_s + 5.0)
            if found is None:
                return None
            parts.append(found)
        self.lost = max(int(part.metadata["figures"].get("lost", 0)) for part in parts)
        rows = [bucket.empty(1).cpu() for bucket in self.layout.buckets]
        for place, part in enumerate(parts):
            for b, row in enumerate(rows):
                self.slices.put(b, place, part.tensors[b], row[0])
        return rows, first.tensors[-1].clone() if first.metadata.get("buffers") else None

    def close(self) -> None:
        for caller in self.callers:
            caller.close(0)

    def _receive(self, place: int, number: int, timeout_s: float) -> Envelope | None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 or timeout_s == 0:
            answer = self.callers[place].receive(max(left, 0.0))
            if answer is None:
                return None
            if answer.number == number and answer.kind in (Kind.REPLY, Kind.ANSWER):
                return answer
            if answer.number == self._requested and answer.kind == Kind.REPLY:
                self._received = answer  # it came while something else was requested
            if answer.kind == Kind.REFUSAL and answer.number in (0, number):
                raise HocketError(f"Shard {place} at {self.callers[place].address}: {answer.metadata.get('sentence')}")
        return None
