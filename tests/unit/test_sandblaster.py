"""Laws of Sandblaster: it is torch's L-BFGS on the whole batch, and a portion counts once, whoever dies or answers twice."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import asdict
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lbfgs as torchs

import hocket
from hocket import HocketError, Sandblaster, WorkerLost
from hocket.cluster.spec import ClusterSpec
from hocket.programs.base import Compute, Connect, Effects, Send
from hocket.sandblaster import coordinator as coordinators
from hocket.sandblaster.lbfgs import Ask, Evaluate, Mark, Settings, State, lbfgs
from hocket.sandblaster.portions import Dispenser
from hocket.sandblaster.protocol import COORDINATOR
from hocket.sandblaster.roles import SandblasterWorker
from hocket.sandblaster.vectors import Order, Tree, VectorShard, combine, cuts, unrounded
from hocket.sandblaster.wolfe import Point, search
from hocket.transport.frame import Envelope, Kind

TORCH = {"max_iter": 25, "max_eval": 60, "tolerance_grad": 1e-9, "tolerance_change": 1e-12}


def task(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A small convex or non-convex problem."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(203, 6, generator=generator, dtype=dtype)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        if kind == "convex":
            weights = torch.tensor([1.0, 3.0, 10.0, 0.3, 1.0, 0.1], dtype=dtype)
            y = (x.sum(1) + 0.5 * torch.randn(203, generator=generator, dtype=dtype) > 0).long()
            return nn.Linear(6, 2).to(dtype), F.cross_entropy, x * weights, y
        y = torch.sin(2 * x[:, :1]) * x[:, 1:2]
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).to(dtype), F.mse_loss, x, y


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_torch(model: nn.Module, loss: Any, x: Tensor, y: Tensor, l2: float, **options: Any) -> tuple[list[float], Tensor]:
    """Every loss that torch's optimiser evaluated, and the weights at its end."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **options)
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y) + l2 / 2 * sum(p.square().sum() for p in model.parameters())
        value.backward()
        losses.append(value.item())
        return value.detach()

    optimizer.step(closure)
    return losses, flat(model)


