"""Laws of heartbeats, of coming together and of clocks, on a store in this process and a clock that moves when somebody sleeps."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hocket.cluster import heartbeat, join, processes
from hocket.cluster.heartbeat import Heartbeat
from hocket.errors import HocketError, WorkerLost

TIMEOUT_S = 10.0


class Clock:
    """Time goes on while somebody sleeps; ``events`` happen at their times."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()
        self.events: list[tuple[float, Any]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 1, "nobody sleeps for long"
        self.naps.append(seconds)
        self.now += seconds
        assert self.now < 100_000, "it would wait for ever"
        for event in [e for e in self.events if e[0] <= self.now]:
            self.events.remove(event)
            event[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    monkeypatch.setattr(heartbeat, "_TOGETHER_S", 50.0)
    return made


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def process(rank: int, store: Any, processes: int = 4) -> Heartbeat:
    """A process without threads: what these do is called here."""
    made = Heartbeat(rank, 1, [range(2 * r, 2 * r + 2) for r in range(processes)], TIMEOUT_S)
    made.processes, made._store = processes, store
    store.set(f"beat/{rank}", "0")
    return made


# --- coming together -----------------------------------------------------------------------------------------------------------


def wait(store: Any, group: str = "k", left: Any = lambda rank: False) -> None:
    own = process(0, store, 3)
    own.liveness_timeout_s, own._has_left = 5.0, left  # type: ignore[method-assign]
    own.wait_for_all("averaged()", group, [0, 1, 2])


def come(store: Any, group: str, rank: int, what: str = "averaged()") -> None:
    store.set(f"meeting/{group}/1/{rank}", what)


def test_who_comes_to_something_else_is_refused(clock: Clock, store: Any) -> None:
    come(store, "k", 1)
    come(store, "k", 2, "finish()")
    with pytest.raises(HocketError, match=r"Process 2 is in finish\(\), but process 0 in averaged\(\)"):
        wait(store)


def test_who_comes_last_does_not_wait_and_who_comes_first_waits_for_all(clock: Clock, store: Any) -> None:
    for rank in (1, 2):
        come(store, "k", rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait(store)
        assert not clock.naps
        clock.events = [(101.0, lambda: come(store, "m", 1)), (103.0, lambda: come(store, "m", 2))]
        wait(store, "m")
    assert 103.0 <= clock.now < 103.2
    assert clock.naps[0] < 0.01, "those who come at once lose little"
    assert clock.naps[-1] == 0.1, "those who wait for long do not keep the store busy"


def test_who_waits_long_is_warned_once_and_refused_in_the_end(clock: Clock, store: Any) -> None:
    come(store, "k", 1)
    with (
        pytest.warns(UserWarning, match=r"Process 2 has not come to averaged\(\) for 5 s") as caught,
        pytest.raises(HocketError) as ended,
    ):
        wait(store)
    assert len(caught) == 1
    assert "Process 2 has not come to averaged() for 50 s: all workers must enter averaged() together" in str(ended.value)
    assert 150.0 < clock.now < 150.3


def test_one_that_has_ended_is_not_waited_for_unless_it_came_before(clock: Clock, store: Any) -> None:
    come(store, "k", 1)
    with pytest.raises(HocketError, match="Process 2 has ended without"):
        wait(store, left=lambda rank: rank == 2)
    assert clock.now == 100.0
    clock.events = [(101.0, lambda: come(store, "m", 2))]
    come(store, "m", 1)
    wait(store, "m", left=lambda rank: rank == 1)


def test_meetings_are_numbered_by_group_and_a_lost_process_is_named(clock: Clock, store: Any) -> None:
    first, second = process(0, store, 2), process(1, store, 2)
    clock.events = [(100.5, lambda: store.set("meeting/world/1/1", "x")), (101.5, lambda: store.set("meeting/world/2/1", "x"))]
    for until in (100.5, 101.5):
        first.wait_for_all("x", "world", [0, 1])
        assert until <= clock.now < until + 0.2
    first._gone = 1
    with pytest.raises(WorkerLost, match="Workers 2 to 3"):
        first.wait_for_all("x", "world", [0, 1])
    second._stop.set()
    second.wait_for_all("x", "world", [0, 1])


# --- who is lost ---------------------------------------------------------------------------------------------------------------


def test_each_watches_the_nearest_before_it_that_has_not_left(store: Any) -> None:
    watchers = [process(rank, store) for rank in range(4)]
    assert [w._watched() for w in watchers] == [[3], [0], [1], [2]]
    watchers[1].stop()
    assert [watchers[rank]._watched() for rank in (0, 2, 3)] == [[3], [0], [2]]
    for rank in (0, 2):
        watchers[rank].stop()
    assert watchers[3]._watched() == []


def test_a_counter_that_stands_still_for_the_timeout_is_a_lost_process(clock: Clock, store: Any) -> None:
    watcher, other = process(0, store), process(1, store)
    seen: dict[int, Any] = {}
    assert watcher._silent([1], 5.0, seen) is None
    clock.now += 4.0
    store.set("beat/1", "1")
    assert watcher._silent([1], 5.0, seen) is None
    clock.now += 5.0
    assert watcher._silent([1], 5.0, seen) is None, "not yet more than the timeout"
    clock.now += 0.1
    assert watcher._silent([1], 5.0, seen) == 1
    assert other._named() == 1, "all read it"
    assert store.check(["told/1"])
    assert other._name(2) == 1, "the first that was found is the one"
    store.set("left/1", "1")
    assert process(2, store)._silent([1], -1.0, {1: (b"1", 0.0)}) is None, "who has left is not lost"


@pytest.mark.parametrize(
    "text, lost", [("Connection reset by peer", True), ("Timed out waiting", True), ("Broken pipe", True), ("shapes differ", False)]
)
def test_only_failures_of_connections_are_explained_by_a_lost_process(clock: Clock, store: Any, text: str, lost: bool) -> None:
    process(1, store, 2)
    watcher, error = process(0, store, 2), RuntimeError(f"{text}\nsecond line")
    found = watcher.explain(error)
    assert (found is not error) == lost
    if lost:
        assert isinstance(found, WorkerLost)
        assert found.worker == 2
        assert str(found).startswith("Workers 2 to 3 (process 1) died, ended early or stopped answering")
        assert 102.5 < clock.now < 106.5, "after five beats; process 0 then waits a while for the others to read it"
        assert watcher._told


def test_where_all_beat_the_one_that_left_is_the_lost_one_and_else_nobody_is(clock: Clock, store: Any) -> None:
    watcher = process(1, store, 3)
    process(0, store, 3).stop()
    process(2, store, 3)
    beat = iter(range(10**6))
    sleep = clock.sleep
    clock.sleep = lambda seconds: (sleep(seconds), store.set("beat/2", str(next(beat))))[0]  # type: ignore[method-assign]
    assert watcher._find() == 0
    assert 103.0 < clock.now < 103.3
    fresh = dist.HashStore()
    watcher = process(1, fresh, 3)
    for rank in (0, 2):
        process(rank, fresh, 3)
    clock.sleep = lambda seconds: (sleep(seconds), [fresh.set(f"beat/{r}", str(next(beat))) for r in (0, 2)])[0]  # type: ignore[method-assign]
    begun = clock.now
    assert watcher._find() is None
    assert clock.now - begun == pytest.approx(TIMEOUT_S + 2, abs=0.2)
    assert "no lost process was found (peer)" in str(watcher.explain(RuntimeError("peer")))


def test_a_store_that_does_not_answer_means_its_host(clock: Clock, store: Any) -> None:
    watcher = process(1, store, 2)

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("closed")

    watcher._store = Gone()
    assert watcher._find() == -1
    found = watcher.explain(RuntimeError("socket"))
    assert "Workers 0 to 1 (process 0), or the launcher if it hosts the job's store, died" in str(found)
    assert found.worker == -1  # type: ignore[attr-defined]
    assert "Worker 1 (process 1) died" in Heartbeat(0, 1, [range(1), range(1, 2)], 1.0)._sentence(1)


# --- leaving -------------------------------------------------------------------------------------------------------------------


def test_process_0_leaves_last(clock: Clock, store: Any) -> None:
    first, *others = (process(rank, store, 3) for rank in range(3))
    others[0]._at_exit()
    assert clock.now == 100.0, "the others do not wait"
    clock.events = [(102.0, others[1]._at_exit)]
    first._at_exit()
    assert 102.0 <= clock.now < 102.2
    assert all(store.check([f"left/{rank}"]) for rank in range(3))


def test_process_0_does_not_wait_for_a_lost_one_nor_after_it_has_said_so(clock: Clock, store: Any) -> None:
    first = process(0, store, 2)
    process(1, store, 2)
    first._at_exit()
    assert clock.now == pytest.approx(100.0 + TIMEOUT_S, abs=0.2)
    fresh = dist.HashStore()
    first = process(0, fresh, 2)
    process(1, fresh, 2)
    first._told, begun = True, clock.now
    first._at_exit()
    assert clock.now == begun


def test_an_exit_by_an_exception_is_not_announced(clock: Clock, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    first, joined = process(0, store, 2), []
    first._threads = [SimpleNamespace(join=lambda timeout: joined.append(timeout))]  # type: ignore[list-item]
    first._at_exit()
    assert first._stop.is_set()
    assert joined == [1.0]
    assert not store.check(["left/0"])
    assert clock.now == 100.0


def test_process_0_gives_the_others_a_while_to_read_who_is_lost(clock: Clock, store: Any) -> None:
    first, *others = (process(rank, store, 4) for rank in range(4))
    others[0].stop()
    clock.events = [(101.0, others[2]._named)]
    store.set("gone", "2")
    first._tell(2)
    assert 101.0 <= clock.now < 101.2, "the lost one and the one that has left are not waited for"
    begun = clock.now
    fresh = dist.HashStore()
    process(0, fresh, 3)._tell(2)
    assert clock.now - begun == pytest.approx(3.0, abs=0.2)
    begun = clock.now
    process(1, fresh, 3)._tell(2)
    process(0, fresh, 3)._tell(-1)
    assert clock.now == begun


# --- clocks and ports ----------------------------------------------------------------------------------------------------------


def test_the_offset_of_a_clock_is_that_of_the_shortest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0's clock shows 1000 more; the way back takes longer in all round trips but the third."""
    now, trips = [50.0], iter([0.2, 0.2, 0.01, *[0.2] * 7])

    def send(tensor: torch.Tensor, to: int) -> None:
        now[0] += 0.01

    def recv(tensor: torch.Tensor, source: int) -> None:
        assert source == 7
        tensor[0] = now[0] + 1000
        now[0] += next(trips)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", recv)
    monkeypatch.setattr(processes, "all_gather_plain", lambda own, group: ["a", "b", "a"])
    found = processes.clock_offset(1, [7, 8, 9], None, torch.device("cpu"))
    assert found == pytest.approx(1000.0, abs=1e-9)
    assert next(trips, None) is None, "ten round trips"
    assert processes.clock_offset(2, [7, 8, 9], None, torch.device("cpu")) == 0.0, "it shares process 0's kernel"


def test_a_jobs_port_is_a_function_of_its_id() -> None:
    ports = {job: join._port(job) for job in ("12", "21", "1234567", "1234568")}
    assert ports["12"] == 20000 + ord("1") + 31 * ord("2")
    assert len(set(ports.values())) == 4
    assert all(20000 <= port < 32768 for port in ports.values())
