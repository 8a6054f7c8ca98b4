"""Sandblaster on real processes: equal bits to virtual workers, whoever is killed or stopped meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket import HocketError, Sandblaster, WorkerLost

pytestmark = [pytest.mark.process, pytest.mark.slow]


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

    def __call__(self, company: Any) -> None:
        while self.acts and iteration(self.folder) >= self.acts[0][0]:
            self.acts.pop(0)[1](company)


def kill_coordinator(company: Any) -> None:
    os.kill(company.coordinator.pid, signal.SIGKILL)


def kill_worker(company: Any) -> None:
    os.kill(company.workers[1].pid, signal.SIGKILL)


def pause_workers(company: Any) -> None:
    """For longer than the coordinator is patient."""
    alive = [w for w in company.workers if w.exitcode is None]
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

    def watch(company: Any) -> None:
        pids.update(process.pid for process in company.everyone)
        script(company)

    run = job.launch(tmp_path, patience_s=1.0, watch=watch)
    assert script.acts == []
    assert torch.equal(flat(run), flat(expected))
    assert [row["loss"] for row in run.metrics] == [row["loss"] for row in expected.metrics]
    assert (run.evaluations, run.ended, run.accuracy) == (expected.evaluations, expected.ended, expected.accuracy)
    assert run.total("lost") >= 3
    assert len(pids) == 1 + 2 + 3 + 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_run_that_was_stopped_goes_on_in_its_folder(tmp_path: Path) -> None:
    def stop(company: Any) -> None:
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


def test_without_a_shard_it_ends_with_a_sentence(tmp_path: Path) -> None:
    script = Script(tmp_path, at_1=lambda company: os.kill(company.shards[1].pid, signal.SIGKILL))
    with pytest.raises(WorkerLost, match="Shard 1 ended with code -9: start again"):
        task().launch(tmp_path, watch=script)


def test_what_cannot_be_sent_to_processes_is_refused(tmp_path: Path) -> None:
    job = task()
    job.loss = lambda out, y: F.cross_entropy(out, y)
    with pytest.raises(HocketError, match="can be sent to them"):
        job.launch(tmp_path)
