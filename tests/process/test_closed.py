"""A run on one machine is reached by nobody else, shows no secret, leaves nothing behind, and ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from hocket.cluster.join import _launcher_process, find_launcher
from hocket.drivers.processes import SHARD
from hocket.drivers.start import JOB, start_shard
from hocket.supervisor import FaultPolicy, prepare, servers
from hocket.train.settings import RunSettings
from process.closed import listening
from process.launch import Nursery, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
TRAIN = ["train", "--data", "digits", "--model", "mlp", "--epochs", "2", "--workers", "2", "--max-steps", "4"]


@pytest.mark.parametrize(
    "options", [["bulk"], ["async + server(2)"], ["async + gossip"], ["bulk", "--elastic", "1:2"]], ids=" ".join
)
def test_no_other_machine_reaches_a_run_on_this_one_and_nothing_stays(options: list[str], nursery: Nursery, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    seen: set[str] = set()
    with nursery.command([*TRAIN, "--strategy", *options], tmp_path / "said", tmp_path, {"TMPDIR": str(temporary)}) as run:

        def over() -> bool:
            for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    seen.update(listening(process.pid))
            return run.poll() is not None

        assert eventually(over, 120), run.said()
        assert run.ended().returncode == 0, run.said()
    assert seen, "it listened nowhere"
    assert seen <= LOOPBACK
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []  # that is torch's own


def test_processes_of_a_launcher_listen_on_loopback(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.closed:where", 2, tmp_path)
    assert group.wait(60) == [0, 0], group.said()
    for result in group.results():
        assert result["everyone"] == [0.0, 1.0]
        assert set(result["listens"]) <= LOOPBACK


def test_the_doctor_of_one_machine_listens_on_loopback(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.doctors:examined", 2, tmp_path, arguments=["--json"], fault="listens")
    assert group.wait(60) == [0, 0], group.said()
    for rank in (0, 1):
        listens = set((tmp_path / f"{rank}.listens").read_text().split())
        assert listens, "it listened nowhere"
        assert listens <= LOOPBACK


def test_processes_on_several_machines_want_keys_or_a_closed_network(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.closed:where", 2, tmp_path, {"MASTER_ADDR": "192.0.2.7"})  # a machine that there is not
    assert 0 not in group.wait(60)
    for rank in (0, 1):
        assert "anyone who reaches 192.0.2.7 could take part: make keys with `hocket keys FILE`" in group.said(rank)


def test_the_id_of_a_job_does_not_stand_in_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda arguments, env, **_: started.append((arguments, env)))
    job = bytes(range(100, 116))
    start_shard(0, job, "tcp://127.0.0.1:0", None, 10.0)
    ((arguments, environ),) = started
    assert not any(job.hex() in argument for argument in arguments)
    assert environ[JOB] == job.hex()


def test_a_killed_study_leaves_no_training_behind(nursery: Nursery, tmp_path: Path) -> None:
    study = tmp_path / "one.toml"
    study.write_text('workers = 2\nepochs = 100000\nmodel = "mlp"\nvirtual = false\nstrategies = ["bulk"]\n')
    out = tmp_path / "out"
    arguments = ["study", str(study), "--device", "cpu", "--out", str(out), "--max-steps", "1000000"]
    run = nursery.command(arguments, tmp_path / "said", tmp_path)
    assert eventually(lambda: run.poll() is not None or any(out.glob("runs/*/metrics.jsonl")), 120), run.said()
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 3, "a launcher and two workers"
    os.kill(run.pid, signal.SIGKILL)
    assert eventually(lambda: run.poll() is not None)
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


def test_a_stopped_shard_is_replaced_from_its_snapshot(
    forked: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "_SILENCE_S", 4.0)
    settings = RunSettings.of(strategy="async + server", workers=2, data="digits", model="mlp", epochs=2)
    run = prepare(settings, policy=FaultPolicy(liveness_timeout_s=1.0, snapshot_s=0.2))
    stopped: list[int] = []

    def stop(_: Any) -> None:
        if not stopped:
            stopped.append(run.supervisor.process(SHARD, 0).pid)
            os.kill(stopped[0], signal.SIGSTOP)

    late = threading.Timer(100.0, lambda: os.kill(stopped[0], signal.SIGCONT))
    late.start()
    try:
        metrics = run.train(on_epoch=stop)
    finally:
        late.cancel()
    assert len(metrics) == 2
    said = capfd.readouterr().err
    assert "shard 0 has not answered for" in said
    assert "shard 0 died and is back from its snapshot" in said


# --- ports ---------------------------------------------------------------------------------------------------------------------


def test_two_steps_of_an_allocation_have_two_ports() -> None:
    def port(step: str, rank: str) -> int:
        told = {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": step}
        place = find_launcher(told)
        assert place is not None
        return place.port

    assert port("0", "0") == port("0", "1") != port("1", "0")


def test_two_jobs_of_mpich_have_two_ports_whatever_wraps_their_programs() -> None:
    """MPICH names no job; what starts the processes of one is their nearest ancestor without a rank."""
    script = "PMI_RANK=0 sh -c 'sleep 100; true' & PMI_RANK=1 sleep 100 & wait"
    jobs = [subprocess.Popen(["sh", "-c", script], start_new_session=True) for _ in range(2)]
    try:
        for job in jobs:
            ranks = psutil.Process(job.pid).children
            assert eventually(lambda ranks=ranks: len(ranks(recursive=True)) == 3)  # type: ignore[misc]
            assert {_launcher_process("PMI_RANK", process.pid) for process in ranks(recursive=True)} == {job.pid}
        told = {"PMI_RANK": "0", "PMI_SIZE": "2"}
        here = find_launcher(told)
        assert here is not None
        assert here.job == f"MPICH {os.getppid()}"
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
