"""What launchers say, where they contradict each other or the options, and processes that agents start for a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hocket.cli.launchers import check_launcher, check_machines, check_options, refuse_launched
from hocket.cluster.join import find_launcher
from hocket.cluster.launchers import announced
from hocket.drivers import machines as machines_file
from hocket.drivers import store_agents
from hocket.drivers.machines import LOST, Agent, Fixed
from hocket.drivers.processes import reported_error
from hocket.drivers.shard_process import check_snapshot
from hocket.drivers.store_agents import OwnProcess, StoreAgent, StoreMachines, job_secret
from hocket.errors import HocketError, WorkerLost
from hocket.programs.server.shard_server import ShardServer
from hocket.study.carry_out import Data, Watch
from hocket.study.folder import Folder
from hocket.study.plan import Planned, Study
from hocket.study.side_by_side import carry_out_side_by_side, grouped
from hocket.supervisor import FaultPolicy, together
from hocket.train.settings import RunSettings

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
STEP = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}

# --- what launchers say ---------------------------------------------------------------------------------------------------------


def test_two_launchers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(
        HocketError, match=r"Open MPI says that this is process 1 of 4, and Slurm says .* process 2 of 4; .* unset SLURM_PROCID"
    ):
        announced({**OPEN_MPI, **STEP})
    with pytest.raises(HocketError, match="Two launchers at once: torchrun"):  # four torchruns of one machine each, one per task
        announced({**TORCHRUN, "LOCAL_WORLD_SIZE": "4", **STEP})


@pytest.mark.parametrize(
    "environ, launcher",
    [
        ({**TORCHRUN, **STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "torchrun"),  # srun starts one torchrun per machine
        ({**TORCHRUN, "WORLD_SIZE": "3", **STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "torchrun"),  # two here, one there
        ({**OPEN_MPI, **SCRIPT}, "Open MPI"),  # mpirun in a batch script
        ({**OPEN_MPI, **STEP, "SLURM_NTASKS": "3"}, "Open MPI"),  # mpirun's helpers on other machines are started by srun
        ({**OPEN_MPI, **STEP, "SLURM_PROCID": "1"}, "Open MPI"),  # the same said twice
        (STEP, "Slurm"),
    ],
)
def test_a_launcher_inside_another_counts(environ: dict[str, str], launcher: str) -> None:
    found = announced(environ)
    assert found is not None
    assert found.launcher == launcher


def test_a_batch_script_that_srun_did_not_start_is_one_process() -> None:
    assert announced(SCRIPT) is None


@pytest.mark.parametrize("node, here", [("0", 2), ("1", 2), ("2", 1)])
def test_slurm_lists_tasks_by_node(node: str, here: int) -> None:
    found = announced({**STEP, "SLURM_NTASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": node})
    assert found is not None
    assert found.per_host == here


def test_variables_that_no_launcher_sets_are_refused() -> None:
    with pytest.raises(HocketError, match=r"RANK=x, WORLD_SIZE=2: torchrun sets whole numbers here"):
        announced({"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(HocketError, match="numbered from 0 to 1"):
        announced({"PMI_RANK": "2", "PMI_SIZE": "2"})


def test_mpi_on_several_machines_needs_the_first_ones_address() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(HocketError, match="set MASTER_ADDR to the first machine's name"):
        find_launcher(several)
    found = find_launcher({**several, "MASTER_ADDR": "node1"})
    assert found is not None
    assert (found.address, found.one_host) == ("node1", False)


def test_options_that_contradict_the_launcher_are_refused() -> None:
    found = find_launcher(TORCHRUN)
    with pytest.raises(HocketError, match=r"--processes 2: torchrun has started 4 processes; leave --processes out"):
        check_options(found, RunSettings.of(workers=4), 2)
    with pytest.raises(HocketError, match=r"--workers 2: torchrun has started 4 processes"):
        check_options(found, RunSettings.of(workers=2), None)
    with pytest.raises(HocketError, match="torchrun has started 4 of them: start it once"):
        refuse_launched(TORCHRUN, "hocket study", "start it once")
    with pytest.raises(HocketError, match="Two launchers at once: --launcher ray, and torchrun"):
        check_launcher("ray", TORCHRUN)
    with pytest.raises(HocketError, match="--launcher kubernetes: use ray"):
        check_launcher("kubernetes", {})


def test_messages_between_machines_need_keys_and_are_not_recorded() -> None:
    settings, several = RunSettings.of(strategy="async + server", workers=2), Fixed(["a", "b"])
    check_machines(Fixed(["a", "a"]), settings, FaultPolicy())
    with pytest.raises(HocketError, match=r"async \+ server.* between 2 machines, and messages between machines need keys"):
        check_machines(several, settings, FaultPolicy())
    with pytest.raises(HocketError, match="--record writes on one machine"):
        check_machines(several, settings, FaultPolicy(keys=Path("k"), record=Path("r")))


# --- agents ---------------------------------------------------------------------------------------------------------------------

ECHO = (
    "import sys, os; print(os.environ['COLOUR'], flush=True); print(sys.stdin.readline().upper(), end='', flush=True); sys.exit(3)"
)


SECRET = b"only the job's"


class Agents:
    """A supervisor's machines, and the agent of a second process in a thread."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.second = StoreAgent(self.store, 1, "127.0.0.1", SECRET)
        self.machines = StoreMachines(self.store, 2, StoreAgent(self.store, 0, "127.0.0.1", SECRET).agent, SECRET)
        self.thread = threading.Thread(target=self.second.serve)

    def __enter__(self) -> StoreMachines:
        self.thread.start()
        return self.machines

    def __exit__(self, *_: object) -> None:
        self.machines.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


