"""What all supervised runs share: worker processes that are started, receive their task, are watched, and may be replaced."""

import contextlib
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.data import DataSet, load
from hocket.drivers.machines import Machines, ThisMachine
from hocket.drivers.processes import Role, Supervisor, how_ended, reported_error, say
from hocket.drivers.replay import describe_recording
from hocket.errors import HocketError, NonFiniteGradient, SettingError
from hocket.models import loss_for
from hocket.programs.account import data_of, entry_of, staleness_since, steps_of
from hocket.programs.server.optimizer_spec import shard_optimizer
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S, link_bytes
from hocket.supervisor.kept import Keeping, KeptWeights
from hocket.train.adaptive import with_exchange
from hocket.train.async_worker import WorkerTask, batch_sequence
from hocket.train.evaluate import Evaluation, Evaluator
from hocket.train.job import layout_for
from hocket.train.loop import Progress
from hocket.train.other_workers import optimizer_names
from hocket.train.record import Record
from hocket.train.replicas import swapped_weights
from hocket.train.run import describe_run, repeated
from hocket.train.settings import RunSettings
from hocket.train.trial import check_own
from hocket.train.watch import check_weights
from hocket.transport import Keys

Watch = Callable[[Progress], None]
OnEpoch = Callable[[dict[str, Any]], None]
Evaluate = Callable[[list[Tensor], Tensor | None], Evaluation | float | None]
"""Of weights ``[1, values]`` per bucket and of flat floating-point buffers: an evaluation, or only the accuracy, or None."""
WORKER = "worker"
_LEAVE_S = 20.0


@dataclass(frozen=True)
class FaultPolicy:
    """A worker that is silent for ``liveness_timeout_s`` is given up; shards take a snapshot every ``snapshot_s`` (0: never)."""

    liveness_timeout_s: float = LIVENESS_TIMEOUT_S
    snapshot_s: float = SNAPSHOT_S
    replace: bool = False
    """Whether another worker is started for one that died."""
    keys: Path | None = None
    """A file made by ``hocket keys``: links are encrypted."""
    record: Path | None = None
    """A folder for recordings of the events of workers and shards, to replay the run."""

    def __post_init__(self) -> None:
        if self.snapshot_s < 0 or self.liveness_timeout_s <= 0:
            given = {"liveness_timeout_s": f"{self.liveness_timeout_s:g}", "snapshot_s": f"{self.snapshot_s:g}"}
            text = "<liveness_timeout_s>, <snapshot_s>: seconds are above 0 (<snapshot_s:0>: no snapshots)."
            raise SettingError(text, **given)

    def record_of(self, process: str) -> Path | None:
        return None if self.record is None else self.record / f"{process}.jsonl"


