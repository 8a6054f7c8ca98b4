"""The files of a study: study.json, a folder per run, and rates.json with the learning rates that were tried.

A run's folder holds run.json and metrics.jsonl as ``hocket train`` leaves them. run.json has ``finished`` or ``failure`` when the
run has ended, ``rate`` where its learning rate was searched for, and ``outer`` where rate and momentum of its outer optimiser were.
A run that was interrupted has none of them, and starts again.
"""

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hocket.errors import HocketError
from hocket.files import CannotWrite, write_whole
from hocket.study.plan import EACH, Planned, Study, assign_folders
from hocket.train.record import versions
from hocket.train.settings import RunSettings


@dataclass(frozen=True)
class Outcome:
    """A run that has ended: its run.json and its epochs, or why it failed."""

    planned: Planned
    run: Mapping[str, Any]
    metrics: tuple[dict[str, Any], ...]
    failure: str | None = None
    lr: float | None = None
    """The learning rate it was trained with; None if it failed before one was chosen."""


class Folder:
    """The folder of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lrs = threading.Lock()  # runs of a study may go on side by side

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Hold a lock on the folder, which child processes inherit."""
        self._refuse_others()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise HocketError(f"Cannot make the folder {self.path} ({error.strerror}); choose another folder.") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HocketError(f"Another process runs the study in {self.path}; wait for it or choose another folder.") from None
            except OSError as error:
                raise HocketError(f"Cannot lock the folder {self.path} ({error.strerror}); choose another folder.") from None
            yield handle
        finally:
            os.close(handle)

    def _refuse_others(self) -> None:
        if not self.path.is_dir() or (self.path / "study.json").exists():
            return
        if others := sorted(p.name for p in self.path.iterdir() if p.name != ".lock"):
            few = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            raise HocketError(f"{self.path} holds no study, but {few}; choose an empty or a new folder.")

    def begin(self, study: Study, command: str = "") -> Study:
        """Write study.json, or resume the study in the folder; returns it with the folders of its runs."""
        path = self.path / "study.json"
        before = self._load(path) if path.exists() else {}
        if path.exists():
            study = replace(study, runs=assign_folders(study.runs, self._folders(before, study)))
        self._refuse_others()
        content = {
            "title": study.title,
            "preset": study.preset,
            "command": command,
            "within": study.within,
            "notes": list(study.notes),
            "runs": [{"folder": r.folder, "settings": r.described()} for r in study.runs],
            "versions": before.get("versions", versions()),
        }
        if {**before, "command": command} != content:
            _write(path, content)
        return study

    def outcome(self, planned: Planned) -> Outcome | None:
        """The outcome of a run, if it has ended."""
        place = self.path / planned.folder
        try:
            run = json.loads((place / "run.json").read_bytes())
            lines = (place / "metrics.jsonl").read_text().splitlines() if (place / "metrics.jsonl").exists() else []
            metrics = tuple(json.loads(line) for line in lines)
        except (OSError, ValueError):
            return None
        failure = run.get("failure")
        if not failure and not (run.get("finished") and metrics):
            return None
        lr = run.get("lr")
        return Outcome(planned, run, metrics, failure, lr if isinstance(lr, (int, float)) else None)

    def clear(self, planned: Planned) -> Path:
        """An empty folder for a run that starts again."""
        place = self.path / planned.folder
        shutil.rmtree(place, ignore_errors=True)
        return place

    def finish(self, planned: Planned, searched: Mapping[str, Any] | None) -> Outcome:
        run = json.loads((self.path / planned.folder / "run.json").read_bytes())
        return self._end(planned, {**run, "finished": True}, searched)

    def fail(self, planned: Planned, failure: str, searched: Mapping[str, Any] | None) -> Outcome:
        """Record that a run has failed; its finished epochs are kept."""
        place = self.path / planned.folder
        try:
            run = json.loads((place / "run.json").read_bytes())
        except (OSError, ValueError):
            lr = searched["rate"]["chosen"] if searched and "rate" in searched else planned.described()["lr"]
            run = {**planned.described(), "lr": lr, "versions": versions()}
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"make the folder {place}", error) from None
        return self._end(planned, {**run, "failure": failure}, searched)

    def _end(self, planned: Planned, run: dict[str, Any], searched: Mapping[str, Any] | None) -> Outcome:
        _write(self.path / planned.folder / "run.json", {**run, **(searched or {})})
        outcome = self.outcome(planned)
        assert outcome is not None
        return outcome

    def lrs(self) -> dict[str, dict[str, Any]]:
        """The learning rates tried so far, by the settings they were tried for."""
        path = self.path / "rates.json"
        return self._load(path) if path.exists() else {}

    def keep_lrs(self, what: str, found: Mapping[str, Any]) -> None:
        """Save the learning rates tried for ``what``, so that no search is repeated."""
        with self._lrs:
            _write(self.path / "rates.json", {**self.lrs(), what: found})

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise HocketError(f"{path} cannot be read ({type(error).__name__}); choose another folder.") from None
        if not isinstance(content, dict):
            raise HocketError(f"{path} is not a JSON object, so it is no study; choose another folder.")
        return content

    def _folders(self, before: Mapping[str, Any], study: Study) -> dict[str, str]:
        """The folders of the existing runs by their settings; refuses the files of a different study."""
        defaults = RunSettings().recorded()
        try:
            there = [({**defaults, **run["settings"]}, str(run["folder"])) for run in before["runs"]]
        except (KeyError, TypeError):
            raise HocketError(f"{self.path}/study.json is damaged; choose another folder.") from None
        # A run's folder is emptied before the run starts again: only folders that a study creates may be.
        strange = next((folder for _, folder in there if not re.fullmatch(r"runs/\w[\w.-]*", folder, re.ASCII)), None)
        if strange is not None:
            raise HocketError(f"{self.path}/study.json names a folder {strange!r} that no study makes; choose another folder.")
        here = [run.described() for run in study.runs]
        missing = [settings for settings, _ in there if settings not in here]
        if missing:
            raise HocketError(_differs(self.path, missing, [s for s, _ in there], here))
        return {repr(next(h for h in here if h == settings)): folder for settings, folder in there}


def _differs(path: Path, missing: list[dict[str, Any]], there: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    new = [settings for settings in here if settings not in there]
    if not new:
        named = "{strategy} with {workers} workers and seed {seed}".format(**missing[0])
        return (
            f"{path} holds a study of {len(there)} runs, of which this one leaves out {len(missing)}, such as {named}; "
            "ask for all of them, or choose another folder."
        )

    def differences(other: dict[str, Any]) -> list[str]:
        return [name for name in missing[0] if missing[0][name] != other.get(name)]

    nearest = min(new, key=lambda other: (len(differences(other)), [n in EACH for n in differences(other)]))
    words = [f"{name} is {missing[0][name]!r} there and {nearest.get(name)!r} here" for name in differences(nearest)[:3]]
    return f"{path} holds another study: {', '.join(words)}; choose another folder."


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
