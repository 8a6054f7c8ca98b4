"""A shard and its workers: who is here, what they push and fetch, who has to wait.

Every request carries a number and gets one answer with that number. A worker has at most one request open, so what a server holds
for it is bounded; a worker that got no answer (a cut link, a server that was restarted) sends it again, and nothing is applied
twice.

=========  ==================================================================  =============================================
message    from a worker (or an observer)                                      is answered by
=========  ==================================================================  =============================================
HELLO      job configuration, steps pushed so far, mini-batches held;          WELCOME: the step to go on from, whether weights
           optimiser with its state, weights, where the shard has none         are there, and brought by it; or REFUSAL
PUSH       step, coded gradients, learning rates, other options of the         REPLY, at once or once it may go on
           optimiser that have changed, its figures; whether it wants weights
FETCH      step; *final*: it has ended and wants the final weights; from an    REPLY: weights, how long they were held back,
           observer: the weights at the end of an epoch                        from shard 0 the next mini-batches
BEAT       every second; what its training thread does, if for long            nothing
GOODBYE    it has ended                                                        nothing
ORDER      from an observer: status, or a worker that is known to be dead      ANSWER
=========  ==================================================================  =============================================

While an answer is held back, WAIT is sent every second, so that silence means that the server is gone; where that takes long, it
says whom the worker waits for. A worker that is silent for
``liveness_timeout_s`` is no longer waited for; with its next message it is back. Under bulk and ssp a worker that was away resumes
at the slowest live worker's step. A message with a wrong configuration, worker, step or shape is rejected, counted in ``rejected``,
and never touches the weights.

Bytes in both directions are counted by the worker.
"""

import copy
import json
from typing import Any

import torch
from torch import Tensor

from hocket.files import unlike
from hocket.programs.account import checked
from hocket.programs.base import Address, Finished, Rejected, event, whole
from hocket.programs.server.members import Member, Request, SnapshotRequest
from hocket.programs.server.membership import GRACE, Membership
from hocket.programs.server.shard import Shard
from hocket.programs.server.wire import (
    FETCH,
    MAX_BATCH_IDS,
    OBSERVER,
    WORKER_MARK,
    as_messages,
    gradients_of,
)
from hocket.transport.frame import Envelope, Kind

_WAIT_EVERY_S = 1.0
_CHECK_EVERY_S = 0.2
_LATE_S = 2.0
_NAMED = 3
"""After these seconds of waiting, a worker is told the names of the workers that it waits for, this many of them."""
_LONG = 3
"""A worker that is silent for so many liveness timeouts counts as one that has left, where a server ends with its workers."""
_LONGEST_S = 1e6
_CHECK = "check"


