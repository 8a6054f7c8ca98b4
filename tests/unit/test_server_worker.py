"""Laws of a worker of parameter servers, on shards in this process: what it sends, and how it goes on where it was saved."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hocket.cluster.layout import layout_of
from hocket.errors import HocketError
from hocket.programs.base import Effects, Send
from hocket.programs.server.optimizer_spec import OptimizerSpec
from hocket.programs.server.requests import WorkerConfig
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.worker import ServerWorker
from hocket.strategy import Strategy
from hocket.transport import Envelope, Kind

LR = 0.5
SGD = OptimizerSpec("sgd", ({"lr": LR},))
LAYOUT = layout_of(nn.Linear(9, 5).named_parameters())


class Wires:
    """Shards and workers; messages to workers wait in ``to_worker`` until :meth:`deliver`."""

    def __init__(self, text: str, world: int = 1, shards: int = 2, optimizer: OptimizerSpec = SGD) -> None:
        self.strategy, self.world, self.optimizer = Strategy.parse(text), world, optimizer
        self.shards = [ShardServer(place) for place in range(shards)]
        for shard in self.shards:
            shard.start(0.0)
        self.sent: list[Envelope] = []
        self.workers: dict[int, ServerWorker] = {}
        self.to_worker: dict[int, deque[tuple[int, Envelope]]] = {w: deque() for w in range(world)}

    def worker(self, number: int, value: float = 1.0) -> ServerWorker:
        made = self.workers[number] = ServerWorker(WorkerConfig(self.strategy, LAYOUT, number, self.world))
        self.carry(number, made.join([torch.full((1, 50), value)], self.optimizer, 0.0))
        self.deliver(number)
        assert not made.busy
        return made

    def carry(self, worker: int, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.sent.append(effect.message)
                assert isinstance(effect.to, int)
                for answer in self.shards[effect.to].message(b"w%d" % worker, effect.message, 0.0):
                    if isinstance(answer, Send):
                        assert isinstance(answer.to, bytes)
                        self.to_worker[int(answer.to[1:])].append((effect.to, answer.message))

    def deliver(self, worker: int) -> None:
        waiting = self.to_worker[worker]
        while waiting:
            self.carry(worker, self.workers[worker].message(*waiting.popleft(), 0.0))

    def step(self, worker: int, gradient: Tensor) -> None:
        own = self.workers[worker]
        self.carry(worker, own.before_update([gradient], 0.0))
        self.deliver(worker)
        self.carry(worker, own.after_update([LR], None, 0.0))

    def of(self, kind: Kind) -> list[Envelope]:
        return [message for message in self.sent if message.kind == kind]


def test_joining_takes_one_hello_per_shard_and_one_more_each_from_whoever_brings_the_weights() -> None:
    wires = Wires("async + server(2)", 2)
    first = wires.worker(0, 3.0)
    assert [(m.place, bool(m.tensors)) for m in wires.of(Kind.HELLO)] == [(0, False), (0, True), (1, True)]
    wires.sent.clear()
    second = wires.worker(1, 9.0)
    assert [(m.place, bool(m.tensors)) for m in wires.of(Kind.HELLO)] == [(0, False), (1, False)]
    assert torch.equal(first.rows[0], torch.full((1, 50), 3.0))
    assert torch.equal(second.rows[0], first.rows[0]), "it gets those that the first has brought"
    assert [(m.place, m.metadata["fetch"]) for m in wires.of(Kind.FETCH)] == [(0, True), (1, True)]


@pytest.mark.parametrize("text", ["async(overlap=True)", "async", "downpour(2, 2, overlap=False)"])
def test_pushes_are_sums_and_fetched_weights_are_written_by_the_next_call(text: str) -> None:
    wires = Wires(f"{text} + server(2)")
    worker = wires.worker(0)
    for step in range(1, 5):
        wires.step(0, torch.full((50,), float(step)))
        wires.deliver(0)
    wires.carry(0, worker.flush(0.0))
    wires.deliver(0)
    pushes = wires.of(Kind.PUSH)
    period = 2 if "downpour" in text else 1
    assert [m.step for m in pushes] == [s for s in range(1, 5) if s % period == 0 for _ in range(2)]
    wanted = [sum(range(s - period + 1, s + 1)) for s in range(period, 5, period)]
    assert [float(m.tensors[0][0]) for m in pushes if m.place == 0] == wanted
    assert torch.allclose(worker.rows[0], torch.full((1, 50), 1.0 - LR * 10))
    assert worker.pushed == worker.step == 4


@pytest.mark.parametrize("moment", ["before", "after", "flush"])
def test_a_worker_that_is_saved_while_it_waits_goes_on_where_it_was(moment: str) -> None:
    wires = Wires("async + server(2)" if moment == "after" else "async(overlap=True) + server(2)")
    worker, gradient = wires.worker(0), torch.arange(50.0)
    wires.step(0, gradient)
    if moment == "before":
        wires.carry(0, worker.before_update([2 * gradient], 0.0))
    elif moment == "flush":
        wires.carry(0, worker.flush(0.0))
    assert worker.busy
    again = ServerWorker(WorkerConfig(wires.strategy, LAYOUT, 0, 1))
    again.attach([worker.rows[0].clone()], SGD)
    again.load_state_dict(worker.state_dict())
    assert again.busy
    for place, message in list(wires.to_worker[0]):
        assert not again.message(place, message, 0.0)
    wires.deliver(0)
    assert not worker.busy
    assert not again.busy
    assert torch.equal(again.rows[0], worker.rows[0])
    assert len(again._sums) == len(worker._sums) == (moment == "before")
    for one, other in zip(again._sums, worker._sums, strict=True):
        assert torch.equal(one, other)
    assert (again.step, again.pushed, again.versions) == (worker.step, worker.pushed, worker.versions)


def test_whoever_brings_the_weights_brings_what_the_optimiser_remembers() -> None:
    """Cut as the weights are, so that the shards' next step is the one that the optimiser would have made."""
    wires = Wires("async + server(2)")
    momentum = torch.arange(50.0)
    spec = OptimizerSpec("sgd", ({"lr": LR, "momentum": 0.5},), state=({"momentum_buffer": momentum},))
    worker = wires.workers[0] = ServerWorker(WorkerConfig(wires.strategy, LAYOUT, 0, 1))
    wires.carry(0, worker.join([torch.ones(1, 50)], spec, 0.0))
    wires.deliver(0)
    assert [len(m.tensors) for m in wires.of(Kind.HELLO)] == [0, 2, 2]
    wires.step(0, torch.full((50,), 2.0))
    wires.deliver(0)
    assert torch.equal(worker.rows[0][0], 1.0 - LR * (0.5 * momentum + 2.0))


