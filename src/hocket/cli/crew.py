"""Shards and workers of one run on this machine, started, watched and evaluated by this process.

Unlike torch's launcher it does not end all when one dies: a worker that is lost is reported (and replaced, where asked), a shard
that dies is started again from its snapshot. After every epoch this process fetches the global weights, evaluates and records them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.cluster.join import without_launcher
from hocket.data import load
from hocket.drivers.observer import Observer
from hocket.drivers.start import Child, address_of, end_child, start_shard
from hocket.errors import HocketError, NonFiniteGradient
from hocket.messages import Envelope, Keys
from hocket.models import build
from hocket.programs.account import entry_of, staleness_since
from hocket.programs.server.slices import Slices
from hocket.programs.server.wire import link_bytes
from hocket.train.checks import layout_for
from hocket.train.free_worker import WorkerTask, batch_sequence
from hocket.train.loop import Progress, accuracy_of
from hocket.train.record import Record
from hocket.train.replicas import swapped_weights
from hocket.train.run import Settings, describe_run
from hocket.train.runtimes.server import optimizer_spec_for
from hocket.train.simulate import seeded
from hocket.train.watch import check_weights

_MOST_RESTARTS = 10


@dataclass(frozen=True)
class Care:
    """How a crew deals with faults."""

    liveness_timeout_s: float = 10.0
    snapshot_s: float = 5.0
    replace: bool = False
    keys: Path | None = None
    record: Path | None = None
    """A folder for recordings of all that happens to workers and shards, to replay the run."""

    def record_of(self, process: str) -> Path | None:
        """The file of one process."""
        return None if self.record is None else self.record / f"{process}.jsonl"


class Told(Protocol):
    """Hears of workers that have died (``gone=worker``)."""

    def tell(self, **order: Any) -> None: ...


class Crew:
    """The processes of a run of ``settings``, and what becomes of it: ``metrics``."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        data_dir: Path | None,
        out: Path | None,
        care: Care = Care(),  # noqa: B008
    ) -> None:
        self.settings, self.device, self.data_dir, self.out, self.care = settings, device, data_dir, out, care
        self.strategy = settings.check()
        self.data = load(settings.data, data_dir)
        self.model = seeded(lambda: build(settings.model, self.data), settings.seed).to(device)
        optimizer = settings.make_optimizer(list(self.model.parameters()))
        self.layout = layout_for(self.model, optimizer, self.strategy, settings.bucket_cap_bytes, settings.first_bucket_cap_bytes)
        self.slices = Slices.of(self.strategy, self.layout, settings.workers)
        optimizer_spec_for(self.strategy, optimizer)  # refuses what shards cannot run
        self.sequence = batch_sequence(settings, self.data)
        self.epochs = -(-self.sequence.steps // len(self.sequence.partition))
        self.metrics: list[dict[str, Any]] = []
        self._most_bytes = link_bytes(self.strategy, self.layout)
        self._keys = None if care.keys is None else Keys.read(care.keys)
        self.record = None if out is None else Record(out, 0)
        self._job = secrets.token_bytes(16)
        self._folder: Path | None = None
        self._shards: list[Child] = []
        self._workers: dict[int, subprocess.Popen[str]] = {}
        self._dead: set[int] = set()
        self._addresses: list[str] = []
        self._restarts = self._replaced = 0
        self._before: dict[str, Any] = {"workers": {}, "ages": {}, "lost": 0}
        self._took = 0.0

    def run(self, watch: Callable[[Progress], None], on_epoch: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """Train to the end; no process is left behind, whatever happens."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="hocket-"))  # of our own making: it is removed at the end
            self._start()
            observer = Observer(self._addresses, self._job, self.layout, self.slices, self._most_bytes, self._keys)
            try:
                self._observe(observer, watch, on_epoch)
            finally:
                observer.close()
        finally:
            self._end()
        return self.metrics

    # --- processes -----------------------------------------------------------------------------------------------------------

    def _write_run(self, processes: int) -> None:
        if self.record is not None:
            where = {"kind": "processes", "workers": self.settings.workers, "processes": processes, "device": str(self.device)}
            where |= {"backend": "zeromq", "step_s": None}
            self.record.write_run(describe_run(self.settings, where, self.sequence.steps, self.layout))

    def _start(self) -> None:
        self._write_run(self.settings.workers + self.slices.shards)
        # All at once: what takes long is importing torch.
        self._shards = [self._shard(place, "tcp://127.0.0.1:0") for place in range(self.slices.shards)]
        for worker in range(self.settings.workers):
            self._workers[worker] = self._worker()
        self._addresses = [address_of(shard) for shard in self._shards]
        for worker in range(self.settings.workers):
            self._post(worker, replaces=False)

    def _shard(self, place: int, bind: str) -> Child:
        care = self.care
        return start_shard(
            place,
            self._job,
            bind,
            care.keys,
            care.liveness_timeout_s,
            self._folder,
            care.snapshot_s,
            self._most_bytes,
            stays=True,
            record=care.record_of(f"shard-{place}"),
        )

    def _worker(self) -> subprocess.Popen[str]:
        environ = without_launcher(os.environ)
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.settings.workers)))
        command = [sys.executable, "-m", "hocket.cli.crew_worker"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def _post(self, worker: int, replaces: bool) -> None:
        record = self.care.record_of(f"worker-{worker}")
        post = WorkerTask(
            asdict(self.settings),
            worker,
            self._addresses,
            self._job.hex(),
            self._device_of(worker),
            None if self.data_dir is None else str(self.data_dir),
            None if self.care.keys is None else str(self.care.keys),
            self.care.liveness_timeout_s,
            replaces,
            None if record is None else str(record),
        )
        pipe = self._workers[worker].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already; the next look at it says so
            pipe.write(json.dumps(post.describe()) + "\n")
            pipe.flush()

    def _device_of(self, worker: int) -> str:
        if self.device.type != "cuda":
            return str(self.device)
        return f"cuda:{worker % max(torch.cuda.device_count(), 1)}"

    def _tend(self, observer: Told) -> bool:
        """Look after everybody; True if a shard had to be started again."""
        for worker, process in list(self._workers.items()):
            code = process.poll()
            if code is None or worker in self._dead or code == 0:
                continue
            self._lose(worker, process, code, observer)
        again = False
        for place, shard in enumerate(self._shards):
            if shard.poll() is not None:
                self._restart(place, shard)
                again = True
        return again

    def _lose(self, worker: int, process: subprocess.Popen[str], code: int, observer: Told) -> None:
        told = _told(process)
        if told is not None:
            if told["kind"] == "NonFiniteGradient":
                raise NonFiniteGradient(told["error"])
            raise HocketError(told["error"])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._dead.add(worker)
        observer.tell(gone=worker)
        left = self.settings.workers - len(self._dead)
        self._replaced += self.care.replace
        if self._replaced > _MOST_RESTARTS:
            raise HocketError(
                f"Worker {worker} {how}: workers died again and again ({_MOST_RESTARTS} replaced); see their output above."
            )
        if self.care.replace:
            _say(f"worker {worker} {how}; another takes its place")
            self._dead.discard(worker)
            self._workers[worker] = self._worker()
            self._post(worker, replaces=True)
        elif left:
            _say(f"worker {worker} {how}; the others go on")
        else:
            raise HocketError(f"Worker {worker} {how}, and no worker is left; see their own output above.")

    def _restart(self, place: int, shard: Child) -> None:
        told = _told(shard)
        if told is not None:
            raise HocketError(told["error"])
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise HocketError(f"Shard {place} died again and again ({self._restarts} restarts); see its own output above.")
        end_child(shard)
        fresh = self._shards[place] = self._shard(place, self._addresses[place])
        try:
            address_of(fresh)
        except HocketError:
            if (fresh.returncode or 0) < 0:
                return  # killed again: the next look at it starts another
            raise
        found = "its snapshot" if self.care.snapshot_s > 0 else "what a worker has, for it had no snapshot"
        _say(f"shard {place} died and is back from {found}")

    def _end(self) -> None:
        for process in self._workers.values():
            if process.poll() is None:
                process.terminate()
        for process in self._workers.values():
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for shard in self._shards:
            shard.kill()
            end_child(shard)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- observing -----------------------------------------------------------------------------------------------------------

    def _observe(self, observer: Observer, watch: Callable[[Progress], None], on_epoch: Callable[[dict[str, Any]], None]) -> None:
        epoch, looked = 1, time.monotonic()
        observer.request_weights(epoch)
        while epoch <= self.epochs:
            over = all(process.poll() is not None for process in self._workers.values())
            first = observer.receive_weights(3.0 if over else 0.1)
            again = self._tend(observer)
            if first is None:
                if again or over:  # with all workers gone there is only what there is
                    observer.request_weights(epoch, waits=again)
                elif time.monotonic() - looked > 1.0:
                    looked = time.monotonic()
                    for worker in self._dead:  # a shard may have started, or started again, since it died
                        observer.tell(gone=worker, unseen=True)
                    self._progress(observer, epoch, watch)
                continue
            if self._epoch_ends(observer, first, epoch, on_epoch):
                epoch += 1
            if epoch <= self.epochs:
                observer.request_weights(epoch)

    def _progress(self, observer: Observer, epoch: int, watch: Callable[[Progress], None]) -> None:
        status = observer.status(0.2)
        if status is not None:
            watch(Progress(epoch - 1, self.epochs, int(status["progress"]) // self.settings.workers, self.sequence.steps))

    def _epoch_ends(self, observer: Observer, first: Envelope, epoch: int, on_epoch: Callable[[dict[str, Any]], None]) -> bool:
        """Evaluate and record an epoch; False when a shard did not answer."""
        found = observer.global_weights(first, epoch)
        if found is None:
            return False
        figures, before = first.note["figures"], self._before
        entry, loss = entry_of(figures["workers"], before["workers"])
        check_weights(self.layout, found[0], epoch)
        accuracy = self._evaluate(*found)
        took = max((w["seconds"] for w in figures["workers"].values()), default=0.0)
        metrics = {"epoch": epoch, "accuracy": accuracy, "loss": loss, **vars(entry), "wall_s": max(took - self._took, 0.0)}
        metrics["staleness"] = staleness_since(figures["ages"], before["ages"])
        metrics["lost"] = max(observer.lost - before["lost"], 0)
        self._before, self._took = {**figures, "lost": max(observer.lost, before["lost"])}, took
        self.metrics.append(metrics)
        if self.record is not None:
            self.record.write_metrics(self.metrics)
        on_epoch(metrics)
        return True

    def _evaluate(self, rows: list[Tensor], flat: Tensor | None) -> float | None:
        floating = {n: b for n, b in self.model.named_buffers() if b.is_floating_point()}
        parts = () if flat is None else flat.split([b.numel() for b in floating.values()])
        buffers = {n: part.view(b.shape).to(b) for (n, b), part in zip(floating.items(), parts, strict=False)}
        x, y = (t.to(self.device) for t in self.data.test)
        with swapped_weights(self.model, self.layout, [row.to(self.device) for row in rows], buffers):
            right, seen = accuracy_of(self.model, (x, y), self.data)
        return right / seen if seen else None


def _told(process: subprocess.Popen[str]) -> dict[str, str] | None:
    """The error that a process told before it ended."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and "error" in told:
            return {"kind": "HocketError", **told}
    return None


def _say(text: str) -> None:
    print(f"hocket: {text}.", file=sys.stderr, flush=True)
