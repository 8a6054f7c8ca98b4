"""Sandblaster on real processes: equal bits to virtual workers, whoever is killed or stopped meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from hocket import HocketError, Sandblaster, WorkerLost
from hocket.cli.batch import train_on_batches
from hocket.cli.main import app
from hocket.cli.options import arguments
from hocket.data.base import DataSet, identity
from hocket.files import unsealed
from hocket.sandblaster import SandblasterRun
from hocket.train.settings import RunSettings
from process.launch import Nursery, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]


def task(**options: Any) -> Sandblaster:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()

    options = {"workers": 3, "shards": 2, "history": 4, "max_iter": 30, "exact": True, **options}
    return Sandblaster(model, F.cross_entropy, (x, y), (x, y), **options)


def flat(run: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def iteration(folder: Path) -> int:
    file = folder / "state.json"
    return json.loads(file.read_text())["state"]["iteration"] if file.exists() else -1


class Script:
    """What happens to the processes once an iteration is reached; each thing once."""

    def __init__(self, folder: Path, **acts: Callable[[Any], None]) -> None:
        self.folder, self.acts = folder, sorted((int(at.removeprefix("at_")), act) for at, act in acts.items())

    def __call__(self, supervisor: Any) -> None:
        while self.acts and iteration(self.folder) >= self.acts[0][0]:
            self.acts.pop(0)[1](supervisor)


def kill_coordinator(supervisor: Any) -> None:
    os.kill(supervisor.of("coordinator")[0].pid, signal.SIGKILL)


def kill_shard(supervisor: Any) -> None:
    os.kill(supervisor.of("shard")[1].pid, signal.SIGKILL)


def kill_shards(supervisor: Any) -> None:
    for shard in supervisor.of("shard"):
        os.kill(shard.pid, signal.SIGKILL)


def kill_both(supervisor: Any) -> None:
    kill_coordinator(supervisor)
    kill_shard(supervisor)


def kill_worker(supervisor: Any) -> None:
    os.kill(supervisor.of("worker")[1].pid, signal.SIGKILL)


def pause_workers(supervisor: Any) -> None:
    """For longer than the coordinator is patient."""
    alive = [w for w in supervisor.of("worker") if w.poll() is None]
    for worker in alive:
        os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(2.5)
    for worker in alive:
        os.kill(worker.pid, signal.SIGCONT)


def test_deaths_and_pauses_leave_the_bits_as_they_are(tmp_path: Path) -> None:
    job = task()
    expected = job.run()
    script = Script(tmp_path, at_2=kill_worker, at_6=pause_workers, at_12=kill_coordinator, at_16=pause_workers)
    pids: set[int] = set()

    def watch(supervisor: Any) -> None:
        pids.update(process.pid for process in supervisor.everyone)
        script(supervisor)

    run = job.launch(tmp_path, liveness_timeout_s=1.0, watch=watch)
    assert script.acts == []
    assert torch.equal(flat(run), flat(expected))
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in expected.metrics]
    assert (run.evaluations, run.ended, run.accuracy) == (expected.evaluations, expected.ended, expected.accuracy)
    assert run.total("lost") >= 3
    assert len(pids) == 1 + 2 + 3 + 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


DEATHS = {
    "by and by": {"at_0": kill_shard, "at_3": kill_both},
    "all at once": {"at_5": kill_shards},
}


def stop_shard(supervisor: Any) -> None:
    os.kill(supervisor.of("shard")[1].pid, signal.SIGSTOP)


def test_a_shard_that_is_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, usual = task(), Sandblaster.config
    monkeypatch.setattr(Sandblaster, "config", lambda self, **given: replace(usual(self, **given), shard_timeout_s=3.0))
    script = Script(tmp_path, at_4=stop_shard)
    run = job.launch(tmp_path, liveness_timeout_s=1.0, watch=script)
    assert script.acts == []
    assert torch.equal(flat(run), flat(job.run()))


@pytest.mark.parametrize("name", DEATHS)
def test_shards_that_are_killed_come_back_from_the_last_iteration(name: str, tmp_path: Path) -> None:
    job, acts, supervisors = task(max_iter=40), DEATHS[name], []
    script = Script(tmp_path, **acts)

    def watch(supervisor: Any) -> None:
        supervisors.append(supervisor)
        script(supervisor)

    expected = job.run()
    (tmp_path / "failure.json").write_text('{"kind": "WorkerLost", "sentence": "of a coordinator before"}')
    run = job.launch(tmp_path, watch=watch)
    assert script.acts == []
    assert len(acts) <= supervisors[0].times_restarted <= 3
    assert torch.equal(flat(run), flat(expected))
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in expected.metrics]


def test_both_worlds_tell_why_it_ended(tmp_path: Path) -> None:
    job = task(tolerance_change=1e9)
    assert job.launch(tmp_path).ended == job.run().ended == "the direction no longer descends"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_is_damaged_gives_way_to_the_iteration_before_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = task(max_iter=2)
    expected = flat(job.launch(tmp_path))
    last = iteration(tmp_path)
    for file in (tmp_path / f"shard-1-{last}.pt", tmp_path / "state.json"):
        flip(file)
        assert torch.equal(flat(job.launch(tmp_path)), expected)
        assert f"{file} is" in (said := capfd.readouterr().err)
        assert f"; the run goes on from iteration {last - 1}." in said
    flip(tmp_path / f"shard-1-{last}.pt")
    (tmp_path / "previous.json").write_text("{}")
    with pytest.raises(HocketError, match=r"missing or damaged .* cannot be resumed: choose another folder"):
        job.launch(tmp_path)


def test_a_run_that_was_stopped_goes_on_in_its_folder(tmp_path: Path) -> None:
    def stop(supervisor: Any) -> None:
        raise KeyboardInterrupt

    job = task(exact=False)
    with pytest.raises(KeyboardInterrupt):
        job.launch(tmp_path, watch=Script(tmp_path, at_4=stop))
    reached = iteration(tmp_path)
    run = job.launch(tmp_path)
    assert 4 <= reached < 30
    assert [row["iteration"] for row in run.metrics] == list(range(31))
    torch.testing.assert_close(flat(run), flat(job.run()), rtol=1e-6, atol=1e-8)
    assert run.total("bytes_shards") > 0
    with pytest.raises(HocketError, match="holds another run, with history=4"):
        task(exact=False, history=5).launch(tmp_path)


def test_without_a_shard_it_ends_with_a_sentence_that_can_be_followed(tmp_path: Path) -> None:
    job = task()
    with pytest.raises(WorkerLost, match="Shard 1 ended with code -9: start again with the same folder"):
        job.launch(tmp_path, restarts=0, watch=Script(tmp_path, at_4=kill_shard))
    reached = iteration(tmp_path)
    assert 4 <= reached < 30
    run = job.launch(tmp_path)
    assert [row["iteration"] for row in run.metrics] == list(range(31))
    assert torch.equal(flat(run), flat(job.run()))


def test_without_a_folder_it_does_not_promise_to_go_on() -> None:
    def kill(supervisor: Any) -> None:
        if len(rows) > 1:
            kill_shard(supervisor)

    rows: list[dict[str, Any]] = []
    with pytest.raises(WorkerLost, match="ended with code -9: start again, with a folder"):
        task().launch(restarts=0, watch=kill, on_iteration=rows.append)


# The command.


def points() -> DataSet:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    pair = x, (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()
    return DataSet("points", pair, pair, 2, identity)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2))


OPTIONS = {"optimizer": "sandblaster", "workers": 2, "lr": 1.0, "weight_decay": 1e-4, "exact": True}
OPTIONS |= {"data": "process.test_sandblaster:points", "model": "process.test_sandblaster:net"}
ITERATIONS = 40


def words(out: Path, *more: str, **options: Any) -> list[str]:
    settings = RunSettings.of(**{**OPTIONS, "epochs": ITERATIONS, **options})
    return ["train", *arguments(settings), "--out", str(out), *more]


def losses(out: Path) -> list[float]:
    """What ``metrics.jsonl`` tells, whenever it is read."""
    file = out / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [line["epoch"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def weights(out: Path, at: int) -> Tensor:
    return torch.cat([unsealed((out / "state" / f"shard-{i}-{at}.pt").read_bytes())["x"] for i in range(2)])


def test_a_command_that_was_killed_is_resumed_and_ends_at_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = nursery.command(words(killed), tmp_path / "said", Path.cwd())
    assert eventually(lambda: len(losses(killed)) > 3), first.said()
    os.kill(first.pid, signal.SIGKILL)
    assert first.ended().returncode == -9
    told, before = losses(killed), iteration(killed / "state")
    assert 3 < len(told) <= before + 1 <= ITERATIONS, "a line per iteration, as it happens"

    refused = {
        "holds a run already": words(killed),
        f"has epochs {ITERATIONS}, not 9; resume with the settings it had": words(killed, "--resume", epochs=9),
        "cluster shards 2, not 3": words(killed, "--resume", strategy="server(shards=3)"),
    }
    for sentence, line in refused.items():
        with pytest.raises(HocketError, match=sentence):
            app(line, standalone_mode=False)
    assert losses(killed) == told

    app(words(killed, "--resume"), standalone_mode=False)
    app(words(whole), standalone_mode=False)
    assert losses(killed) == losses(whole)
    assert losses(killed)[: len(told)] == told
    end = iteration(whole / "state")
    assert end == iteration(killed / "state") > before
    assert torch.equal(weights(killed, end), weights(whole, end))
    last = (json.loads((out / "metrics.jsonl").read_text().splitlines()[-1]) for out in (whole, killed))
    assert len({line["accuracy"] for line in last} - {None}) == 1


def told_loss(folder: str, output: Tensor, target: Tensor) -> Tensor:
    """Leaves a byte in a file of this process."""
    with open(f"{folder}/{os.getpid()}", "ab") as file:
        file.write(b".")
    return F.cross_entropy(output, target)


def test_a_slow_worker_computes_less_and_changes_no_bit(tmp_path: Path) -> None:
    pids: dict[int, int] = {}

    def watch(supervisor: Any) -> None:
        pids.update(enumerate(worker.pid for worker in supervisor.of("worker")))

    job = task(max_iter=10)
    expected = flat(job.run())
    job.loss = partial(told_loss, str(tmp_path))
    run = job.launch(watch=watch, slowdown=(1, 1000, 1))
    files = [tmp_path / str(pids[worker]) for worker in range(3)]
    computed = [len(file.read_bytes()) if file.exists() else 0 for file in files]
    assert 5 * computed[1] < computed[0] + computed[2]
    assert torch.equal(flat(run), expected)


def test_the_command_hands_its_slowdown_on(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[Any] = []

    def launch(self: Sandblaster, folder: Path | None, **options: Any) -> SandblasterRun:
        handed.append(options["slowdown"])
        return self.run()

    monkeypatch.setattr(Sandblaster, "launch", launch)
    train_on_batches(RunSettings.of(**{**OPTIONS, "workers": 3, "epochs": 1, "slowdown": "1,4"}), torch.device("cpu"), None, None)
    assert handed == [[1, 4, 1]]
    with pytest.raises(HocketError, match="real workers can only be made slower"):
        train_on_batches(RunSettings.of(**{**OPTIONS, "slowdown": "1,0.5"}), torch.device("cpu"), None, None)


RESUMED_IN_VAIN = {
    "nowhere": ({}, None, "--resume needs --out"),
    "nothing": ({}, "new", "There is no run in .*new to go on with"),
    "virtual": ({"virtual": True}, "new", "--resume: virtual workers of sandblaster"),
}


@pytest.mark.parametrize("name", RESUMED_IN_VAIN)
def test_what_cannot_be_resumed_is_refused(name: str, tmp_path: Path) -> None:
    options, folder, sentence = RESUMED_IN_VAIN[name]
    out = None if folder is None else tmp_path / folder
    with pytest.raises(HocketError, match=sentence):
        train_on_batches(RunSettings.of(**{**OPTIONS, **options}), torch.device("cpu"), None, out, resume=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--replace", "--liveness-timeout -1", "--snapshot -1", "--keys nofile", "--no-checkpoints"])
@pytest.mark.parametrize("where", ["--virtual", "--workers 2"])
def test_care_for_servers_is_refused(option: str, where: str) -> None:
    ended = CliRunner().invoke(app, ["train", "--optimizer", "sandblaster", "--epochs", "1", *option.split(), *where.split()])
    assert isinstance(ended.exception, HocketError), ended.output
    assert option.split()[0] in str(ended.exception)
    assert "leave" in str(ended.exception)


def test_what_cannot_be_sent_to_processes_is_refused(tmp_path: Path) -> None:
    job = task()
    job.loss = lambda out, y: F.cross_entropy(out, y)
    with pytest.raises(HocketError, match="can be sent to them"):
        job.launch(tmp_path)