class Recorder:
    """Writes down the coordinator's conversation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses: list[float] = []
        self.orders: list[Order] = []
        self.states: list[State] = []
        monkeypatch.setattr(coordinators, "lbfgs", self.recorded)

    def recorded(self, settings: Settings, state: State) -> Any:
        conversation, answer = lbfgs(settings, state), None
        while True:
            try:
                request = conversation.send(answer)
            except StopIteration:
                return
            answer = yield request
            match request:
                case Ask(orders):
                    self.orders += orders
                case Evaluate():
                    self.orders += [*request.first, *request.then]
                    self.losses.append(answer[0])
                case Mark(state):
                    self.states.append(copy.deepcopy(state))


@pytest.mark.parametrize("kind", ["convex", "non-convex"])
@pytest.mark.parametrize("lr", [1.0, 30.0, 0.02])
@pytest.mark.parametrize("history", [3, 10])
def test_evaluation_by_evaluation_it_is_torchs_lbfgs(kind: str, lr: float, history: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, x, y = task(kind)
    expected, weights = by_torch(model, loss, x, y, 0.0, lr=lr, history_size=history, **TORCH)
    job = Sandblaster(model, loss, (x, y), workers=3, shards=2, portions_per_worker=4, history=history, lr=lr, **TORCH)
    recorder = Recorder(monkeypatch)
    run = job.run()
    assert recorder.states[-1].iteration >= 10
    assert len(recorder.losses) == len(expected)
    assert recorder.losses == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(flat(run.model), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["convex", "non-convex"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 2e-3)])
def test_regularised_and_in_either_precision(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    options = {**TORCH, "max_iter": 12, "tolerance_change": 0.0}
    model, loss, x, y = task(kind, dtype)
    expected, weights = by_torch(model, loss, x, y, 0.03, history_size=7, **options)
    run = Sandblaster(model, loss, (x, y), workers=4, shards=3, history=7, l2=0.03, **options).run()
    assert run.evaluations == len(expected)
    assert len(run.metrics) == 13
    assert run.loss == pytest.approx(min(expected), rel=tolerance / 100)
    torch.testing.assert_close(flat(run.model), weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"max_iter": 3}, "max_iter"),
        ({"max_eval": 5}, "max_eval"),
        ({"max_eval": 1}, "max_eval"),
        ({"tolerance_grad": 3e-2}, "gradient"),
        ({"tolerance_grad": 1e9}, "gradient"),
        ({"tolerance_change": 3e-3}, "change"),
    ],
)
def test_it_ends_where_torch_ends(options: dict[str, Any], reason: str) -> None:
    model, loss, x, y = task("non-convex")
    expected, weights = by_torch(model, loss, x, y, 0.0, history_size=10, **{**TORCH, **options})
    run = Sandblaster(model, loss, (x, y), **{**TORCH, **options}).run()
    assert run.evaluations == len(expected)
    assert reason in run.ended
    torch.testing.assert_close(flat(run.model), weights, rtol=1e-6, atol=1e-9)


def test_the_line_search_is_torchs() -> None:
    dice = random.Random(0)
    lengths = set()
    for _ in range(600):
        waves = [(dice.gauss(0, 1), 4 * dice.random() ** 2, 6 * dice.random()) for _ in range(3)]
        tilt, bowl = dice.gauss(0, 1), dice.choice([0.0, 0.1, 3.0])
        sign = -1.0 if tilt + sum(a * k * math.cos(c) for a, k, c in waves) > 0 else 1.0

        def f(t: float, waves: Any = waves, tilt: float = tilt, bowl: float = bowl, sign: float = sign) -> tuple[float, float]:
            value = tilt * t + sum(a * math.sin(k * t + c) for a, k, c in waves)
            slope = tilt + sum(a * k * math.cos(k * t + c) for a, k, c in waves)
            return sign * value + bowl * t * t, sign * slope + 2 * bowl * t

        # Without a bottom steps grow for ever, and waves far out magnify the last bit.
        step, more = 10 ** dice.uniform(-2, 1.5), dice.randrange(16 if bowl else 4)
        ours = by_search(f, step, more)
        assert ours == pytest.approx(by_torchs_search(f, step, more), rel=1e-9, abs=1e-12)
        lengths.add(len(ours))
    assert len(lengths) >= 7

    def stairs(t: float) -> tuple[float, float]:
        return (-t, -1.0) if t < 1 else (-5.0, -1.0) if t < 1.5 else (-4.0, -1.0)

    assert by_search(stairs, 1.0, 6) == pytest.approx(by_torchs_search(stairs, 1.0, 6))
    assert by_search(lambda t: (-t, -1.0), 1.0, 3) == by_torchs_search(lambda t: (-t, -1.0), 1.0, 3) == [1, 10, 100, 1000, 1000]


def by_search(f: Any, step: float, more: int) -> list[float]:
    """All steps tried, and the one taken."""
    steps: list[float] = []

    def trial(t: float, used: set[str]) -> Any:
        steps.append(t)
        return Point(t, *f(t), next(n for n in "abcd" if n not in used))
        yield

    with pytest.raises(StopIteration) as end:
        next(search(trial, Point(0.0, *f(0.0), "a"), step, 1.0, 1e-9, more))
    return [*steps, end.value.value.step]


def by_torchs_search(f: Any, step: float, more: int) -> list[float]:
    steps: list[float] = []

    def objective(x: Any, t: Any, d: Tensor) -> tuple[float, Tensor]:
        steps.append(float(t))
        value, slope = f(float(t))
        return value, torch.tensor([slope], dtype=torch.float64)

    loss, slope = f(0.0)
    d, g = torch.ones(1, dtype=torch.float64), torch.tensor([slope], dtype=torch.float64)
    found = torchs._strong_wolfe(objective, None, step, d, loss, g, g.dot(d), tolerance_change=1e-9, max_ls=more)
    return [*steps, float(found[2])]


def test_a_loss_that_is_not_finite_is_walked_back_from() -> None:
    x = torch.linspace(0.5, 2.0, 40, dtype=torch.float64)[:, None]
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.05)
    run = Sandblaster(
        model, lambda out, y: (out - y * out.log()).mean(), (x, 3 * x), shards=1, lr=1e3, max_iter=15, max_eval=100
    ).run()
    assert model.weight.item() == 0.05
    assert run.model.weight.item() == pytest.approx(3.0, rel=1e-4)


class Chaos:
    """Workers and shards that answer, die and repeat themselves in an order that hypothesis draws."""

    def __init__(self, data: st.DataObject, portions: int, workers: int, shards: int, exact: bool) -> None:
        self.data, self.exact = data, exact
        self.dispenser = Dispenser(portions, shards, backups=data.draw(st.booleans()), exact=exact)
        self.shards = [VectorShard(torch.zeros(1, dtype=torch.float64), exact) for _ in range(shards)]
        self.order([("begin", 0, "x")])
        self.alive = list(range(workers))
        self.computing: dict[int, int] = {}
        self.sums: dict[int, float] = {}
        self.transit: list[tuple[int, int, int, float]] = []
        self.acks: list[tuple[int, int, int]] = []
        self.counted: list[list[int]] = []

    def order(self, orders: list[Order]) -> None:
        for shard in self.shards:
            shard.obey(orders)

    def act(self) -> None:
        options = [("give", w) for w in self.alive if w not in self.computing]
        options += [("report", w) for w in self.computing]
        options += [("deliver", m) for m in self.transit] + [("ack", a) for a in self.acks]
        if len(self.alive) > 1:
            options += [("die", w) for w in self.alive]
        verb, what = self.data.draw(st.sampled_from(options))
        getattr(self, verb)(what)

    def give(self, worker: int) -> None:
        portion = self.dispenser.next(worker)
        if portion is not None:
            self.computing[worker] = portion

    def report(self, worker: int) -> None:
        portion = self.computing.pop(worker)
        answer = self.dispenser.report(worker, portion, 2.0**portion)
        assert answer is not None
        assert self.dispenser.report(worker, portion, 2.0**portion) is None or answer.portion == portion
        if answer.keep:
            self.sums[worker] = self.sums.get(worker, 0.0) + 2.0**portion
        self.send(worker, answer.bundle)
        if answer.portion is not None:
            self.computing[worker] = answer.portion

    def send(self, worker: int, number: int | None) -> None:
        if number is not None:
            total = self.sums.pop(worker)
            self.transit += [(worker, number, shard, total) for shard in range(len(self.shards))]

    def deliver(self, message: tuple[int, int, int, float]) -> None:
        worker, number, shard, total = message
        self.transit.remove(message)
        assert self.shards[shard].stage(0, worker, number, torch.tensor([total], dtype=torch.float64))
        self.acks.append((worker, number, shard))

    def ack(self, message: tuple[int, int, int]) -> None:
        worker, number, shard = message
        if self.data.draw(st.booleans()):  # else it will come once more
            self.acks.remove(message)
        orders = self.dispenser.staged(worker, number, shard)
        self.order(orders)
        if orders and worker in self.alive:
            self.send(worker, self.dispenser.bundle(worker))

    def die(self, worker: int) -> None:
        """Its computing and its sum are lost, and some of its messages on their way."""
        self.alive.remove(worker)
        self.computing.pop(worker, None)
        self.sums.pop(worker, None)
        self.transit = [m for m in self.transit if m[0] != worker or self.data.draw(st.booleans())]
        self.order(self.dispenser.lost(worker))


@given(st.data(), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_every_portion_counts_once(data: st.DataObject, portions: int, workers: int, shards: int, exact: bool) -> None:
    chaos = Chaos(data, portions, workers, shards, exact)
    for _ in range(60):
        if chaos.dispenser.complete:
            break
        chaos.act()
    while not chaos.dispenser.complete:  # the rest without surprises
        before = (len(chaos.acks), len(chaos.transit), len(chaos.computing))
        for worker in chaos.alive:
            if worker not in chaos.computing:
                chaos.give(worker)
        for worker in list(chaos.computing):
            chaos.report(worker)
        for message in list(chaos.transit):
            chaos.deliver(message)
        for a in list(chaos.acks):
            chaos.acks.remove(a)
            orders = chaos.dispenser.staged(*a)
            chaos.order(orders)
            if orders and a[0] in chaos.alive:
                chaos.send(a[0], chaos.dispenser.bundle(a[0]))
        assert before != (0, 0, 0) or chaos.dispenser.complete or chaos.acks or chaos.transit or chaos.computing, "stuck"
    chaos.order([("total", "g")])
    assert [shard.vectors["g"].item() for shard in chaos.shards] == [2.0**portions - 1] * shards
    assert chaos.dispenser.loss == 2.0**portions - 1


def test_a_worker_that_dies_between_two_shards_counts_on_neither() -> None:
    dispenser = Dispenser(portions=1, shards=2)
    assert dispenser.next(0) == 0
    answer = dispenser.report(0, 0, 1.0)
    assert answer is not None
    assert answer.bundle == 0
    assert dispenser.staged(0, 0, shard=1) == []
    assert dispenser.lost(0) == [("discard", 0, 0)]
    assert dispenser.staged(0, 0, shard=0) == []
    assert not dispenser.complete
    assert dispenser.next(1) == 0


def test_the_portion_that_is_out_longest_is_copied_first_and_once() -> None:
    dispenser = Dispenser(portions=3, shards=1)
    assert [dispenser.next(w) for w in range(3)] == [0, 1, 2]
    answers = [dispenser.report(worker, portion, 0.0) for worker, portion in ((1, 1), (2, 2), (1, 0), (0, 0), (0, 0))]
    assert [answer and answer.portion for answer in answers] == [0, None, None, None, None]
    assert [answer and answer.keep for answer in answers] == [True, True, True, False, None]
    assert (dispenser.counts.issued, dispenser.counts.duplicated, dispenser.counts.wasted) == (4, 1, 1)


def order(evaluation: int, number: int, ticket: int = 3, **metadata: Any) -> Envelope:
    return Envelope(Kind.ORDER, ticket, step=evaluation, number=number, metadata=metadata)


def sent(effects: Effects, kind: Kind) -> list[tuple[Any, Envelope]]:
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, Send) and effect.message.kind == kind]


def with_point(worker: SandblasterWorker, effects: Effects) -> Effects:
    """Answer what a worker with two shards of one value each has fetched."""
    assert [shard for shard, _ in sent(effects, Kind.FETCH)] == [0, 1]
    for shard in (1, 0):
        reply = Envelope(Kind.REPLY, shard, step=worker.evaluation, tensors=(torch.tensor([float(shard)]),))
        effects = worker.message(shard, reply, 0.0)
    return effects


def test_a_worker_pushes_what_it_was_told_to_keep_and_obeys_each_order_once() -> None:
    worker = SandblasterWorker(2, 2)
    effects = with_point(worker, worker.message(COORDINATOR, order(5, 1, shards=["a", "b"], portion=0), 0.0))
    number, pushed = 1, []
    for portion, keep in ((0, True), (1, False), (2, True), (3, True)):
        (task,) = (effect for effect in effects if isinstance(effect, Compute))
        assert (task.portion, task.point.tolist()) == (portion, [0.0, 1.0])
        ((to, report),) = sent(worker.computed(portion, 0.5, torch.full((2,), 2.0**portion), 0.0), Kind.ANSWER)
        assert (to, report.place, report.step, report.number, report.metadata) == (COORDINATOR, portion, 5, number, {"loss": 0.5})
        number += 1
        more = {"bundle": 7} if portion == 2 else {}
        told = order(5, number, judged=portion, keep=keep, portion=portion + 1, **more)
        assert worker.message(COORDINATOR, order(5, number + 1, judged=portion, keep=True), 0.0) == []  # it came too early
        effects = worker.message(COORDINATOR, told, 0.0)
        pushed += sent(effects, Kind.PUSH)
        assert worker.message(COORDINATOR, told, 0.0) == []  # it came twice, while the worker computes
    assert [(shard, m.sender, m.step, m.number, m.tensors[0].tolist()) for shard, m in pushed] == [
        (0, 3, 5, 7, [5.0]),
        (1, 3, 5, 7, [5.0]),
    ]
    worker.computed(4, 0.5, torch.zeros(2), 0.0)
    again = sent(worker.message(COORDINATOR, order(5, number + 1, judged=4, keep=True, bundle=8, again=[7]), 0.0), Kind.PUSH)
    assert [(m.number, m.tensors[0].tolist()) for _, m in again] == [(7, [5.0])] * 2 + [(8, [8.0])] * 2


def test_a_worker_does_not_wait_for_a_shard_that_was_replaced() -> None:
    worker = SandblasterWorker(2, 2)
    worker.message(COORDINATOR, order(5, 1, shards=["a", "b"], portion=0), 0.0)  # it fetches, and shard 1 is dead
    effects = worker.message(COORDINATOR, order(6, 1, shards=["a", "c"], portion=2), 1.0)
    assert [effect for effect in effects if isinstance(effect, Connect)] == [Connect(1, "c")]
    assert [message.step for _, message in sent(effects, Kind.FETCH)] == [6, 6]
    assert worker.message(COORDINATOR, order(5, 2, portion=1), 1.0) == []
    assert [effect.portion for effect in with_point(worker, effects) if isinstance(effect, Compute)] == [2]


def test_a_worker_that_comes_too_late_says_that_it_is_free() -> None:
    worker = SandblasterWorker(2, 2)
    worker.message(COORDINATOR, order(5, 1, shards=["a", "b"], portion=0), 0.0)
    effects = worker.message(0, Envelope(Kind.REPLY, 0, step=5), 0.0)
    assert [message.metadata for _, message in sent(effects, Kind.HELLO)] == [{"free": True}]


def test_a_slow_worker_process_answers_when_it_has_slept_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.sandblaster.processes import throttled

    slept: list[float] = []
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("hocket.train.throttle.time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=slept.append))
    model, loss, x, y = task("convex")
    objective = Sandblaster(model, loss, (x, y)).objective()
    found = throttled(objective, 4.0)(objective.point, 3)
    assert slept == [6.0]
    torch.testing.assert_close(found, objective.portion(objective.point, 3))


CODES = {  # of the coordinator and of two shards: what becomes of it
    (None, None, None): "goes on",
    (0, 0, -9): "is over",
    (1, None, None): "is over",  # with a sentence of its own
    (-9, None, None): "coordinator",
    (None, None, -9): "shard 1",  # the coordinator has all shards load the last iteration
    (1, -9, -9): "shard 0, shard 1, coordinator",  # it could not do without them
    (None, 1, None): "Shard 0 ended with code 1: again",
    (None, -9, 1): "Shard 1 ended with code 1: again",
}


@pytest.mark.parametrize("codes", CODES)
def test_who_is_started_again(codes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.sandblaster.launch import SandblasterProcesses
    from hocket.supervisor import Role

    first = {"coordinator": codes[:1], "shard": codes[1:], "worker": (None,)}

    def role(name: str) -> Role:
        def start(number: int, incarnation: int) -> Any:
            if incarnation:
                started.append("coordinator" if name == "coordinator" else f"{name} {number}")
            code = None if incarnation else first[name][number]
            return SimpleNamespace(poll=lambda: code, kill=lambda: None, terminate=lambda: None, wait=lambda timeout=None: None)

        return Role(name, len(first[name]), start)

    monkeypatch.setattr("hocket.sandblaster.launch.SETTLE_S", 0.0)
    for restarts in (1, 0):
        started: list[str] = []
        processes = SandblasterProcesses([role(name) for name in first], "again")
        for name in first:
            processes.start(name)
        try:
            became = "is over" if processes.check(restarts) else ", ".join(started) or "goes on"
        except WorkerLost as lost:
            became = str(lost).rstrip(".")
        if restarts:
            assert became == CODES[codes]
        else:
            assert started == []


@pytest.mark.parametrize("slowdown", [(), (0.5, 1), (1, math.inf), (1, math.nan)])
def test_real_workers_are_only_made_slower(slowdown: tuple[float, ...]) -> None:
    model, loss, x, y = task("convex")
    with pytest.raises(HocketError, match="real workers can only be made slower"):
        Sandblaster(model, loss, (x, y)).launch(slowdown=slowdown)


@pytest.mark.parametrize("exact", [False, True])
def test_the_same_seed_gives_the_same_run(exact: bool) -> None:
    model, loss, x, y = task("non-convex")
    spec = ClusterSpec(step_s=0.1, jitter=0.3, stragglers=0.1, straggle=5, bandwidth=1e6, latency_s=1e-3)
    runs = [Sandblaster(model, loss, (x, y), cluster=spec, seed=s, max_iter=5, exact=exact).run() for s in (3, 3, 4)]
    assert runs[0].metrics == runs[1].metrics
    assert torch.equal(flat(runs[0].model), flat(runs[1].model))
    assert runs[0].seconds != runs[2].seconds


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 5e-3)])
def test_neither_workers_nor_shards_nor_speeds_change_the_result(dtype: torch.dtype, tolerance: float) -> None:
    model, loss, x, y = task("non-convex", dtype)
    slow = ClusterSpec(step_s=0.1, slowdown=(1, 7), jitter=0.5, bandwidth=1e5, latency_s=1e-3)
    shapes = [(1, 1, 24, "1gbit"), (4, 3, 6, "1gbit"), (8, 2, 3, slow), (3, 5, 8, slow)]
    for exact in (False, True):
        runs = [
            Sandblaster(
                model, loss, (x, y), workers=w, shards=s, portions_per_worker=p, cluster=c, max_iter=10, max_eval=30, exact=exact
            ).run()
            for w, s, p, c in shapes
        ]
        for run in runs[1:]:
            if exact:
                assert torch.equal(flat(run.model), flat(runs[0].model))
                assert [row["loss"] for row in run.metrics] == [row["loss"] for row in runs[0].metrics]
            else:
                torch.testing.assert_close(flat(run.model), flat(runs[0].model), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bandwidth", [1e4, 1e7])
def test_a_worker_may_die_at_any_moment(bandwidth: float) -> None:
    model, loss, x, y = task("convex")
    spec = ClusterSpec(step_s=0.1, bandwidth=bandwidth, latency_s=1e-3)
    options: dict[str, Any] = {"workers": 3, "portions_per_worker": 3, "cluster": spec, "max_iter": 2, "exact": True}
    calm = Sandblaster(model, loss, (x, y), **options).run()
    for moment in range(0, 40):
        death = calm.seconds * moment / 40
        run = Sandblaster(model, loss, (x, y), deaths={1: death}, notice_s=0.05, **options).run()
        assert torch.equal(flat(run.model), flat(calm.model))
        assert run.total("lost") == 1 or death > calm.seconds / 2  # the last ones are not found out


def test_when_all_are_dead_it_says_so() -> None:
    model, loss, x, y = task("convex")
    with pytest.raises(WorkerLost, match="All virtual workers have died"):
        Sandblaster(model, loss, (x, y), workers=2, deaths={0: 0.0, 1: 0.001}).run()


def test_a_slow_worker_costs_little_with_copies_and_much_in_a_static_split() -> None:
    model, loss, x, y = task("convex")
    spec = ClusterSpec(step_s=1.0, slowdown=(1, 1, 1, 1, 1, 1, 1, 10), latency_s=1e-4, bandwidth=1e8)
    ratios = {}
    for name, options in {"copies": {}, "none": {"backups": False}, "static": {"static": True}}.items():
        job = Sandblaster(model, loss, (x, y), workers=8, cluster=spec, max_iter=3, **options)
        run = job.run()
        ratios[name] = run.seconds / run.evaluations / job.world().ideal_s()
    assert ratios["copies"] < 1.15 < 8 < ratios["static"]
    assert ratios["copies"] < ratios["none"]


def test_slow_links_make_workers_send_sums_of_several_portions() -> None:
    _, loss, x, y = task("convex", torch.float32)
    model = nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 2))
    sent = []
    for bandwidth in (1e6, 1e9):
        spec = ClusterSpec(step_s=0.1, bandwidth=bandwidth)
        sent.append(Sandblaster(model, loss, (x, y), cluster=spec, max_iter=2).run().total("bytes_shards"))
    assert sent[0] < sent[1] / 2


def test_orders_are_plain_data_and_only_scalars_pass_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, x, y = task("non-convex")
    recorder = Recorder(monkeypatch)
    world = Sandblaster(model, loss, (x, y), max_iter=12, history=3, l2=0.1).world()
    world.run(lambda row: None)
    for state in recorder.states:
        assert State(**json.loads(json.dumps(asdict(state)))) == state or state.pairs
    assert [tuple(order) for order in json.loads(json.dumps(recorder.orders))] == recorder.orders
    shard = world.shards[0].shard
    assert all(len(terms) <= 1 for terms in shard.obey([("dot", "x", "d"), ("sum", "x"), ("max", "x"), ("copy", "a", "x")]))
    assert set(shard.vectors) == {"x", "d", "trial", "a"} | {f"g{i}" for i in range(4)} & set(shard.vectors) | {
        f"{v}{k}" for v in "sy" for k in range(4)
    }


@given(st.lists(st.floats(-1e30, 1e30), max_size=30), st.integers(1, 4))
def test_unrounded_sums_do_not_depend_on_the_cuts(values: list[float], shards: int) -> None:
    assert sum(map(Fraction, unrounded(values))) == sum(map(Fraction, values))
    parts = [unrounded(values[part]) for part in cuts(len(values), shards)]
    assert combine(("dot",), parts) == math.fsum(values)


@given(st.permutations(range(11)))
def test_the_tree_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    values = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
    sums = []
    for arrival in (range(11), order):
        tree = Tree()
        for portion in arrival:
            tree.add(portion, values[portion])
        sums.append(tree.total())
    assert torch.equal(*sums)
    torch.testing.assert_close(sums[0], values.sum(0))


def test_the_tree_holds_few_slices() -> None:
    tree = Tree()
    for portion in range(1, 1024):
        tree.add(portion, torch.zeros(1))
    assert len(tree) == 10


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model": nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2))}, r"'1' \(BatchNorm1d\) uses statistics of each portion"),
        ({"model": nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))}, "Dropout draws new random numbers"),
        ({"loss": lambda o, y: F.cross_entropy(F.dropout(o), y)}, "this model or loss draws new random numbers"),
        (
            {"model": nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2).double())},
            "got float32 on cpu, float64 on cpu",
        ),
        ({"model": nn.Linear(6, 2).bfloat16()}, "got bfloat16 on cpu"),
        ({"model": nn.Flatten()}, "the model has none"),
        ({"model": lambda: 3}, "must return an nn.Module"),
        ({"workers": 0}, "workers=0 must be a whole number"),
        ({"shards": True}, "shards=True must be a whole number"),
        ({"shards": 100}, "100 shards are too many for 14 parameters"),
        ({"workers": 500, "static": True}, "203 samples cannot be cut into 500 portions"),
        ({"history": 0}, "history=0 must be at least 1"),
        ({"max_iter": 0}, "max_iter=0 must be at least 1"),
        ({"max_eval": 0}, "max_eval=0 must be at least 1"),
        ({"lr": 0.0}, "lr=0: the first step tried must be above 0"),
        ({"l2": -1.0}, "l2=-1 must be at least 0"),
        ({"cluster": "1gbits"}, "did you mean '1gbit'"),
        ({"deaths": {4: 1.0}}, "there is no worker 4"),
        ({"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")}, "must be one number"),
        ({"loss": lambda out, y: out.sum() * math.nan}, "the loss at the start is nan"),
    ],
)
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    model, loss, x, y = task("convex", torch.float32)
    options: dict[str, Any] = {"model": model, "loss": loss, "data": (x, y), **change}
    with pytest.raises(HocketError, match=sentence):
        Sandblaster(**options).run()


def test_frozen_batch_statistics_are_fine() -> None:
    _, loss, x, y = task("convex", torch.float32)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()

    run = Sandblaster(model, loss, (x, y), max_iter=5).run()
    assert run.loss < 0.9 * run.metrics[0]["loss"]


def test_a_shard_refuses_orders_that_it_does_not_know() -> None:
    with pytest.raises(HocketError, match="has no command 'fly'"):
        VectorShard(torch.zeros(2)).obey([("fly", "x")])


def test_the_embedded_digits() -> None:
    from hocket.data import load
    from hocket.models import loss_for, mlp

    data = load("digits")
    run = hocket.Sandblaster(lambda: mlp(64, 10, (32,)), loss_for(data), data, workers=8, l2=1e-3, max_iter=30).run()
    assert run.accuracy is not None
    assert run.accuracy > 0.93
    assert run.total("bytes_coordinator") < run.total("bytes_shards")