def test_an_agents_process_is_as_a_child_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreAgent, "_carry_out", carry_out_any)
    with Agents() as machines:
        assert not machines.several
        for place in (0, 1):
            process = machines.start(place, ["-c", ECHO], {"COLOUR": "blue"})
            assert process.poll() is None
            assert process.stdout.readline() == "blue\n"
            process.stdin.write("hello\n")
            assert process.wait(30) == 3
            assert list(process.stdout) == ["HELLO\n"]
        told = machines.start(1, ["-c", 'print(\'{"error": "no"}\')'], {})
        told.wait(30)
        assert reported_error(told) == {"kind": "HocketError", "error": "no"}
        for place in (0, 1):
            killed = machines.start(place, ["-c", "import time; time.sleep(100)"], {})
            killed.kill()
            assert killed.wait(30) == -signal.SIGKILL
        left = machines.start(1, ["-c", "import time; time.sleep(100)"], {})
        folder = machines.places[1].folder
        assert os.path.isdir(folder)
    assert not os.path.exists(folder), "an agent leaves no folder"
    assert left.poll() in (None, -signal.SIGKILL)


def carry_out_any(self: StoreAgent, what: str, *arguments: Any) -> bool:
    """Also programs that are no process of a run."""
    if what != "end":
        getattr(self.agent, what)(*arguments)
    return what == "end"


@pytest.mark.parametrize(
    "secret, module, refusal",
    [(b"a stranger's", "hocket.drivers.shard_process", "not signed"), (SECRET, "this", "no process of a run")],
)
def test_an_agent_starts_nothing_but_what_the_first_process_has_signed(secret: bytes, module: str, refusal: str) -> None:
    store = dist.HashStore()
    agent = StoreAgent(store, 1, "127.0.0.1", SECRET)
    machines = StoreMachines(store, 1, StoreAgent(store, 0, "127.0.0.1", SECRET).agent, secret)
    machines.order(1, "start", "1-0", ["-m", module], {})
    with pytest.raises(HocketError, match=refusal):
        agent.serve()
    assert agent.agent.names() == []
    machines.close()


def test_the_secret_of_a_job_on_one_machine_is_its_users(tmp_path: Path) -> None:
    store = dist.HashStore()
    with job_secret(store, 0, None) as secret, job_secret(store, 1, None) as other:
        assert secret == other
        path = Path(store.get("secret").decode())
        path.chmod(0o644)
        with pytest.raises(HocketError, match="not the secret file of a job of this user"), job_secret(store, 1, None):
            pass
        (empty := tmp_path / "hocket-empty").touch(0o600)
        for known in (empty, Path("/proc/self/personality")):  # a file whose content others know
            store.set("secret", str(known))
            with pytest.raises(HocketError, match="not the secret file of a job of this user"), job_secret(store, 1, None):
                pass
    assert not path.exists()


@pytest.mark.parametrize("order", [("start", "w", ["-m", "hocket.drivers.shard_process"], {"LD_PRELOAD": "x"}), ("shutdown",)])
def test_an_agent_sets_no_other_variables_and_calls_no_other_methods(order: tuple[Any, ...]) -> None:
    with pytest.raises(HocketError, match=r"Process 1 received the (command to set LD_PRELOAD|unknown command shutdown)"):
        StoreAgent(dist.HashStore(), 1, "127.0.0.1", SECRET)._carry_out(*order)


def test_processes_of_a_silent_agent_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_agents, "SILENCE_S", 0.3)
    monkeypatch.setattr(store_agents, "_BEAT_S", 0.05)
    monkeypatch.setattr(store_agents, "_LEAVE_S", 0.1)
    store = dist.HashStore()
    silent = StoreAgent(store, 1, "127.0.0.1", SECRET)
    machines = StoreMachines(store, 2, StoreAgent(store, 0, "127.0.0.1", SECRET).agent, SECRET)
    try:
        process = machines.start(1, ["-c", "pass"], {})  # nobody carries it out
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() == LOST
    finally:
        machines.close()
        silent.agent.shutdown()


