"""``async + gossip``: workers average their weights with a partner whenever they meet, and nobody waits for a third (AD-PSGD).

The protocol cannot deadlock: workers with an even number *call*, those with an odd number *answer*, and only callers ever wait. A
caller sends its weights when it begins a step; they travel while it computes. Who answers takes the mean of both at once, whatever
it is computing itself, and sends back its own weights from before; the caller then takes the mean too, and after it the update of
its gradient. Neither changes its weights in between, so the mean over all workers is kept. An answerer only updates.

Whom a caller calls goes round: the answerers at distance 1, 3, 5, … from it, once per exchange; ``ring``: its two neighbours in
turn; ``random``: any.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hocket.cluster.message import framed
from hocket.topology.partners import answerer
from hocket.train.free.scheme import Heard, Payload, Scheme

if TYPE_CHECKING:
    from hocket.train.free.training import FreeTraining


@dataclass
class _Caller:
    """Where a worker stands with its call."""

    calls: int = 0
    out: bool = False
    """Its weights are on their way, or the answer is."""
    computed: bool = False
    """Its gradient is there, but not the answer."""
    since: float = 0.0


class Pairs(Scheme):
    """Callers and answerers."""

    def __init__(self, training: FreeTraining) -> None:
        super().__init__(training)
        self.workers = [_Caller() for _ in range(self.crowd.rows)]
        self.answers: dict[int, list[Tensor]] = {}
        self.done = 0
        self.heard = Heard(self.crowd.rows)
        self.size = framed(self.crowd.layout.bytes)
        self.kind = getattr(training.strategy.topology, "kind", "rotating")

    def start(self) -> None:
        for worker in range(self.crowd.rows):
            self._begin(worker, 0.0)

    def partner(self, worker: int, call: int) -> int:
        """Whom a caller reaches at its ``call``-th call."""
        return answerer(self.kind, worker, call, self.crowd.rows, self.training.plan.seed)

    def _begin(self, worker: int, now: float) -> None:
        begun = self.training.begin(worker, now)
        own = self.workers[worker]
        if begun and worker % 2 == 0 and self.crowd.rows > 1:
            other = self.partner(worker, own.calls)
            own.calls, own.out = own.calls + 1, True
            self.training.send("call", worker, other, other, self.size, [w[worker].clone() for w in self.crowd.weights], now)

    def again(self, worker: int, now: float) -> None:
        self.heard.read(worker)
        self._begin(worker, now)

    def computed(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        if own.out and worker not in self.answers:
            own.computed, own.since = True, now
            return
        self._update(worker, now)

    def _update(self, worker: int, now: float) -> None:
        own = self.workers[worker]
        answer = self.answers.pop(worker, None)
        if answer is not None:
            self.training.stood(worker, now - own.since if own.computed else 0.0, 0.0, 0.0)
            for rows, theirs in zip(self.crowd.weights, answer, strict=True):
                rows[worker].add_(theirs).div_(2)
            self.heard.contribution(worker)
        own.out = own.computed = False
        self.crowd.step_alone(worker, self.training.rates(worker))
        self.heard.applied(worker)
        self.done += 1
        self._begin(worker, now)

    def arrived(self, kind: str, worker: int, end: int, payload: Payload, now: float) -> None:
        if kind == "call":
            self.training.settle(end)
            own = [w[end].clone() for w in self.crowd.weights]
            for rows, theirs in zip(self.crowd.weights, payload, strict=True):
                rows[end].add_(theirs).div_(2)
            self.heard.contribution(end)
            self.training.send("answer", worker, end, worker, self.size, own, now, end)
            return
        self.answers[worker] = payload
        if self.workers[worker].computed:
            self._update(worker, now)

    def ages(self) -> dict[int, int]:
        return self.heard.ages()

    def counted(self) -> int:
        return self.done

    def truth(self) -> list[Tensor]:
        return [rows.mean(0, keepdim=True) for rows in self.crowd.weights]

    def state_dict(self) -> dict[str, Any]:
        return {
            "workers": [asdict(w) for w in self.workers],
            "answers": {w: [t.clone() for t in a] for w, a in self.answers.items()},
            "done": self.done,
            "heard": self.heard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.workers = [_Caller(**w) for w in state["workers"]]
        self.answers, self.done = dict(state["answers"]), state["done"]
        self.heard.load_state_dict(state["heard"])