class ShardServer(Membership):
    """Shard ``place`` of a job."""

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def start(self, now: float, state: dict[str, Any] | None = None) -> None:
        """Begin to serve, from a snapshot's ``state`` if there is one."""
        self._checked = self._saved = now
        if state is not None:
            self.load_state_dict(state)
            self._grace_until = None  # by the clock of another process
            for member in self.members.values():
                member.incarnation, member.request, member.seen = b"", None, now
        self._set_timer(_CHECK, now + _CHECK_EVERY_S)

    def on_message(self, sender: Address, message: Envelope) -> None:
        handlers = {
            Kind.HELLO: self._hello,
            Kind.PUSH: self._push,
            Kind.FETCH: self._fetch,
            Kind.BEAT: self._beat,
            Kind.GOODBYE: self._goodbye,
            Kind.ORDER: self._order,
        }
        self._serve(sender, message, handlers)
        self._wait_for_more()
        self._release()

    def on_timer(self, name: str) -> None:
        """Give up silent workers, send WAIT to waiting ones, and take snapshots when they are due."""
        now = self.now
        if name == GRACE:
            self._end_grace()
            return
        suspended_s, self._checked = max(now - self._checked - 1.0, 0.0), now
        self._set_timer(_CHECK, now + _CHECK_EVERY_S)
        if self.shard is None:
            return
        self._miss_silent(suspended_s)
        for worker, member in self.members.items():
            request = member.request
            if request is not None and now - request.notified >= _WAIT_EVERY_S:
                request.notified = now
                behind = {"behind": self._behind(worker, request)} if now - request.since > _LATE_S else {}
                self._send(request.peer, Envelope(Kind.WAIT, self.place, number=request.number, metadata=behind))
        self._wait_for_more()
        self._release()
        if self.snapshot_s > 0 and now - self._saved >= self.snapshot_s:
            self._save()
        known = [m for m in self.members.values() if m.incarnation]
        long_s = _LONG * self.liveness_timeout_s
        self.over = not self.stays and bool(known) and all(m.left or now - m.seen > long_s for m in known)
        if self.over:
            self._effects.append(Finished())

    def _behind(self, worker: int, request: Request) -> list[list[Any]]:
        """For whom a worker waits: their numbers, steps, seconds since the last message, and what they do."""
        assert self.shard is not None
        done = self.shard.done
        late = self.shard.called() or sorted((w for w in done if request.final or done[w] < request.step), key=lambda w: done[w])
        named = [(w, self.members[w]) for w in late if w != worker and w in self.members][:_NAMED]
        return [[w, done.get(w, m.reached), self.now - m.seen, m.doing] for w, m in named]

    # --- pushes and fetches --------------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, message: Envelope) -> None:
        shard, member = self._known(peer, message)
        worker, step, metadata = message.sender, message.step, message.metadata
        if member.ended:
            raise Rejected("worker", f"Worker {worker} has left.")
        done, period = shard.done[worker], self._strategy.sync.period
        if not 1 <= step <= done + period:
            raise Rejected("step", f"Worker {worker} pushed step {step}, but steps {done + 1} to {done + period} come next.")
        if step > done:
            lrs, seen = [float(lr) for lr in metadata["lrs"]], metadata.get("seen")
            ids, figures = [whole(number) for number in metadata.get("batch_ids", [])], checked(metadata.get("figures", {}))
            if len(lrs) != len(self._start_config["optimizer"]["groups"]):
                raise ValueError(f"{len(lrs)} learning rates for {len(self._start_config['optimizer']['groups'])} groups")
            tensors, seen = self._read(shard, message), None if seen is None else whole(seen)
            shard.set_options(metadata.get("options", []))
            if self.place == 0:
                member.figures = {**figures, "staleness": {}}  # the shard's own counts
            if self.dispatcher is not None:
                self.lost -= self.dispatcher.recover(worker, ids)
            if shard.push(worker, step, tensors, lrs, seen):
                self.pushed += step - member.reached if self.dispatcher is None else self.dispatcher.done(worker, ids)
            else:
                self.lost += step - member.reached if self.dispatcher is None else self.dispatcher.give_back(worker, ids)
            member.reached = step
            self._look_at_epoch()
        self._open(peer, member, message)
        self._call(shard)

    def _call(self, shard: Shard) -> None:
        """A worker waits for a meeting: tell those who have not come (again with every one that comes, should it get lost)."""
        if self.place == 0:
            for worker in shard.called():
                member = self.members[worker]
                if member.incarnation and not member.ended:
                    call = {"call": shard.version}
                    self._send(WORKER_MARK + member.incarnation, Envelope(Kind.WAIT, self.place, metadata=call))

    def _read(self, shard: Shard, message: Envelope) -> list[Tensor]:
        """All of a push, or nothing."""
        tensors = list(message.tensors)
        buffers = tensors.pop() if message.metadata.get("buffers") else None
        config, own = self.job_config, shard.weights
        messages = as_messages(message.metadata["parts"], tensors)
        found = gradients_of(self._strategy, messages, own, message.step, message.sender, config["world"], config["seed"])
        if buffers is not None:
            if any(m.buffers is not None and m.buffers.shape != buffers.shape for m in self.members.values()):
                raise ValueError(f"{buffers.numel()} values in buffers, other workers have another number")
            self._member(message.sender).buffers = buffers.to(torch.float32, copy=True)
        return found

    def _fetch(self, peer: bytes, message: Envelope) -> None:
        if message.sender == OBSERVER:
            within_s, epoch = float(message.metadata.get("within_s", 0.0)), whole(message.metadata.get("epoch", 0))
            if not 0 <= within_s <= _LONGEST_S:
                raise ValueError(f"a wait of {within_s} s is too short or too long")
            self.epochs.request(SnapshotRequest(peer, message.number, epoch, self.now + within_s))
            return
        shard, member = self._known(peer, message)
        request = self._open(peer, member, message)
        if request is not None and request.final:
            member.ended = True
            shard.leave(message.sender)
            if self.dispatcher is not None:
                self.dispatcher.give_back(message.sender, lost=False)
            self._look_at_epoch()

    def _open(self, peer: bytes, member: Member, message: Envelope) -> Request | None:
        """Open the worker's request; None where the message is older than its last request or answer."""
        metadata, number = message.metadata, message.number
        if number < member.answered or (member.request is not None and number < member.request.number):
            return None
        want = min(whole(metadata.get("want", 0)), MAX_BATCH_IDS)
        fetch, final = bool(metadata.get("fetch")), bool(metadata.get("final"))
        push = message.kind == Kind.PUSH
        member.request = Request(peer, number, message.step, fetch, final, want, self.now, self.now, push)
        return member.request

    def _release(self) -> None:
        """Answer the requests of all workers that may continue."""
        if self.shard is None:
            return
        for worker, member in self.members.items():
            request = member.request
            if request is None:
                continue
            if request.final:
                ready = not self.shard.done
            elif self._strategy.sync.averages_weights and not request.push:
                ready = True  # only who has brought weights waits for a meeting
            else:
                ready = not request.fetch or self.shard.ready(worker, request.step)
            if ready:
                member.request = None
                self._reply(worker, member, request)
        for asked in self.epochs.due(self.now):
            self._show(asked)

    def _reply(self, worker: int, member: Member, request: Request) -> None:
        assert self.shard is not None
        if self.dispatcher is not None and member.answered != request.number:
            member.dispatched = self.dispatcher.take(worker, request.want)
        member.answered = request.number
        metadata: dict[str, Any] = {"held": self.now - request.since, "at": self.now, "seen": self.shard.version}
        if self.dispatcher is not None:
            metadata["batch_ids"], metadata["over"] = member.dispatched, self.dispatcher.empty
        tensors: tuple[Tensor, ...] = ()
        if request.fetch:
            self.shard.give(worker)
            tensors = self._weights()
            if request.final:  # in full precision
                self._save_final()
                tensors = self._with_buffers(tuple(w.clone() for w in self.shard.weights), metadata)
        self._answer(request.peer, Kind.REPLY, request.number, metadata, tensors, member.reached)

    def _save_final(self) -> None:
        """Save the final weights durably before workers get them: after a restart no worker would be left to push again."""
        assert self.shard is not None
        if self.snapshot_s > 0 and self._final != self.shard.version:
            self._final = self.shard.version
            self._save(durable=True)

    def _weights(self) -> tuple[Tensor, ...]:
        """A copy to send, made once per version: nobody writes to it."""
        assert self.shard is not None
        if self._copy is None or self._copy[0] != self.shard.version:
            dtype = FETCH[self._strategy.topology.fetch_dtype]
            self._copy = self.shard.version, tuple(w.to(dtype or w.dtype, copy=True) for w in self.shard.weights)
        return self._copy[1]

    # --- state ---------------------------------------------------------------------------------------------------------------

    def extend(self, total: int) -> None:
        """Make the training longer: ``total`` mini-batches from now on."""
        self._start_config["total"] = self.epochs.total = total
        if self.dispatcher is not None:
            self.dispatcher.total = total

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from (copies)."""
        assert self.shard is not None
        members = {}
        for worker, m in self.members.items():
            request = None if m.request is None else [m.request.peer.hex(), *list(vars(m.request).values())[1:]]
            plain = {"incarnation": m.incarnation.hex(), "figures": json.dumps(m.figures), "request": request}
            members[worker] = {name: value for name, value in {**vars(m), **plain}.items() if name not in ("seen", "doing")}
        dispatcher = None if self.dispatcher is None else self.dispatcher.state_dict()
        own = {"job_config": self.job_config, "start_config": self._start_config, "members": members, "dispatcher": dispatcher}
        counters = [self.pushed, self.lost, self.epochs.done]
        return {**copy.deepcopy(own), "shard": self.shard.state_dict(), "counters": counters, "grace_until": self._grace_until}

    def end_state(self) -> dict[str, Any]:
        return {} if self.shard is None else {**self.state_dict(), "rejected": dict(self.rejected)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start_shard(state["job_config"], state["start_config"], [w.clone() for w in state["shard"]["weights"]])
        assert self.shard is not None
        if (place := unlike(self.shard.state_dict(), state["shard"])) is not None:
            raise ValueError(f"its structure differs at '{place}'")
        self.shard.load_state_dict(state["shard"])
        for worker, saved in state["members"].items():
            values = {**saved, "figures": json.loads(saved["figures"]), "incarnation": bytes.fromhex(saved["incarnation"])}
            request = values.pop("request")
            opened = None if request is None else Request(bytes.fromhex(request[0]), *request[1:])
            self.members[worker] = Member(seen=self.now, request=opened, **values)
        if self.dispatcher is not None and state["dispatcher"] is not None:
            self.dispatcher.load_state_dict(state["dispatcher"])
        self.pushed, self.lost, self.epochs.done = state["counters"]
        self._grace_until = state.get("grace_until")