class _Two(Fixed):
    """Two places of one agent, which runs a program in place of a worker."""

    def __init__(self) -> None:
        super().__init__(["here", "there"])
        self.agent, self.processes = Agent("127.0.0.1"), []

    def free_port(self) -> int:
        return 1

    def start(self, place: int, arguments: Any, environ: Any) -> OwnProcess:
        self.processes.append(OwnProcess(self.agent, str(place)))
        self.agent.start(str(place), list(arguments), dict(environ))
        return self.processes[-1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("print('rank', rank)", None),
        (
            "sys.exit(3) if rank == '1' else time.sleep(60)",
            (WorkerLost, "Worker 1 ended with exit code 3, and the others were ended"),
        ),
        ("rank == '1' and print('{\"error\": \"Too few.\"}'); sys.exit(1)", (HocketError, "Too few")),
    ],
)
def test_workers_that_run_together_end_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, wrong: Any
) -> None:
    monkeypatch.setattr(together, "_SETTLE_S", 0.3)
    machines: Any = _Two()
    try:
        with contextlib.nullcontext() if wrong is None else pytest.raises(wrong[0], match=wrong[1]):
            together.run_together(machines, ["-c", f"import os, sys, time; rank = os.environ['RANK']; {program}"])
        assert None not in [process.returncode for process in machines.processes]
    finally:
        machines.agent.shutdown()
    assert capsys.readouterr().out == ("rank 0\n" if wrong is None else "")


def test_a_process_that_an_earlier_agent_started_is_lost() -> None:
    agent = machines_file.Agent("127.0.0.1")
    try:
        assert agent.look("0-0") == (LOST, [])
    finally:
        agent.shutdown()


def test_a_snapshot_is_checked_without_copying_the_driver() -> None:
    """That of a listener with keys has threads, which cannot be copied."""
    server = ShardServer(0, 10.0, 5.0, True)
    server.transport_rejected = threading.Lock().acquire  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it says of nothing, it is not about the lock
        check_snapshot(server, {})
    assert "pickle" not in str(caught.value)


# --- studies side by side ------------------------------------------------------------------------------------------------------


class Training:
    """Trains nothing, but two at a time: each waits for another one."""

    def __init__(self) -> None:
        self.together = threading.Barrier(2, timeout=30)
        self.stopped = threading.Event()

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> list[dict[str, Any]]:
        self.together.wait()
        assert out is not None
        out.mkdir(parents=True)
        line = {"epoch": 1, "loss": float(settings.seed), "accuracy": 0.5}
        (out / "run.json").write_text(json.dumps({"seed": settings.seed, "lr": 0.1}))
        (out / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        watch.note("the same remark")
        return [line]


def study(seeds: int) -> Study:
    runs = [Planned(f"runs/s{seed}", RunSettings.of(virtual=True, seed=seed)) for seed in range(seeds)]
    return Study("Seeds", tuple(runs))


def test_runs_of_a_study_go_on_side_by_side_and_are_not_repeated(tmp_path: Path) -> None:
    class Notes(Watch):
        notes: list[str] = []  # noqa: RUF012
        ended: list[int] = []  # noqa: RUF012

        def note(self, text: str) -> None:
            self.notes.append(text)

        def end(self, number: int, outcome: Any) -> None:
            self.ended.append(number)

    folder, watch, planned = Folder(tmp_path), Notes(), study(4)
    for _ in range(2):
        outcomes = carry_out_side_by_side(folder, planned, Data(), Training(), lambda: None, watch)
        assert [outcome.run["seed"] for outcome in outcomes] == [0, 1, 2, 3]
    assert sorted(watch.ended) == [0, 1, 2, 3]
    assert watch.notes == ["the same remark"]


def test_an_interrupted_run_of_several_is_not_a_failed_one(tmp_path: Path) -> None:
    training = Training()

    def interrupted(settings: RunSettings, out: Path | None, watch: Watch) -> list[dict[str, Any]]:
        if settings.seed == 0:
            raise KeyboardInterrupt
        assert training.stopped.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out_side_by_side(Folder(tmp_path), study(2), Data(), interrupted, training.stopped.set, Watch())
    assert not list(tmp_path.rglob("run.json"))


def test_runs_with_one_search_go_one_after_another() -> None:
    runs = dict(enumerate(study(4).runs))
    assert grouped(runs, lambda run: None) == [[0], [1], [2], [3]]
    assert grouped(runs, lambda run: "rate" if run.settings.seed % 2 else None) == [[0], [1, 3], [2]]


@pytest.mark.skipif("ray" in sys.modules, reason="Ray is loaded")
def test_without_ray_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from hocket.drivers.ray_cluster import import_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HocketError, match=r"pip install 'hocket\[ray\]'"):
        import_ray()
