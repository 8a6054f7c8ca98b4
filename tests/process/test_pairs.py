"""Workers without servers, in pairs and by push-sum: what they keep and learn, and what becomes of them when some die or stop."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.cluster.message import framed
from hocket.data import load
from hocket.drivers.gossip_runtime import CoordinatorLink, GossipRuntime
from hocket.drivers.record import Recorder, read_record
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.programs.account import entry_of
from hocket.programs.coordinator import Coordinator
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import Mean, PeerState
from hocket.strategy import Strategy
from hocket.supervisor import _KINDS as KINDS_OF_RUNS
from hocket.supervisor import FaultPolicy, prepare
from hocket.supervisor.gossip import GossipRun
from hocket.topology.partners import answerer, target
from hocket.train.async_worker import WorkerTask, batch_sequence
from hocket.train.job import Job
from hocket.train.runtimes.messages import peer_runtime
from hocket.train.settings import RunSettings
from hocket.transport import Caller, Envelope, Keys, Kind, Listener, pack
from process.cases import batch, net, sgd
from process.launch import Group, Nursery, eventually, offspring
from process.paired import LIVENESS_TIMEOUT_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

JOB = b"pairs".ljust(16, b".")
HERE, THERE = "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"
KINDS = ["async + gossip", "async + gossip(ring)", "async + gossip(random)", "async + gossip(pushsum)"]
LIMIT_S = 100.0


# --- the protocol ------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["rotating", "ring", "random"]), st.integers(2, 40), st.integers(0, 1000), st.integers(0, 9), st.data())
def test_callers_reach_answerers_only_so_no_chain_of_waiting_has_two_links(
    kind: str, workers: int, call: int, seed: int, data: st.DataObject
) -> None:
    caller = 2 * data.draw(st.integers(0, (workers - 1) // 2))
    reached = answerer(kind, caller, call, workers, seed)
    assert 0 <= reached < workers
    assert reached % 2 == 1
    half = target(caller, call, workers)
    assert 0 <= half < workers
    assert half != caller


class Crowd:
    """Workers as threads of this process: their runtimes and links are the real ones, their steps take no time."""

    def __init__(self, workers: int, kind: str, liveness_timeout_s: float = 20.0, keys: list[Keys] | None = None) -> None:
        self.kind, self.workers, self.liveness_timeout_s = kind, workers, liveness_timeout_s
        self.begun = [torch.arange(6.0) * (w + 1) + w for w in range(workers)]
        self.rows = [[row[:4].view(1, -1).clone(), row[4:].view(1, -1).clone()] for row in self.begun]
        self.addresses: list[str] = [""] * workers
        self._all_are_known = threading.Barrier(workers)
        self.pool = ThreadPoolExecutor(workers)
        own: list[Keys | None] = [None] * workers if keys is None else list(keys)
        self.runtimes = list(self.pool.map(lambda w: self.make(w, lambda a: self._tell(w, a), own[w]), range(workers)))

    def make(self, worker: int, rendezvous: Callable[[str], Any], keys: Keys | None = None, incarnation: int = 0) -> GossipRuntime:
        config = PeerConfig(
            worker, self.workers, self.kind, 3, self.liveness_timeout_s, incarnation=incarnation, joins=incarnation > 0
        )
        return GossipRuntime(config, JOB, 1 << 22, rendezvous, keys=keys)

    def _tell(self, worker: int, address: str) -> list[str]:
        self.addresses[worker] = address
        self._all_are_known.wait(LIMIT_S)
        return self.addresses

    def join(self) -> Crowd:
        """All join; the first error of one that cannot."""
        joined = [self.pool.submit(runtime.join, rows) for runtime, rows in zip(self.runtimes, self.rows, strict=True)]
        for each in joined:
            each.result()
        return self

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for runtime in self.runtimes:
            runtime.close(0)
        self.pool.shutdown()

    def program(self, worker: int) -> GossipPeer:
        return self.runtimes[worker].program

    def x(self, worker: int) -> Tensor:
        return torch.cat(self.program(worker).state.x)

    def step(self, worker: int, delay_s: float = 0.0) -> None:
        self.runtimes[worker].before_update()
        time.sleep(delay_s)
        self.runtimes[worker].after_update([], None)

    @property
    def means(self) -> list[Mean]:
        found = [runtime.mean for runtime in self.runtimes]
        return [mean for mean in found if mean is not None]

    def train(self, delays: list[list[float]]) -> None:
        """Each worker makes a step after each of its delays; nobody is left waiting."""
        ended = [self.pool.submit(self.work, w, each) for w, each in enumerate(delays)]
        for each in ended:
            each.result(LIMIT_S)

    def work(self, worker: int, delays: list[float]) -> None:
        for delay in delays:
            self.step(worker, delay)
        self.runtimes[worker].finish()


def ask(caller: Caller, message: Envelope) -> Envelope:
    caller.send(message, 1.0)
    answer = caller.receive(10.0)
    assert answer is not None
    return answer


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["rotating", "ring", "random", "pushsum"]), st.data())
def test_whatever_the_delays_nobody_waits_for_ever_and_the_mean_is_kept(kind: str, data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 5))
    some = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01]), max_size=12)
    with Crowd(workers, kind) as crowd:
        crowd.join().train([data.draw(some) for _ in range(workers)])
        expected = torch.stack(crowd.begun).mean(0)
        assert len(crowd.means) == workers
        for mean in crowd.means:
            assert torch.allclose(torch.cat(mean.rows), expected, atol=1e-5)
            assert torch.equal(torch.cat(mean.rows), torch.cat(crowd.means[0].rows))
            assert mean.push_sum_weight == workers
            assert mean.here == list(range(workers))
        assert all(not runtime.refused for runtime in crowd.runtimes)


PUSHED = {"incarnation": 0, "to": 0}


def test_strangers_are_refused_and_counted_and_touch_nothing() -> None:
    with Crowd(3, "rotating") as crowd:
        crowd.join()
        before, rows = crowd.x(1), tuple(crowd.program(2).state.x)
        wrong = [
            Envelope(Kind.PUSH, 2, number=1, metadata=PUSHED, tensors=rows[:1]),
            Envelope(Kind.PUSH, 2, number=2, metadata=PUSHED, tensors=(rows[0].double(), rows[1])),
            Envelope(Kind.PUSH, 2, number=3, metadata=PUSHED, tensors=(rows[1], rows[0])),
            Envelope(Kind.PUSH, 1, number=4, metadata=PUSHED, tensors=rows),
            Envelope(Kind.PUSH, 8, number=5, metadata=PUSHED, tensors=rows),
            Envelope(Kind.ORDER, 2, number=6, metadata=PUSHED),
            Envelope(Kind.FETCH, 2, number=7, metadata={**PUSHED, "mean": True}),
            Envelope(Kind.PUSH, 2, number=8, tensors=rows),
        ]
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(crowd.addresses[1])
        raw.send_multipart([b"GET / HTTP/1.1"])
        raw.send_multipart(pack(Envelope(Kind.PUSH, 0, metadata=PUSHED, tensors=rows), b"another job.....")[:])
        with Caller(crowd.addresses[1], JOB) as caller:
            answers = [ask(caller, envelope).metadata["reason"] for envelope in wrong]
        assert answers == ["shape", "shape", "shape", "worker", "worker", "kind", "early", "shape"]
        assert eventually(lambda: crowd.runtimes[1].refused.get("job") == 1)
        assert crowd.runtimes[1].refused == {"magic": 1, "job": 1, "shape": 4, "worker": 2, "kind": 1, "early": 1}
        assert torch.equal(crowd.x(1), before)
        crowd.train([[0.0], [0.0], []])  # and it still answers
        assert crowd.program(0).account.exchanges == 1
        assert torch.allclose(torch.cat(crowd.means[1].rows), torch.stack(crowd.begun).mean(0))
        raw.close(0)
        context.term()


def test_workers_with_keys_let_in_those_who_have_them() -> None:
    keys = Keys.make()
    with Crowd(2, "pushsum", keys=[keys, keys]) as crowd:
        crowd.join().train([[0.0] * 3, [0.0] * 3])
        assert crowd.means[0].push_sum_weight == 2.0
    with (
        Crowd(2, "rotating", liveness_timeout_s=5.0, keys=[keys, Keys.make()]) as crowd,
        pytest.raises(HocketError, match=r"Worker 1 at .* keys of its job"),
    ):
        crowd.join()
    with pytest.raises(HocketError, match="hocket keys"):
        Listener("tcp://0.0.0.0:0", JOB)


def test_a_half_that_the_receiver_did_not_take_comes_back() -> None:
    """Worker 1 leaves, and says with its goodbye that it has not taken the half which lies before it."""
    with Crowd(2, "pushsum", liveness_timeout_s=60.0) as crowd:
        crowd.join()
        leaver = crowd.runtimes[1]
        with leaver.driver.lock:
            crowd.step(0)
            assert crowd.program(0).state.push_sum_weight == 0.5
            leaver.driver.begin(leaver.program.leave)
        crowd.runtimes[0].driver.call(crowd.program(0).drain)
        assert crowd.program(0).state.push_sum_weight == 1.0
        assert torch.equal(crowd.x(0), crowd.begun[0])
        assert crowd.program(0).account.lost == 1


def test_a_half_for_a_dead_worker_is_counted_as_lost() -> None:
    """Nobody can know whether worker 1 took it: it is not taken back, lest it count twice, and its weight is known."""
    with Crowd(2, "pushsum", liveness_timeout_s=1.0) as crowd:
        die(crowd.join(), 1)
        crowd.step(0)
        crowd.runtimes[0].driver.call(crowd.program(0).drain)
        assert crowd.program(0).peers[1].silent
        assert torch.equal(2 * crowd.x(0), crowd.begun[0])
        crowd.runtimes[0].leave()
        state = crowd.program(0).state
        assert (state.push_sum_weight, state.lost_weight, crowd.program(0).account.lost) == (0.5, 0.5, 1)


def test_a_worker_that_was_suspended_soon_accepts_again_however_often_it_is_called() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=0.5) as crowd, Caller(crowd.join().addresses[1], JOB) as caller:
        tensors = tuple(crowd.program(0).state.x)

        def push(number: int) -> bool:
            return ask(caller, Envelope(Kind.PUSH, 0, number=number, metadata=PUSHED, tensors=tensors)).kind is Kind.REPLY

        assert eventually(lambda: crowd.program(1)._timed)  # its first check has been made
        with crowd.runtimes[1].driver.lock:  # its service thread stands still, as if suspended
            caller.send(Envelope(Kind.PUSH, 0, number=101, metadata=PUSHED, tensors=tensors), 1.0)
            assert caller.receive(1.0) is None
        assert caller.receive(10.0) is not None
        numbers = iter(range(102, 10**9))
        assert not push(next(numbers))
        begun = time.monotonic()
        while not push(next(numbers)):
            assert time.monotonic() - begun < LIMIT_S
        assert set(crowd.runtimes[1].refused) == {"late"}


def test_who_was_silent_for_a_while_takes_part_in_the_end() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        crowd.join()
        with crowd.runtimes[0].driver.lock:
            rows, _ = crowd.runtimes[1].global_weights()
            assert crowd.program(1).peers[0].silent  # as long as the lock keeps it silent
        assert torch.equal(torch.cat(rows, 1)[0], crowd.begun[1]), "of itself alone"
        crowd.train([[], []])
        assert crowd.means[0].here == crowd.means[1].here == [0, 1]


def test_who_has_the_mean_stays_until_it_has_arrived() -> None:
    with Crowd(2, "rotating") as crowd:
        crowd.join()
        crowd.program(1).state.ended = True
        leader = crowd.pool.submit(crowd.work, 0, [])
        assert eventually(lambda: crowd.program(0).mean is not None)
        with Caller(crowd.addresses[0], JOB) as caller:  # it was sent, but has not arrived
            assert ask(caller, Envelope(Kind.FETCH, 1, number=999, metadata={**PUSHED, "mean": True})).kind is Kind.REPLY
        assert crowd.program(0).given == {1}
        asked = crowd.program(0)._number
        assert eventually(lambda: crowd.program(0)._number > asked + 2)
        assert not leader.done(), "its answer may still be on its way"
        crowd.runtimes[1].finish()
        leader.result(LIMIT_S)


def test_a_stranger_on_the_port_of_a_dead_worker_ends_nobody() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=0.5) as crowd:
        die(crowd.join(), 1)
        with Listener(crowd.addresses[1], b"another job.....") as stranger:
            over = threading.Event()
            turned = crowd.pool.submit(lambda: [stranger.receive(0.02) for _ in iter(over.is_set, True)])

            def refused_twice() -> bool:
                crowd.step(0)
                return stranger.refused["job"] >= 2

            assert eventually(refused_twice)
            assert crowd.program(0).peers[1].silent
            over.set()
            assert not any(turned.result())


@pytest.mark.parametrize("text", [KINDS[0], KINDS[3]])
def test_gradients_of_one_who_is_alone_are_never_old(text: str) -> None:
    model = net()
    optimizer = sgd(model)
    strategy = Strategy.parse(text)
    config = PeerConfig(0, 2, strategy.topology.partner_rule)
    runtime = peer_runtime(lambda layout: GossipRuntime(config, JOB, 1 << 22, lambda address: [address, None]))
    job = Job(model, optimizer, strategy, runtime)
    for t in range(5):
        x, y = batch(t, 0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    job.finish()
    assert job.summary(all_workers=True)["staleness"] == {"0": 5}


def test_halves_that_come_back_make_no_gradient_old() -> None:
    state = PeerState([torch.ones(4)])
    part, weight = state.halve()
    state.take_in(part, weight, own=True)
    assert (state.changes, state.heard) == (2, 0)
    state.take_in(part, weight)
    assert (state.changes, state.heard) == (3, 1)


def test_an_error_of_the_service_thread_is_raised_by_the_next_call() -> None:
    with Crowd(2, "rotating") as crowd:
        crowd.join()
        metadata = {"incarnation": 1, "to": 0, "address": "tcp://127.0.0.1:9"}
        with Caller(crowd.addresses[0], JOB) as caller:  # another process is worker 1 from now on
            assert ask(caller, Envelope(Kind.HELLO, 1, number=1, metadata=metadata)).kind is Kind.ANSWER
        with pytest.raises(HocketError, match="Another process is worker 1 now"):
            crowd.runtimes[1].global_weights()
        with pytest.raises(HocketError, match="Another process is worker 1 now"):
            crowd.runtimes[1].before_update()
        crowd.runtimes[1].leave()
        assert not crowd.runtimes[1].attached


def test_events_are_recorded_in_the_order_in_which_they_were_handled(tmp_path: Path) -> None:
    handled: list[tuple[str, float]] = []

    class Noted(GossipPeer):
        def message(self, sender: Any, message: Envelope, now: float) -> Any:
            handled.append(("message", now))
            return super().message(sender, message, now)

        def before_update(self, now: float) -> Any:
            handled.append(("call", now))
            return super().before_update(now)

    with Crowd(2, "rotating") as crowd:
        made = crowd.runtimes[1]
        made.program.__class__ = Noted
        made.driver.recorder = Recorder(tmp_path / "worker-1.jsonl")
        crowd.join().train([[0.001] * 20, [0.001] * 20])
    events = read_record(tmp_path / "worker-1.jsonl")
    recorded = [(e["event"], e["now"]) for e in events if e["event"] == "message" or e.get("name") == "before_update"]
    assert recorded == handled
    assert len(handled) > 40


# --- another in the place of one that died -----------------------------------------------------------------------------------


class Newcomer:
    """Takes the place of ``worker`` in a crowd, with links and weights of its own; it has not joined yet."""

    def __init__(self, crowd: Crowd, worker: int, others: list[str | None] | None = None) -> None:
        self.crowd, self.worker = crowd, worker
        self.rows = [torch.full((1, 4), 99.0), torch.full((1, 2), 99.0)]
        known = [None if w == worker else a for w, a in enumerate(crowd.addresses)] if others is None else others
        self.runtime = crowd.make(worker, lambda address: known, incarnation=1)
        assert self.runtime.config.address is not None
        self.address = self.runtime.config.address

    def __enter__(self) -> Newcomer:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close(0)

    def join(self) -> None:
        """Join, and be that worker of the crowd."""
        self.runtime.join(self.rows)
        self.crowd.runtimes[self.worker], self.crowd.rows[self.worker] = self.runtime, self.rows


def die(crowd: Crowd, worker: int) -> None:
    """Without a goodbye."""
    crowd.runtimes[worker].close(0)


@pytest.mark.parametrize(("kind", "dead"), [("rotating", 1), ("rotating", 2), ("pushsum", 0)])
def test_a_newcomer_begins_at_the_mean_and_takes_nothing_from_anybody(kind: str, dead: int) -> None:
    """Σ x / Σ ω is what it was among those who live, Σ ω is one more, and nothing of it is lost after that."""
    with Crowd(4, kind) as crowd:
        crowd.join()
        survivors = [w for w in range(4) if w != dead]
        for _ in range(3):
            for w in range(4):
                crowd.step(w)
        for w in range(4):
            crowd.runtimes[w].driver.call(crowd.program(w).drain)
        die(crowd, dead)
        x, weight = [crowd.x(w) for w in survivors], [crowd.program(w).state.push_sum_weight for w in survivors]
        mean = sum(x).double() / sum(weight)  # type: ignore[union-attr]
        with Newcomer(crowd, dead) as newcomer:
            newcomer.join()
            assert all(torch.equal(crowd.x(w), before) for w, before in zip(survivors, x, strict=True))
            assert [crowd.program(w).state.push_sum_weight for w in survivors] == weight
            assert torch.allclose(crowd.x(dead).double(), mean, atol=1e-5)
            assert torch.equal(torch.cat(newcomer.rows, 1)[0], crowd.x(dead))
            state = newcomer.runtime.program.state
            assert state.push_sum_weight == 1.0
            heard = state.heard
            crowd.train([[0.0] * 8] * 4)
            assert state.heard > heard, "others exchange with it"
            assert len(crowd.means) == 4
            for found in crowd.means:
                assert found.here == [0, 1, 2, 3]
                assert found.push_sum_weight == pytest.approx(sum(weight) + 1)
                assert torch.allclose(torch.cat(found.rows).double(), mean, atol=1e-4)
        assert all(not crowd.runtimes[w].refused for w in survivors)


def test_who_joins_gives_and_takes_nothing_before_it_has_weights_and_needs_somebody_who_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hocket.programs.gossip.agreement._GIVE_UP_S", 2.0)
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        for worker in (0, 1):
            die(crowd, worker)
        with Newcomer(crowd, 1) as answerer, Newcomer(crowd, 0, [None, answerer.address]) as caller:
            joining = [crowd.pool.submit(answerer.join), crowd.pool.submit(caller.join)]
            with Caller(answerer.address, JOB) as link:
                metadata = {"incarnation": 1, "to": 1}
                pushed = Envelope(Kind.PUSH, 0, number=10**6, metadata=metadata, tensors=(torch.ones(4), torch.ones(2)))
                assert ask(link, pushed).metadata["reason"] == "early"
            for each in joining:
                with pytest.raises(HocketError, match="no other worker has weights for it: start again"):
                    each.result(LIMIT_S)
            assert answerer.runtime.program.rejected["early"] >= 1
            assert float(answerer.runtime.program.state.x[0][0]) == 99.0
        with Newcomer(crowd, 0, [None, None]) as alone, pytest.raises(HocketError, match="no other worker has weights"):
            alone.join()


def test_who_joins_when_the_others_have_agreed_has_what_they_agreed_on() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        die(crowd.join(), 1)
        crowd.runtimes[0].finish()
        with Newcomer(crowd, 1) as newcomer:
            newcomer.join()
            crowd.runtimes[0].leave()  # who had it need not stay
            newcomer.runtime.finish()
            late = newcomer.runtime.mean
            assert late is not None
        assert late.here == [0]
        assert torch.equal(torch.cat(late.rows), crowd.begun[0])


def test_who_was_away_when_another_joined_is_told_where_it_is() -> None:
    with Crowd(3, "pushsum", liveness_timeout_s=1.0) as crowd:
        die(crowd.join(), 2)
        with Newcomer(crowd, 2) as newcomer:
            with crowd.runtimes[0].driver.lock:
                newcomer.join()
                assert newcomer.runtime.program.here == [1]
            assert eventually(lambda: crowd.program(0).peers[2].address == newcomer.address)
            assert eventually(lambda: newcomer.runtime.program.here == [0, 1])
            for row in newcomer.rows:
                row += 3
            crowd.train([[0.0]] * 3)
        assert [mean.here for mean in crowd.means] == [[0, 1, 2]] * 3


def test_nobody_is_led_to_an_address_that_is_none() -> None:
    with Crowd(2, "rotating") as crowd, Caller(crowd.join().addresses[1], JOB) as caller:
        none = ("nowhere", "tcp://no.such.host:1", 7, "ipc:///tmp/x", "tcp://127.0.0.1:0", "tcp://127.0.0.1%lo:5", "tcp://::1%lo:5")
        for number, address in enumerate((*none, "tcp://192.0.2.1:5"), 1):
            answer = ask(caller, Envelope(Kind.HELLO, 0, number=number, metadata={**PUSHED, "address": address}))
            assert answer.metadata["reason"] == ("shape" if address in none else "worker"), answer.metadata
        assert crowd.program(1).peers[0].address is None
        assert crowd.runtimes[1].driver.callers[0].address == crowd.addresses[0]


# --- processes ---------------------------------------------------------------------------------------------------------------


def spread(results: list[dict[str, Any]], name: str, of: Tensor) -> float:
    return max(float((r[name].double() - of).abs().max()) for r in results)


def test_the_mean_is_kept_and_all_come_to_it(nursery: Nursery, tmp_path: Path) -> None:
    four = nursery.start("process.paired:mixing", 4, tmp_path / "four", strategies=KINDS, steps=30)
    assert four.wait(LIMIT_S) == [0] * 4, four.said()
    two = nursery.start("process.paired:mixing", 2, tmp_path / "two", strategies=KINDS[:1], steps=2)
    alone = nursery.start("process.paired:served", 1, tmp_path / "alone")
    left = nursery.start("process.paired:leaving", 2, tmp_path / "left")
    for group in (two, alone, left):
        assert group.wait(LIMIT_S) == [0] * len(group.pids), group.said()
    for group, kinds in ((four, KINDS), (two, KINDS[:1])):
        for text in kinds:
            results = [r[text] for r in group.results()]
            mean = torch.stack([r["begun"] for r in results]).double().mean(0)
            assert spread(results, "end", mean) < 1e-6, text
            assert spread(results, "own", mean) < (1e-3 if len(results) == 4 else 1.0), text
            assert spread(results, "during", mean) < (1e-2 if len(results) == 4 else 1.0), text
            for result in results:
                assert result["weight"] == pytest.approx(len(results), rel=1e-9), "after more than 52 halves it is rounded"
                assert result["here"] == list(range(len(results)))
            assert all(torch.equal(r["end"], results[0]["end"]) and not r["refused"] for r in results)
    assert "has no servers" in (tmp_path / "alone" / "sentence").read_text()


def test_they_learn(nursery: Nursery, tmp_path: Path) -> None:
    strategies = [KINDS[0], KINDS[3]]
    group = nursery.start("process.paired:learning", 4, tmp_path, strategies=strategies, epochs=6)
    assert group.wait(LIMIT_S) == [0] * 4, group.said()
    for text in strategies:
        results = [r[text] for r in group.results()]
        assert all(torch.equal(r["end"], results[0]["end"]) for r in results)
        assert results[0]["accuracy"] > 0.8, text
        seen = [same for r in results for same in r["seen"]]
        assert all(seen), "after a step the model is what its worker holds, for its push-sum weight"
        assert bool(seen) == (text == strategies[1]), "pairs have a weight of 1"
        ledger = results[0]["ledger"]
        assert all(r["ledger"] == ledger for r in results)
        assert ledger["lost"] == 0
        ages = {int(age): count for age, count in ledger["staleness"].items()}
        assert sum(ages.values()) == sum(r["steps"] for r in results), "every gradient has an age"
        heard = sum(age * count for age, count in ages.items())
        took = ledger["exchanges"]
        least, most = (took - 2, 2 * took) if text == strategies[0] else (1, took)
        assert least <= heard <= most, "both callers hear of each but their last before a step, answerers of each at most once"
        whole = framed(4 * len(results[0]["end"])), framed(4 * len(results[0]["end"]) + 8) + framed(0)
        each = 2 * whole[0] if text == strategies[0] else whole[1]
        assert ledger["bytes_sent"] == ledger["exchanges"] * each
        assert ledger["seconds"] == pytest.approx(ledger["compute_s"] + ledger["wait_s"] + ledger["transfer_s"])


def steps(group: Group, rank: int) -> int:
    path = group.folder / f"{rank}.steps"
    return int(path.read_text() or 0) if path.exists() else 0


def changes(group: Group, rank: int) -> int:
    return int((group.folder / f"{rank}.changes").read_text() or 0)


def all_go_on(group: Group, ranks: list[int], more: int = 30) -> bool:
    """Whether all of these make so many more steps."""
    goals = {rank: steps(group, rank) + more for rank in ranks}
    return eventually(lambda: all(steps(group, rank) >= goal for rank, goal in goals.items()), LIMIT_S)


def test_a_killed_worker_ends_nobody(nursery: Nursery, tmp_path: Path) -> None:
    killed = {"async + gossip": 1, "async + gossip(pushsum)": 0}
    groups = {text: nursery.start("process.paired:enduring", 4, tmp_path / str(k), strategy=text) for text, k in killed.items()}
    for text, group in groups.items():
        assert all_go_on(group, [0, 1, 2, 3]), group.said()
        os.kill(group.pids[killed[text]], signal.SIGKILL)
    for text, group in groups.items():
        others = [rank for rank in range(4) if rank != killed[text]]
        assert all_go_on(group, others, 100), group.said()
        (group.folder / "enough").touch()
        assert group.wait(LIMIT_S) == [-signal.SIGKILL if rank == killed[text] else 0 for rank in range(4)], group.said()
        results = [torch.load(group.folder / f"{rank}.pt") for rank in others]
        assert all(r["here"] == others and torch.equal(r["end"], results[0]["end"]) for r in results)
        assert text != "async + gossip" or results[0]["ledger"]["lost"] >= 1


def test_a_stopped_worker_ends_nobody_and_may_return(nursery: Nursery, tmp_path: Path) -> None:
    """In one group it comes back in time and nothing is lost or counted twice, in the other the training ends without it."""
    texts = ["async + gossip", "async + gossip(pushsum)", "async + gossip"]
    groups = [nursery.start("process.paired:enduring", 3, tmp_path / str(k), strategy=t) for k, t in enumerate(texts)]
    for group in groups:
        assert all_go_on(group, [0, 1, 2]), group.said()
        os.kill(group.pids[1], signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert eventually(lambda: time.monotonic() - begun > LIVENESS_TIMEOUT_S + 0.5)
        for group in groups:
            assert all_go_on(group, [0, 2]), group.said()
        (groups[2].folder / "enough").touch()
        assert eventually(lambda: [groups[2].poll()[r] for r in (0, 2)] == [0, 0], LIMIT_S), groups[2].said()
    finally:
        for group in groups:
            os.kill(group.pids[1], signal.SIGCONT)
    for group in groups[:2]:
        before = changes(group, 1)  # alone it could give away half twice, and no more
        assert eventually(lambda group=group, before=before: changes(group, 1) > before + 10, LIMIT_S), "others change it again"
        (group.folder / "enough.part").write_text("all")
        (group.folder / "enough.part").rename(group.folder / "enough")
    for group in groups:
        assert group.wait(LIMIT_S) == [0, 0, 0], group.said()
    for group in groups[:2]:
        results = group.results()
        mean = torch.stack([r["begun"] for r in results]).double().mean(0)
        assert spread(results, "end", mean) < 1e-4, "but for what thousands of steps round off"
        assert all(r["here"] == [0, 1, 2] and r["weight"] == pytest.approx(3.0, rel=1e-9) for r in results)
    ended = groups[2].results()
    assert ended[0]["here"] == ended[2]["here"] == [0, 2]
    assert ended[1]["here"] == [1], "who comes back when all have left ends alone"
    assert torch.equal(ended[0]["end"], ended[2]["end"])


# --- the command -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_children() -> Iterator[None]:
    def others() -> dict[int, str]:
        found = {child.pid: str(child) for child in psutil.Process().children(recursive=True)}
        return {pid: text for pid, text in found.items() if pid not in before and "chromium" not in text}

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert eventually(lambda: not others()), others()


@pytest.mark.usefixtures("no_children")
def test_the_command_trains_and_survives_the_loss_of_a_worker(nursery: Nursery, tmp_path: Path) -> None:
    arguments = ["train", "--model", "process.served:small", "--batch-size", "32", "--slowdown", "4"]
    arguments += [
        "--strategy",
        "async + gossip",
        "--workers",
        "3",
        "--epochs",
        "20",
        "--liveness-timeout",
        "2",
        "--out",
        str(tmp_path),
    ]
    with nursery.command(arguments, tmp_path / "said", Path.cwd()) as run:
        assert eventually((tmp_path / "metrics.jsonl").exists, LIMIT_S), run.said()
        offspring(run.pid, "hocket.supervisor.worker_process")[1].kill()
        ended = run.ended(LIMIT_S)
    said = ended.stderr
    assert ended.returncode == 0, said
    assert "was ended by SIGKILL; the others go on" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 21))
    assert lines[-1]["accuracy"] > 0.85
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert 0 < lines[-1]["test_loss"] < 1
    assert all(line["bytes_sent"] > 0 for line in lines[:2])
    assert sum(line["lost"] for line in lines) <= 2
    assert sum(line["lost_exchanges"] for line in lines) >= 1
    assert all(line["staleness"] for line in lines)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["cluster"]["processes"] == written["cluster"]["workers"] == 3


class Watched(GossipRun):
    """Kills ``victims`` after the first epoch, and dispatches the second half only when others are in their place."""

    victims: tuple[int, ...] = ()

    def _coordinate(self, *given: Any) -> None:
        coordinator = self.coordinator
        dispatcher, take = coordinator.dispatcher, coordinator.dispatcher.take

        def gated(worker: int, count: int) -> list[int]:
            waits = self.supervisor.restarts["worker"] < len(self.victims) or coordinator.gone
            return [] if waits and dispatcher.following > dispatcher.total // 2 else take(worker, count)

        dispatcher.take = gated  # type: ignore[method-assign]
        super()._coordinate(*given)

    def epoch_ends(self, *given: Any) -> dict[str, Any]:
        metrics = super().epoch_ends(*given)
        if metrics["epoch"] == 1:
            for victim in self.victims:
                self.supervisor.process("worker", victim).kill()
        return metrics


def replaced(text: str, workers: int) -> RunSettings:
    return RunSettings.of(strategy=text, model="process.served:small", batch_size=32, workers=workers, epochs=6, lr=0.05)


@pytest.mark.usefixtures("no_children", "forked")
@pytest.mark.parametrize(("text", "victim"), [("async + gossip", 1), ("async + gossip(pushsum)", 0)])
def test_another_takes_the_place_of_a_killed_worker(
    text: str, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = []

    class Kept(Watched):
        victims = (victim,)

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            runs.append(self)

    monkeypatch.setitem(KINDS_OF_RUNS, "peers", Kept)
    arguments = ["--strategy", text, "--model", "process.served:small", "--batch-size", "32", "--workers", "3", "--epochs", "6"]
    arguments += ["--replace", "--liveness-timeout", "2", "--lr", "0.05", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)
    assert ended.exit_code == 0
    assert f"worker {victim} was ended by SIGKILL; another takes its place" in capfd.readouterr().err + ended.output
    coordinator = runs[0].coordinator
    assert coordinator.dispatcher.counted == coordinator.dispatcher.total, "every mini-batch was done"
    assert not coordinator.gone
    assert all(mean.here == [0, 1, 2] for mean in coordinator.means.values()), "the new one took part to the end"
    assert coordinator.figures[str(victim)]["losses"] > 0
    assert all(
        torch.equal(a, b) for m in coordinator.means.values() for a, b in zip(m.rows, coordinator.means[2].rows, strict=True)
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 7))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]
    assert sum(line["lost_exchanges"] for line in lines) == coordinator.lost_exchanges
    assert min(line["lost_exchanges"] for line in lines) >= 0
    done = sum(count for line in lines for count in line["staleness"].values())
    assert done == sum(coordinator.staleness.values())
    assert coordinator.dispatcher.total <= done <= coordinator.dispatcher.total + coordinator.lost, (
        "what the dead one held may have been done twice"
    )


@pytest.mark.usefixtures("no_children", "forked")
def test_where_all_have_died_there_is_nothing_to_go_on_from() -> None:
    policy = FaultPolicy(liveness_timeout_s=2.0, replace=True)
    run = Watched(replaced("async + gossip", 2), torch.device("cpu"), policy=policy)
    run.victims = (0, 1)
    with pytest.raises(HocketError, match="no other worker has weights for it: start again"):
        run.train()


def test_a_coordinator_dispatches_every_mini_batch_and_is_told_the_mean(nursery: Nursery, tmp_path: Path) -> None:
    given = RunSettings.of(
        strategy="async + gossip(pushsum)", model="process.served:small", batch_size=32, workers=3, epochs=8, lr=0.05
    )
    total = len(batch_sequence(given, load("digits")))
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        coordinator = Coordinator(3, total)
        driver = SocketDriver(coordinator, listener=listener)
        driver.begin(coordinator.start)
        posts = [WorkerTask(given.by_name(), w, [listener.address], JOB.hex()) for w in range(3)]
        groups = [nursery.start("process.served:worker", 1, tmp_path / str(w), post=posts[w].describe()) for w in range(3)]

        def over() -> bool:
            driver.poll(0.01)
            return len(coordinator.means) == 3 and coordinator.rejected["shape"] == 1 and coordinator.rejected["worker"] == 1

        assert eventually(lambda: driver.poll(0.01) or 0 in coordinator.incarnations, LIMIT_S)
        with Caller(listener.address, JOB) as stranger:
            stranger.send(Envelope(Kind.FETCH, 9, number=1), 1.0)
            stranger.send(Envelope(Kind.FETCH, 0, number=2, metadata={"done": "all"}), 1.0)
            assert eventually(over, LIMIT_S), [group.said() for group in groups]
    for group in groups:
        assert group.wait(LIMIT_S) == [0], group.said()
    assert coordinator.dispatcher.counted == total
    assert coordinator.lost == 0
    assert sum(account["losses"] for account in coordinator.figures.values()) == total
    assert sum(coordinator.staleness.values()) == total
    assert max(int(age) for age in coordinator.staleness) > 0
    first = coordinator.means[0]
    assert first.push_sum_weight == pytest.approx(3.0, rel=1e-9)
    for mean in coordinator.means.values():
        assert mean.here == [0, 1, 2]
        assert all(torch.equal(own, other) for own, other in zip(mean.rows, first.rows, strict=True))


class Coordinated:
    """A coordinator on a socket; what others do meanwhile is done in threads."""

    def __init__(self, listener: Listener, workers: int, total: int, threads: int = 2) -> None:
        self.coordinator = Coordinator(workers, total)
        self.driver = SocketDriver(self.coordinator, listener=listener)
        self.driver.begin(self.coordinator.start)
        self.pool = ThreadPoolExecutor(threads)

    def serve(self, *tasks: Callable[[], Any]) -> list[Any]:
        """What the tasks return while the coordinator serves."""
        running = [self.pool.submit(task) for task in tasks]
        assert eventually(lambda: self.driver.poll(0.01) or all(each.done() for each in running))
        return [each.result() for each in running]


def test_a_coordinator_tells_who_waits_and_dispatches_what_a_dead_worker_held_to_the_end() -> None:
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        served = Coordinated(listener, 2, 3)
        links = [CoordinatorLink(listener.address, JOB, worker, None, 1 << 22) for worker in range(2)]
        with Caller(listener.address, JOB) as caller:
            caller.send(Envelope(Kind.HELLO, 1, number=1, metadata={"address": THERE, "incarnation": 0}), 1.0)
            heard = served.serve(lambda: [caller.receive(10.0) for _ in range(2)])[0]
            assert [envelope.kind for envelope in heard] == [Kind.WAIT, Kind.WAIT]
        assert served.serve(lambda: links[0].join(HERE), lambda: links[1].join(THERE)) == [[HERE, THERE]] * 2
        assert served.serve(links[0].next_batch) == [0]
        # It asks for the next one already; the other one asks after that.
        assert eventually(lambda: served.driver.poll(0.01) or served.coordinator.dispatcher.following == 2)
        assert served.serve(links[1].next_batch) == [2]
        served.driver.begin(served.coordinator.worker_lost, 0)
        assert [served.serve(links[1].next_batch)[0] for _ in range(3)] == [0, 1, None]
        assert served.coordinator.dispatcher.counted == 3
        assert served.coordinator.lost == 2
        for link in links:
            link.close(0)


def test_a_coordinator_goes_on_with_the_sums_of_a_replaced_worker_and_dispatches_nothing_to_the_dead() -> None:
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        served = Coordinated(listener, 2, 9)
        coordinator, numbers = served.coordinator, iter(range(1, 100))

        def told(caller: Caller, kind: Kind, incarnation: int, **metadata: Any) -> Envelope:
            message = Envelope(kind, 0, number=next(numbers), metadata={"incarnation": incarnation, **metadata})
            return served.serve(lambda: ask(caller, message))[0]  # type: ignore[no-any-return]

        def lose(worker: int) -> None:
            served.driver.begin(coordinator.worker_lost, worker)

        lose(1)
        with Caller(listener.address, JOB) as dead, Caller(listener.address, JOB) as newcomer:
            told(dead, Kind.HELLO, 0, address=THERE)
            first = {"staleness": {"0": 5, "2": 1}, "lost": 4, "bytes_sent": 100, "loss": 3.0, "losses": 2}
            assert told(dead, Kind.FETCH, 0, done=[], ledger=first).metadata["batch_ids"] == [0]
            lose(0)
            assert told(dead, Kind.FETCH, 0, done=[0], ledger={**first, "staleness": {"0": 6, "2": 1}}).metadata["batch_ids"] == []
            welcome = told(newcomer, Kind.HELLO, 1, address=HERE)
            assert welcome.metadata["addresses"] == [HERE, None]
            assert coordinator.gone == {1}
            assert (coordinator.staleness, coordinator.lost_exchanges) == ({"0": 6, "2": 1}, 4)
            again = {"staleness": {"0": 1}, "lost": 1, "bytes_sent": 100, "loss": 1.0, "losses": 2}
            assert told(newcomer, Kind.FETCH, 1, done=[], ledger=again).metadata["batch_ids"] == [0]
            assert (coordinator.staleness, coordinator.lost_exchanges) == ({"0": 7, "2": 1}, 5)
            entry, loss = entry_of(coordinator.figures, {"0": first})
            assert (entry.bytes_sent, loss) == (100, 0.5)
            assert told(dead, Kind.FETCH, 0, done=[], ledger=first).metadata["reason"] == "outdated"


def test_one_that_replaces_a_worker_which_died_before_its_hello_gets_mini_batches() -> None:
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        served = Coordinated(listener, 1, 1)
        served.driver.begin(served.coordinator.worker_lost, 0)
        link = CoordinatorLink(listener.address, JOB, 0, None, 1 << 22, incarnation=1)
        assert served.serve(lambda: link.join(HERE)) == [[HERE]]
        assert served.serve(link.next_batch) == [0]
        link.close(0)


def test_an_epoch_at_which_nobody_answers_has_no_accuracy_and_one_who_does_not_tell_the_mean_is_not_waited_for() -> None:
    settings = RunSettings.of(strategy="async + gossip", model="process.served:small", batch_size=32, workers=2, epochs=2)
    run = GossipRun(settings, torch.device("cpu"), policy=FaultPolicy(liveness_timeout_s=0.2))
    with Listener("tcp://127.0.0.1:0", JOB) as silent:
        assert run.look(lambda: [silent.address, None]) is None
        counts = {"lost": 0, "lost_exchanges": 3}
        metrics = run.epoch_ends(lambda: None, {"workers": {}, "staleness": {"0": 4}, "counts": counts}, 1)
        assert (metrics["staleness"], metrics["lost_exchanges"]) == ({"0": 4}, 3)
        assert metrics["accuracy"] is None
        assert not run.is_over()
        run.coordinator.means[0] = Mean([], None, [0, 1], 2.0)
        assert not run.is_over()
        assert eventually(run.is_over)
        run.close()


@pytest.mark.usefixtures("no_children", "forked")
@pytest.mark.parametrize("text", ["async + gossip", "async + server(shards=2)"])
def test_a_run_from_python_goes_on_when_a_worker_is_killed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    seen: list[int] = []

    def evaluate(rows: list[Tensor], buffers: Tensor | None) -> float:
        seen.append(sum(row.numel() for row in rows))
        return 0.25

    def kill_first(metrics: dict[str, Any]) -> None:
        if metrics["epoch"] == 1:
            run.supervisor.process("worker", 0).kill()

    settings = RunSettings.of(**{**replaced(text, 3).by_name(), "slowdown": "4"})
    run = prepare(settings, out=tmp_path / "out", policy=FaultPolicy(liveness_timeout_s=2.0), evaluate=evaluate)
    assert run.description.startswith("3 workers")
    metrics = run.train(on_epoch=kill_first)
    assert [line["epoch"] for line in metrics] == list(range(1, 7))
    # An epoch of gossip at which no worker answers in time has no accuracy; the last one is the mean that they agreed on.
    evaluated = [line["accuracy"] for line in metrics if "gossip" not in text or line["accuracy"] is not None]
    assert metrics[0]["accuracy"] == metrics[-1]["accuracy"] == 0.25
    assert evaluated == [0.25] * len(seen)
    assert set(seen) == {sum(p.numel() for p in run.model.parameters())}
    assert run.dead == {0}
    assert "worker 0 was ended by SIGKILL; the others go on" in capfd.readouterr().err
    assert not list(tmp_path.glob("hocket-*")), "no folder is left behind"


def test_collective_strategies_and_impossible_times_are_refused() -> None:
    with pytest.raises(HocketError, match="is collective: start it with torchrun"):
        prepare(RunSettings.of(strategy="bulk", workers=2))
    with pytest.raises(HocketError, match="seconds are above 0"):
        FaultPolicy(liveness_timeout_s=0.0)


REFUSED = {
    "--strategy 'async + gossip' --snapshot 1": "leave --snapshot out",
    "--strategy 'async + gossip + topk(0.1)'": "leave the compression out",
    "--strategy 'async + gossip' --resume --out somewhere": "There is no run in somewhere to go on with",
    "--strategy 'async + gossip' --keys nowhere": "There are no keys at nowhere",
    "--strategy 'async + gossip(exponential)'": "use gossip, gossip(ring)",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_pairs_cannot_do_is_said_before_any_process_is_started(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    ended = CliRunner().invoke(app, ["train", "--model", "process.served:small", "--workers", "2", *shlex.split(arguments)])
    assert isinstance(ended.exception, HocketError), ended.exception
    assert REFUSED[arguments] in str(ended.exception)
