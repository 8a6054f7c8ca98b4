"""A worker's requests to the shards of its job: one is open at a time, to all shards at once; what got no answer is sent again.

A shard that sends neither an answer nor a sign of waiting for two seconds may have been restarted or cut off: the worker says hello
again, brings the weights it has if the shard has none, and repeats its request.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.message import FRAME_BYTES, framed
from hocket.errors import HocketError, WorkerLost
from hocket.programs.account import Account
from hocket.programs.base import Address, Client, Link, Say, Task, Until, from_plain, to_plain
from hocket.programs.late import LateAnswers
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.push_encoder import PushEncoder, Slices
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, MAX_BATCH_IDS, as_tensors, job_config, slices_of, write_state
from hocket.strategy import Strategy
from hocket.transport.frame import Envelope, Kind

GIVE_UP_S = 60.0
_PAUSE_S = 0.05
_LONG = 3
"""A worker that has waited for a shard for this many liveness timeouts tells the other shards not to wait for it."""
_HELLO_AGAIN = ("hello", "step")
"""Refusals after which the worker sends a new HELLO."""


@dataclass(frozen=True)
class WorkerConfig:
    """Worker ``worker`` of ``world``; of ``total`` mini-batches, ``per_epoch`` make an epoch."""

    strategy: Strategy
    layout: Layout
    worker: int
    world: int
    seed: int = 0
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S
    give_up_s: float = GIVE_UP_S
    total: int | None = None
    per_epoch: int | None = None
    replaces: bool = False
    """Whether this process takes the place of a worker that has died."""


@dataclass
class ShardLink(Link):
    """One shard as a worker sees it; it is asked again by a hello."""

    offset_s: float = 0.0
    """What its clock shows more than ours."""
    seen: int = 0
    """The version of the weights that it gave last."""
    greetings: deque[Envelope] = field(default_factory=deque)

    def state(self) -> list[Any]:
        times = [self.heard, self.asked, self.offset_s, self.seen]
        return [to_plain(self.request), to_plain(self.reply), *times]

    def load(self, state: list[Any]) -> None:
        request, reply, self.heard, self.asked, self.offset_s, self.seen = state
        self.request, self.reply = from_plain(request), from_plain(reply)


class ShardRequests(Client):
    """Joins the shards, pushes gradients, fetches weights and mini-batches, and keeps requests alive.

    :class:`~hocket.programs.server.worker.ServerWorker` says when.
    """

    peer_kind = "Shard"

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__()
        self.config, self.give_up_s = config, config.give_up_s
        self.slices = Slices.of(config.strategy, config.layout, config.world)
        self.links: list[ShardLink] = [ShardLink(place) for place in range(self.slices.shards)]
        self.rows: Sequence[Tensor] = ()
        """This worker's weights ``[1, values]`` per bucket: fetched weights are written there."""
        self.batch_ids: deque[int] = deque()
        """Mini-batches that lie ready."""
        self._taken: list[int] = []
        self._steps_last_time = 0  # between the last two meetings
        self._optimizer: OptimizerSpec | None = None
        self.pushed = 0
        """Steps whose push all shards have answered."""
        self._sent = 0.0
        self._call = -1  # the version of the weights whose holders were called to a meeting last
        self._greeting: int | None = None
        self.sync = config.strategy.sync
        self.account = Account()
        self.late = LateAnswers()
        self._waiting: tuple[str, float] | None = None  # the doing and its beginning
        self.step = 0
        """Steps done; a worker that was away goes on with the others."""
        self._encoder = PushEncoder(config.strategy, self.slices, config.worker, config.world, config.seed)
        self._sums: list[Tensor] = []
        self._lrs: list[float] = []
        self._options: list[dict[str, Any]] = []
        self._buffers: Tensor | None = None
        self._seen = self.versions
        self._resumes = False  # whether it goes on from a checkpoint: its steps were pushed to other shards

    @property
    def versions(self) -> list[int]:
        """The versions of the weights applied last, per shard."""
        return [link.seen for link in self.links]

    # --- joining -------------------------------------------------------------------------------------------------------------

    def _hello_all(self) -> Task:
        """Join with the weights that this worker has, which the first worker brings; the step to go on from."""
        steps, initializer = [], False
        for link in self.links:
            since, brings = self.now, initializer
            while not (welcome := (yield from self._greet(link, brings))).metadata["weights"]:
                # The worker whose weights the first shard took brings them to all, so that they are of one worker.
                brings = brings or link.peer == 0 or self.now - since > self.config.liveness_timeout_s
                if not brings:
                    yield Until(lambda: False, self.now + _PAUSE_S)
            steps.append(welcome.step)
            initializer = bool(welcome.metadata["initializer"]) if link.peer == 0 else initializer
        self.pushed = max(steps)
        for link, step in zip(self.links, steps, strict=True):
            if step < self.pushed:
                yield from self._greet_with_step(link)
        return self.pushed

    def _greet_with_step(self, link: ShardLink) -> Task:
        """Say hello until the shard counts from this worker's step; a late answer to an earlier hello does not show that."""
        while (yield from self._greet(link, False)).step < self.pushed:
            pass

    def _greet(self, link: ShardLink, brings: bool) -> Task:
        """Say hello until it is answered."""
        begun, asked = self.now, -math.inf
        self._greeting = link.peer
        while True:
            if self.now - begun > self.give_up_s:
                raise WorkerLost(f"{self.describe_peer(link.peer)} has not answered for {self.give_up_s:g} s.")
            if self.now >= asked + self.silence_s:  # the very time of the Until below, or the task would spin by a rounding error
                asked = self.now
                self._say_hello(link, brings)
            yield Until(lambda: bool(link.greetings), asked + self.silence_s)
            if not link.greetings:
                continue
            answer = link.greetings.popleft()
            if answer.kind == Kind.WELCOME:
                link.greetings.clear()
                self._greeting = None
                link.offset_s = float(answer.metadata["at"]) - (asked + self.now) / 2
                return answer
            if answer.metadata.get("reason") == "taken" and self.now - begun < self.config.liveness_timeout_s + self.silence_s:
                continue  # the worker that this one replaces has not been missed yet
            raise self._refusal(link, answer)

    def _say_hello(self, link: ShardLink, brings: bool) -> None:
        assert self._optimizer is not None
        config = self.config
        metadata: dict[str, Any] = {"pushed": self.pushed, "replaces": config.replaces}
        metadata["job_config"] = job_config(config.strategy, config.layout, config.seed, config.world)
        if self._resumes:
            metadata["resumes"] = True
        if link.peer == 0:
            metadata["holds"] = self._holds(link)
        tensors: tuple[Tensor, ...] = ()
        if brings:
            metadata |= {"optimizer": self._optimizer.describe(), "groups": [b.group for b in config.layout.buckets]}
            metadata |= {"total": config.total, "per_epoch": config.per_epoch}
            tensors = slices_of(self.slices, link.peer, self.rows)
            if self._optimizer.state:
                metadata["state"], rows = write_state(self._optimizer.state, self.slices, link.peer)
                tensors += tuple(rows)
        link.asked = self.now
        self._send(link.peer, Envelope(Kind.HELLO, config.worker, link.peer, metadata=metadata, tensors=tensors))

    def _holds(self, link: ShardLink) -> list[int]:
        """The mini-batches that this worker has and that are not known to be in the weights."""
        pushed = [] if link.request is None else link.request.metadata.get("batch_ids", [])
        return [*pushed, *self._taken, *self.batch_ids]

    # --- requests ------------------------------------------------------------------------------------------------------------

    def on_timer(self, name: str) -> None:
        """Ask silent shards again; tell those that have answered if another does not for long, lest they wait for this worker."""
        super().on_timer(name)
        if self.sync.averages_weights and self.now - self._sent > _LONG * self.config.liveness_timeout_s:
            for link in self.links:
                if link.request is not None and link.reply is not None:
                    self._send(link.peer, Envelope(Kind.BEAT, self.config.worker, metadata={"waits_elsewhere": True}))

    def _ask_again(self, link: ShardLink) -> None:
        self._say_hello(link, brings=False)

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, int)
        link = self.links[sender]
        link.heard = self.now
        if message.kind == Kind.WAIT:  # a call to a meeting may come at any time
            self._call = message.metadata.get("call", self._call)
            if self._waiting is not None:
                behind, waited = message.metadata.get("behind", []), self.now - self._waiting[1]
                text = self.late.judge(self.config.worker, self.step, waited, behind)
                self._effects += [Say(text)] * bool(text)
        elif self._greeting == sender and message.kind in (Kind.WELCOME, Kind.REFUSAL):
            link.greetings.append(message)
        elif link.request is None or link.reply is not None:
            return  # an answer that came twice
        elif message.kind == Kind.REPLY and message.number == link.request.number:
            link.reply = message
        elif message.kind == Kind.WELCOME:
            if message.metadata["weights"]:
                self._send(link.peer, link.request)
            else:
                self._say_hello(link, brings=True)
        elif message.kind == Kind.REFUSAL and message.number in (0, link.request.number):
            if message.metadata.get("reason") not in _HELLO_AGAIN:
                raise self._refusal(link, message)
            if self.now - link.asked > self.silence_s / 4:
                self._say_hello(link, brings=False)

    def next_batch(self) -> int | None:
        """The number of the next mini-batch that lies ready; None when there is none."""
        if not self.batch_ids:
            return None
        self._taken.append(self.batch_ids.popleft())
        return self._taken[-1]

    def _push(self, fetch: bool, want: int) -> None:
        """Push the sums up to this step; ``fetch``: the push requests weights too."""
        requests = []
        for link, messages in zip(self.links, self._encoder.encode(self.step, self._sums), strict=True):
            parts, tensors = as_tensors(messages)
            metadata = {"parts": parts, "lrs": self._lrs, "fetch": fetch, "seen": self._seen[link.peer]}
            if self._options:
                metadata["options"] = self._options
            size = sum(int(m.payload_bytes().sum()) for m in messages)
            if link.peer == 0:
                metadata |= {"batch_ids": self._taken, "want": want, "buffers": self._buffers is not None}
                if self._buffers is not None:
                    tensors.append(self._buffers)
                    size += self._buffers.numel() * self._buffers.element_size()
            self.account.bytes_sent += framed(size)
            requests.append(Envelope(Kind.PUSH, self.config.worker, link.peer, self.step, 0, metadata, tuple(tensors)))
        figures = self.account.describe(self.now)
        requests[0] = replace(requests[0], metadata={**requests[0].metadata, "figures": figures})
        self._taken, self._sums = [], []
        self._request(requests)
        self._sent = self.now

    def _fetch(self, want: int, weights: bool = True, final: bool = False) -> None:
        """Request weights, or mini-batches alone; ``final``: the weights when all workers have ended."""
        metadata = {"fetch": weights, "want": want, "final": final}
        asked = self.links if weights else self.links[:1]
        self.account.bytes_sent += FRAME_BYTES * len(asked)
        self._request([Envelope(Kind.FETCH, self.config.worker, link.peer, self.step, 0, metadata) for link in asked])
        self._sent = self.now

    def residuals(self) -> list[Tensor | None] | None:
        """The residuals of error feedback per bucket; None while steps wait to be pushed."""
        codec = self._encoder.codec
        waits = codec is not None and codec.uses_error_feedback and self._last_push < self.step
        return None if waits else list(self._encoder.errors)

    def begin_with(self, residuals: Sequence[Tensor | None]) -> None:
        """Begin with these residuals, per bucket, before the first push."""
        device = self.rows[0].device
        self._encoder.errors = [None if error is None else error.to(device) for error in residuals]

    @property
    def _last_push(self) -> int:
        """The step of the last push; one under way counts."""
        pushes = [link.request.step for link in self.links if link.request is not None and link.request.kind == Kind.PUSH]
        return max([self.pushed, *pushes])

    def _want(self) -> int:
        """Mini-batches to request now: up to the step at which the next answer is applied."""
        if self.config.total is None:
            return 0
        sync, talk = self.sync, self.step + 1
        if sync.averages_weights:
            steps = sync.batches_ahead(self._steps_last_time)
        else:
            while not (sync.server_action(talk).push or sync.server_action(talk).fetch):
                talk += 1
            steps = talk - self.step + (sync.overlaps or not sync.server_action(talk).fetch)
        return max(0, min(steps - len(self.batch_ids), MAX_BATCH_IDS))

    def _refusal(self, link: ShardLink, message: Envelope) -> HocketError:
        return HocketError(f"{self.describe_peer(link.peer)}: {message.metadata.get('sentence')}")
