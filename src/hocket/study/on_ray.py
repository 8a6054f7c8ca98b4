"""The trainings of a study side by side, each a task on a machine of a Ray cluster.

A training of virtual workers takes one CPU, or one GPU; one of real workers as many CPUs as it has processes, on one machine. Ray
decides where and when. What a training leaves comes back through Ray and is written here, so machines need no folder in common.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hocket.drivers.ray_cluster import Tasks, check_room, connect
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.files import write_whole
from hocket.study.carry_out import Train, Watch
from hocket.study.plan import Study
from hocket.train.settings import RunSettings

_RETRIES = 3
"""How often Ray starts a training again whose machine or process died."""


@dataclass
class Result:
    """The results of a training: metrics, files by name, remarks, and its error, if it failed."""

    metrics: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None


class _Notes(Watch):
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def note(self, text: str) -> None:
        self._notes.append(text)


def result_of(train: Train, settings: RunSettings, briefly: bool) -> Result:
    """Train, and return the results, or the error. ``briefly``: without files."""
    result = Result()
    with tempfile.TemporaryDirectory(prefix="hocket-") as temporary:
        out = Path(temporary) / "run"
        try:
            result.metrics = list(train(settings, None if briefly else out, _Notes(result.notes)))
        except (HocketError, NonFiniteGradient, WorkerLost) as error:
            result.error = (type(error).__name__, str(error))
        except Exception as error:  # worded like errors of the study's own machine
            lines = str(error).strip().splitlines()
            result.error = ("HocketError", f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
        if out.is_dir():
            result.files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    return result


class RayTrainings:
    """Trains as :class:`~hocket.study.carry_out.Train` says, on a Ray cluster; several threads may call it."""

    def __init__(self, device: torch.device, data_dir: Path | None, task: Callable[..., Result]) -> None:
        """``task(settings, device, data_dir, briefly, folder)`` makes one training on the machine that Ray chose."""
        self._ray = connect()
        self._tasks = Tasks(self._ray)
        self._device, self._data_dir = device.type, None if data_dir is None else str(data_dir.resolve())
        self._remote = self._ray.remote(max_retries=_RETRIES)(task)
        self.stop = self._tasks.stop

    def check(self, study: Study) -> None:
        for planned in study.runs:
            check_room(self._ray, *self._room(planned.settings))

    def _room(self, settings: RunSettings) -> tuple[int, str, int]:
        workers = settings.workers
        cpus = 1 if workers.virtual else workers.count * settings.processes
        gpus = 1 if self._device == "cuda" else 0
        return cpus, f"A training of {settings.strategy} with {workers.count} {'virtual ' * workers.virtual}workers", gpus

    def __call__(self, settings: RunSettings, out: Path | None, watch: Watch) -> Sequence[dict[str, Any]]:
        cpus, _, gpus = self._room(settings)
        remote = self._remote.options(num_cpus=cpus, num_gpus=gpus, name=f"hocket {settings.strategy}").remote
        given = (settings.by_name(), self._device, self._data_dir, out is None, os.getcwd())
        result: Result = self._tasks.run(remote, *given)
        for text in result.notes:
            watch.note(text)
        if out is not None and result.files:
            out.mkdir(parents=True, exist_ok=True)
            for name, content in result.files.items():
                write_whole(out / name, content)
        if result.error is not None:
            kind, text = result.error
            raise {"NonFiniteGradient": NonFiniteGradient, "WorkerLost": WorkerLost}.get(kind, HocketError)(text)
        return result.metrics