def shown(
    model: nn.Module, layout: Layout, rows: list[Tensor], flat: Tensor | None, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """``model`` with these weights and flat floating-point buffers, for a while."""
    floating = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    parts = () if flat is None else flat.split([b.numel() for b in floating.values()])
    buffers = {n: part.view(b.shape).to(b) for (n, b), part in zip(floating.items(), parts, strict=False)}
    return swapped_weights(model, layout, [row.to(device) for row in rows], buffers)


def evaluator(model: nn.Module, layout: Layout, data: DataSet, device: torch.device) -> Evaluate:
    """Evaluates a model on the test set of ``data``, with the loss of the training."""
    evaluator = Evaluator(data, loss_for(data))

    def evaluate(rows: list[Tensor], flat: Tensor | None) -> Evaluation:
        if data.test is None:
            return Evaluation()
        x, y = (t.to(device) for t in data.test)
        with shown(model, layout, rows, flat, device):
            return evaluator.evaluation(evaluator.tally(model, (x, y)))

    return evaluate


class EpochMetrics:
    """A line per epoch, from figures that only grow: ``workers`` (accounts), ``staleness`` and counts by name.

    Those of a run that goes on follow the ``lines`` of the epochs before it.
    """

    def __init__(
        self, record: Record | None, tokens: Callable[[int], dict[str, int]], lines: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.lines = list(lines)
        self.before, self._record, self._tokens = list(lines), record, tokens
        self._before: dict[str, Any] = {"workers": {}, "staleness": {}}
        self._took = 0.0

    def add(
        self, epoch: int, found: Evaluation | float | None, figures: Mapping[str, Any], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """The line of an epoch that has ended with these figures; it is also written to the record."""
        before, workers = self._before, figures["workers"]
        entry, loss = entry_of(workers, before["workers"])
        took = max((account["seconds"] for account in workers.values()), default=0.0)
        evaluation = found if isinstance(found, Evaluation) else Evaluation(accuracy=found)
        line = {"epoch": len(self.before) + epoch, **evaluation.line(loss), **vars(entry), "wall_s": max(took - self._took, 0.0)}
        line |= {"step_times": steps} if (steps := steps_of(workers)) else {}
        line |= self._tokens(len(self.before) + epoch - 1) | data_of(workers, before["workers"])
        line["staleness"] = staleness_since(figures["staleness"], before["staleness"])
        totals = {name: max(count, before.get(name, 0)) for name, count in counts.items()}
        line |= {name: total - before.get(name, 0) for name, total in totals.items()}
        self._before, self._took = {"workers": workers, "staleness": figures["staleness"], **totals}, took
        self.lines.append(line)
        if self._record is not None:
            self._record.write_metrics(self.lines)
        return line


class SupervisedRun(ABC):
    """A run on processes of one machine or several; :func:`~hocket.supervisor.prepare` says what the arguments mean."""

    def __init__(
        self,
        settings: RunSettings,
        device: torch.device,
        data_dir: Path | None = None,
        out: Path | None = None,
        policy: FaultPolicy = FaultPolicy(),  # noqa: B008 - it is frozen
        evaluate: Evaluate | None = None,
        keeping: Keeping = Keeping(),  # noqa: B008 - it is frozen
        machines: Machines | None = None,
    ) -> None:
        self.machines = machines or ThisMachine()
        self.settings, self.device, self.data_dir, self.policy = settings, device, data_dir, policy
        self.strategy = settings.strategy
        data = load(settings.data.name, data_dir)
        self.model = settings.build(data).to(device)
        optimizer = settings.optimizer_for(self.model)(list(self.model.parameters()))
        buckets = settings.buckets
        self.layout = layout_for(self.model, optimizer, self.strategy, buckets.cap_bytes, buckets.first_cap_bytes)
        with_exchange(self.strategy, optimizer)  # warns of compressions that hurt this optimiser
        shard_optimizer(self.strategy, optimizer)  # refuses optimisers that shards cannot run
        self._record = None if out is None else Record(out, 0, keeping.resume)
        self._kept = (
            None if out is None else KeptWeights(out, keeping, self.strategy, self.layout, optimizer_names(self.model, optimizer))
        )
        before: list[dict[str, Any]] = []
        if self._kept is not None and self._record is not None:
            before = self._kept.load(self.model, self._record, repeated(settings), settings.workers.count)
        self.metrics = EpochMetrics(self._record, lambda epoch: self.sequence.tokens(epoch, data), before)
        self.sequence = batch_sequence(settings, data, len(before))
        self.epochs = -(-(self.sequence.steps - self.sequence.begun) // len(self.sequence.partition))
        self.evaluate = evaluate or evaluator(self.model, self.layout, data, device)
        check_own(settings.model, data, settings.data.batch_size, self.model)
        self.keys = None if policy.keys is None else Keys.read(policy.keys)
        self.job, self.max_bytes = secrets.token_bytes(16), link_bytes(self.strategy, self.layout)
        self.supervisor = Supervisor([Role(WORKER, settings.workers.count, self._start_worker), *self.server_roles()])
        self.addresses: list[str] = []
        """Where workers find the shards, or the coordinator."""
        self.dead: set[int] = set()
        """Workers that have died and were not replaced."""

    @property
    def description(self) -> str:
        """The processes of the run, in words."""
        return f"{self.settings.workers.count} workers"

    def train(self, watch: Watch = lambda _: None, on_epoch: OnEpoch = lambda _: None) -> list[dict[str, Any]]:
        """Train to the end: a line of metrics per epoch. No process is left behind, whatever happens."""
        with self.supervisor, contextlib.nullcontext() if self._kept is None else self._kept.checkpoints:
            self._write_run()
            if self.epochs > 0:
                self._train(watch, on_epoch)
                self._await_workers()
        return self.metrics.lines

    def close_epoch(
        self, epoch: int, rows: list[Tensor], flat: Tensor | None, figures: Mapping[str, Any], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Evaluate and keep the global weights of an epoch: ``[1, values]`` per bucket, and flat buffers; its line of metrics."""
        check_weights(self.layout, rows, epoch)
        line = self.metrics.add(epoch, self.evaluate(rows, flat), figures, counts)
        if self._kept is not None:
            with shown(self.model, self.layout, rows, flat, self.device):
                done = min(len(self.metrics.lines) * len(self.sequence.partition), self.sequence.steps)
                self._kept.save(self.model.state_dict(), self.metrics.lines, done, self._described())
                if self._record is not None and epoch == self.epochs and self._kept.keeping.checkpoints:
                    self._record.write_weights(self.model.state_dict())
        return line

    def server_roles(self) -> list[Role]:
        """Processes beside the workers."""
        return []

    @abstractmethod
    def _train(self, watch: Watch, on_epoch: OnEpoch) -> None:
        """Start all processes, and see the run to its end."""

    @abstractmethod
    def _worker_gone(self, worker: int) -> None:
        """Report a dead worker to the processes that may wait for it."""

    def check_workers(self) -> None:
        """Handle workers that have ended: replace them, or end the run."""
        for worker, code in self.supervisor.ended(WORKER).items():
            if code != 0 and worker not in self.dead:
                self._lose(worker, code)

    def assign(self, worker: int) -> None:
        """Send a worker's process its task."""
        data_dir, keys, record = (
            None if path is None else str(path)
            for path in (self.data_dir, self.policy.keys, self.policy.record_of(f"worker-{worker}"))
        )
        place = self.machines.of_worker(worker, self.settings.workers.count)
        shared = self.device.type == "cuda" and not self.machines.assigns_gpus
        device = f"cuda:{worker % max(torch.cuda.device_count(), 1)}" if shared else str(self.device)
        where = (self.addresses, self.job.hex(), device, data_dir, keys, self.policy.liveness_timeout_s)
        incarnation = self.supervisor.incarnations[WORKER, worker]
        weights = None if self._kept is None or incarnation else self._kept.weights  # a replacement takes them from the others
        begun: dict[str, Any] = {"epochs_done": len(self.metrics.before), "weights": weights, "bind": self.machines.bind(place)}
        if self._kept is not None and self._kept.keeps_states:
            begun |= {"states": str(self._kept.files.folder), "run": self._kept.files.run}
        if self._kept is not None and not incarnation:
            begun["begins"] = self._kept.begins
        task = WorkerTask(self.settings.by_name(), worker, *where, incarnation, record, **begun)
        pipe = self.supervisor.process(WORKER, worker).stdin
        with contextlib.suppress(BrokenPipeError):  # it has died already, which the next check reports
            pipe.write(json.dumps(task.describe()) + "\n")
            pipe.flush()

    def _lose(self, worker: int, code: int) -> None:
        if failure := reported_error(self.supervisor.process(WORKER, worker)):
            raise (NonFiniteGradient if failure["kind"] == "NonFiniteGradient" else HocketError)(failure["error"])
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
            raise HocketError(f"Worker {worker} {how}, and it was the last worker; see the workers' own output above.")

    def _await_workers(self) -> None:
        """Workers that record write how they ended when they leave, and others their state after the last epoch."""
        writes = self.policy.record is not None or (self._kept is not None and self._kept.keeps_states)
        deadline = time.monotonic() + (_LEAVE_S if writes else 0.0)
        while time.monotonic() < deadline and None in self.supervisor.codes(WORKER).values():
            time.sleep(0.05)

    def _start_worker(self, worker: int, incarnation: int) -> Any:
        workers = self.settings.workers.count
        threads = str(max(1, (os.cpu_count() or 1) * self.machines.count // workers))
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        return self.machines.start(self.machines.of_worker(worker, workers), ["-m", "hocket.supervisor.worker_process"], environ)

    def _write_run(self) -> None:
        if self.policy.record is not None:
            shards = sum(role.count for role in self.server_roles())
            data_dir = None if self.data_dir is None else str(self.data_dir)
            facts = {"settings": self.settings.by_name(), "shards": shards, "device": str(self.device), "data_dir": data_dir}
            describe_recording(self.policy.record, "train", **facts)
        if self._record is not None:
            self._record.write_run(self._described())
        if self._kept is not None:
            self._kept.prepare()

    def _described(self) -> dict[str, Any]:
        """The content of run.json."""
        processes = sum(role.count for role in self.supervisor.roles.values())
        where = {"kind": "processes", "workers": self.settings.workers.count, "processes": processes}
        where |= {"device": str(self.device), "backend": "zeromq", "step_s": None}
        resumed = {} if self._kept is None or not self._kept.resumed else {"resumed": self._kept.resumed}
        return {**describe_run(self.settings, where, self.sequence.steps, self.layout), **resumed}
