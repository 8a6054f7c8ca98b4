"""The worker's side of the parameter server: it adds up gradients, pushes them, fetches weights, and waits where the strategy says
so.

Whoever trains calls, per step, :meth:`ServerWorker.before_update` with the gradients, steps its own optimiser if
:attr:`ServerWorker.steps_locally` says so, and calls :meth:`ServerWorker.after_update`. While the program is ``busy`` the worker
stands still. Fetched weights are written into ``rows`` by these calls and at no other time.

The weights are on the shards, and so is the optimiser; the learning rates are this worker's. Under ``stale`` the workers keep their
optimisers, and what they push are weights.
"""

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hocket.cluster.message import framed
from hocket.programs.account import Account
from hocket.programs.base import Task, Until, event
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import ShardRequests, WorkerConfig
from hocket.transport.frame import Envelope, Kind

_SAVED = ["step", "over", "_sums", "_gradients", "_waiting", "_seen", "_steps_since_meeting", "_taken"]
_SAVED += ["pushed", "number", "_sent", "_call", "_fetched", "_met", "_steps_last_time", "_lrs", "_options", "_buffers"]


class ServerWorker(ShardRequests):
    """One worker; ``config`` says which."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.over = False
        """Whether all mini-batches have been handed out; ``batch_ids`` may hold some of them."""
        self.final_buffers: Tensor | None = None
        """All workers' mean buffers, after :meth:`finish`."""
        self._gradients: list[Tensor] = []
        self._steps_since_meeting = 0
        self._met = 0.0  # when the last meeting was over
        self._fetched: list[Tensor] = []  # the weights from which displacements are measured, where these are pushed

    # --- events --------------------------------------------------------------------------------------------------------------

    @event
    def join(self, rows: Sequence[Tensor], optimizer: OptimizerSpec, now: float) -> Task:
        """Join the shards with these weights, which the first worker brings, and fetch those that the shards have."""
        self.attach(rows, optimizer)
        self.step = yield from self._hello_all()
        self._seen = self.versions
        self._fetch(self._want())
        yield from self._apply("after")
        self._met = self.now

    def attach(self, rows: Sequence[Tensor], optimizer: OptimizerSpec) -> None:
        """The worker's weights, and the optimiser that the shards run."""
        self.rows, self._optimizer = rows, optimizer

    @event
    def before_update(self, gradients: Sequence[Tensor], now: float) -> Task:
        """This step's gradients, flat, one per bucket; they are kept, so the caller must not write to them any more."""
        self._seen = self.versions  # of the weights that the gradients were computed at, whatever is applied now
        self._gradients = list(gradients)
        if self.open:
            yield from self._apply("before")
        self._add()

    @property
    def steps_locally(self) -> bool:
        """Whether the worker's own optimiser makes the step under way."""
        return self.sync.averages_weights or self.sync.server_action(self.step + 1).local

    @event
    def after_update(self, lrs: Sequence[float], buffers: Tensor | None, now: float) -> Task:
        """The step is done, with the worker's learning rates ``lrs``; ``buffers`` are its floating-point buffers, flat."""
        outer = self.sync.outer_optimizer
        self._lrs, self._buffers = list(lrs) if outer is None else [outer["lr"]] * len(lrs), buffers
        self.step += 1
        self.account.end_step(self.now)
        if self.sync.averages_weights:
            self._steps_since_meeting += 1
            if self.sync.meets(self._steps_since_meeting, self.now - self._met) or self._call == self.links[0].seen:
                yield from self._meet()
            return
        action = self.sync.server_action(self.step)
        if action.push:
            self._measure()
            self._push(action.fetch, self._want())
        elif action.fetch:
            self._fetch(self._want())
        if action.fetch and not self.sync.overlaps:
            yield from self._apply("after")

    @event
    def set_options(self, options: list[dict[str, Any]], now: float) -> None:
        """What has changed of the optimiser's options beside the rates, per group; nothing where all are as at the beginning."""
        self._options = options

    @event
    def take_batch(self, now: float) -> Task:
        """Fetch a mini-batch in advance, if there is one left."""
        return self._ensure_batch()

    @property
    def may_get_batch(self) -> bool:
        """Whether :meth:`take_batch` may get a mini-batch where none is ready."""
        return self.open or not self.over

    @event
    def flush(self, now: float) -> Task:
        """Apply the requested weights, and push the remaining sums."""
        return self._flush()

    @event
    def finish(self, now: float) -> Task:
        """Flush, and wait for the final weights, the same on all workers."""
        yield from self._flush()
        self._fetch(0, final=True)
        reply = yield from self._apply("final")
        if reply.metadata.get("buffers"):
            self.final_buffers = reply.tensors[-1].clone()

    @event
    def resume(self, state: dict[str, Any], now: float) -> Task:
        """Go on from a :meth:`strategy_state` of a worker of other shards; to be called between :meth:`join` and the first step."""
        state = copy.deepcopy(state)
        self._encoder.load_state_dict(state["encoder"])
        if self.sync.outer_optimizer is None:
            self._sums = state["sums"]
        else:
            for rows, displacement in zip(self.rows, state["sums"], strict=True):
                rows[0] -= displacement
        self._steps_since_meeting, self._met = state["since"], self.now - state["since_s"]
        self._lrs = state["lrs"]  # of sums that no step will follow
        self.pushed, self._resumes = state["pushed"], True
        yield from self._hello_all()  # the shards count from here
        self._resumes = False
        self.step = max(state["step"], self.pushed)

    @event
    def leave(self, now: float) -> None:
        for link in self.links:
            self._send(link.peer, Envelope(Kind.GOODBYE, self.config.worker, link.peer))

    # --- tasks ---------------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Where displacements are pushed: the displacement since the last push."""
        if self.sync.outer_optimizer is not None:
            now = [rows[0].clone() for rows in self.rows]
            self._sums = [then - own for then, own in zip(self._fetched, now, strict=True)]
            self._fetched = now

    def _add(self) -> None:
        if not self.sync.averages_weights and self.sync.outer_optimizer is None:
            for total, gradient in zip(self._sums, self._gradients, strict=False):
                total += gradient
            self._sums = self._sums or self._gradients
        self._gradients = []

    def _meet(self, then: str = "after") -> Task:
        """Push these weights, and take the mean of all workers'."""
        self._sums = [rows[0].clone() for rows in self.rows]
        self._steps_last_time, self._steps_since_meeting = self._steps_since_meeting, 0
        self._push(True, self._want())
        yield from self._apply(then)
        self._met = self.now

    def _ensure_batch(self) -> Task:
        while not self.batch_ids and (self.open or not self.over):
            if not self.open:
                self._fetch(1, weights=False)
            yield from self._apply("batch")

    def _flush(self) -> Task:
        displaced = self.sync.outer_optimizer is not None
        while self._steps_since_meeting or self.open or self._sums or (displaced and self.step > self.pushed):
            if self._steps_since_meeting:
                yield from self._meet("flush")
            elif self.open:
                yield from self._apply("flush")
            else:
                self._measure()
                self._push(False, 0)
                yield from self._apply("flush")

    def _resumed(self, then: str, begun: float) -> Task:
        """The task that a saved worker was waiting in."""
        yield from self._apply(then, begun)
        if then == "before":
            self._add()
        elif then == "batch":
            yield from self._ensure_batch()
        elif then == "flush":
            yield from self._flush()
        elif self.sync.averages_weights:
            self._met = self.now

    def _apply(self, then: str, begun: float | None = None) -> Task:
        """Wait for what was requested and write weights, if they come, into ``rows``; shard 0's answer.

        ``then`` names what comes after it, for a worker that is saved while it waits.
        """
        begun = self.now if begun is None else begun
        self._waiting = then, begun
        for link in self.links:
            link.heard = max(link.heard, begun)  # this worker did not read messages while it computed
        yield Until(self._answered)
        self._waiting = None
        self.late.ended(self.now - begun)
        held = moved = 0.0
        reached = 0
        asked = [link for link in self.links if link.request is not None]
        for link in asked:
            reply = link.reply
            assert reply is not None
            for b, part in enumerate(reply.tensors[: len(self.rows)]):
                self.slices.put(b, link.peer, part.to(self.rows[b].dtype), self.rows[b][0])
            if reply.tensors:
                link.seen = int(reply.metadata["seen"])
            self.account.bytes_sent += framed(reply.tensor_bytes)
            held, moved = max(held, float(reply.metadata["held"])), max(moved, float(reply.metadata["at"]) - link.offset_s)
            reached = max(reached, reply.step)
            if link.request is not None and link.request.kind == Kind.PUSH:
                self.pushed = max(self.pushed, link.request.step)  # the push is known to be applied only now
            link.request = None
        # What moved before the worker stood still was hidden, as far as the shard's clock tells.
        self.account.stalled(self.now - begun, held, max(min(moved, begun) - self._sent - held, 0.0))
        first = asked[0].reply
        assert first is not None
        if first.tensors and self.sync.outer_optimizer is not None:
            self._fetched = [rows[0].clone() for rows in self.rows]
        self.batch_ids.extend(first.metadata.get("batch_ids", []))
        self.over = bool(first.metadata.get("over", self.over))
        self.pushed = max(self.pushed, reached)
        if reached > self.step:  # this worker was away, and the others went on
            self.step, self._sums = reached, []
            behind = [link for link in asked if link.reply is not None and link.reply.step < reached]
            for link in behind:  # all shards must count its steps from there
                yield from self._greet_with_step(link)
            if behind and then != "final":  # and it must wait there for workers that are too far behind that step
                self._fetch(0)
                yield from self._apply(then)
        return first

    # --- state ---------------------------------------------------------------------------------------------------------------

    def strategy_state(self) -> dict[str, Any]:
        """The state beside the weights on the shards; a push under way counts as applied."""
        state: dict[str, Any] = {"step": self.step, "pushed": self._last_push}
        state |= {"since": self._steps_since_meeting, "since_s": self.now - self._met}
        sums = self._sums
        if self.sync.outer_optimizer is not None:  # how far this worker has come since
            sums = [then - rows[0] for then, rows in zip(self._fetched, self.rows, strict=True)]
        return copy.deepcopy({**state, "encoder": self._encoder.state_dict(), "sums": sums, "lrs": self._lrs})

    def state_dict(self) -> dict[str, Any]:
        """All state of this worker; messages under way are the driver's."""
        state = {name: getattr(self, name) for name in _SAVED}
        state |= {"encoder": self._encoder.state_dict(), "account": vars(self.account), "batch_ids": list(self.batch_ids)}
        return copy.deepcopy({**state, "links": [link.state() for link in self.links]})

    def end_state(self) -> dict[str, Any]:
        return {"rows": list(self.rows), **self.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        for name in _SAVED:
            setattr(self, name, state[name])
        self._encoder.load_state_dict(state["encoder"])
        self.batch_ids, self.account = deque(state["batch_ids"]), Account(**state["account"])
        for link, saved in zip(self.links, state["links"], strict=True):
            link.load(saved)
        self._task = self._until = None
        if self._waiting is not None:
            self._task = self._resumed(*self._waiting)
            self._advance()
