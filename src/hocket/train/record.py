"""What a run leaves behind: run.json, metrics.jsonl and checkpoints. Files appear whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from hocket.errors import HocketError, SettingError
from hocket.strategy import Strategy
from hocket.version import __version__

_MAY_CHANGE = ("epochs", "max_steps", "mesh", "pipe", "micro", "cut", "virtual_stages", "measure", "plan")
"""How long a run is, and how its model is split."""


class CannotWrite(SettingError):
    """No space left, or no leave to write: what was written before is whole."""

    def __init__(self, what: str, error: OSError) -> None:
        self.cause = f"Cannot {what} ({error.strerror})"
        self.remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see that it can be written"
        super().__init__(f"{self.cause}; what was written before is whole: {self.remedy} and go on with <resume:True>.")


class Record:
    """The folder of one run, written by the process that hosts worker 0 (checkpoints: by every process)."""

    def __init__(self, folder: Path, process: int, resume: bool = False) -> None:
        self.folder, self.process = folder, process
        if process == 0:
            if (folder / "run.json").exists() and not resume:
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
            write_whole(self.folder / "run.json", (json.dumps(run, indent=2) + "\n").encode())

    def write_metrics(self, metrics: list[dict[str, Any]]) -> None:
        """One line per epoch."""
        if self.process == 0:
            write_whole(self.folder / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in metrics).encode())

    def write_timeline(self, timeline: dict[str, Any] | None) -> None:
        """When every stage of a pipeline did what in the last mini-batch."""
        if self.process == 0 and timeline is not None:
            write_whole(self.folder / "timeline.json", (json.dumps(timeline) + "\n").encode())

    def save(self, state: dict[str, Any]) -> None:
        """This process's checkpoint."""
        _write_state(self._checkpoint, state)

    def save_whole(self, state: dict[str, Any] | None) -> None:
        """The model put together again, written by whoever has it of the first replica."""
        if self.process == 0 and state is not None:
            _write_state(self.folder / "whole.pt", state)

    def load_whole(self) -> dict[str, Any]:
        """The same for a run on any mesh, or on none."""
        if self.mesh() is not None:
            return self._read(self.folder / "whole.pt")
        state = self._read(self.folder / "checkpoint-0.pt")
        replica = state.pop("replicas")
        if not {"model", "optimizer"} <= set(replica):
            raise HocketError(f"The run in {self.folder} had virtual workers; only one of real workers can go on as a split one.")
        return {**state, "model": replica["model"], "optimizer": replica["optimizer"]}

    def mesh(self) -> str | None:
        """That of the run so far."""
        path = self.folder / "run.json"
        return json.loads(path.read_text()).get("mesh") if path.exists() else None

    def check_resumed(self, settings: dict[str, Any], may_change: Collection[str] = _MAY_CHANGE) -> None:
        """Refuse to go on with other settings than the run was started with (it may be made longer, or split otherwise)."""
        path = self.folder / "run.json"
        if not path.exists():
            raise SettingError(f"There is no run in {self.folder} to go on with; start without <resume>.")
        before = json.loads(path.read_text())
        for name, value in settings.items():
            same = _meaning(name, before.get(name)) == _meaning(name, value)
            if name not in may_change and not same:
                raise HocketError(
                    f"The run in {self.folder} has {_apart(name, before.get(name), value)}; resume with the settings it had."
                )

    def load(self, first: bool = False) -> dict[str, Any]:
        """This process's checkpoint, or the first one's, where that holds everything."""
        return self._read(self.folder / "checkpoint-0.pt" if first else self._checkpoint)

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise SettingError(f"There is no checkpoint {path}; start without <resume>.")
        try:
            return dict(torch.load(path, weights_only=True, map_location="cpu"))
        except Exception as error:
            raise SettingError(f"The checkpoint {path} is damaged ({type(error).__name__}); start without <resume>.") from None

    @property
    def _checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.process}.pt"


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


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise  # an interruption
        raise CannotWrite(f"write {path}", error) from None


def _write_state(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, buffer.getvalue())


def versions() -> dict[str, str]:
    """What the run ran on."""
    return {
        "hocket": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
    }
