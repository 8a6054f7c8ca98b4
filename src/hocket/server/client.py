"""A worker's side of the shards: it pushes, asks, and lands the answers; what got no answer is asked again.

One request is open at a time, to all shards at once. A shard that sends neither an answer nor a sign of waiting for two seconds
may have been restarted or cut off: the worker says hello again, brings the weights it has if the shard has none, and repeats its
request.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import zmq
from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.message import FRAME_BYTES, framed
from hocket.errors import HocketError, WorkerLost
from hocket.messages import Caller, Envelope, Keys, Kind
from hocket.server.account import Account
from hocket.server.observer import Observer
from hocket.server.optimizer_spec import OptimizerSpec
from hocket.server.push_encoder import PushEncoder
from hocket.server.slices import Slices
from hocket.server.wire import LIVENESS_TIMEOUT_S, MAX_BATCH_IDS, WORKER_MARK, as_tensors, link_bytes, slices_of, terms_of
from hocket.strategy import Strategy

GIVE_UP_S = 60.0
_SILENCE_S = 2.0
_REDIAL_S = 3.0
"""A connection that acknowledges nothing for so long is made anew."""
_AGAIN = ("hello", "step")
"""Refusals that a new hello mends."""


@dataclass
class Peer:
    """One shard as a worker sees it."""

    place: int
    caller: Caller
    request: Envelope | None = None
    reply: Envelope | None = None
    sign: float = 0.0
    """When it last gave a sign of life."""
    greeted: float = 0.0
    offset_s: float = 0.0
    """What its clock shows more than ours."""
    seen: int = 0
    """The version of the weights that it gave last."""


class Client:
    """Worker ``worker`` of ``world`` on the shards at ``addresses``; of ``total`` mini-batches, ``per_epoch`` make an epoch."""

    def __init__(
        self,
        addresses: Sequence[str],
        job: bytes,
        strategy: Strategy,
        layout: Layout,
        worker: int,
        world: int,
        seed: int = 0,
        keys: Keys | None = None,
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        give_up_s: float = GIVE_UP_S,
        total: int | None = None,
        per_epoch: int | None = None,
        replaces: bool = False,
    ) -> None:
        self.strategy, self.layout, self.worker, self.world, self.seed = strategy, layout, worker, world, seed
        self.slices = Slices.of(strategy, layout, world)
        if len(addresses) != self.slices.shards:
            raise HocketError(f"{strategy} has {self.slices.shards} shards, but {len(addresses)} addresses are given.")
        self.liveness_timeout_s, self.give_up_s = liveness_timeout_s, give_up_s
        self._job, self._keys = job, keys
        self._total, self._per_epoch, self._replaces = total, per_epoch, replaces
        self.account = Account()
        self.over = False
        """Whether all mini-batches have been dealt; ``batch_ids`` may hold some of them."""
        self.batch_ids: deque[int] = deque()
        self._taken: list[int] = []
        self._number = 0
        self._sent = 0.0
        self._call = -1  # the version of the weights whose holders were called last
        self._pushed = 0
        self._rows: Sequence[Tensor] = ()
        self._recipe: OptimizerSpec | None = None
        most, token = link_bytes(strategy, layout), secrets.token_bytes(8)
        dialled = [Caller(a, job, keys, WORKER_MARK + token, most, redial_s=_REDIAL_S) for a in addresses]
        self.peers = [Peer(s, caller) for s, caller in enumerate(dialled)]
        self._beats = _Beats([Caller(a, job, keys, b"b" + token, high_water=2, redial_s=_REDIAL_S) for a in addresses])
        self._outbox: PushEncoder | None = None

    # --- coming and going ----------------------------------------------------------------------------------------------------

    def hello(self, rows: Sequence[Tensor], recipe: OptimizerSpec) -> int:
        """Join with these weights (rows ``[1, values]``), which the first worker brings; the step to go on from."""
        self._rows, self._recipe = rows, recipe
        steps, founder = [], False
        for peer in self.peers:
            since, brings = time.monotonic(), founder
            while not (welcome := self._greet(peer, brings)).note["weights"]:
                # Whose weights the first shard took brings them to all, so that they are of one worker.
                brings = brings or peer.place == 0 or time.monotonic() - since > self.liveness_timeout_s
                if not brings:
                    time.sleep(0.05)
            steps.append(welcome.step)
            founder = bool(welcome.note["founder"]) if peer.place == 0 else founder
        self._pushed = max(steps)
        for peer, step in zip(self.peers, steps, strict=True):
            if step < self._pushed:
                self._greet(peer, False)
        self._outbox = PushEncoder(self.strategy, self.slices, self.worker, self.world, self.seed)
        self._beats.start(self.worker)
        return self._pushed

    def goodbye(self) -> None:
        """Leave in good order."""
        self._beats.stop()
        for peer in self.peers:
            peer.caller.send(Envelope(Kind.GOODBYE, self.worker, peer.place), 0.0)
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Let go of the links; the shards notice it by the silence."""
        self._beats.stop()
        for peer in self.peers:
            peer.caller.close(linger_s)

    def _greet(self, peer: Peer, brings: bool) -> Envelope:
        """Say hello until it is answered."""
        begun, asked = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now - begun > self.give_up_s:
                raise WorkerLost(f"Shard {peer.place} at {peer.caller.address} has not answered for {self.give_up_s:g} s.")
            if now - asked > _SILENCE_S:
                asked = now
                self._say_hello(peer, brings)
            answer = peer.caller.receive(0.1)
            if peer.caller.refused["key"]:
                raise HocketError(f"Shard {peer.place} at {peer.caller.address} does not let us in: use the keys of its job.")
            if answer is None:
                continue
            if answer.kind == Kind.WELCOME:
                peer.sign = time.monotonic()
                peer.offset_s = float(answer.note["at"]) - (asked + peer.sign) / 2
                return answer
            if answer.kind == Kind.REFUSAL:
                if answer.note.get("reason") == "taken" and now - begun < self.liveness_timeout_s + _SILENCE_S:
                    continue  # whom we replace has not been missed yet
                raise HocketError(f"Shard {peer.place} at {peer.caller.address}: {answer.note.get('sentence')}")

    def _say_hello(self, peer: Peer, brings: bool) -> None:
        assert self._recipe is not None
        note: dict[str, Any] = {
            "terms": terms_of(self.strategy, self.layout, self.seed, self.world),
            "pushed": self._pushed,
            "replaces": self._replaces,
        }
        tensors: tuple[Tensor, ...] = ()
        if brings:
            note |= {"recipe": self._recipe.describe(), "groups": [b.group for b in self.layout.buckets]}
            note |= {"total": self._total, "per_epoch": self._per_epoch}
            tensors = slices_of(self.slices, peer.place, self._rows)
        peer.greeted = time.monotonic()
        peer.caller.send(Envelope(Kind.HELLO, self.worker, peer.place, note=note, tensors=tensors), 0.0)

    def observer(self) -> Observer:
        """A look at the same shards that takes no part."""
        return self._observer([peer.caller.address for peer in self.peers])

    def statuses(self, timeout_s: float) -> list[dict[str, Any] | None]:
        """Where the job stands, as each shard sees it; None where one does not answer in time."""
        observers = [self._observer([peer.caller.address]) for peer in self.peers]
        deadline = time.monotonic() + timeout_s
        try:
            for observer in observers:
                observer.ask()
            return [observer.told(max(deadline - time.monotonic(), 0.01)) for observer in observers]
        finally:
            for observer in observers:
                observer.close()

    def _observer(self, addresses: Sequence[str]) -> Observer:
        return Observer(addresses, self._job, self.layout, self.slices, link_bytes(self.strategy, self.layout), self._keys)

    # --- exchanges -----------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether something asked for has not landed yet."""
        return any(peer.request is not None for peer in self.peers)

    @property
    def versions(self) -> list[int]:
        """The versions of the weights landed last, per shard."""
        return [peer.seen for peer in self.peers]

    def push(
        self,
        step: int,
        gradients: Sequence[Tensor],
        rates: Sequence[float],
        fetch: bool,
        seen: Sequence[int],
        want: int = 0,
        buffers: Tensor | None = None,
    ) -> None:
        """Push flat gradients (one per bucket) up to ``step``, computed at the versions ``seen``; ``fetch``: ask for weights."""
        assert self._outbox is not None
        requests = []
        for peer, messages in zip(self.peers, self._outbox.encode(step, gradients), strict=True):
            parts, tensors = as_tensors(messages)
            note = {"parts": parts, "rates": list(rates), "fetch": fetch, "seen": seen[peer.place]}
            size = sum(int(m.payload_bytes().sum()) for m in messages)
            if peer.place == 0:
                note |= {"batch_ids": self._taken, "want": want, "buffers": buffers is not None}
                if buffers is not None:
                    tensors.append(buffers)
                    size += buffers.numel() * buffers.element_size()
            self.account.bytes_sent += framed(size)
            requests.append(Envelope(Kind.PUSH, self.worker, peer.place, step, 0, note, tuple(tensors)))
        requests[0] = replace(requests[0], note={**requests[0].note, "ledger": self.account.describe()})
        self._taken = []
        self._ask(requests)

    def fetch(self, step: int, want: int = 0, weights: bool = True, final: bool = False) -> None:
        """Ask for weights, or for mini-batches alone; ``final``: the last truth, when all workers have ended."""
        note = {"fetch": weights, "want": want, "final": final}
        asked = self.peers if weights else self.peers[:1]
        self.account.bytes_sent += FRAME_BYTES * len(asked)
        self._ask([Envelope(Kind.FETCH, self.worker, peer.place, step, 0, note) for peer in asked])

    def _ask(self, requests: Sequence[Envelope]) -> None:
        assert not self.open
        self._number += 1
        for peer, request in zip(self.peers, requests, strict=False):
            peer.request, peer.reply, peer.sign = replace(request, number=self._number), None, time.monotonic()
            peer.caller.send(peer.request, 0.0)
        self._sent = time.monotonic()

    def called(self) -> bool:
        """Whether others wait for a meeting since the last one."""
        first = self.peers[0]
        while self._call != first.seen and (message := first.caller.receive(0.0)) is not None:
            first.sign = time.monotonic()
            self._hear_call(message)
        return self._call == first.seen

    def _hear_call(self, message: Envelope) -> None:
        """A call may come at any time, also while something is waited for; it counts until the weights of a meeting land."""
        if message.kind == Kind.WAIT:
            self._call = message.note.get("call", self._call)

    def land(self, rows: Sequence[Tensor]) -> int:
        """Wait for what was asked for and write weights, if they come, into ``rows``; how far the shards think we are."""
        begun = time.monotonic()
        asked = [peer for peer in self.peers if peer.request is not None]
        self._await(asked)
        blocked = time.monotonic() - begun
        held = moved = 0.0
        reached = 0
        for peer in asked:
            reply = peer.reply
            assert reply is not None
            for b, part in enumerate(reply.tensors[: len(rows)]):
                self.slices.put(b, peer.place, part.to(rows[b].dtype), rows[b][0])
            if reply.tensors:
                peer.seen = int(reply.note["seen"])
            self.account.bytes_sent += framed(reply.tensor_bytes)
            held, moved = max(held, float(reply.note["held"])), max(moved, float(reply.note["at"]) - peer.offset_s)
            reached = max(reached, reply.step)
            if peer.request is not None and peer.request.kind == Kind.PUSH:
                self._pushed = max(self._pushed, peer.request.step)  # only now is it known to be there
            peer.request = None
        # What moved before we stood still for it was hidden, as far as the shard's clock tells.
        self.account.stood(blocked, held, max(min(moved, begun) - self._sent - held, 0.0))
        note = asked[0].reply.note if asked and asked[0].reply is not None else {}
        self.batch_ids.extend(note.get("batch_ids", []))
        self.over = bool(note.get("over", self.over))
        self._pushed = max(self._pushed, reached)
        return reached

    def buffers(self) -> Tensor | None:
        """Everybody's mean buffers, where they came with the answer landed last."""
        reply = self.peers[0].reply
        return reply.tensors[-1].clone() if reply is not None and reply.note.get("buffers") else None

    def take(self) -> int | None:
        """The number of the next mini-batch; None when there is none left."""
        while not self.batch_ids and not self.over and not self.open:
            self.fetch(self._pushed, want=1, weights=False)
            self.land(())
        if not self.batch_ids:
            return None
        self._taken.append(self.batch_ids.popleft())
        return self._taken[-1]

    def wanted(self, steps: int) -> int:
        """How many mini-batches to ask for so that ``steps`` lie ready."""
        return 0 if self._total is None else max(0, min(steps - len(self.batch_ids), MAX_BATCH_IDS))

    # --- waiting -------------------------------------------------------------------------------------------------------------

    def _await(self, asked: Sequence[Peer]) -> None:
        waiting = [peer for peer in asked if peer.reply is None]
        poller = zmq.Poller()
        for peer in waiting:
            poller.register(peer.caller.socket, zmq.POLLIN)
        while waiting:
            poller.poll(100)
            for peer in list(waiting):
                while peer.reply is None and (answer := peer.caller.receive(0.0)) is not None:
                    self._heard(peer, answer)
                if peer.reply is not None:
                    poller.unregister(peer.caller.socket)
                    waiting.remove(peer)
                else:
                    self._ask_again(peer)

    def _heard(self, peer: Peer, answer: Envelope) -> None:
        assert peer.request is not None
        peer.sign = time.monotonic()
        self._hear_call(answer)
        if answer.kind == Kind.REPLY and answer.number == peer.request.number:
            peer.reply = answer
        elif answer.kind == Kind.WELCOME:
            if answer.note["weights"]:
                peer.caller.send(peer.request, 0.0)
            else:
                self._say_hello(peer, brings=True)
        elif answer.kind == Kind.REFUSAL and answer.number in (0, peer.request.number):
            if answer.note.get("reason") not in _AGAIN:
                raise HocketError(f"Shard {peer.place} at {peer.caller.address}: {answer.note.get('sentence')}")
            if peer.sign - peer.greeted > _SILENCE_S / 4:
                self._say_hello(peer, brings=False)

    def _ask_again(self, peer: Peer) -> None:
        now = time.monotonic()
        if now - peer.sign > self.give_up_s:
            raise WorkerLost(f"Shard {peer.place} at {peer.caller.address} has not answered for {self.give_up_s:g} s.")
        if now - max(peer.sign, peer.greeted) > _SILENCE_S:
            self._say_hello(peer, brings=False)


class _Beats:
    """Tells the shards every second that this worker lives, in a thread of its own."""

    def __init__(self, callers: Sequence[Caller]) -> None:
        self._callers, self._over = callers, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker: int) -> None:
        """From now on."""
        self._thread = threading.Thread(target=self._beat, args=(worker,), name="hocket-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for caller in self._callers:
            caller.close(0)

    def _beat(self, worker: int) -> None:
        while not self._over.wait(1.0):
            for caller in self._callers:
                caller.send(Envelope(Kind.BEAT, worker), 0.0)
                caller.receive(0.0)
