"""Shards and workers as programs without I/O; see ``protocol`` for their messages.

A shard carries out the coordinator's orders on its slice of every vector. A worker does one thing at a time: a message that arrives
while it computes a portion is handled afterwards.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.programs.base import Address, Compute, Connect, Finished, Program, Restore, Service, Snapshot, event
from hocket.sandblaster.protocol import BEAT_S, COORDINATOR, RESEND_S, message_bytes
from hocket.sandblaster.vectors import Order, Terms, VectorShard, cuts
from hocket.transport.frame import Envelope, Kind

_BEAT = "beat"


class _Subordinate(Program):
    """Sends HELLO every ``BEAT_S``, and ends when the coordinator sends GOODBYE."""

    @event
    def start(self, now: float) -> None:
        self.on_timer(_BEAT)

    def on_timer(self, name: str) -> None:
        self._hello()
        self._set_timer(_BEAT, self.now + BEAT_S)

    @abstractmethod
    def _hello(self) -> None: ...


class SandblasterShard(_Subordinate, Service):
    """Shard ``number``, whose first slice of the weights is ``x``; workers reach it at ``address``.

    ``incarnation`` says how many processes were this shard before.
    """

    def __init__(self, number: int, x: Tensor, exact: bool = False, address: str = "", incarnation: int = 0) -> None:
        super().__init__()
        self.number, self.address, self.incarnation = number, address, incarnation
        self.own_number = number
        self.shard = VectorShard(x, exact)
        self._begin_session(-1)

    def _begin_session(self, session: int) -> None:
        self._session, self._obeyed, self._moved = session, 0, 0
        self._reply: Envelope | None = None
        self.shard.forget()

    def on_message(self, sender: Address, message: Envelope) -> None:
        if sender != COORDINATOR:
            self._serve(sender, message, {Kind.FETCH: self._fetch, Kind.PUSH: self._push})
        elif message.kind == Kind.GOODBYE:
            self._effects.append(Finished())
        elif message.kind == Kind.ORDER:
            if message.step > self._session and message.number == 1:
                self._begin_session(message.step)
            if message.step == self._session and message.number == self._obeyed + 1:
                self._obey(message)
            elif self._reply is not None and (message.step, message.number) == (self._reply.step, self._reply.number):
                self._send(COORDINATOR, self._reply)  # the order was lost

    def _obey(self, message: Envelope) -> None:
        self._obeyed += 1
        orders = [tuple(order) for order in message.metadata.get("ask") or message.metadata.get("orders", ())]
        if orders and orders[0][0] == "load":
            self._effects.append(Restore(str(orders[0][1])))  # the answer comes afterwards
            return
        answers = [self._carry_out(order) for order in orders]
        if "ask" in message.metadata:
            self._tell(answers)

    def _carry_out(self, order: Order) -> Terms:
        if order[0] == "save":
            self._effects.append(Snapshot(str(order[1])))
            return []
        return self.shard.obey([order])[0]

    def _tell(self, answers: list[Terms]) -> None:
        metadata = {"answers": answers, "moved": self._moved}
        self._reply = Envelope(Kind.REPLY, self.number, step=self._session, number=self._obeyed, metadata=metadata)
        self._send(COORDINATOR, self._reply)

    @event
    def restored(self, state: dict[str, Tensor], now: float) -> None:
        """The snapshot that a :class:`Restore` asked for."""
        self.shard.vectors = state
        self._tell([[]])

    def state_dict(self) -> dict[str, Tensor]:
        """This shard's slices, but for the trial point, which every line search makes anew."""
        return {name: vector for name, vector in self.shard.vectors.items() if name != "trial"}

    def _fetch(self, worker: bytes, message: Envelope) -> None:
        current = message.step == self.shard.evaluation
        reply = Envelope(Kind.REPLY, self.number, step=message.step, tensors=(self.shard.point,) if current else ())
        self._moved += message_bytes(message) + message_bytes(reply)
        self._send(worker, reply)

    def _push(self, worker: bytes, message: Envelope) -> None:
        (values,) = message.tensors
        self._moved += message_bytes(message)
        if self.shard.stage(message.step, message.sender, message.number, values):
            staged = Envelope(Kind.PUSH, self.number, place=message.sender, step=message.step, number=message.number)
            self._send(COORDINATOR, staged)

    def _hello(self) -> None:
        metadata = {"address": self.address, "incarnation": self.incarnation}
        self._send(COORDINATOR, Envelope(Kind.HELLO, self.number, step=self._session, number=self._obeyed, metadata=metadata))


