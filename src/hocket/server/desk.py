"""Where a shard meets its workers: one thread, one listener, a :class:`~hocket.server.shard.Shard` behind it.

Every request carries a number and gets one answer with that number. A worker has at most one request open, so what a shard holds
for it is bounded; one that got no answer (a cut link, a shard that was restarted) sends it again, and nothing is taken twice.

=========  ==================================================================  =============================================
message    from a worker (or an observer)                                      is answered by
=========  ==================================================================  =============================================
HELLO      terms (version, strategy, model, seed, world), steps pushed so far; WELCOME: the step to go on from, whether weights
           optimiser and a slice of the weights, where the shard has none      are there, and brought by it; or REFUSAL
PUSH       step, coded gradients, rates, its ledger; whether it wants weights  REPLY, at once or once it may go on
FETCH      step; *final*: it has ended and wants the last truth; from an       REPLY: weights, how long they were held back,
           observer: the truth at the end of an epoch                          from shard 0 the next mini-batches
BEAT       every second                                                        nothing
GOODBYE    it has ended                                                        nothing
ORDER      from an observer: status, or a worker that is known to be dead      ANSWER
=========  ==================================================================  =============================================

While an answer is held back, WAIT is sent every second, so that silence means that the shard is gone. A worker that is silent for
``liveness_timeout_s`` is no longer waited for; with its next message it is back, and goes on with the slowest where nobody may be
far ahead. Wrong terms, workers, steps and shapes are refused, counted in ``refused``, and never touch the weights.

Bytes on both ways are counted by the worker: what it sends, and what is sent to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.messages import Envelope, Kind, Listener
from hocket.server.meeting import MeetingShard
from hocket.server.members import BatchDispatcher, Member, Request
from hocket.server.milestones import Milestone, Milestones, Wish
from hocket.server.optimizer_spec import OptimizerSpec
from hocket.server.shard import Shard
from hocket.server.snapshots import Snapshots
from hocket.server.wire import (
    FETCH,
    LIVENESS_TIMEOUT_S,
    MAX_BATCH_IDS,
    OBSERVER,
    SNAPSHOT_S,
    WORKER_MARK,
    Terms,
    as_messages,
    difference,
    gradients_of,
)
from hocket.strategy import Strategy
from hocket.sync import Stale
from hocket.topology import Server

_FIRST_PATIENCE_S = 60.0
"""How long a worker that has not come yet is waited for."""
_WAIT_EVERY_S = 1.0
_CARE_EVERY_S = 0.2
_LONG = 3
"""A worker that is silent for so many times the patience counts as one that has left, where a shard ends with its workers."""


class Turned(Exception):
    """A message that is not let in: a word to count it by, and a sentence for its sender."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Desk:
    """Shard ``place`` of a job behind ``listener``."""

    def __init__(
        self,
        listener: Listener,
        place: int,
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        snapshots: Snapshots | None = None,
        snapshot_s: float = SNAPSHOT_S,
        stays: bool = False,
    ) -> None:
        """``stays``: it does not end when all workers have left."""
        self.listener, self.place, self.liveness_timeout_s, self.stays = listener, place, liveness_timeout_s, stays
        self.snapshots, self.snapshot_s = snapshots, snapshot_s
        self.refused: Counter[str] = Counter()
        self.shard: Shard | None = None
        self.terms: Terms = {}
        self.members: dict[int, Member] = {}
        self.dispatcher: BatchDispatcher | None = None
        self.pushed = 0
        """Mini-batches whose gradients have come."""
        self.lost = 0
        """Mini-batches whose gradients are lost: of workers that died, and of pushes that came after the last snapshot."""
        self.over = False
        self._founder = b""  # who brought the weights; nobody, where they are from a snapshot
        self._charter: dict[str, Any] = {}
        self._strategy = Strategy()
        self.milestones = Milestones()
        self._copy: tuple[int, tuple[Tensor, ...]] | None = None
        self._cared = self._saved = time.monotonic()
        if snapshots is not None and (state := snapshots.load()) is not None:
            self._restore(state)

    # --- the loop ------------------------------------------------------------------------------------------------------------

    def run(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Serve until all workers have left, or until ``ended`` (asked now and then)."""
        while not self.over:
            got = self.listener.receive(_CARE_EVERY_S)
            if got is not None:
                self.handle(*got)
            if time.monotonic() - self._cared >= _CARE_EVERY_S:
                if ended():
                    return
                self.care()

    def handle(self, peer: bytes, message: Envelope) -> None:
        """Take one message."""
        takes = {
            Kind.HELLO: self._hello,
            Kind.PUSH: self._push,
            Kind.FETCH: self._fetch,
            Kind.BEAT: self._beat,
            Kind.GOODBYE: self._goodbye,
            Kind.ORDER: self._order,
        }
        try:
            if message.kind not in takes:
                raise Turned("kind", f"A shard does not take {message.kind.name}.")
            try:
                takes[message.kind](peer, message)
            except Turned:
                raise
            except Exception as error:  # whatever a peer sent, the shard goes on
                why = (str(error).splitlines() or [type(error).__name__])[0][:200]
                raise Turned("shape", f"The message cannot be taken: {why}.") from None
        except Turned as turned:
            self._refuse(peer, message.number, turned)
        self._release()

    def _refuse(self, peer: bytes, number: int, turned: Turned) -> None:
        self.refused[turned.reason] += 1
        note = {"reason": turned.reason, "sentence": str(turned)}
        self.listener.send(peer, Envelope(Kind.REFUSAL, self.place, self.place, number=number, note=note))

    def care(self) -> None:
        """What time demands: workers that are silent, those who wait and want to know that we live, snapshots."""
        now = time.monotonic()
        deaf_s, self._cared = max(now - self._cared - 1.0, 0.0), now
        if self.shard is None:
            return
        for worker, member in self.members.items():
            member.seen += deaf_s  # while we were stopped ourselves nobody was silent
            liveness_timeout_s = self.liveness_timeout_s if member.life else max(self.liveness_timeout_s, _FIRST_PATIENCE_S)
            if worker in self.shard.done and now - member.seen > liveness_timeout_s:
                self._say(f"worker {worker} has been silent for {now - member.seen:.0f} s; the others go on without it")
                self._gone(worker)
            request = member.request
            if request is not None and now - request.told >= _WAIT_EVERY_S:
                request.told = now
                self.listener.send(request.peer, Envelope(Kind.WAIT, self.place, number=request.number))
        self._release()
        if self.snapshots is not None and self.snapshot_s > 0 and now - self._saved >= self.snapshot_s:
            self._save()
        known = [m for m in self.members.values() if m.life]
        self.over = not self.stays and bool(known) and all(m.left or now - m.seen > _LONG * self.liveness_timeout_s for m in known)

    # --- who comes and goes --------------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, message: Envelope) -> None:
        note = message.note
        if self.shard is None and message.tensors:
            self._found(note, message.tensors)
            self._founder = peer
        if self.terms and (apart := difference(self.terms, dict(note["terms"]))) is not None:
            raise Turned(*apart)
        if self.shard is None:
            self._answer(peer, Kind.WELCOME, message.number, {"weights": False, "at": time.monotonic()})
            return
        worker, pushed, life = message.sender, int(note["pushed"]), peer[1:]
        member = self._member(worker)
        if member.life not in (b"", life) and worker in self.shard.done and not note.get("replaces"):
            raise Turned("taken", f"Worker {worker} is there already: give every worker a number of its own.")
        if member.life != life:
            member.answered = -1
            self._give_back(worker)
        member.life, member.seen, member.request, member.ended, member.left = life, time.monotonic(), None, False, False
        if not self._strategy.sync.static_partition:  # otherwise they are found by counting what was skipped
            self.lost += max(pushed - member.reached, 0)
        self._join(worker, pushed)
        welcome = {"weights": True, "at": time.monotonic(), "founder": peer == self._founder}
        self._answer(peer, Kind.WELCOME, message.number, welcome, step=member.reached)

    def _found(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """The first worker brings the weights and the optimiser."""
        terms = dict(note["terms"])
        if not isinstance(terms.get("world"), int) or not 1 <= terms["world"] < 1 << 20:
            raise ValueError("it says no number of workers")
        charter = {name: note[name] for name in ("recipe", "groups", "total", "per_epoch")}
        if not all(charter[name] is None or isinstance(charter[name], int) for name in ("total", "per_epoch")):
            raise ValueError("it says no number of mini-batches")
        self._start(terms, charter, [t.clone() for t in tensors])
        if self.snapshots is not None and self.snapshot_s > 0:
            self._save()

    def _start(self, terms: Terms, charter: dict[str, Any], weights: list[Tensor]) -> None:
        strategy = Strategy.parse(terms["strategy"])
        server = strategy.topology
        recipe, workers = OptimizerSpec.read(charter["recipe"]), range(terms["world"])
        rate = server.lr if isinstance(server, Server) else 1.0
        kind = MeetingShard if isinstance(strategy.sync, Stale) else Shard
        self.shard = kind(weights, charter["groups"], recipe, strategy.sync, workers, rate)
        self.terms, self._charter, self._strategy = terms, charter, strategy
        self.members = {worker: Member() for worker in workers}
        self.milestones = Milestones(charter["per_epoch"], charter["total"], self.milestones.wishes)
        if self.place == 0 and charter["total"] is not None and not strategy.sync.static_partition:
            self.dispatcher = BatchDispatcher(charter["total"])

    def _member(self, worker: int) -> Member:
        if worker not in self.members:
            raise Turned("worker", f"There is no worker {worker} in a job of {len(self.members)}.")
        return self.members[worker]

    def _known(self, peer: bytes, message: Envelope) -> tuple[Shard, Member]:
        """The worker that sends this; back, if it was gone."""
        if self.shard is None:
            raise Turned("hello", "This shard has no weights yet: say hello first.")
        member = self._member(message.sender)
        if member.life != peer[1:]:
            if member.life:
                raise Turned("replaced", f"Another process is worker {message.sender} now: this one can end.")
            raise Turned("hello", "This shard does not know you: say hello first.")
        member.seen = time.monotonic()
        if message.sender not in self.shard.done and not member.ended:
            self._say(f"worker {message.sender} is back")
            self._join(message.sender, member.reached)
        return self.shard, member

    def _join(self, worker: int, pushed: int) -> None:
        """Where nobody may be far ahead, one that was not waited for goes on with the slowest of the others."""
        assert self.shard is not None
        member, others = self.members[worker], self.shard.done
        step = max(member.reached, pushed)
        if others and worker not in others and (self.shard.together or self.shard.sync.max_staleness < math.inf):
            step = max(step, min(others.values()))
        member.reached = self.shard.join(worker, step)
        self._look_at_epoch()

    def _gone(self, worker: int) -> None:
        """A worker is silent or known to be dead: nobody waits for it any longer."""
        assert self.shard is not None
        self.lost += max(int(self.shard.leave(worker)), self._give_back(worker))
        self.members[worker].request = None
        self._look_at_epoch()

    def _give_back(self, worker: int) -> int:
        return 0 if self.dispatcher is None else self.dispatcher.gone(worker)

    def _beat(self, peer: bytes, message: Envelope) -> None:
        with contextlib.suppress(Turned):  # it may come before the hello
            self._known(peer, message)

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        shard, member = self._known(peer, message)
        member.ended, member.left, member.request = True, True, None
        shard.leave(message.sender)
        self._give_back(message.sender)
        self._look_at_epoch()

    # --- pushes and fetches --------------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, message: Envelope) -> None:
        shard, member = self._known(peer, message)
        worker, step, note = message.sender, message.step, message.note
        if member.ended:
            raise Turned("worker", f"Worker {worker} has left.")
        done, period = shard.done[worker], shard.sync.period
        if not 1 <= step <= done + period:
            raise Turned("step", f"Step {step} of worker {worker} was pushed where {done + 1} to {done + period} come next.")
        if step > done:
            gradients, rates = self._read(shard, message), [float(rate) for rate in note["rates"]]
            if len(rates) != len(shard.optimizer.param_groups):
                raise ValueError(f"{len(rates)} rates for {len(shard.optimizer.param_groups)} groups")
            seen, batch_ids = note.get("seen"), [int(batch_id) for batch_id in note.get("batch_ids", [])]
            if self.place == 0:
                member.figures = dict(note.get("ledger", {}))
            if shard.push(worker, step, gradients, rates, None if seen is None else int(seen)):
                self.pushed += step - member.reached if self.dispatcher is None else self.dispatcher.done(worker, batch_ids)
            else:
                self.lost += step - member.reached if self.dispatcher is None else self.dispatcher.gone(worker, batch_ids)
            member.reached = step
            self._look_at_epoch()
        member.request = self._request(peer, message)
        self._call(shard)

    def _call(self, shard: Shard) -> None:
        """Somebody waits for a meeting: tell those who have not come (again with every one that comes, should it get lost)."""
        if self.place == 0 and isinstance(shard, MeetingShard) and shard.called:
            for worker, member in self.members.items():
                if member.life and worker in shard.done and shard.ready(worker, 0) and not member.ended:
                    call = {"call": shard.version}
                    self.listener.send(WORKER_MARK + member.life, Envelope(Kind.WAIT, self.place, note=call))

    def _read(self, shard: Shard, message: Envelope) -> list[Tensor]:
        """All of a push, or nothing."""
        tensors = list(message.tensors)
        buffers = tensors.pop() if message.note.get("buffers") else None
        terms, own = self.terms, shard.weights
        messages = as_messages(message.note["parts"], tensors)
        gradients = gradients_of(self._strategy, messages, own, message.step, message.sender, terms["world"], terms["seed"])
        if buffers is not None:
            if any(m.buffers is not None and m.buffers.shape != buffers.shape for m in self.members.values()):
                raise ValueError(f"{buffers.numel()} values in buffers, other workers have another number")
            self._member(message.sender).buffers = buffers.to(torch.float32, copy=True)
        return gradients

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        if message.sender == OBSERVER:
            within_s = min(float(message.note.get("within_s", 0.0)), 1e6)
            self.milestones.wish(Wish(peer, message.number, int(message.note.get("epoch", 0)), time.monotonic() + within_s))
            return
        shard, member = self._known(peer, message)
        member.request = self._request(peer, message)
        if member.request.final:
            member.ended = True
            shard.leave(message.sender)
            self._give_back(message.sender)

    def _request(self, peer: bytes, message: Envelope) -> Request:
        note = message.note
        want = max(0, min(int(note.get("want", 0)), MAX_BATCH_IDS))
        return Request(peer, message.number, message.step, bool(note.get("fetch")), bool(note.get("final")), want)

    def _release(self) -> None:
        """Answer all who may go on."""
        if self.shard is None:
            return
        for worker, member in self.members.items():
            request = member.request
            if request is None:
                continue
            if request.final:
                ready = not self.shard.done
            else:
                ready = not request.fetch or self.shard.ready(worker, request.step)
            if ready:
                member.request = None
                self._reply(worker, member, request)
        for wish in self.milestones.due():
            self._show(wish)

    def _reply(self, worker: int, member: Member, request: Request) -> None:
        assert self.shard is not None
        if self.dispatcher is not None and member.answered != request.number:
            member.dealt = self.dispatcher.deal(worker, request.want)
        member.answered = request.number
        note: dict[str, Any] = {"held": time.monotonic() - request.since, "at": time.monotonic(), "seen": self.shard.version}
        if self.dispatcher is not None:
            note["batch_ids"], note["over"] = member.dealt, self.dispatcher.empty
        tensors: tuple[Tensor, ...] = ()
        if request.fetch:
            self.shard.give(worker)
            tensors = self._truth()
            if request.final:  # in full precision
                tensors = self._with_buffers(tuple(w.clone() for w in self.shard.weights), note)
        self._answer(request.peer, Kind.REPLY, request.number, note, tensors, member.reached)

    def _truth(self) -> tuple[Tensor, ...]:
        """A copy to send, made once per version: nobody writes to it."""
        assert self.shard is not None
        if self._copy is None or self._copy[0] != self.shard.version:
            server = self._strategy.topology
            dtype = FETCH[server.fetch] if isinstance(server, Server) else None
            self._copy = self.shard.version, tuple(w.to(dtype or w.dtype, copy=True) for w in self.shard.weights)
        return self._copy[1]

    # --- for observers -------------------------------------------------------------------------------------------------------

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
        # Who has ended has done all that it had; who is away may have missed what the others did.
        return sum(done.get(w, m.reached if m.ended else max(m.reached, floor)) for w, m in self.members.items())

    @property
    def all_lost(self) -> int:
        """Mini-batches lost, also those of workers that were away, where everybody has a share of its own."""
        return self.lost + (max(self.progress - self.pushed, 0) if self._strategy.sync.static_partition else 0)

    def figures(self) -> dict[str, Any]:
        """Where the job stands, as plain data."""
        assert self.shard is not None
        return {
            "progress": self.progress,
            "lost": self.all_lost,
            "version": self.shard.version,
            "ages": {str(age): count for age, count in sorted(self.shard.ages.items())},
            "workers": {str(w): m.figures for w, m in self.members.items() if m.figures},
            "here": sorted(self.shard.done),
            "refused": dict(self.refused + self.listener.refused),
        }

    def _look_at_epoch(self) -> None:
        """Keep the truth and the figures at the end of every epoch, for whoever evaluates them."""
        self.milestones.look(self.progress, self._now)

    def _now(self) -> Milestone:
        assert self.shard is not None
        figures = self.figures() if self.place == 0 else {"lost": self.all_lost}
        return Milestone(tuple(w.clone() for w in self.shard.weights), self._mean_buffers(), figures)

    def _mean_buffers(self) -> Tensor | None:
        rows = [m.buffers for m in self.members.values() if m.buffers is not None]
        return torch.stack(rows).mean(0) if rows else None

    def _with_buffers(self, tensors: tuple[Tensor, ...], note: dict[str, Any]) -> tuple[Tensor, ...]:
        buffers = self._mean_buffers()
        note["buffers"] = buffers is not None
        return tensors if buffers is None else (*tensors, buffers)

    def _show(self, wish: Wish) -> None:
        found = self.milestones.show(wish.epoch) or self._now()
        tensors = found.weights if found.buffers is None else (*found.weights, found.buffers)
        note = {"buffers": found.buffers is not None, "figures": found.figures, "at": time.monotonic()}
        self._answer(wish.peer, Kind.REPLY, wish.number, note, tensors)

    def _order(self, peer: bytes, message: Envelope) -> None:
        if message.sender != OBSERVER:
            raise Turned("worker", "Only observers give orders.")
        gone, unseen = message.note.get("gone"), message.note.get("unseen")
        # Of one that was never seen: somebody may have taken its place meanwhile.
        if self.shard is not None and gone in self.shard.done and not (unseen and self.members[gone].life):
            self._gone(gone)
        note: dict[str, Any] = {"weights": self.shard is not None, "at": time.monotonic()}
        if self.shard is not None:
            note["figures"] = self.figures()
        self._answer(peer, Kind.ANSWER, message.number, note)

    def _answer(
        self, peer: bytes, kind: Kind, number: int, note: dict[str, Any], tensors: tuple[Tensor, ...] = (), step: int = 0
    ) -> None:
        # Who is gone does not get it; who is merely slow asks again.
        try:
            self.listener.send(peer, Envelope(kind, self.place, self.place, step, number, note, tensors))
        except HocketError as error:  # too large for the link
            self._refuse(peer, number, Turned("size", str(error)))

    def _say(self, text: str) -> None:
        if self.place == 0:
            print(f"hocket: {text}.", file=sys.stderr, flush=True)

    # --- snapshots -----------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        assert self.shard is not None
        assert self.snapshots is not None
        self._saved = time.monotonic()
        self.snapshots.save(
            {
                "terms": self.terms,
                "charter": self._charter,
                "shard": self.shard.state_dict(),
                "reached": {w: m.reached for w, m in self.members.items()},
                "ended": [w for w, m in self.members.items() if m.ended],
                "figures": {w: json.dumps(m.figures) for w, m in self.members.items()},
                "dispatcher": None if self.dispatcher is None else self.dispatcher.state_dict(),
                "counters": [self.pushed, self.lost, self.milestones.done],
            }
        )

    def _restore(self, state: dict[str, Any]) -> None:
        saved = state["shard"]
        self._start(state["terms"], state["charter"], [w.clone() for w in saved["weights"]])
        assert self.shard is not None
        self.shard.load_state_dict(saved)
        for worker, reached in state["reached"].items():
            self.members[worker].reached = reached
            self.members[worker].figures = json.loads(state["figures"][worker])
            self.members[worker].ended = worker in state["ended"]
        if state["dispatcher"] is not None:
            self.dispatcher = BatchDispatcher(**state["dispatcher"])
        self.pushed, self.lost, self.milestones.done = state["counters"]
