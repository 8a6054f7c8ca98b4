"""What shard and worker processes do all day. See ``coordinator`` for the messages; between these two there are

    worker → shard    FETCH, PUSH (a bundle: its number, the worker's slice of the sum)
    shard → worker    REPLY (this shard's slice of the point, or nothing when that evaluation is over)

A process ends when the coordinator says goodbye; :func:`end_with_parent` sees to it that it does not outlive whoever started it.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from hocket.messages.frame import Envelope, Kind
from hocket.messages.link import Caller, Listener
from hocket.sandblaster.objective import Objective
from hocket.sandblaster.vectors import VectorShard, cuts
from hocket.server.snapshots import sealed, unsealed
from hocket.train.throttle import Throttle

BEAT_S = 0.5
SEND_S = 30.0
KEPT = 2
"""Snapshots kept on disk: the coordinator may die after shards have written one and before it has written its own."""


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however that happened."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def most_bytes(values: int) -> int:
    """Of one message with so many float64 values."""
    return (1 << 20) + 8 * values


class ShardProcess:
    """Shard ``number``: a :class:`VectorShard` between the coordinator's orders and the workers' slices."""

    def __init__(self, number: int, x: Tensor, exact: bool, coordinator: str, job: bytes, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.shard = VectorShard(x, exact)
        self.moved = 0
        room = most_bytes(len(x))
        self.listener = Listener("tcp://127.0.0.1:0", job, most_bytes=room, high_water=64)
        self.coordinator = Caller(coordinator, job, identity=f"shard {number}".encode(), high_water=1000)

    def serve(self) -> None:
        """Until the coordinator says goodbye."""
        poller = zmq.Poller()
        poller.register(self.listener.socket, zmq.POLLIN)
        poller.register(self.coordinator.socket, zmq.POLLIN)
        hello = Envelope(Kind.HELLO, self.number, note={"address": self.listener.address})
        said = 0.0
        with self.listener, self.coordinator:
            while True:
                if time.monotonic() - said > BEAT_S:
                    self.coordinator.send(hello, 0)
                    said = time.monotonic()
                poller.poll(int(BEAT_S * 1000))
                while (order := self.coordinator.receive(0)) is not None:
                    if order.kind == Kind.GOODBYE:
                        return
                    self._obey(order)
                while (received := self.listener.receive(0)) is not None:
                    self._serve_worker(*received)

    def _obey(self, order: Envelope) -> None:
        answers: list[list[float]] = []
        if "save" in order.note:
            self._save(int(order.note["save"]))
        elif "load" in order.note:
            self.shard.vectors = unsealed(self._file(int(order.note["load"])).read_bytes())
        else:
            answers = self.shard.obey([tuple(o) for o in order.note["orders"]])
        if order.number:
            note = {"answers": answers, "moved": self.moved}
            self.coordinator.send(Envelope(Kind.REPLY, self.number, number=order.number, note=note), SEND_S)

    def _serve_worker(self, peer: bytes, message: Envelope) -> None:
        self.moved += message.tensor_bytes
        if message.kind == Kind.FETCH:
            current = message.step == self.shard.evaluation
            reply = Envelope(Kind.REPLY, self.number, step=message.step, tensors=(self.shard.point.clone(),) if current else ())
            self.moved += reply.tensor_bytes
            self.listener.send(peer, reply)
        elif message.kind == Kind.PUSH and self.shard.stage(message.step, message.sender, message.number, message.tensors[0]):
            staged = Envelope(Kind.PUSH, self.number, place=message.sender, step=message.step, number=message.number)
            self.coordinator.send(staged, SEND_S)

    def _file(self, iteration: int) -> Path:
        return self.folder / f"shard-{self.number}-{iteration}.pt"

    def _save(self, iteration: int) -> None:
        """There is the whole file or none."""
        file = self._file(iteration)
        beside = file.with_suffix(".new")
        with beside.open("wb") as stream:
            stream.write(sealed({name: v for name, v in self.shard.vectors.items() if name != "trial"}))
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
        for old in self.folder.glob(f"shard-{self.number}-*.pt"):
            if int(old.stem.rpartition("-")[2]) <= iteration - KEPT:
                old.unlink()


class WorkerProcess:
    """Worker ``number``: computes portions, keeps what it is told to keep in a sum, sends the sum when it is told to."""

    def __init__(self, number: int, objective: Objective, shards: int, coordinator: str, job: bytes, slowdown: float = 1.0) -> None:
        self.objective, self.address, self.job = objective, coordinator, job
        self.cuts = cuts(len(objective.point), shards)
        self.link = f"worker {number} {secrets.token_hex(4)}"
        self.coordinator = Caller(coordinator, job, identity=self.link.encode())
        self.shards: list[Caller] = []
        self.throttle = Throttle(slowdown)
        self.ticket = -1
        self.inbox: deque[Envelope] = deque()
        self._forget(-1)

    def serve(self) -> None:
        """Until the coordinator says goodbye."""
        threading.Thread(target=self._beat, daemon=True).start()
        said = 0.0
        while True:
            if not self.tasks and time.monotonic() - said > BEAT_S:
                self.coordinator.send(Envelope(Kind.HELLO, self.ticket), 0)
                said = time.monotonic()
            message = self.inbox.popleft() if self.inbox else self.coordinator.receive(0 if self.tasks else BEAT_S)
            if message is None:
                if self.tasks:
                    self._compute(self.tasks.popleft())
            elif message.kind == Kind.GOODBYE:
                break
            elif message.kind == Kind.ORDER and message.step >= self.evaluation:
                if message.step > self.evaluation or message.note["ticket"] != self.ticket:
                    self._forget(message.step)
                    self.ticket = message.note["ticket"]
                self._heed(message.note)
        for link in (self.coordinator, *self.shards):
            link.close()

    def _forget(self, evaluation: int) -> None:
        """What belongs to another evaluation, or to another ticket."""
        self.evaluation = evaluation
        self.point: Tensor | None = None
        self.tasks: deque[int] = deque()
        self.pending: dict[int, Tensor] = {}
        self.total: Tensor | None = None

    def _heed(self, note: Any) -> None:
        if [link.address for link in self.shards] != note["shards"]:
            for link in self.shards:
                link.close()
            room = most_bytes(max(part.stop - part.start for part in self.cuts))
            self.shards = [Caller(address, self.job, most_bytes=room) for address in note["shards"]]
        judged = self.pending.pop(note["judged"], None)
        if judged is not None and note["keep"]:
            self.total = judged if self.total is None else self.total + judged
        if note["bundle"] is not None and self.total is not None:
            for part, link in zip(self.cuts, self.shards, strict=True):
                slice_ = self.total[part].cpu().contiguous()
                link.send(Envelope(Kind.PUSH, self.ticket, step=self.evaluation, number=note["bundle"], tensors=(slice_,)), SEND_S)
            self.total = None
        if note["portion"] is not None:
            self.tasks.append(note["portion"])

    def _compute(self, portion: int) -> None:
        if self.point is None:
            self.point = self._fetch()
        if self.point is None:
            self.tasks.clear()
            return
        self.throttle.begin()
        loss, self.pending[portion] = self.objective.portion(self.point, portion)
        self.throttle.end()
        report = Envelope(Kind.ANSWER, self.ticket, place=portion, step=self.evaluation, note={"loss": loss})
        self.coordinator.send(report, SEND_S)

    def _fetch(self) -> Tensor | None:
        """The point of this evaluation, or None if it is over."""
        for link in self.shards:
            link.send(Envelope(Kind.FETCH, self.ticket, step=self.evaluation), SEND_S)
        parts = [self._part(link) for link in self.shards]
        found = [part for part in parts if part is not None]
        return torch.cat(found) if len(found) == len(parts) else None

    def _part(self, link: Caller) -> Tensor | None:
        deadline = time.monotonic() + SEND_S
        while time.monotonic() < deadline:
            reply = link.receive(BEAT_S)
            if reply is not None and reply.step == self.evaluation:
                return reply.tensors[0] if reply.tensors else None
            if reply is None and self._called_away():
                return None
        return None

    def _called_away(self) -> bool:
        """Whether the coordinator, perhaps a new one, is done with this evaluation: a shard that died answers no more."""
        self.coordinator.send(Envelope(Kind.HELLO, self.ticket), 0)
        while (message := self.coordinator.receive(0)) is not None:
            self.inbox.append(message)
        return any(message.kind == Kind.GOODBYE or message.step > self.evaluation for message in self.inbox)

    def _beat(self) -> None:
        """A sign of life, also in the midst of a long portion."""
        with Caller(self.address, self.job) as link:
            while True:
                link.send(Envelope(Kind.BEAT, self.ticket, note={"link": self.link}), 0)
                time.sleep(BEAT_S)
