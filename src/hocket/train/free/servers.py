"""Workers that push to servers and fetch from them: ``async``, ``ssp``, ``downpour`` and ``bulk`` on ``server``.

The shards and the coding of pushes are those of real processes (:mod:`hocket.server`); here their messages are events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hocket.cluster.message import FRAME_BYTES, Message, framed
from hocket.server.optimizer_spec import OptimizerSpec
from hocket.server.push_encoder import PushEncoder, read
from hocket.server.shard import Shard
from hocket.server.slices import Slices
from hocket.server.wire import FETCH
from hocket.topology import Server
from hocket.train.free.links import size_of
from hocket.train.free.scheme import Payload, Scheme

if TYPE_CHECKING:
    from hocket.train.free.training import FreeTraining


@dataclass
class _Progress:
    """Where a worker stands."""

    step: int = 0
    pushed: int = 0
    left: int = 0
    """Replies that are still to come."""
    asked: float = 0.0
    blocked: float = 0.0
    held: float = 0.0
    waits: bool = False
    """Whether it stands still until they have come."""
    ready: bool = False
    """Whether fetched weights lie ready to be taken over."""
    fetched: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    """Per shard: the version of the weights that were fetched, and of those that it computes with."""


class ServerScheme(Scheme):
    """Shards at ends ``N …`` of the links."""

    def __init__(self, training: FreeTraining) -> None:
        super().__init__(training)
        crowd, strategy = self.crowd, training.strategy
        server = strategy.topology
        assert isinstance(server, Server)
        self.strategy, self.sync, self.seed = strategy, strategy.sync, training.plan.seed
        self.overlap = bool(getattr(self.sync, "overlap", False))
        self.slices = Slices.of(strategy, crowd.layout)
        self.fetch = FETCH[server.fetch]
        recipe = OptimizerSpec.of(crowd.optimizer, server.optimizer)
        groups = [b.group for b in crowd.layout.buckets]
        first = [w[0] for w in crowd.weights]
        self.shards = [
            Shard(
                [self.slices.cut(b, row)[s].clone() for b, row in enumerate(first)],
                groups,
                recipe,
                self.sync,
                range(crowd.rows),
                server.lr,
            )
            for s in range(server.shards)
        ]
        self.outboxes = [PushEncoder(strategy, self.slices, w, crowd.rows, self.seed) for w in range(crowd.rows)]
        none = [0] * len(self.shards)
        self.workers = [_Progress(fetched=list(none), seen=list(none)) for _ in range(crowd.rows)]
        self.held: list[list[tuple[int, int, float]]] = [[] for _ in self.shards]
        self.arrived_steps = [0] * len(self.shards)
        self.sums = [torch.zeros_like(g) for g in crowd.grads]
        self.incoming = [torch.zeros_like(g) for g in crowd.grads]
        self._ages: Counter[int] = Counter()

    def start(self) -> None:
        for worker in range(self.crowd.rows):
            if all(shard.ready(worker, 0) for shard in self.shards):
                self.training.begin(worker, 0.0)
            else:
                self._await(worker, 0.0)
                self._ask(worker, 0.0)

    # --- workers -------------------------------------------------------------------------------------------------------------

    def computed(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        own.step += 1
        if own.left:  # weights asked for earlier are still on their way: they land first
            own.waits, own.blocked = True, now
            return
        self._go_on(worker, now)

    def _go_on(self, worker: int, now: float) -> None:
        own, crowd, action = self.workers[worker], self.crowd, self.sync.server_action(self.workers[worker].step)
        seen = list(own.seen)  # of the weights that this gradient was computed at, whatever lands now
        if own.ready:
            self._take_over(worker)
        together = self.shards[0].together
        weight = self.training.minibatch(worker).weight if together else 1.0
        for total, rows in zip(self.sums, crowd.grads, strict=True):
            total[worker].add_(rows[worker], alpha=weight)
        rates = self.training.rates(worker)
        if action.local:
            crowd.step_alone(worker, rates)
        if action.fetch:
            self._await(worker, now)
        if action.push:
            self._push(worker, now, rates, seen, action.fetch)
        elif action.fetch:
            self._ask(worker, now)
        if action.fetch and not self.overlap:
            return
        own.waits = False
        self.training.begin(worker, now)

    def _push(self, worker: int, now: float, rates: list[float], seen: list[int], fetch: bool) -> None:
        """``fetch``: the push asks for weights too."""
        own = self.workers[worker]
        flat = [total[worker].clone() for total in self.sums]
        for s, messages in enumerate(self.outboxes[worker].encode(own.step, flat)):
            size = size_of(messages)
            coded = [(list(m.parts), m.lengths) for m in messages]
            payload = (own.step, own.step - own.pushed, coded, rates, seen[s], fetch)
            self.training.send("push", worker, s, self.crowd.rows + s, size, payload, now)
        for total in self.sums:
            total[worker].zero_()
        own.pushed = own.step

    def _await(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        own.left, own.asked, own.blocked, own.held, own.waits = len(self.shards), now, now, 0.0, True

    def _ask(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        for s in range(len(self.shards)):
            self.training.send("ask", worker, s, self.crowd.rows + s, FRAME_BYTES, own.step, now)

    def _take_over(self, worker: int) -> None:
        for rows, fresh in zip(self.crowd.weights, self.incoming, strict=True):
            rows[worker] = fresh[worker]
        own = self.workers[worker]
        own.ready, own.seen = False, list(own.fetched)

    def over(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        if own.pushed < own.step:
            self._push(worker, now, self.training.rates(worker), own.seen, False)

    # --- arrivals ------------------------------------------------------------------------------------------------------------

    def arrived(self, kind: str, worker: int, end: int, payload: Payload, now: float) -> None:
        if kind == "push":
            self._pushed(worker, end, payload, now)
        elif kind == "ask":
            self.held[end].append((worker, payload, now))
            self._release(end, now, self.held[end])
        else:
            self._replied(worker, end, payload, now)

    def _pushed(self, worker: int, s: int, payload: Payload, now: float) -> None:
        step, steps, coded, rates, seen, fetch = payload
        widths = self.slices.widths(s)
        gradients = [
            read(self.strategy, Message(tuple(parts), lengths), widths[b], b, step, worker, self.crowd.rows, self.seed)
            for b, (parts, lengths) in enumerate(coded)
        ]
        before = self.shards[s].ages.copy() if s == 0 else Counter()
        self.shards[s].push(worker, step, gradients, rates, seen)
        if s == 0:
            self._ages += self.shards[0].ages - before
        self.arrived_steps[s] += steps
        if fetch:
            self.held[s].append((worker, step, now))
        self._release(s, now, self.held[s])

    def _release(self, s: int, now: float, waiting: list[tuple[int, int, float]]) -> None:
        """Answer those who may go on."""
        shard = self.shards[s]
        able = [(w, step, since) for w, step, since in waiting if shard.ready(w, step)]
        if not able:
            return
        self.held[s] = [entry for entry in waiting if entry not in able]
        for worker, _, since in able:
            weights = [w.clone() if self.fetch is None else w.to(self.fetch) for w in shard.give(worker)]
            size = framed(sum(w.numel() * w.element_size() for w in weights))
            self.training.send("reply", worker, s, worker, size, (weights, now - since, shard.version), now, self.crowd.rows + s)

    def _replied(self, worker: int, s: int, payload: Payload, now: float) -> None:
        weights, held, version = payload
        own = self.workers[worker]
        own.fetched[s] = version
        for b, part in enumerate(weights):
            self.slices.put(b, s, part.to(self.incoming[b].dtype), self.incoming[b][worker])
        own.held = max(own.held, held)
        own.left -= 1
        if own.left:
            return
        own.ready = True
        exposed = now - own.blocked if own.waits else 0.0
        self.training.stood(worker, exposed, min(own.held, exposed), max(now - own.asked - own.held - exposed, 0.0))
        if not own.waits:
            return
        own.waits = False
        if self.overlap and own.step:
            self._go_on(worker, now)
        else:
            self._take_over(worker)
            self.training.begin(worker, now)

    # --- figures and state ---------------------------------------------------------------------------------------------------

    def counted(self) -> int:
        return min(self.arrived_steps)

    def truth(self) -> list[Tensor]:
        rows = [torch.empty_like(g[:1]) for g in self.crowd.grads]
        for s, shard in enumerate(self.shards):
            for b, part in enumerate(shard.weights):
                self.slices.put(b, s, part, rows[b][0])
        return rows

    def ages(self) -> dict[int, int] | None:
        found, self._ages = dict(sorted(self._ages.items())), Counter()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "shards": [s.state_dict() for s in self.shards],
            "outboxes": [o.state_dict() for o in self.outboxes],
            "workers": [asdict(w) for w in self.workers],
            "held": [list(h) for h in self.held],
            "arrived": list(self.arrived_steps),
            "sums": [t.clone() for t in self.sums],
            "incoming": [t.clone() for t in self.incoming],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for shard, saved in zip(self.shards, state["shards"], strict=True):
            shard.load_state_dict(saved)
        for outbox, saved in zip(self.outboxes, state["outboxes"], strict=True):
            outbox.load_state_dict(saved)
        self.workers = [_Progress(**w) for w in state["workers"]]
        self.held = [[(int(w), int(step), float(since)) for w, step, since in h] for h in state["held"]]
        self.arrived_steps = list(state["arrived"])
        for own, saved in zip((*self.sums, *self.incoming), (*state["sums"], *state["incoming"]), strict=True):
            own.copy_(saved)
