"""A look at the shards from outside: where the job stands, the truth after an epoch, and word of who is dead."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.messages import Caller, Envelope, Keys, Kind
from hocket.server.slices import Slices
from hocket.server.wire import OBSERVER


class Observer:
    """Watches the shards without taking part: status, the truth, and telling them who is dead."""

    def __init__(
        self, addresses: Sequence[str], job: bytes, layout: Layout, slices: Slices, most_bytes: int, keys: Keys | None
    ) -> None:
        self.layout, self.slices = layout, slices
        self.callers = [Caller(a, job, keys, b"o" + secrets.token_bytes(8), most_bytes) for a in addresses]
        self._number = 0
        self._wish: int | None = None
        self._granted: Envelope | None = None
        self.lost = 0
        """Mini-batches lost, at the truth looked at last, as the shard sees it that has lost most."""

    def tell(self, **order: Any) -> None:
        """Give all shards an order; nobody waits for the answer."""
        for caller in self.callers:
            caller.send(Envelope(Kind.ORDER, OBSERVER, note=order), 0.0)

    def status(self, timeout_s: float) -> dict[str, Any] | None:
        """Where the job stands, as shard 0 sees it."""
        self.ask()
        return self.told(timeout_s)

    def ask(self) -> None:
        """Ask shard 0 where the job stands; :meth:`told` has the answer."""
        self._number += 1
        self.callers[0].send(Envelope(Kind.ORDER, OBSERVER, number=self._number, note={"order": "status"}), 0.0)

    def told(self, timeout_s: float) -> dict[str, Any] | None:
        """What was asked last; None when nobody answers in time."""
        answer = self._receive(0, self._number, timeout_s)
        return None if answer is None else answer.note.get("figures")

    def wish(self, epoch: int, waits: bool = True) -> None:
        """Ask shard 0 for the truth after an epoch (from 1; 0: as it is now); :meth:`granted` tells when it is there.

        Without ``waits`` the truth as it is now will do, where the epoch has not come to its end.
        """
        self._number += 1
        self._wish, self._granted = self._number, None
        note = {"epoch": epoch, "within_s": 1e6 if epoch and waits else 0.0}
        self.callers[0].send(Envelope(Kind.FETCH, OBSERVER, number=self._number, note=note), 0.0)

    def granted(self, timeout_s: float) -> Envelope | None:
        """Shard 0's part of what was wished for, as soon as it is there."""
        if self._wish is None:
            return None
        found, self._granted = self._granted or self._receive(0, self._wish, timeout_s), None
        return found

    def truth(self, first: Envelope, epoch: int, within_s: float = 2.0) -> tuple[list[Tensor], Tensor | None] | None:
        """The weights ``[1, values]`` per bucket and the mean buffers, given shard 0's part; None when a shard does not answer."""
        parts = [first]
        for place in range(1, len(self.callers)):
            self._number += 1
            note = {"epoch": epoch, "within_s": within_s if epoch else 0.0}
            self.callers[place].send(Envelope(Kind.FETCH, OBSERVER, number=self._number, note=note), 0.0)
            found = self._receive(place, self._number, within_s + 5.0)
            if found is None:
                return None
            parts.append(found)
        self.lost = max(int(part.note["figures"].get("lost", 0)) for part in parts)
        rows = [bucket.empty(1).cpu() for bucket in self.layout.buckets]
        for place, part in enumerate(parts):
            for b, row in enumerate(rows):
                self.slices.put(b, place, part.tensors[b], row[0])
        return rows, first.tensors[-1].clone() if first.note.get("buffers") else None

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
            if answer.number == self._wish and answer.kind == Kind.REPLY:
                self._granted = answer  # it came while something else was asked
            if answer.kind == Kind.REFUSAL and answer.number in (0, number):
                raise HocketError(f"Shard {place} at {self.callers[place].address}: {answer.note.get('sentence')}")
        return None
