"""What a shard tells observers: its progress, its figures, and the weights at the end of every epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.programs.base import Rejected
from hocket.programs.server.epoch_snapshots import EpochSnapshot, SnapshotRequest
from hocket.programs.server.membership import Membership
from hocket.programs.server.wire import OBSERVER
from hocket.transport.frame import Envelope, Kind


class ObservedShard(Membership):
    """The members of a shard, and what observers may ask about them."""

    @property
    def progress(self) -> int:
        """Mini-batches that are done with, whether they had their effect or were lost."""
        if self.shard is None:
            return 0
        if self.dispatcher is not None:
            return self.dispatcher.counted
        if not self._strategy.sync.static_partition:
            return self.pushed
        done = self.shard.done
        floor = min(done.values()) if done else max(m.reached for m in self.members.values())
        # A worker that has ended has done all that it had; one that is away may have missed what the others did.
        return sum(done.get(w, m.reached if m.ended else max(m.reached, floor)) for w, m in self.members.items())

    @property
    def all_lost(self) -> int:
        """Mini-batches lost, also those of workers that were away, where every worker has its own part of the data."""
        return self.lost + (max(self.progress - self.pushed, 0) if self._strategy.sync.static_partition else 0)

    def figures(self) -> dict[str, Any]:
        """Where the job stands, as plain data."""
        assert self.shard is not None
        return {
            "progress": self.progress,
            "lost": self.all_lost,
            "version": self.shard.version,
            "ages": {str(age): count for age, count in sorted(self.shard.staleness.items())},
            "workers": {str(w): m.figures for w, m in self.members.items() if m.figures},
            "here": sorted(self.shard.done),
            "refused": dict(self.rejected + self.transport_rejected()),
        }

    def _look_at_epoch(self) -> None:
        self.epochs.look(self.progress, self.snapshot)

    def snapshot(self) -> EpochSnapshot:
        """The weights and figures as they are now."""
        assert self.shard is not None
        figures = self.figures() if self.place == 0 else {"lost": self.all_lost}
        return EpochSnapshot(tuple(w.clone() for w in self.shard.weights), self._mean_buffers(), figures)

    def _mean_buffers(self) -> Tensor | None:
        rows = [m.buffers for m in self.members.values() if m.buffers is not None]
        return torch.stack(rows).mean(0) if rows else None

    def _with_buffers(self, tensors: tuple[Tensor, ...], metadata: dict[str, Any]) -> tuple[Tensor, ...]:
        buffers = self._mean_buffers()
        metadata["buffers"] = buffers is not None
        return tensors if buffers is None else (*tensors, buffers)

    def _show(self, asked: SnapshotRequest) -> None:
        found = self.epochs.show(asked.epoch) or self.snapshot()
        tensors = found.weights if found.buffers is None else (*found.weights, found.buffers)
        metadata = {"buffers": found.buffers is not None, "figures": found.figures, "at": self.now}
        self._answer(asked.peer, Kind.REPLY, asked.number, metadata, tensors)

    def _order(self, peer: bytes, message: Envelope) -> None:
        if message.sender != OBSERVER:
            raise Rejected("worker", "Only observers give orders.")
        gone, unseen = message.metadata.get("gone"), message.metadata.get("unseen")
        # ``unseen``: unless another process has said hello as this worker meanwhile.
        if self.shard is not None and gone in self.shard.done and not (unseen and self.members[gone].incarnation):
            self._gone(gone)
        metadata: dict[str, Any] = {"weights": self.shard is not None, "at": self.now}
        if self.shard is not None:
            metadata["figures"] = self.figures()
        self._answer(peer, Kind.ANSWER, message.number, metadata)

    def _answer(
        self, peer: bytes, kind: Kind, number: int, metadata: dict[str, Any], tensors: tuple[Tensor, ...] = (), step: int = 0
    ) -> None:
        # A peer that is gone does not get it; one that is merely slow asks again.
        self._send(peer, Envelope(kind, self.place, self.place, step, number, metadata, tensors))
