"""The coordinator as a program without I/O: it holds the L-BFGS conversation and has no parameters.

After every iteration the shards save their vectors and then the coordinator its state. When a shard was restarted, all shards load
that iteration again and the conversation goes on from it; a restarted coordinator does the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hocket.errors import WorkerLost
from hocket.messages.frame import Envelope, Kind
from hocket.programs.base import Effects, Finished, Snapshot, Task, Until
from hocket.sandblaster.dispatch import JOIN_S, CoordinatorConfig, Dispatch
from hocket.sandblaster.lbfgs import Ask, Evaluate, State, lbfgs
from hocket.sandblaster.portions import Dispenser
from hocket.sandblaster.protocol import Outbox
from hocket.sandblaster.vectors import Order, combine

_NUMBERS = 20
"""Bits for the sessions of one coordinator, and for the evaluations of one session."""


class _ShardRestarted(Exception):
    """A shard has lost its vectors."""


class SandblasterCoordinator(Dispatch):
    """Minimises from ``saved``, a :meth:`state_dict`, or from the beginning; ``metrics`` has one row per iteration."""

    def __init__(self, config: CoordinatorConfig, saved: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.state, self.metrics = State(), list[dict[str, Any]]()
        self._saved = saved
        self._session = config.incarnation << _NUMBERS
        self._begun, self._before = 0.0, dict[str, Any]()

    def start(self, now: float) -> Effects:
        """Wait for the shards, then minimise."""
        self.now = self._begun = now
        self._watch()
        return self._run(self._train(), now)

    def _spent(self) -> dict[str, Any]:
        """So far."""
        moved = {"bytes_coordinator": self._bytes, "bytes_shards": sum(self._moved.values())}
        return {"seconds": self.now - self._begun, **moved, **asdict(self._counts)}

    def state_dict(self) -> dict[str, Any]:
        """The state and the metrics after the last iteration."""
        return {"state": asdict(self.state), "metrics": self.metrics}

    # --- the conversation ----------------------------------------------------------------------------------------------------

    def _train(self) -> Task:
        while True:
            try:
                yield from self._minimise()
                break
            except _ShardRestarted:
                self._dispenser = None
        for peer in (*self._workers.values(), *self._shards.values()):
            self._send(peer.identity, Envelope(Kind.GOODBYE))
        self._effects.append(Finished())

    def _minimise(self) -> Task:
        """Begin a session: from what was saved last, or from the beginning."""
        yield from self._join()
        if self._saved is not None:
            saved = copy.deepcopy(self._saved)
            self.state, self.metrics = State(**saved["state"]), saved["metrics"]
        else:
            self.state, self.metrics = State(), []
        conversation, answer = lbfgs(self.config.settings, self.state), None
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration:
                break
            if isinstance(request, Ask):
                answer = yield from self._ask(request.orders)
            elif isinstance(request, Evaluate):
                answer = yield from self._evaluate(request)
            else:
                yield from self._mark()
        self._save()  # why it ended may be known only now

    def _join(self) -> Task:
        wanted = self.config.shards
        yield Until(lambda: len(self._shards) == wanted, self.now + JOIN_S)
        if len(self._shards) < wanted:
            raise WorkerLost(f"Only {len(self._shards)} of {wanted} shards came within {JOIN_S:g} s: look at their output.")
        self._session, self._restarted = self._session + 1, False
        self._evaluation = self._session << _NUMBERS
        for shard in self._shards.values():
            shard.outbox = Outbox()
        yield from self._ask(() if self._saved is None else (("load", self._saved["state"]["iteration"]),))

    def _mark(self) -> Task:
        """An iteration has ended."""
        state, spent = self.state, self._spent()
        row = {"iteration": state.iteration, "loss": state.loss, "accuracy": None}
        row["evaluations"] = state.evaluations - sum(row["evaluations"] for row in self.metrics)
        self.metrics.append({**row, **{name: spent[name] - self._before.get(name, 0) for name in spent}})
        self._before = spent
        yield from self._ask((("save", self.state.iteration),))
        self._save()

    def _save(self) -> None:
        self._saved = copy.deepcopy(self.state_dict())
        self._effects.append(Snapshot())

    def _ask(self, orders: tuple[Order, ...]) -> Task:
        """All shards carry out ``orders``; one scalar each."""
        self._answers = {}
        self._order_shards({"ask": orders})
        self._asked = self._shards[0].outbox.sent
        yield from self._wait(lambda: len(self._answers) == len(self._shards))
        terms = zip(*(self._answers[shard] for shard in sorted(self._answers)), strict=True)
        return [combine(order, answers) for order, answers in zip(orders, terms, strict=True)]

    def _evaluate(self, request: Evaluate) -> Task:
        """See :class:`Evaluate`."""
        self._evaluation, self._dispenser = self._evaluation + 1, None
        for worker in self._workers.values():
            worker.outbox, worker.counted = Outbox(), []
        yield from self._ask((*request.first, ("begin", self._evaluation, request.at)))
        config = self.config
        dispenser = self._dispenser = Dispenser(config.portions, config.shards, config.backups, config.exact, self._counts)
        self._wake()
        yield from self._wait(lambda: dispenser.complete)
        _, *scalars = yield from self._ask((("total", request.into), *request.then))
        return [dispenser.loss, *scalars]

    def _wait(self, condition: Callable[[], bool]) -> Task:
        yield Until(lambda: self._restarted or condition())
        if self._restarted:
            raise _ShardRestarted
