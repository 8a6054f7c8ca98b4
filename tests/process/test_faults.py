"""Workers that die, stop, raise or disagree: the others end within seconds, with one sentence and a non-zero exit; nobody hangs."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from hocket.cluster.join import LaunchInfo, find_launcher
from process.launch import ENVIRON, Group, Nursery, eventually, free_port

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LIMIT_S = 40.0
"""For starting on a busy machine and for ending; a hang would last for half an hour."""


def all_train(group: Group, steps: int = 5) -> bool:
    """Wait until everybody has done some steps."""
    files = [group.folder / f"{rank}.steps" for rank in range(len(group.pids))]
    return eventually(lambda: all(f.exists() and f.stat().st_size >= steps for f in files), LIMIT_S)


def last_line(group: Group, rank: int) -> str:
    return (group.folder / f"{rank}.err").read_text().strip().splitlines()[-1]


KILLED = [
    (2, "bulk", 1),
    (2, "bulk + gossip", 0),
    (4, "bulk", 2),
    (4, "bulk + gossip", 3),
    (4, "local(4) + topk(0.1)", 0),
    (6, "bulk", 5),
    (6, "local(2) + gossip", 3),
]
STOPPED = [("bulk", 2), ("bulk + gossip", 1), ("bulk", 0)]
ENDED = [
    ("bulk", "exception", 1),
    ("local(2) + gossip", "exception", 1),
    ("bulk", "exit code", 7),
    ("local(2) + gossip", "early end", 0),
]
POISONED = ["bulk", "bulk + topk(0.1)", "bulk + gossip", "local(4)"]


@pytest.fixture(scope="module")
def groups(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Group]:
    """All accidents, one soon after another: each group only waits by the time the next one starts."""
    found: dict[Any, Group] = {}
    for how, scenes in ((signal.SIGKILL, KILLED), (signal.SIGSTOP, [(4, *scene) for scene in STOPPED])):
        for processes, strategy, victim in scenes:
            folder = tmp_path_factory.mktemp("signal")
            group = nursery.start("process.faults:endless", processes, folder, strategy=strategy)
            assert all_train(group), group.said()
            os.kill(group.pids[victim], how)
            found[how, processes, strategy, victim] = group
    for strategy, what, code in ENDED:
        folder = tmp_path_factory.mktemp("ended")
        found[strategy, what, code] = nursery.start("process.faults:accident", 4, folder, strategy=strategy, what=what)
        assert eventually(lambda group=found[strategy, what, code]: group.poll()[1] is not None, LIMIT_S)
    for strategy in POISONED:
        found[strategy] = nursery.start("process.faults:poisoned", 4, tmp_path_factory.mktemp("nan"), strategy=strategy)
        assert eventually(lambda group=found[strategy]: group.poll()[1] is not None, LIMIT_S)
    return found


@pytest.mark.parametrize("processes, strategy, victim", KILLED)
def test_a_killed_worker_is_named_and_all_end(groups: dict[Any, Group], processes: int, strategy: str, victim: int) -> None:
    group = groups[signal.SIGKILL, processes, strategy, victim]
    codes = group.wait(LIMIT_S)
    assert codes[victim] == -signal.SIGKILL
    for rank in range(processes):
        if rank != victim:
            assert codes[rank] == 1, group.said(rank)
            assert f"Worker {victim} (process {victim})" in last_line(group, rank), group.said()
            assert "died, ended early or stopped answering" in last_line(group, rank)


@pytest.mark.parametrize("strategy, victim", STOPPED)
def test_a_stopped_worker_is_named_after_the_patience(groups: dict[Any, Group], strategy: str, victim: int) -> None:
    group = groups[signal.SIGSTOP, 4, strategy, victim]
    others = [rank for rank in range(4) if rank != victim]
    assert eventually(lambda: all(group.poll()[rank] is not None for rank in others), LIMIT_S), group.said()
    os.kill(group.pids[victim], signal.SIGKILL)
    codes = group.wait(LIMIT_S)
    for rank in others:
        assert codes[rank] == 1, group.said(rank)
        assert f"Worker {victim} (process {victim})" in group.said(rank)


@pytest.mark.parametrize("strategy, what, code", ENDED)
def test_a_worker_that_ends_early_takes_the_others_along(groups: dict[Any, Group], strategy: str, what: str, code: int) -> None:
    group = groups[strategy, what, code]
    codes = group.wait(LIMIT_S)
    assert codes[1] == code, group.said(1)
    assert (what != "exception") or "ValueError: an accident" in group.said(1)
    for rank in (0, 2, 3):
        assert codes[rank] == 1
        assert "Worker 1 (process 1)" in last_line(group, rank), group.said(rank)


@pytest.mark.parametrize("strategy", POISONED)
def test_a_nan_ends_all_and_is_named(groups: dict[Any, Group], strategy: str) -> None:
    group = groups[strategy]
    assert group.wait(LIMIT_S) == [1] * 4, group.said()
    assert "The gradient of 1.weight holds NaN or Inf at step 3 on worker 1" in last_line(group, 1)
    for rank in (0, 2, 3):
        travels = strategy in ("bulk", "bulk + topk(0.1)")  # then all agree in the same exchange
        expected = "Another worker's gradient holds NaN or Inf" if travels else "Worker 1 (process 1)"
        assert expected in last_line(group, rank), group.said(rank)


def test_who_is_told_of_a_loss_has_time_to_save(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.faults:saver", 2, tmp_path)
    assert all_train(group), group.said()
    os.kill(group.pids[1], signal.SIGKILL)
    assert group.wait(LIMIT_S) == [1, -signal.SIGKILL]
    assert (tmp_path / "0.saved").read_text() == "1"


def test_who_ends_first_does_not_take_the_store_along(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.faults:slow_end", 2, tmp_path)
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    assert group.said(1).strip() == "--- 1"


def test_models_that_differ_end_all(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.faults:different", 2, tmp_path)
    assert group.wait(LIMIT_S) == [1, 1]
    for rank in (0, 1):
        assert "Worker 1's model or job differs from worker 0's: parameter weight (3, 3)" in last_line(group, rank)


@pytest.mark.parametrize("what", ["parallelize", "distribute"])
def test_init_comes_first(nursery: Nursery, tmp_path: Path, what: str) -> None:
    group = nursery.start("process.faults:too_early", 1, tmp_path, what=what)
    assert group.wait(LIMIT_S) == [1]
    assert f"Call hocket.init() before hocket.{what}(…)." in last_line(group, 0)


def test_a_taken_port_is_named(nursery: Nursery, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"MASTER_PORT": port}
        group = nursery.start("process.faults:joins", 2, tmp_path, environ, timeout_s=2.0)
        assert group.wait(LIMIT_S) == [1, 1], group.said()
    assert f"Port {port} on 127.0.0.1 is taken; choose another with MASTER_PORT." in last_line(group, 0)
    assert f"could not join the others at 127.0.0.1:{port}" in last_line(group, 1)


def test_nobody_waits_for_ever_for_somebody_who_never_comes(nursery: Nursery, tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": "3", "MASTER_PORT": str(free_port())}
    group = nursery.start("process.faults:joins", 2, tmp_path, environ, timeout_s=3.0)
    assert group.wait(LIMIT_S) == [1, 1], group.said()
    for rank in (0, 1):
        assert f"Process {rank} of 3 could not join the others" in last_line(group, rank)


def test_one_worker_trains_plainly_and_sends_nothing(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.faults:alone", 1, tmp_path)
    assert group.wait(LIMIT_S) == [0], group.said()
    assert set(map(tuple, group.results()[0].values())) == {(True, 0)}


# --- who started us --------------------------------------------------------------------------------------------------------


PLACES = {
    "torchrun": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        LaunchInfo("torchrun", 5, 8, 1, 4, "a", 1, one_host=False),
    ),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "b",
            "MASTER_PORT": "2",
        },
        LaunchInfo("Open MPI", 3, 4, 1, 2, "b", 2, one_host=False),
    ),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "3"},
        LaunchInfo("MPICH", 1, 2, 1, 2, "127.0.0.1", 3),
    ),
    "Slurm": (
        {
            "SLURM_PROCID": "6",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "2",
            "SLURM_NTASKS_PER_NODE": "4(x2)",
            "SLURM_JOB_NODELIST": "node[03-07,9]",
            "MASTER_PORT": "4",
        },
        LaunchInfo("Slurm", 6, 8, 2, 4, "node03", 4, one_host=False),
    ),
}


@pytest.mark.parametrize("launcher", PLACES)
def test_each_launcher_says_where_we_stand(launcher: str) -> None:
    environ, place = PLACES[launcher]
    assert find_launcher(environ) == place


@pytest.mark.parametrize(
    "nodes, first", [("a1", "a1"), ("a1,a2", "a1"), ("gpu[1-4]", "gpu1"), ("gpu[07,09]", "gpu07"), ("x-[2-3],y1", "x-2")]
)
def test_the_first_host_of_an_allocation_keeps_the_store(nodes: str, first: str) -> None:
    place = find_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": nodes})
    assert place is not None
    assert place.address == first


def test_a_job_has_one_port_and_another_job_another() -> None:
    def port(job: str, rank: str) -> int:
        place = find_launcher({"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_JOB_ID": job})
        assert place is not None
        return place.port

    assert port("4711", "0") == port("4711", "1") != port("4712", "0")
    assert 1024 < port("4711", "0") < 65536


def test_torchrun_comes_before_the_scheduler_it_runs_under() -> None:
    per_host = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}  # srun has started one torchrun on each of two machines
    place = find_launcher({**PLACES["Slurm"][0], **per_host, **PLACES["torchrun"][0]})
    assert place is not None
    assert place.launcher == "torchrun"


def test_nobody_started_us() -> None:
    assert find_launcher({}) is None
    assert find_launcher({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None
    assert "RANK" not in ENVIRON
