"""Real processes, each with a disk of its own: a checkpoint counts when all of them have it whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.data import load
from hocket.files import read_safetensors, unsealed
from hocket.train.checks import layout_for
from hocket.train.settings import RunSettings
from hocket.train.worker_states import StateFiles
from process.launch import Hocket, Nursery, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def found(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    before = tmp_path_factory.mktemp("dies")
    dies = nursery.start("process.kept:dies", 2, before)
    assert dies.wait(60)[1] == -9, dies.said()
    assert sorted(p.name for p in Path(before, "killed", "disk-1", "checkpoints", "3").iterdir()) == ["process-1.pt.tmp"]
    group = nursery.start("process.kept:main", 2, tmp_path_factory.mktemp("kept"), before=str(before))
    assert group.wait(100, together=True) == [0, 0], group.said()
    return group.results()


@pytest.mark.parametrize("name", ["killed", "flipped", "left"])
def test_a_run_goes_on_from_the_newest_that_is_whole_and_ends_at_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for worker in found:
        assert all(torch.equal(a, b) for a, b in zip(worker[name]["weights"], worker["whole"]["weights"], strict=True))
        kept = {"killed": ["4", "5"], "flipped": ["5", "6"], "left": ["4", "5"]}
        assert worker[name]["kept"] == kept[name], "no number is used twice"


def test_all_leave_after_the_same_step_in_the_middle_of_an_epoch(found: list[dict[str, Any]]) -> None:
    assert [[worker["left"]["facts"][name] for name in ("epoch", "step", "taken")] for worker in found] == [[1, 7, 2]] * 2


def test_a_command_that_is_told_to_leave_ends_well_and_goes_on_later(nursery: Nursery, tmp_path: Path) -> None:
    arguments = ["train", "--workers", "2", "--data", "digits", "--model", "mlp", "--batch-size", "1", "--device", "cpu"]
    arguments += ["--strategy", "bulk + topk(0.2)", "--out", str(tmp_path / "run")]
    with nursery.command([*arguments, "--epochs", "200"], tmp_path / "said", tmp_path) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert eventually(metrics.exists), command.group.said()
        os.kill(command.pid, signal.SIGTERM)
        done = command.ended(60)
    assert done.returncode == 0, done.stderr
    assert "signal SIGTERM: all workers have left, and --resume goes on from the newest checkpoint" in done.stderr
    newest = max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    facts = json.loads((newest / "manifest.json").read_bytes())["facts"]
    assert f"all workers leave; checkpoint {newest.name} (epoch {facts['epoch']}, step {facts['step']}" in done.stderr
    assert facts["taken"] > 0
    epochs = len(metrics.read_text().splitlines()) + 1
    with nursery.command([*arguments, "--epochs", str(epochs), "--resume"], tmp_path / "then", tmp_path) as command:
        done = command.ended(100)
    assert done.returncode == 0, done.stderr
    assert f"Goes on from checkpoint {newest.name}" in done.stderr
    assert [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()] == list(range(1, epochs + 1))


def test_it_says_which_and_why_on_the_first_process_alone(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert not second["killed"]["said"] + second["flipped"]["said"] + second["full"]["said"]
    assert "Goes on from checkpoint 2 (epoch 2, step " in first["killed"]["said"][0]
    assert "Checkpoint 3 is passed over: process 0 was not finished." in first["killed"]["said"][0]
    assert "Goes on from checkpoint 1 (epoch 1, step " in first["flipped"]["said"][0]
    why = "Checkpoint 3 is passed over: process 1 has a damaged process-1.pt (its checksum does not match)."
    assert why in first["flipped"]["said"][0]


def test_a_full_disk_on_one_process_costs_that_checkpoint_alone(found: list[dict[str, Any]]) -> None:
    assert found[0]["full"]["said"] == [
        "Checkpoint 2 was not saved: process 1 cannot write process-1.pt (No space left on device); "
        "checkpoint 1 is the newest, and training goes on."
    ]
    assert [worker["full"]["kept"] for worker in found] == [["1", "3"]] * 2


@pytest.mark.parametrize("strategy", ["async + server", "async + gossip"])
def test_a_run_of_messages_goes_on_after_its_last_epoch_with_other_workers(hocket: Hocket, tmp_path: Path, strategy: str) -> None:
    base = ["train", "--strategy", strategy, "--batch-size", "150", "--device", "cpu", "--out", str(tmp_path / "run")]
    for epochs, workers, more in ((1, 2, []), (3, 1 if "server" in strategy else 3, ["--resume"])):
        ended = hocket(*base, "--epochs", str(epochs), "--workers", str(workers), *more)
        assert ended.returncode == 0, ended.stderr
    assert "Goes on from checkpoint 1 (epoch 1, step " in ended.stderr
    assert f"2 workers become {workers}" in ended.stderr
    assert "epoch 2 begins at its first sample" in ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] < lines[1]["loss"] < lines[0]["loss"], "it did not begin anew"
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "3"]
    newest = tmp_path / "run" / "checkpoints" / "3" / "model.safetensors"
    assert newest.read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def test_workers_on_servers_hand_on_what_they_have_not_sent_yet(hocket: Hocket, tmp_path: Path) -> None:
    """Gradients are clipped to nothing, so residuals alone move the weights: what is sent and what is left are the sum before."""
    out, lr = tmp_path / "run", 0.1
    base = ["train", "--strategy", "async + server(2) + topk(0.02)", "--clip", "1e-30", "--lr", str(lr), "--momentum", "0"]
    base += ["--lr-schedule", "constant", "--batch-size", "200", "--device", "cpu", "--out", str(out)]

    def owed(epoch: int) -> list[list[torch.Tensor | None]]:
        paths = sorted((out / "workers").glob(f"worker-*-{epoch}.pt"))
        return [unsealed(path.read_bytes())["residuals"] for path in paths]

    def weights() -> torch.Tensor:
        named = read_safetensors((out / "model.safetensors").read_bytes())
        return torch.cat([named[name].flatten().double() for name in names])

    ended = hocket(*base, "--epochs", "1", "--workers", "2")
    assert ended.returncode == 0, ended.stderr
    settings = RunSettings.of(strategy="async + server(2) + topk(0.02)")
    model = settings.build(load("digits"))
    layout = layout_for(model, settings.optimizer_for(model)(list(model.parameters())), settings.strategy)
    names = [slot.name for bucket in layout.buckets for slot in bucket.slots]
    assert len(owed(1)) == 2
    run = unsealed((out / "workers" / "worker-0-1.pt").read_bytes())["run"]
    files = StateFiles(out / "workers", run)
    for worker in range(2):
        rows: list[torch.Tensor | None] = [torch.randn(b.size, generator=torch.manual_seed(worker)) / 50 for b in layout.buckets]
        files.write(worker, 1, layout, rows, {})
    for epoch, before, workers in ((2, 2, 3), (3, 3, 2)):
        then, sums = weights(), _sum(owed(epoch - 1))
        ended = hocket(*base, "--epochs", str(epoch), "--workers", str(workers), "--resume")
        assert ended.returncode == 0, ended.stderr
        done = f"{before} workers become {workers}: each begins with one part of {workers} of the sum of the residuals; "
        assert done in ended.stderr
        assert len(owed(epoch)) == workers
        left = _sum(owed(epoch))
        assert 0 < left.norm() < 0.95 * sums.norm()
        torch.testing.assert_close(weights(), then - lr * (sums - left), rtol=1e-4, atol=1e-5)
    assert [each["epoch"] for each in json.loads((out / "run.json").read_text())["resumed"]] == [1, 2]


def _sum(owed: list[list[torch.Tensor | None]]) -> torch.Tensor:
    """What workers owe together, flat."""
    return torch.stack([torch.cat([row.double() for row in rows if row is not None]) for rows in owed]).sum(0)


@pytest.fixture(scope="module")
def stopped(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What two workers of a loop of their own did, and what the one did that went on from them."""
    folder = tmp_path_factory.mktemp("stopped")
    group = nursery.start("process.kept:stops", 2, folder)
    assert group.wait(60, together=True) == [0, 0], group.said()
    alone = nursery.start("process.kept:goes_on", 1, folder / "alone", before=str(folder))
    assert alone.wait(60) == [0], alone.said()
    return group.results(), alone.results()[0]


def test_a_job_is_stateful_and_each_worker_gets_its_own_state_from_a_distributed_checkpoint(stopped: Any) -> None:
    workers, _ = stopped
    for worker in workers:
        assert worker["stateful"]
        assert worker["loaded"] == worker["saved"]
    assert workers[0]["saved"] != workers[1]["saved"], "residuals differ between workers"


def test_an_epoch_goes_on_with_fewer_workers_behind_its_last_sample(stopped: Any) -> None:
    workers, alone = stopped
    seen = [sample for each in (*workers, alone) for sample in each["samples"]]
    assert len(alone["samples"]) < len(seen)
    assert sorted(seen) == list(range(50))
    assert torch.equal(alone["weights"], torch.stack([w["weights"] for w in workers]).double().mean(0).float())
    assert alone["step"] == 3
    assert alone["hosts"] == [2], "it merges by the hosts of those that saved"
    assert "process 1" in alone["sentence"], "the state of another process is not taken for one's own"