class SandblasterWorker(_Subordinate):
    """A worker for ``values`` parameters on ``shards``: computes portions, adds up those it is told to keep, pushes their sum."""

    def __init__(self, values: int, shards: int) -> None:
        super().__init__()
        self._cuts = cuts(values, shards)
        self._addresses: list[str] = []
        self._inbox: deque[tuple[Address, Envelope]] = deque()
        self._forget((-1, -1))

    def _forget(self, series: tuple[int, int]) -> None:
        """Begin another series of orders; drop what belongs to an earlier evaluation or ticket."""
        self.evaluation, self.ticket = series
        self._obeyed = 0
        self._portions: deque[int] = deque()
        self._computing: int | None = None
        self._slices: dict[Address, Tensor] = {}
        self._point: Tensor | None = None
        self._fetched_at, self._retry_s = 0.0, 0.0
        self._pending: dict[int, tuple[float, Tensor]] = {}
        self._total: Tensor | None = None
        self._pushed: dict[int, Tensor] = {}

    def end_state(self) -> dict[str, Any]:
        return {"orders": [self.evaluation, self.ticket, self._obeyed], "total": self._total, "pushed": self._pushed}

    @event
    def computed(self, portion: int, loss: float, gradient: Tensor, now: float) -> None:
        """The portion that a :class:`Compute` asked for: its share of the loss and of the gradient."""
        self._computing, self._pending[portion] = None, (loss, gradient)
        self._report(portion)
        while self._inbox and self._computing is None:
            self.on_message(*self._inbox.popleft())
        self._proceed()

    def on_message(self, sender: Address, message: Envelope) -> None:
        if message.kind == Kind.GOODBYE:
            self._effects.append(Finished())
        elif self._computing is not None:
            self._inbox.append((sender, message))
        elif message.kind == Kind.ORDER:
            series = message.step, message.sender
            if series > (self.evaluation, self.ticket) and message.number == 1:
                self._forget(series)
            if series == (self.evaluation, self.ticket) and message.number == self._obeyed + 1:
                self._obeyed += 1
                self._obey(message.metadata)
        elif message.kind == Kind.REPLY and message.step == self.evaluation and self._retry_s:
            self._fetched(sender, message)

    def _obey(self, metadata: Mapping[str, Any]) -> None:
        self._connect(metadata.get("shards", self._addresses))
        if "judged" in metadata:
            _, gradient = self._pending.pop(metadata["judged"])
            if metadata["keep"]:
                self._total = gradient if self._total is None else self._total + gradient
        for number in metadata.get("counted", ()):
            del self._pushed[number]
        for number in metadata.get("again", ()):
            self._push(number)
        if "bundle" in metadata:
            assert self._total is not None
            self._pushed[metadata["bundle"]], self._total = self._total, None
            self._push(metadata["bundle"])
        if "portion" in metadata:
            self._portions.append(metadata["portion"])
        self._proceed()

    def _connect(self, addresses: list[str]) -> None:
        for shard, address in enumerate(addresses):
            if shard >= len(self._addresses) or self._addresses[shard] != address:
                self._effects.append(Connect(shard, address))
        self._addresses = addresses

    def _push(self, number: int) -> None:
        for shard, part in enumerate(self._cuts):
            values = self._pushed[number][part]
            self._send(shard, Envelope(Kind.PUSH, self.ticket, shard, self.evaluation, number, tensors=(values,)))

    def _proceed(self) -> None:
        """Compute the next portion, once the point is there."""
        if not self._portions or self._computing is not None:
            return
        if self._point is not None:
            self._computing = self._portions.popleft()
            self._effects.append(Compute(self._computing, self._point))
        elif not self._retry_s:
            self._fetch()

    def _fetch(self) -> None:
        self._fetched_at, self._retry_s = self.now, 2 * self._retry_s or RESEND_S
        for shard in range(len(self._cuts)):
            if shard not in self._slices:
                self._send(shard, Envelope(Kind.FETCH, self.ticket, shard, self.evaluation))

    def _fetched(self, shard: Address, reply: Envelope) -> None:
        if not reply.tensors:  # that evaluation is over
            self._retry_s = 0.0
            self._portions.clear()
            self._hello()
            return
        self._slices[shard] = reply.tensors[0]
        if len(self._slices) == len(self._cuts):
            self._point, self._retry_s = torch.cat([self._slices[s] for s in range(len(self._cuts))]), 0.0
            self._slices = {}
            self._proceed()

    def _report(self, portion: int) -> None:
        metadata = {"loss": self._pending[portion][0]}
        self._send(COORDINATOR, Envelope(Kind.ANSWER, self.ticket, portion, self.evaluation, self._obeyed, metadata))

    def _hello(self) -> None:
        if self._computing is not None:  # only a sign of life
            self._send(COORDINATOR, Envelope(Kind.BEAT, self.ticket))
            return
        if self._retry_s and self.now - self._fetched_at >= self._retry_s:
            self._fetch()
        for portion in self._pending:
            self._report(portion)
        metadata = {} if self._pending or self._portions else {"free": True}
        self._send(COORDINATOR, Envelope(Kind.HELLO, self.ticket, step=self.evaluation, number=self._obeyed, metadata=metadata))
