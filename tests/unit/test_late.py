"""Laws of the report on late workers: who is named, in which state, once for all, on a store in this process."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hocket.cluster import late, progress
from hocket.cluster.late import LateWatch
from hocket.cluster.progress import FLOOR_S, Progress, stack_of

WHAT = "gradients of bucket 0"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    clock = SimpleNamespace(monotonic=lambda: time[0])
    monkeypatch.setattr(late, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    return time


class World:
    """Processes without threads; what their heartbeats do is called here."""

    def __init__(self, processes: int) -> None:
        self.store, ranks = dist.HashStore(), list(range(processes))
        self.progress = [Progress() for _ in ranks]
        self.tracks = [one.track("group", ranks) for one in self.progress]
        self.watches = [LateWatch(rank, [range(r, r + 1) for r in ranks], one) for rank, one in enumerate(self.progress)]

    def wait(self, *ranks: int, what: str = WHAT, track: str = "group") -> None:
        """These come to their next launch, and wait there."""
        for rank in ranks:
            own = self.progress[rank].track(track, list(range(len(self.progress))))
            self.progress[rank].enter(progress.Wait(own, own.launch(), what, progress.time.monotonic()))

    def beat(self, *silent: int) -> None:
        """Everybody beats, but for the ``silent``."""
        for rank, one in enumerate(self.progress):
            if rank not in silent:
                self.store.set(f"beat/{rank}", json.dumps(one.describe()))
        for rank, watch in enumerate(self.watches):
            if rank not in silent:
                watch.turn(self.store)

    def texts(self, rank: int) -> list[str]:
        return [report["text"] for report in self.watches[rank].reports]


def test_the_one_that_computes_is_named_once_on_every_process(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    world = World(4)
    for track in world.tracks:
        track.step = 5
    world.wait(0, 1, 3)
    world.beat()
    assert not world.texts(0), "nobody is late yet"
    now[0] += FLOOR_S + 0.1
    for _ in range(3):
        world.beat()
    (text,) = world.texts(0)
    assert text.startswith(f"3 of 4 processes have waited 3.1 s for {WHAT} (step 6); lately such a wait took at most 0 s.")
    assert "Worker 2 (process 2) has not arrived: in step 6 it has been computing for 3.1 s in " in text
    assert all(world.texts(rank) == [text] for rank in range(4)), "also on the one that is late"
    assert capsys.readouterr().err.count(text) == 4
    now[0] += FLOOR_S + 1
    world.beat()
    world.beat()
    assert len(world.texts(2)) == 2, "again when the wait has doubled"
    world.wait(2)
    for one in world.progress:
        one.leave(now[0])
    world.beat()
    assert capsys.readouterr().err.count(f"{WHAT} went on after 7.1 s.") == 3


def test_of_two_that_find_it_at_once_one_reports(now: list[float]) -> None:
    """Heartbeats are in step: both look before either has written."""
    world = World(3)
    world.wait(0, 1)
    now[0] += FLOOR_S + 0.1
    for rank in range(3):
        world.store.set(f"beat/{rank}", json.dumps(world.progress[rank].describe()))
    world.watches[0].turn(world.store)
    before = SimpleNamespace(check=lambda keys: False, add=world.store.add)
    world.watches[1].turn(before)
    assert (len(world.texts(0)), len(world.texts(1))) == (1, 0)
    world.beat()
    assert world.texts(0) == world.texts(1) == world.texts(2)


def test_what_is_late_goes_by_what_was_before(now: list[float]) -> None:
    world = World(2)
    track = world.tracks[0]
    track.wait(lambda: now.__setitem__(0, now[0] + 60.0), track.launch(), WHAT)
    world.tracks[1].launch()
    world.wait(0)
    now[0] += 299.0
    world.beat()
    assert not world.texts(0)
    now[0] += 2.0
    world.beat()
    assert "lately such a wait took at most 60 s" in world.texts(0)[0]


def test_in_a_chain_of_neighbours_the_first_is_named(now: list[float]) -> None:
    """0 waits for 1, which waits for 2 in the exchange before, which computes."""
    world = World(3)
    world.wait(0)
    world.wait(0, 1)
    now[0] += FLOOR_S + 0.1
    world.beat()
    world.beat()
    assert [one["process"] for one in world.watches[0].reports[-1]["late"]] == [2]


def test_silent_left_and_strayed_processes_are_told_apart(now: list[float]) -> None:
    world = World(4)
    world.beat()
    world.wait(0)
    world.wait(3, what="job.finish()", track="meeting/group")
    world.progress[2].hears = (1, 4.5)
    world.store.set("left/2", "1")
    now[0] += FLOOR_S + 0.1
    world.beat(1)
    world.beat(1)
    found = {one["process"]: one["state"] for one in world.watches[0].reports[0]["late"]}
    assert found == {1: "silent", 2: "left", 3: "waiting"}
    text = world.texts(0)[0]
    assert "Worker 1 (process 1) is silent: no heartbeat for 4.5 s" in text
    assert "Worker 3 (process 3) has not arrived: in step 1 it has been waiting 3.1 s for job.finish()" in text


def test_where_all_have_come_the_exchange_itself_is_slow(now: list[float]) -> None:
    world = World(2)
    world.wait(0, 1)
    now[0] += FLOOR_S + 0.1
    world.beat()
    assert "All workers have arrived" in (world.texts(0) or world.texts(1))[0]


def test_a_stack_is_that_of_the_thread_innermost_first() -> None:
    started, go = threading.Event(), threading.Event()

    def inner() -> None:
        started.set()
        go.wait()

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    started.wait()
    names: list[Any] = [frame.split(" ")[0] for frame in stack_of(thread.ident)]
    go.set()
    thread.join()
    assert names.index("inner") + 1 == names.index("outer")
    assert stack_of(-1) == []


@pytest.mark.parametrize("junk", ["no JSON", "[]", '{"number": "many"}', '{"number": 7}'])
def test_nothing_in_the_store_ends_a_heartbeat(now: list[float], junk: str) -> None:
    world = World(2)
    world.wait(0)
    now[0] += FLOOR_S + 0.1
    world.store.set("beat/1", junk)
    world.store.set("late", junk)
    world.watches[0].turn(world.store)