def test_a_process_whose_number_is_taken_asks_again_and_one_of_another_job_is_told_so() -> None:
    """The worker that it replaces may not have been missed yet."""
    wires = Wires("async + server(2)")
    wires.worker(0)
    wires.sent.clear()
    config = WorkerConfig(wires.strategy, LAYOUT, 0, 1)
    late = ServerWorker(config)
    effects = late.join([torch.ones(1, 50)], SGD, 0.0)
    (hello,) = (e.message for e in effects if isinstance(e, Send))
    (refusal,) = (e.message for e in wires.shards[0].message(b"wx", hello, 0.0) if isinstance(e, Send))
    assert (refusal.kind, refusal.metadata["reason"]) == (Kind.REFUSAL, "taken")
    late.message(0, refusal, 0.1)
    assert late.busy
    again = late.timer("check", 0.1 + late.silence_s) + late.message(0, refusal, config.liveness_timeout_s)
    assert any(isinstance(e, Send) and e.message.kind == Kind.HELLO for e in again)
    with pytest.raises(HocketError):
        late.message(0, refusal, config.liveness_timeout_s + late.silence_s + 1.0)
    other = ServerWorker(replace(config, seed=5))
    (hello,) = (e.message for e in other.join([torch.ones(1, 50)], SGD, 0.0) if isinstance(e, Send))
    (refusal,) = (e.message for e in wires.shards[0].message(b"wx", hello, 0.0) if isinstance(e, Send))
    with pytest.raises(HocketError, match="The job has seed 0, you have 5"):
        other.message(0, refusal, 0.1)


