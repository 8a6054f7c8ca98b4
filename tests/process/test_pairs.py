"""Workers without servers, in pairs and by push-sum: what they keep and learn, and what becomes of them when some die or stop."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
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

from hocket.cli.crew import Care
from hocket.cli.main import app
from hocket.cli.pairs_crew import PairsCrew
from hocket.cluster.message import framed
from hocket.data import load
from hocket.errors import HocketError
from hocket.messages import Caller, Envelope, Keys, Kind, Listener, pack
from hocket.server.account import entry_of
from hocket.server.clerk import Clerk, ClerkLink
from hocket.server.doorkeeper import Doorkeeper
from hocket.server.exchanges import Calls, Halves
from hocket.server.holding import Holding, Mean
from hocket.server.peers import Peers, agree, join
from hocket.strategy import Strategy
from hocket.topology.partners import answerer, target
from hocket.train.free_worker import WorkerConfig, batch_sequence
from hocket.train.pairs_job import PairsJob, PeerConfig
from hocket.train.settings import RunSettings
from process.cases import batch, net, sgd
from process.launch import ENVIRON, Group, Nursery, eventually
from process.paired import LIVENESS_TIMEOUT_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

JOB = b"pairs".ljust(16, b".")
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
    """Workers as threads of this process: their doors, links and exchanges are the real ones, their steps take no time."""

    def __init__(self, workers: int, kind: str, liveness_timeout_s: float = 20.0, keys: list[Keys] | None = None) -> None:
        self.begun = [torch.arange(6.0) * (w + 1) + w for w in range(workers)]
        self.holdings = [Holding([row[:4], row[4:]]) for row in self.begun]
        own = [None] * workers if keys is None else keys
        listeners = [Listener("tcp://127.0.0.1:0", JOB, own[w]) for w in range(workers)]
        self.addresses = [listener.address for listener in listeners]
        halves = kind == "pushsum"
        self.doors = [Doorkeeper(listeners[w], self.holdings[w], w, workers, halves, liveness_timeout_s) for w in range(workers)]
        self.peers = [
            Peers(self.addresses, JOB, w, own[w], 1 << 22, liveness_timeout_s, self.doors[w].newcomers) for w in range(workers)
        ]
        self.exchanges = [(Halves if halves else Calls)(self.peers[w], self.holdings[w], kind, 3) for w in range(workers)]
        self.means: dict[int, Mean] = {}

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for closing in (*self.doors, *self.peers):
            closing.close()

    def train(self, delays: list[list[float]]) -> None:
        """Each worker makes a step after each of its delays; nobody is left waiting."""
        threads = [threading.Thread(target=self._work, args=(w, delays[w]), daemon=True) for w in range(len(delays))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"

    def _work(self, worker: int, delays: list[float]) -> None:
        for delay in delays:
            self.exchanges[worker].land()
            time.sleep(delay)
            self.exchanges[worker].start()
        self.exchanges[worker].drain()
        self.means[worker] = agree(self.peers[worker], self.holdings[worker], self.doors[worker])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["rotating", "ring", "random", "pushsum"]), st.data())
def test_whatever_the_delays_nobody_waits_for_ever_and_the_mean_is_kept(kind: str, data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 5))
    some = st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.01]), max_size=12)
    with Crowd(workers, kind) as crowd:
        crowd.train([data.draw(some) for _ in range(workers)])
        expected = torch.stack(crowd.begun).mean(0)
        for mean in crowd.means.values():
            assert torch.allclose(torch.cat(mean.rows), expected, atol=1e-5)
            assert torch.equal(torch.cat(mean.rows), torch.cat(crowd.means[0].rows))
            assert mean.mass == workers
            assert mean.here == list(range(workers))
        assert all(not door.refused for door in crowd.doors)


def test_strangers_are_refused_and_counted_and_touch_nothing() -> None:
    with Crowd(2, "rotating") as crowd:
        before = torch.cat(crowd.holdings[1].x)
        rows = tuple(crowd.holdings[0].x)
        wrong = [
            Envelope(Kind.PUSH, 0, number=1, tensors=rows[:1]),
            Envelope(Kind.PUSH, 0, number=2, tensors=(rows[0].double(), rows[1])),
            Envelope(Kind.PUSH, 0, number=3, tensors=(rows[1], rows[0])),
            Envelope(Kind.PUSH, 1, number=4, tensors=rows),
            Envelope(Kind.PUSH, 8, number=5, tensors=rows),
            Envelope(Kind.ORDER, 0, number=6),
            Envelope(Kind.FETCH, 0, number=7, note={"mean": True}),
        ]
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(crowd.addresses[1])
        raw.send_multipart([b"GET / HTTP/1.1"])
        raw.send_multipart(pack(Envelope(Kind.PUSH, 0, tensors=rows), b"another job.....")[:])
        with Caller(crowd.addresses[1], JOB) as caller:
            answers = []
            for envelope in wrong:
                caller.send(envelope, 1.0)
                answer = caller.receive(10.0)
                assert answer is not None
                answers.append(answer.note["reason"])
        assert answers == ["shape", "shape", "shape", "worker", "worker", "kind", "early"]
        assert eventually(lambda: crowd.doors[1].refused["job"] == 1)
        assert crowd.doors[1].refused == {"magic": 1, "job": 1, "shape": 3, "worker": 2, "kind": 1, "early": 1}
        assert torch.equal(torch.cat(crowd.holdings[1].x), before)
        crowd.train([[0.0], [0.0]])  # and it still answers
        assert torch.allclose(torch.cat(crowd.means[1].rows), torch.stack(crowd.begun).mean(0))
        raw.close(0)
        context.term()


def test_doors_with_keys_let_in_those_who_have_them() -> None:
    keys = Keys.make()
    with Crowd(2, "pushsum", keys=[keys, keys]) as crowd:
        crowd.train([[0.0] * 3, [0.0] * 3])
        assert crowd.means[0].mass == 2.0
    with (
        Crowd(2, "rotating", liveness_timeout_s=5.0, keys=[keys, Keys.make()]) as crowd,
        pytest.raises(HocketError, match="keys of its job"),
    ):
        crowd.peers[0].greet()
    with pytest.raises(HocketError, match="hocket keys"):
        Listener("tcp://0.0.0.0:0", JOB)


def test_what_is_not_answered_is_taken_back() -> None:
    """A half for one who is gone goes back to who sent it."""
    with Crowd(2, "pushsum", liveness_timeout_s=1.0) as crowd:
        crowd.doors[1].close()
        crowd.exchanges[0].start()
        crowd.exchanges[0].drain()
        assert crowd.holdings[0].mass == 1.0
        assert torch.equal(torch.cat(crowd.holdings[0].x), crowd.begun[0])
        assert crowd.holdings[0].account.lost == 1
        assert 1 in crowd.peers[0].silent


def test_a_door_that_was_away_soon_takes_again_however_often_it_is_called() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=0.5) as crowd, Caller(crowd.addresses[1], JOB) as caller:

        def push(number: int) -> bool:
            caller.send(Envelope(Kind.PUSH, 0, number=number, tensors=tuple(crowd.holdings[0].x)), 1.0)
            answer = caller.receive(10.0)
            assert answer is not None
            return answer.kind is Kind.REPLY

        with crowd.holdings[1].lock:  # its door stands still, as if stopped
            caller.send(Envelope(Kind.PUSH, 0, number=1, tensors=tuple(crowd.holdings[0].x)), 1.0)
            assert caller.receive(1.0) is None
        assert caller.receive(10.0) is not None
        numbers = iter(range(2, 10**9))
        assert not push(next(numbers))
        begun = time.monotonic()
        while not push(next(numbers)):
            assert time.monotonic() - begun < LIMIT_S
        assert set(crowd.doors[1].refused) == {"late"}


def test_who_was_silent_for_a_while_takes_part_in_the_end() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        with crowd.holdings[0].lock:
            assert crowd.peers[1].ask_all(Kind.FETCH, 1) == {}
        assert crowd.peers[1].silent == {0}
        crowd.train([[], []])
        assert crowd.means[0].here == crowd.means[1].here == [0, 1]


def test_who_has_the_mean_stays_until_it_has_arrived() -> None:
    with Crowd(2, "rotating") as crowd:
        crowd.holdings[1].ended = True
        leader = threading.Thread(target=crowd._work, args=(0, []), daemon=True)
        leader.start()
        assert eventually(lambda: crowd.holdings[0].mean is not None)
        number = crowd.peers[1].ask(0, Kind.FETCH, {"mean": True})
        assert eventually(lambda: crowd.doors[0].given == {1})
        asked = crowd.peers[0]._number
        assert eventually(lambda: crowd.peers[0]._number > asked + 3)
        assert leader.is_alive(), "its answer may still be on its way"
        crowd.peers[1].wait([number])
        crowd.holdings[1].mean = crowd.holdings[0].mean
        leader.join(LIMIT_S)
        assert not leader.is_alive()


def test_a_stranger_on_the_port_of_a_dead_worker_ends_nobody() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=0.5) as crowd:
        crowd.peers[0].greet()
        crowd.doors[1]._known.clear()  # it dies, and says no goodbye
        crowd.doors[1].close()
        listener = Listener(crowd.addresses[1], b"another job.....")
        stranger = Doorkeeper(listener, crowd.holdings[1], 1, 2, False, 0.5)

        def refused_twice() -> bool:
            crowd.exchanges[0].land()
            crowd.exchanges[0].start()
            return stranger.refused["job"] >= 2

        assert eventually(refused_twice)
        assert crowd.peers[0].silent == {1}
        stranger.close()


@pytest.mark.parametrize("text", [KINDS[0], KINDS[3]])
def test_gradients_of_one_who_is_alone_are_never_old(text: str) -> None:
    model = net()
    optimizer = sgd(model)
    job = PairsJob(model, optimizer, Strategy.parse(text), PeerConfig(0, 2, JOB, meet=lambda address: [address, None]))
    for t in range(5):
        x, y = batch(t, 0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    job.finish()
    assert job.ledger.summary()["staleness"] == {"0": 5}


def test_halves_that_come_back_make_no_gradient_old() -> None:
    holding = Holding([torch.ones(4)])
    part, mass = holding.halve()
    holding.take_in(part, mass, own=True)
    assert holding.look()[1:] == (2, 0)
    holding.take_in(part, mass)
    assert holding.look()[1:] == (3, 1)


# --- another in the place of one that died -----------------------------------------------------------------------------------


class Newcomer:
    """Takes the place of ``worker`` in a crowd: a door, links and weights of its own; it has not joined yet."""

    def __init__(self, crowd: Crowd, worker: int, kind: str, liveness_timeout_s: float = 20.0) -> None:
        workers = len(crowd.addresses)
        self.crowd, self.worker, halves = crowd, worker, kind == "pushsum"
        self.holding = Holding([torch.full((4,), 99.0), torch.full((2,), 99.0)])
        self.holding.joined = False
        listener = Listener("tcp://127.0.0.1:0", JOB)
        self.address = listener.address
        self.door = Doorkeeper(listener, self.holding, worker, workers, halves, liveness_timeout_s)
        known = [None if w == worker else a for w, a in enumerate(crowd.addresses)]
        self.peers = Peers(known, JOB, worker, None, 1 << 22, liveness_timeout_s, self.door.newcomers)
        self.exchanges = (Halves if halves else Calls)(self.peers, self.holding, kind, 3)

    def __enter__(self) -> Newcomer:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()
        self.peers.close()

    def join(self) -> Mean:
        """Join, and be that worker of the crowd."""
        mean = join(self.peers, self.holding, self.address)
        for whole, own in (
            (self.crowd.holdings, self.holding),
            (self.crowd.doors, self.door),
            (self.crowd.peers, self.peers),
            (self.crowd.exchanges, self.exchanges),
        ):
            whole[self.worker] = own  # type: ignore[index, assignment]
        return mean


def die(crowd: Crowd, worker: int) -> None:
    """Without a goodbye."""
    crowd.doors[worker]._over.set()
    crowd.doors[worker]._thread.join()
    crowd.doors[worker]._known.clear()
    crowd.doors[worker].listener.close()
    crowd.peers[worker].close()


@pytest.mark.parametrize(("kind", "dead"), [("rotating", 1), ("rotating", 2), ("pushsum", 0)])
def test_a_newcomer_begins_at_the_mean_and_takes_nothing_from_anybody(kind: str, dead: int) -> None:
    """Σ x / Σ ω is what it was among those who live, Σ ω is one more, and nothing of it is lost after that."""
    with Crowd(4, kind) as crowd:
        doors = [door for w, door in enumerate(crowd.doors) if w != dead]
        for _ in range(3):
            for w in range(4):
                crowd.exchanges[w].land()
                crowd.exchanges[w].start()
        for w in range(4):
            crowd.exchanges[w].drain()
        die(crowd, dead)
        alive = [crowd.holdings[w] for w in range(4) if w != dead]
        for w in range(4):
            if w != dead:
                crowd.peers[w]._give_up(dead)  # as when it has not answered for the patience
        x, mass = [torch.cat(h.x) for h in alive], [h.mass for h in alive]
        mean = sum(x).double() / sum(mass)  # type: ignore[union-attr]
        with Newcomer(crowd, dead, kind) as newcomer:
            newcomer.join()
            assert all(torch.equal(torch.cat(h.x), before) for h, before in zip(alive, x, strict=True))
            assert [h.mass for h in alive] == mass
            assert torch.allclose(torch.cat(newcomer.holding.x).double(), mean, atol=1e-5)
            assert newcomer.holding.mass == 1.0
            heard = newcomer.holding.heard
            crowd.train([[0.0] * 8] * 4)
            assert newcomer.holding.heard > heard, "others exchange with it"
            for found in crowd.means.values():
                assert found.here == [0, 1, 2, 3]
                assert found.mass == pytest.approx(sum(mass) + 1)
                assert torch.allclose(torch.cat(found.rows).double(), mean, atol=1e-4)
        assert all(not door.refused for door in doors)


def test_who_joins_gives_and_takes_nothing_before_it_has_weights_and_needs_somebody_who_has() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        die(crowd, 0)
        die(crowd, 1)
        with Newcomer(crowd, 0, "rotating", 1.0) as caller, Newcomer(crowd, 1, "rotating", 1.0) as answerer:
            caller.peers.move(1, answerer.address)
            with pytest.raises(HocketError, match="no other worker is alive"):
                join(caller.peers, caller.holding, caller.address)
            number = caller.peers.ask(1, Kind.PUSH, tensors=caller.holding.x)
            caller.peers.wait([number])
            assert caller.peers.take(number) is None
            assert answerer.door.refused == {"early": 2}
            assert float(answerer.holding.x[0][0]) == 99.0
            caller.peers.move(1, None)
            with pytest.raises(HocketError, match="no other worker is alive"):
                join(caller.peers, caller.holding, caller.address)


def test_who_joins_when_the_others_have_agreed_has_what_they_agreed_on() -> None:
    with Crowd(2, "rotating", liveness_timeout_s=1.0) as crowd:
        die(crowd, 1)
        agreed = threading.Thread(target=crowd._work, args=(0, []), daemon=True)
        agreed.start()
        agreed.join(LIMIT_S)
        with Newcomer(crowd, 1, "rotating") as newcomer:
            newcomer.join()
            crowd.doors[0].close()  # who had it need not stay
            late = agree(newcomer.peers, newcomer.holding, newcomer.door)
        assert late.here == [0]
        assert torch.equal(torch.cat(late.rows), crowd.begun[0])


def test_who_was_away_when_another_joined_is_told_where_it_is() -> None:
    with Crowd(3, "pushsum", liveness_timeout_s=1.0) as crowd:
        die(crowd, 2)
        with Newcomer(crowd, 2, "pushsum", 1.0) as newcomer:
            newcomer.peers._give_up(0)  # as when it does not answer
            newcomer.join()
            assert newcomer.peers.here == [1]

            def told() -> bool:
                newcomer.peers.turn(0.01)
                crowd.peers[0].turn(0.01)
                return crowd.peers[0].addresses[2] == newcomer.address and newcomer.peers.here == [0, 1]

            assert eventually(told)
            newcomer.holding.x = [x + 3 for x in newcomer.holding.x]
            crowd.train([[0.0]] * 3)
        assert all(mean.here == [0, 1, 2] for mean in crowd.means.values())


def test_nobody_is_led_to_an_address_that_is_none() -> None:
    with Crowd(2, "rotating") as crowd, Caller(crowd.addresses[1], JOB) as caller:
        none = ("nowhere", "tcp://no.such.host:1", 7, "ipc:///tmp/x", "tcp://127.0.0.1:0", "tcp://127.0.0.1%lo:5", "tcp://::1%lo:5")
        for number, address in enumerate((*none, "tcp://192.0.2.1:5"), 1):
            caller.send(Envelope(Kind.HELLO, 0, number=number, note={"address": address}), 1.0)
            answer = caller.receive(10.0)
            assert answer is not None
            assert answer.note["reason"] == ("shape" if address in none else "worker"), answer.note
        crowd.peers[1].turn(0.0)
        assert crowd.peers[1].addresses == crowd.addresses


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
                assert result["mass"] == pytest.approx(len(results), rel=1e-9), "after more than 52 halves it is rounded"
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
        assert all(seen), "after a step the model is what its worker holds, for its mass"
        assert bool(seen) == (text == strategies[1]), "pairs have a mass of 1"
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
        assert all(r["here"] == [0, 1, 2] and r["mass"] == pytest.approx(3.0, rel=1e-9) for r in results)
    ended = groups[2].results()
    assert ended[0]["here"] == ended[2]["here"] == [0, 2]
    assert ended[1]["here"] == [1], "who comes back when all have left ends alone"
    assert torch.equal(ended[0]["end"], ended[2]["end"])


# --- the command -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_children() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert eventually(lambda: not set(psutil.Process().children(recursive=True)) - before)


@pytest.mark.usefixtures("no_children")
def test_the_command_trains_and_survives_the_loss_of_a_worker(tmp_path: Path) -> None:
    run = [
        sys.executable,
        "-m",
        "hocket.cli.main",
        "train",
        "--model",
        "process.served:small",
        "--batch-size",
        "32",
        "--slowdown",
        "4",
    ]
    run += ["--strategy", "async + gossip", "--workers", "3", "--epochs", "20", "--liveness-timeout", "2", "--out", str(tmp_path)]
    with subprocess.Popen(run, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert eventually((tmp_path / "metrics.jsonl").exists, LIMIT_S)
            psutil.Process(process.pid).children()[1].kill()
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "was ended by SIGKILL; the others go on" in said
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 21))
    assert lines[-1]["accuracy"] > 0.85
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["bytes_sent"] > 0 for line in lines[:2])
    assert sum(line["lost"] for line in lines) <= 2
    assert sum(line["lost_exchanges"] for line in lines) >= 1
    assert all(line["staleness"] for line in lines)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["cluster"]["processes"] == written["cluster"]["workers"] == 3


class Watched(PairsCrew):
    """Kills ``victims`` after the first epoch, and deals the second half only when others are in their place."""

    victims: tuple[int, ...] = ()
    clerk: Clerk

    def _serve(self, clerk: Clerk, *rest: Any) -> None:
        self.clerk, deal = clerk, clerk.dispatcher.deal

        def gated(worker: int, count: int) -> list[int]:
            waits = self._replaced < len(self.victims) or clerk.gone
            return [] if waits and clerk.dispatcher.following > clerk.dispatcher.total // 2 else deal(worker, count)

        clerk.dispatcher.deal = gated  # type: ignore[method-assign]
        super()._serve(clerk, *rest)

    def _epoch_ends(self, *given: Any) -> dict[str, Any]:  # type: ignore[override]
        metrics = super()._epoch_ends(*given)
        if metrics["epoch"] == 1:
            for victim in self.victims:
                self._workers[victim].kill()
        return metrics


def replaced(text: str, workers: int) -> RunSettings:
    return RunSettings.of(strategy=text, model="process.served:small", batch_size=32, workers=workers, epochs=6, lr=0.05)


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize(("text", "victim"), [("async + gossip", 1), ("async + gossip(pushsum)", 0)])
def test_another_takes_the_place_of_a_killed_worker(
    text: str, victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    crews = []

    class Kept(Watched):
        victims = (victim,)

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            crews.append(self)

    monkeypatch.setattr("hocket.cli.train.PairsCrew", Kept)
    monkeypatch.setenv("PYTHONPATH", ENVIRON["PYTHONPATH"])
    arguments = ["--strategy", text, "--model", "process.served:small", "--batch-size", "32", "--workers", "3", "--epochs", "6"]
    arguments += ["--replace", "--liveness-timeout", "2", "--lr", "0.05", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)
    assert ended.exit_code == 0
    assert f"worker {victim} was ended by SIGKILL; another takes its place" in capfd.readouterr().err + ended.output
    (crew,) = crews
    clerk = crew.clerk
    assert clerk.dispatcher.counted == clerk.dispatcher.total, "every mini-batch was done"
    assert not clerk.gone
    assert all(mean.here == [0, 1, 2] for mean in clerk.means.values()), "the new one took part to the end"
    assert clerk.figures[str(victim)]["losses"] > 0
    assert all(torch.equal(a, b) for m in clerk.means.values() for a, b in zip(m.rows, clerk.means[2].rows, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 7))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["accuracy"] > lines[0]["accuracy"]
    assert sum(line["lost_exchanges"] for line in lines) == clerk.lost_exchanges
    assert min(line["lost_exchanges"] for line in lines) >= 0
    done = sum(count for line in lines for count in line["staleness"].values())
    assert done == sum(clerk.ages.values())
    assert clerk.dispatcher.total <= done <= clerk.dispatcher.total + clerk.lost, "what the dead one held may have been done twice"


@pytest.mark.usefixtures("no_children")
def test_where_all_have_died_there_is_nothing_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRON["PYTHONPATH"])
    crew = Watched(replaced("async + gossip", 2), torch.device("cpu"), None, None, Care(liveness_timeout_s=2.0, replace=True))
    crew.victims = (0, 1)
    with pytest.raises(HocketError, match="no other worker is alive to take weights from: start again"):
        crew.run(lambda _: None, lambda _: None)


def test_a_clerk_deals_every_mini_batch_and_hears_the_mean(nursery: Nursery, tmp_path: Path) -> None:
    given = RunSettings.of(
        strategy="async + gossip(pushsum)", model="process.served:small", batch_size=32, workers=3, epochs=8, lr=0.05
    )
    total = len(batch_sequence(given, load("digits")))
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        clerk = Clerk(listener, 3, total)
        posts = [WorkerConfig(given.by_name(), w, [listener.address], JOB.hex()) for w in range(3)]
        groups = [nursery.start("process.served:worker", 1, tmp_path / str(w), post=posts[w].describe()) for w in range(3)]
        with Caller(listener.address, JOB) as stranger:
            stranger.send(Envelope(Kind.FETCH, 9, number=1), 1.0)
            stranger.send(Envelope(Kind.FETCH, 0, number=2, note={"done": "all"}), 1.0)

            def over() -> bool:
                clerk.turn(0.01)
                return len(clerk.means) == 3 and clerk.refused["shape"] == 2

            assert eventually(over, LIMIT_S), [group.said() for group in groups]
    for group in groups:
        assert group.wait(LIMIT_S) == [0], group.said()
    assert clerk.dispatcher.counted == total
    assert clerk.lost == 0
    assert sum(account["losses"] for account in clerk.figures.values()) == total
    assert sum(clerk.ages.values()) == total
    assert max(int(age) for age in clerk.ages) > 0
    first = clerk.means[0]
    assert first.mass == pytest.approx(3.0, rel=1e-9)
    for mean in clerk.means.values():
        assert mean.here == [0, 1, 2]
        assert all(torch.equal(own, other) for own, other in zip(mean.rows, first.rows, strict=True))


def served(clerk: Clerk, pool: ThreadPoolExecutor, take: Callable[[], int | None]) -> int | None:
    """What ``take`` returns while the clerk serves."""
    taken = pool.submit(take)

    def done() -> bool:
        clerk.turn(0.01)
        return taken.done()

    assert eventually(done)
    return taken.result()


def test_a_clerk_tells_who_waits_and_deals_what_a_dead_worker_held_to_the_end() -> None:
    with Listener("tcp://127.0.0.1:0", JOB) as listener, ThreadPoolExecutor(1) as pool:
        clerk = Clerk(listener, 2, 3)
        links = [ClerkLink(listener.address, JOB, worker, None, 1 << 22) for worker in range(2)]
        with Caller(listener.address, JOB) as caller:
            caller.send(Envelope(Kind.HELLO, 1, number=1, note={"address": "here"}), 1.0)
            heard: list[Envelope] = []

            def told() -> bool:
                clerk.turn(0.01)
                heard.extend(filter(None, [caller.receive(0.0)]))
                return len(heard) == 2

            assert eventually(told)
            assert [envelope.kind for envelope in heard] == [Kind.WAIT, Kind.WAIT]
        assert served(clerk, pool, links[0].take) == 0  # and it has asked for the next one already
        assert served(clerk, pool, links[1].take) == 2
        clerk.tell(gone=0)
        assert [served(clerk, pool, links[1].take) for _ in range(3)] == [0, 1, None]
        assert clerk.dispatcher.counted == 3
        assert clerk.lost == 2
        for link in links:
            link._caller.close(0)


def test_a_clerk_goes_on_with_the_sums_of_a_worker_that_was_replaced_and_deals_nothing_to_the_dead() -> None:
    with Listener("tcp://127.0.0.1:0", JOB) as listener:
        clerk = Clerk(listener, 2, 9)

        def ask(caller: Caller, kind: Kind, **note: Any) -> Envelope:
            caller.send(Envelope(kind, 0, number=1, note=note), 1.0)
            heard: list[Envelope] = []

            def answered() -> bool:
                clerk.turn(0.01)
                heard.extend(filter(None, [caller.receive(0.0)]))
                return bool(heard)

            assert eventually(answered)
            return heard[0]

        clerk.tell(gone=1)
        with Caller(listener.address, JOB) as dead, Caller(listener.address, JOB) as newcomer:
            ask(dead, Kind.HELLO, address="there")
            first = {"ages": {"0": 5, "2": 1}, "lost": 4, "bytes_sent": 100, "loss": 3.0, "losses": 2}
            assert ask(dead, Kind.FETCH, done=[], ledger=first).note["batch_ids"] == [0]
            clerk.tell(gone=0)
            assert ask(dead, Kind.FETCH, done=[0], ledger={**first, "ages": {"0": 6, "2": 1}}).note["batch_ids"] == []
            welcome = ask(newcomer, Kind.HELLO, address="here", replaces=True)
            assert welcome.note["addresses"] == ["here", None]
            assert clerk.gone == {1}
            assert (clerk.ages, clerk.lost_exchanges) == ({"0": 6, "2": 1}, 4)
            again = {"ages": {"0": 1}, "lost": 1, "bytes_sent": 100, "loss": 1.0, "losses": 2}
            assert ask(newcomer, Kind.FETCH, done=[], ledger=again).note["batch_ids"] == [0]
            assert (clerk.ages, clerk.lost_exchanges) == ({"0": 7, "2": 1}, 5)
            entry, loss = entry_of(clerk.figures, {"0": first})
            assert (entry.bytes_sent, loss) == (100, 0.5)


def test_an_epoch_at_which_nobody_answers_has_no_accuracy_and_one_who_does_not_tell_the_mean_is_not_waited_for() -> None:
    settings = RunSettings.of(strategy="async + gossip", model="process.served:small", batch_size=32, workers=2, epochs=2)
    crew = PairsCrew(settings, torch.device("cpu"), None, None, Care(liveness_timeout_s=0.2))
    try:
        with Listener("tcp://127.0.0.1:0", JOB) as silent:
            assert crew._look([silent.address, None]) is None
            metrics = crew._epoch_ends(lambda: None, {"workers": {}, "lost": 0, "lost_exchanges": 3, "ages": {"0": 4}}, 1)
            assert (metrics["staleness"], metrics["lost_exchanges"]) == ({"0": 4}, 3)
            assert metrics["accuracy"] is None
            clerk = Clerk(silent, 2, 4)
            assert not crew._is_over(clerk)
            clerk.means[0] = Mean([], None, [0, 1], 2.0)
            assert not crew._is_over(clerk)
            assert eventually(lambda: crew._is_over(clerk))
    finally:
        assert crew._peers is not None
        crew._peers.close()
        crew._end()


REFUSED = {
    "--strategy 'async + gossip' --snapshot 1": "leave --snapshot out",
    "--strategy 'async + gossip + topk(0.1)'": "leave the compression out",
    "--strategy 'async + gossip' --resume --out somewhere": "cannot run with --resume",
    "--strategy 'async + gossip' --keys nowhere": "There are no keys at nowhere",
    "--strategy 'async + gossip(exponential)'": "use gossip, gossip(ring)",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_pairs_cannot_do_is_said_before_any_process_is_started(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    ended = CliRunner().invoke(app, ["train", "--model", "process.served:small", "--workers", "2", *shlex.split(arguments)])
    assert isinstance(ended.exception, HocketError), ended.exception
    assert REFUSED[arguments] in str(ended.exception)
