"""The files of a run other than its checkpoints: run.json, metrics.jsonl, the mean model. Files appear whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError, SettingError
from hocket.files import safetensors, write_whole
from hocket.strategy import Strategy
from hocket.version import __version__

CHECKPOINTS, METRICS, WEIGHTS, STATES = "checkpoints", "metrics.jsonl", "model.safetensors", "workers"
MAY_CHANGE = ("epochs", "max_steps", "workers", "virtual", "mesh", "pipe", "micro", "cut", "virtual_stages", "measure", "plan")
"""How long a run is, how many workers it has, and how its model is split."""
ELSEWHERE = ("spec", "slowdown", "host_size")
"""What may change, too, where virtual workers become real ones, or real ones virtual."""


class Record:
    """The folder of one run, written by the process that hosts worker 0."""

    def __init__(self, folder: Path, process: int, resume: bool = False) -> None:
        self.folder, self.process = folder, process
        if process == 0:
            if not resume and any((folder / name).exists() for name in ("run.json", CHECKPOINTS)):
                raise SettingError(f"{folder} holds a run already; choose another folder, or go on with it (<resume:True>).")
            if resume:
                return  # the folder is there, or `check_resumed` says so
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HocketError(f"Cannot make the folder {folder} ({error.strerror}); choose another folder.") from None

    def write_run(self, run: dict[str, Any]) -> None:
        """Everything needed to repeat the run."""
        if self.process == 0:
            self._write("run.json", (json.dumps(run, indent=2) + "\n").encode())

    def write_metrics(self, metrics: list[dict[str, Any]]) -> None:
        """One line per epoch."""
        if self.process == 0:
            self._write(METRICS, "".join(json.dumps(m) + "\n" for m in metrics).encode())

    def write_timeline(self, timeline: dict[str, Any] | None) -> None:
        """When every stage of a pipeline did what in the last mini-batch."""
        if self.process == 0 and timeline is not None:
            self._write("timeline.json", (json.dumps(timeline) + "\n").encode())

    def write_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The mean model."""
        if self.process == 0:
            self._write(WEIGHTS, safetensors(weights, {"format": "pt"}))

    def _write(self, name: str, content: bytes) -> None:
        if not self.folder.is_dir():  # an elastic run that others start is recorded by whoever is its first worker now
            self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, content, f".{os.getpid()}")  # after a loss two may be the first for a moment

    def read_run(self) -> dict[str, Any] | None:
        """run.json; None where it is missing or damaged."""
        try:
            found = json.loads((self.folder / "run.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def check_resumed(self, before: Mapping[str, Any], settings: dict[str, Any], may_change: Collection[str] = ()) -> None:
        """Refuse to go on with other settings than the run ``before`` was started with (it may be made longer, or split
        otherwise)."""
        for name, value in settings.items():
            same = _meaning(name, before.get(name)) == _meaning(name, value)
            if name not in may_change and not same:
                raise HocketError(
                    f"The run in {self.folder} has {_apart(name, before.get(name), value)}; resume with the settings it had."
                )


def _meaning(name: str, value: Any) -> Any:
    """A setting as it is compared: runs recorded before strategies named what they exchange may go on, too."""
    try:
        return Strategy.parse(value).meaning if name == "strategy" else value
    except HocketError:
        return value


def _apart(name: str, there: Any, here: Any) -> str:
    """In what a setting differs; of two clusters the first field that does.

    >>> _apart("seed", 1, 0), _apart("spec", {"jitter": 0.1}, {"jitter": 0.0}), _apart("spec", None, {"name": "1gbit"})
    ('seed 1, not 0', 'spec jitter 0.1, not 0.0', "spec None, not '1gbit'")
    """
    if isinstance(there, dict) and isinstance(here, dict):
        field = next(key for key in here if there.get(key) != here[key])
        return f"{name} {field} {there.get(field)!r}, not {here[field]!r}"
    named = [value.get("name") if isinstance(value, dict) else value for value in (there, here)]
    return f"{name} {named[0]!r}, not {named[1]!r}"


def versions() -> dict[str, str]:
    """The versions of the software that the run used."""
    return {
        "hocket": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
    }