def test_a_worker_that_was_away_goes_on_from_the_step_that_the_shards_say() -> None:
    wires = Wires("bulk + server(2)")
    worker = wires.worker(0)
    wires.step(0, torch.ones(50))
    assert worker.busy
    for place, message in list(wires.to_worker[0]):
        worker.message(place, replace(message, step=9), 0.0)
    assert (worker.busy, worker.step, worker.pushed) == (False, 9, 9)


@pytest.mark.parametrize("other_shards", [False, True])
def test_sums_that_no_step_follows_are_pushed_with_the_rates_of_their_steps(other_shards: bool) -> None:
    wires = Wires("downpour(4, 4) + server(2)")
    worker = wires.worker(0)
    wires.step(0, torch.ones(50))
    if other_shards:
        wires = Wires("downpour(4, 4) + server(2)")
        state, worker = worker.strategy_state(), wires.worker(0)
        wires.carry(0, worker.resume(state, 0.0))
        wires.deliver(0)
    else:
        state = worker.state_dict()
        worker = wires.workers[0] = ServerWorker(WorkerConfig(wires.strategy, LAYOUT, 0, 1))
        worker.attach([torch.ones(1, 50)], SGD)
        worker.load_state_dict(state)
    wires.carry(0, worker.flush(0.0))
    wires.deliver(0)
    assert [message.metadata["lrs"] for message in wires.of(Kind.PUSH)] == [[LR], [LR]]
    assert all(
        torch.equal(shard.shard.weights[0], torch.full((25,), 1.0 - LR)) for shard in wires.shards if shard.shard is not None
    )


def test_a_state_between_pushes_of_displacements_holds_the_steps_since_the_last_one() -> None:
    """Seven steps, of which four are pushed; a worker of other shards with their weights goes on from there."""
    outer = OptimizerSpec("delayednesterov", ({"lr": 1.0, "momentum": 0.0, "delay": 1},))

    def steps(wires: Wires, count: int) -> ServerWorker:
        own = wires.workers[0]
        for _ in range(count):
            wires.carry(0, own.before_update([torch.ones(50)], 0.0))
            own.rows[0].sub_(0.125)  # the worker's own optimiser
            wires.carry(0, own.after_update([LR], None, 0.0))
            wires.deliver(0)
        return own

    def weights(wires: Wires) -> Tensor:
        return torch.cat([shard.shard.weights[0] for shard in wires.shards if shard.shard is not None])

    first = Wires("asyncdiloco(4, 1, 0, 1) + server(2)", optimizer=outer)
    first.worker(0)
    state = steps(first, 7).strategy_state()
    assert torch.equal(weights(first), torch.full((50,), 0.5))
    second = Wires("asyncdiloco(4, 1, 0, 1) + server(2)", optimizer=outer)
    second.carry(0, second.worker(0, 0.5).resume(state, 0.0))
    second.deliver(0)
    assert torch.equal(steps(second, 1).rows[0], torch.zeros(1, 50))
    assert torch.equal(weights(second), torch.zeros(50))


def test_a_state_within_a_period_of_seconds_holds_those_that_have_passed() -> None:
    """Of ten seconds seven have passed when it is saved; a worker that goes on at another time meets the others three later."""

    def stepped(wires: Wires, now: float) -> bool:
        wires.carry(0, wires.workers[0].before_update([torch.ones(50)], now))
        wires.carry(0, wires.workers[0].after_update([LR], None, now))
        return any(message.kind == Kind.PUSH for message in wires.sent)

    first, second = (Wires("aedit(10) + server(2)") for _ in range(2))
    first.worker(0)
    assert not stepped(first, 7.0)
    state = first.workers[0].strategy_state()
    second.carry(0, second.worker(0).resume(state, 100.0))
    second.deliver(0)
    assert not stepped(second, 102.0)
    assert stepped(second, 103.0)
