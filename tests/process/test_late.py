"""Who is everybody waiting for? All workers say who has not come, at which step, and where its training thread stands."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from process.late import STEP, said
from process.launch import Group, Nursery, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LIMIT_S = 60.0


def everybody_says(group: Group, *parts: str, ranks: tuple[int, ...] = (0, 1)) -> None:
    assert eventually(lambda: all(said(group, rank, *parts) for rank in ranks), LIMIT_S), group.said()


COLLECTIVE = {"bulk": "gradients of bucket 0", "local(2) + gossip + topk(0.1)": "weights of bucket 0"}


@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_all_workers_name_the_one_that_is_held_up_in_its_own_code(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    group = nursery.start("process.late:train", 2, tmp_path, strategy=strategy, steps=8)
    where = f"Worker 1 (process 1) has not arrived: in step {STEP} it has been computing for"
    what = f"s for {COLLECTIVE[strategy]}"
    everybody_says(group, what, where, "held_up_by_its_data (process/late.py:", "called from train (process/late.py:")
    assert not eventually(lambda: None not in group.poll(), 0.0), "nobody ends"
    (tmp_path / "go").touch()
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    for found in group.results():
        (late,) = found["late"][-1]["late"]
        assert (late["worker"], late["state"], late["step"]) == (1, "computing", STEP)
        assert any("held_up_by_its_data" in frame for frame in late["stack"])
        assert found["steps"]["p50_s"][0] > 0


@pytest.mark.parametrize("victim", [1, 0])  # process 0 hosts the store
def test_a_stopped_worker_is_called_silent_and_nobody_ends_for_it(nursery: Nursery, tmp_path: Path, victim: int) -> None:
    group = nursery.start("process.late:train", 2, tmp_path, strategy="bulk", steps=10**9, hold="nothing")
    try:
        assert eventually(lambda: (tmp_path / "1.steps").exists() and (tmp_path / "1.steps").stat().st_size >= STEP, LIMIT_S)
        os.kill(group.pids[victim], signal.SIGSTOP)
        everybody_says(group, f"Worker {victim} (process {victim})", "is silent: no", ranks=(1 - victim,))
        os.kill(group.pids[victim], signal.SIGCONT)
        everybody_says(group, "went on after", ranks=(1 - victim,))
        assert group.poll() == [None, None]
    finally:
        for pid in group.pids:
            os.kill(pid, signal.SIGKILL)
        group.wait(LIMIT_S)


def test_a_worker_whose_loop_has_fewer_batches_is_said_to_wait_for_something_else(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.late:train", 2, tmp_path, strategy="bulk", steps=8, hold="finish")
    try:
        everybody_says(group, "has not arrived", "s for job.finish()", "fewer batches", ranks=(0,))
        everybody_says(group, "s for gradients of bucket 0", "fewer batches", ranks=(1,))
    finally:
        for pid in group.pids:
            os.kill(pid, signal.SIGKILL)
        group.wait(LIMIT_S)


def test_a_stage_that_is_held_up_is_named_by_the_one_that_waits_for_it(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.late:pipeline", 2, tmp_path)
    what, where = f"s for the pipeline axis of the mesh (step {STEP})", f"Worker 1 (process 1) has not arrived: in step {STEP}"
    everybody_says(group, what, where, "held_up_by_its_data (process/late.py:")
    (tmp_path / "go").touch()
    assert group.wait(LIMIT_S) == [0, 0], group.said()


def test_a_shard_tells_a_worker_whom_it_waits_for(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.late:train", 2, tmp_path, strategy="ssp(1) + server", steps=8)
    everybody_says(group, "worker 0 has waited", "for worker 1 (at step", "held_up_by_its_data (process/late.py:", ranks=(0,))
    (tmp_path / "go").touch()
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    assert group.results()[0]["late"][-1]["late"][0]["worker"] == 1


def test_the_leader_of_the_final_mean_of_gossip_names_who_has_not_ended(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.late:train", 2, tmp_path, strategy="async + gossip", steps=8)
    everybody_says(group, "worker 0 has waited", "for worker 1, which has not ended", ranks=(0,))
    (tmp_path / "go").touch()
    assert group.wait(LIMIT_S) == [0, 0], group.said()
