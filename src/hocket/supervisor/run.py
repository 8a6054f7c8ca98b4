"""What all supervised runs share: worker processes that are started, get their task, are watched, and may be replaced."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hocket.cluster.join import without_launcher
from hocket.data import load
from hocket.drivers.replay import describe_recording
from hocket.errors import HocketError, NonFiniteGradient
from hocket.models import build
from hocket.programs.server.optimizer_spec import shard_optimizer
from hocket.programs.server.wire import link_bytes
from hocket.supervisor.evaluation import EpochMetrics, Evaluate, Evaluator
from hocket.supervisor.policy import FaultPolicy
from hocket.supervisor.processes import Role, Supervisor, error_told, how_ended, say
from hocket.train.free_worker import WorkerTask, batch_sequence
from hocket.train.job import layout_for
from hocket.train.loop import Progress
from hocket.train.record import Record
from hocket.train.run import describe_run
from hocket.train.settings import RunSettings
from hocket.train.simulate import seeded
from hocket.transport import Keys

Watch = Callable[[Progress], None]
OnEpoch = Callable[[dict[str, Any]], None]
WORKER = "worker"
_LEAVE_S = 20.0


def ignore(_: Any) -> None:
    """Nobody watches."""


class SupervisedRun(ABC):
    """A run of ``settings`` on processes of this machine; ``out`` is the folder for run.json and metrics.jsonl.

    ``evaluate`` is called with the global weights after every epoch (default: the accuracy on the test set).
    """

    def __init__(
        self,
        settings: RunSettings,
        device: torch.device,
        data_dir: Path | None = None,
        out: Path | None = None,
        policy: FaultPolicy = FaultPolicy(),  # noqa: B008 - it is frozen
        evaluate: Evaluate | None = None,
    ) -> None:
        self.settings, self.device, self.data_dir, self.policy = settings, device, data_dir, policy
        self.strategy = settings.strategy
        data = load(settings.data.name, data_dir)
        self.model = seeded(lambda: build(settings.model, data), settings.seed).to(device)
        optimizer = settings.make_optimizer(list(self.model.parameters()))
        buckets = settings.buckets
        self.layout = layout_for(self.model, optimizer, self.strategy, buckets.cap_bytes, buckets.first_cap_bytes)
        shard_optimizer(self.strategy, optimizer)  # refuses what shards cannot run
        self.sequence = batch_sequence(settings, data)
        self.epochs = -(-self.sequence.steps // len(self.sequence.partition))
        self.evaluate = Evaluator(self.model, self.layout, data, device) if evaluate is None else evaluate
        self.keys = None if policy.keys is None else Keys.read(policy.keys)
        self.job, self.max_bytes = secrets.token_bytes(16), link_bytes(self.strategy, self.layout)
        self._record = None if out is None else Record(out, 0)
        self.metrics = EpochMetrics(self._record)
        self.supervisor = Supervisor([Role(WORKER, settings.workers.count, self._start_worker), *self.server_roles()])
        self.addresses: list[str] = []
        """Where workers find the shards, or the coordinator."""
        self.dead: set[int] = set()
        """Workers that have died and were not replaced."""

    # --- for users -----------------------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """Which processes there are."""
        return f"{self.settings.workers.count} workers"

    def train(self, watch: Watch = ignore, on_epoch: OnEpoch = ignore) -> list[dict[str, Any]]:
        """Train to the end: a line of metrics per epoch. No process is left behind, whatever happens."""
        with self.supervisor:
            self._write_run()
            self._train(watch, on_epoch)
            self._await_recordings()
        return self.metrics.lines

    # --- for kinds of runs ---------------------------------------------------------------------------------------------------

    def server_roles(self) -> list[Role]:
        """Processes beside the workers."""
        return []

    @abstractmethod
    def _train(self, watch: Watch, on_epoch: OnEpoch) -> None:
        """Start all processes, and see the run to its end."""

    @abstractmethod
    def _worker_gone(self, worker: int) -> None:
        """Tell those who may wait for it that a worker has died."""

    # --- workers -------------------------------------------------------------------------------------------------------------

    def check_workers(self) -> None:
        """Look after workers that have ended."""
        for worker, code in self.supervisor.ended(WORKER).items():
            if code != 0 and worker not in self.dead:
                self._lose(worker, code)

    def assign(self, worker: int) -> None:
        """Tell a worker's process what to do."""
        record = self.policy.record_of(f"worker-{worker}")
        task = WorkerTask(
            self.settings.by_name(),
            worker,
            self.addresses,
            self.job.hex(),
            self._device_of(worker),
            None if self.data_dir is None else str(self.data_dir),
            None if self.policy.keys is None else str(self.policy.keys),
            self.policy.liveness_timeout_s,
            self.supervisor.incarnations[WORKER, worker],
            None if record is None else str(record),
        )
        pipe = self.supervisor.process(WORKER, worker).stdin
        with contextlib.suppress(BrokenPipeError):  # it has died already; the next check says so
            pipe.write(json.dumps(task.describe()) + "\n")
            pipe.flush()

    def _lose(self, worker: int, code: int) -> None:
        told = error_told(self.supervisor.process(WORKER, worker))
        if told is not None:
            if told["kind"] == "NonFiniteGradient":
                raise NonFiniteGradient(told["error"])
            raise HocketError(told["error"])
        how = how_ended(code)
        self.dead.add(worker)
        self._worker_gone(worker)
        if self.policy.replace:
            self.supervisor.restart(WORKER, worker)
            say(f"worker {worker} {how}; another takes its place")
            self.dead.discard(worker)
            self.assign(worker)
        elif len(self.dead) < self.settings.workers.count:
            say(f"worker {worker} {how}; the others go on")
        else:
            raise HocketError(f"Worker {worker} {how}, and no worker is left; see their own output above.")

    def _await_recordings(self) -> None:
        """Workers that record write how they ended when they leave."""
        deadline = time.monotonic() + (0.0 if self.policy.record is None else _LEAVE_S)
        while time.monotonic() < deadline and None in self.supervisor.codes(WORKER).values():
            time.sleep(0.05)

    def _start_worker(self, worker: int, incarnation: int) -> subprocess.Popen[str]:
        environ = without_launcher(os.environ)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.settings.workers.count)))
        command = [sys.executable, "-m", "hocket.supervisor.worker_process"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def _device_of(self, worker: int) -> str:
        if self.device.type != "cuda":
            return str(self.device)
        return f"cuda:{worker % max(torch.cuda.device_count(), 1)}"

    def _write_run(self) -> None:
        if self.policy.record is not None:
            shards = sum(role.count for role in self.server_roles())
            data_dir = None if self.data_dir is None else str(self.data_dir)
            facts = {"settings": self.settings.by_name(), "shards": shards, "device": str(self.device), "data_dir": data_dir}
            describe_recording(self.policy.record, "train", **facts)
        if self._record is not None:
            processes = sum(role.count for role in self.supervisor.roles.values())
            where = {
                "kind": "processes",
                "workers": self.settings.workers.count,
                "processes": processes,
                "device": str(self.device),
            }
            where |= {"backend": "zeromq", "step_s": None}
            self._record.write_run(describe_run(self.settings, where, self.sequence.steps, self.layout))
