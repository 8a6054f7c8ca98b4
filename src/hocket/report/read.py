"""Find runs and studies under folders and read their files: run.json, metrics.jsonl, timeline.json, study.json.

No file is trusted: a damaged one becomes a note in the report, not an error, if at least one run can be read.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hocket.errors import HocketError
from hocket.split.mesh import Mesh
from hocket.split.pipeline.schedules import Action
from hocket.split.pipeline.timeline import KINDS, Span, Timeline

_LARGEST = 1e100
LARGEST_TIMELINE = 16 * 2**20
"""In bytes."""
_MOST_PROCESSES, _MOST_DRAWN = 64, 2000
_MOST_NUMBER, _LONGEST_S = 10**6, 1e6
FINISHED, UNFINISHED, FAILED, PLANNED = "finished", "unfinished", "failed", "not started"


@dataclass(frozen=True)
class Measured:
    """The timeline of a pipeline's processes with the shares that the run recorded; there is at least one action."""

    timeline: Timeline
    bubble_share: float
    communication_share: float

    @classmethod
    def of(cls, content: dict[str, Any]) -> Measured:
        """Of a file's content; a ValueError says what is wrong with it.

        >>> rows = [[["F", 0, 0, 0.0, 0.5]], [["F", 1, 0, 0.5, 1.0]]]
        >>> Measured.of({"bubble_share": 0.5, "communication_share": 0.0, "rows": rows}).timeline.length
        1.0
        >>> Measured.of({"bubble_share": 7, "communication_share": 0.0, "rows": rows})
        Traceback (most recent call last):
        ValueError: its bubble_share is not a number from 0 to 1
        """
        shares = {name: number(content.get(name)) for name in ("bubble_share", "communication_share")}
        for name, share in shares.items():
            if share is None or not 0 <= share <= 1:
                raise ValueError(f"its {name} is not a number from 0 to 1")
        rows = content.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ValueError("its rows are not lists of actions")
        if len(rows) > _MOST_PROCESSES:
            raise ValueError(f"it has {len(rows)} processes; {_MOST_PROCESSES} can be drawn")
        timeline = Timeline(tuple(tuple(_span(entry) for entry in row) for row in rows))
        if any(a.start > b.start or a.end > b.end for row in timeline.rows for a, b in pairwise(row)):
            raise ValueError("its actions are not in order")
        if timeline.length == 0:
            raise ValueError("it holds no action that took time")
        return cls(timeline, **shares)  # type: ignore[arg-type]

    @property
    def actions(self) -> int:
        """How many there are."""
        return sum(map(len, self.timeline.rows))

    def beginning(self, most: int = _MOST_DRAWN) -> Timeline:
        """The actions that can be drawn: all, or the first so many."""
        if self.actions <= most:
            return self.timeline
        end = sorted(span.start for row in self.timeline.rows for span in row)[most]
        return Timeline(tuple(tuple(span for span in row if span.start < end) for row in self.timeline.rows))


def _span(entry: Any) -> Span:
    match entry:
        case [str() as kind, int() as stage, int() as microbatch, start, end] if (
            kind in KINDS
            and max(stage, microbatch) <= _MOST_NUMBER
            and min(stage, microbatch) >= 0
            and (begin := number(start)) is not None
            and (until := number(end)) is not None
            and 0 <= begin <= until <= _LONGEST_S
        ):
            return Span(Action(kind, int(stage), int(microbatch)), begin, until)
    raise ValueError("one of its actions is not [kind, stage, microbatch, start, end]")


@dataclass(frozen=True)
class RunRecord:
    """One run as stored on disk; ``lines`` are its epochs."""

    folder: str
    settings: dict[str, Any]
    lines: tuple[dict[str, Any], ...] = ()
    study: str = ""
    state: str = FINISHED
    reason: str = ""
    """Why it failed or is unfinished."""
    measured: Measured | None = None
    written: float = 0.0
    """When an epoch, or run.json, was last written, in seconds since 1970."""

    @property
    def last_epoch(self) -> int:
        """The last epoch that was recorded; 0 if there is none."""
        return int(self.lines[-1]["epoch"]) if self.lines else 0

    def total(self, name: str, axis: str | None = None) -> float | None:
        """The sum of a field over all epochs, or of a field of one axis of the mesh; None where any epoch lacks it."""
        places: list[Any] = list(self.lines)
        for key in ("axes", axis) if axis else ():
            places = [place.get(key) if isinstance(place, dict) else None for place in places]
        known = [number(place.get(name)) if isinstance(place, dict) else None for place in places]
        return math.fsum(v for v in known if v is not None) if known and None not in known else None


@dataclass(frozen=True)
class Study:
    """The content of study.json besides its runs."""

    title: str
    command: str = ""
    notes: tuple[str, ...] = ()
    within: float | None = None
    """Points of accuracy that may be given up for fewer bytes, if the study names any."""


def read(folders: Sequence[Path], live: bool = False) -> Reading:
    """All runs under ``folders``, each once, in the order of their paths; of ``live`` runs a last line may be half written."""
    if not folders:
        raise HocketError("There is no folder to report on; name at least one that holds runs.")
    reading = Reading(live=live)
    for folder in folders:
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise HocketError(f"{folder} {what}; name a folder that holds runs (run.json and metrics.jsonl) or a study.")
        reading.walk(folder)
    if not reading.runs:
        where = ", ".join(str(f) for f in folders)
        what = f" that can be read ({reading.notes[0].rstrip('.')})" if reading.notes else ""
        raise HocketError(f"There is no run{what} under {where}; a run is a folder with run.json, as a training leaves it.")
    furthest: dict[tuple[Any, ...], int] = defaultdict(int)
    for run in reading.runs:
        furthest[_length(run)] = max(run.last_epoch, furthest[_length(run)])
    for place, run in enumerate(reading.runs):
        if run.state == FINISHED and (reason := _missing(run, furthest[_length(run)])):
            reading.runs[place] = replace(run, state=UNFINISHED, reason=reason)
    return reading


def number(value: Any) -> float | None:
    """A finite number of plausible size, or None for anything else.

    >>> number(3), number(10**400), number("3"), number(True), number(float("nan"))
    (3.0, None, None, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST else None


@dataclass
class Reading:
    """Everything found under the folders, and what could not be read."""

    runs: list[RunRecord] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    live: bool = False
    _seen: dict[Path, Study | None] = field(default_factory=dict)

    def walk(self, top: Path) -> None:
        """Read the runs and studies under ``top``, except for folders read before."""
        studies: dict[Path, Study] = {}
        planned: list[tuple[Path, Study, dict[str, Any]]] = []
        found: dict[Path, str] = {}
        for here, inner, files in os.walk(top, onerror=lambda e: self.notes.append(f"{e.filename} cannot be read ({e.strerror}).")):
            inner.sort()
            place, resolved = Path(here), Path(here).resolve()
            if resolved in self._seen:
                if before := self._seen[resolved]:
                    studies[place] = before
                continue
            if "study.json" in files and (content := self._load(place / "study.json", _name(place, top))) is not None:
                study = self._study(content, place.resolve().name)
                self._seen[resolved] = studies[place] = study
                planned += [(place / folder, study, settings) for folder, settings in _entries(content)]
            if "run.json" in files:
                self._seen.setdefault(resolved, None)
                found[place] = next((studies[p].title for p in (place, *place.parents) if p in studies), "")
        settings = {place.resolve(): entry for place, _, entry in planned}
        for place, title in found.items():
            self._read_run(place, _name(place, top), title, settings.get(place.resolve(), {}))
        for place, study, entry in planned:
            if place.resolve() not in self._seen:
                self._seen[place.resolve()] = None
                self.runs.append(RunRecord(_name(place, top), _settings(entry), study=study.title, state=PLANNED))

    def _study(self, content: dict[str, Any], name: str) -> Study:
        title, notes = str(content.get("title") or name), content.get("notes")
        while title in {study.title for study in self.studies}:
            title += f" ({name})"
        remarks = tuple(str(n) for n in notes) if isinstance(notes, list) else ()
        self.studies.append(Study(title, str(content.get("command") or ""), remarks, number(content.get("within"))))
        return self.studies[-1]

    def _read_run(self, place: Path, name: str, study: str, planned: dict[str, Any]) -> None:
        content = self._load(place / "run.json", name)
        if content is None:
            return
        settings = _settings({**planned, **content})
        if not isinstance(settings.get("strategy"), str):
            self.notes.append(f"{name}/run.json names no strategy, so it is not a run; it was left out.")
            return
        lines = self._read_lines(place / "metrics.jsonl", name)
        measured = self._read_timeline(place / "timeline.json", name) if "mesh" in settings else None
        failure = settings.get("failure")
        state, reason = (FAILED, str(failure)) if failure else (FINISHED, "")
        self.runs.append(RunRecord(name, settings, lines, study, state, reason, measured, _written(place)))

    def _read_timeline(self, path: Path, name: str) -> Measured | None:
        if not path.exists():
            return None
        if path.is_file() and path.stat().st_size > LARGEST_TIMELINE:
            self.notes.append(f"{name}/{path.name} is larger than {LARGEST_TIMELINE >> 20} MiB; it was left out.")
            return None
        content = self._load(path, name)
        try:
            return None if content is None else Measured.of(content)
        except ValueError as error:
            self.notes.append(f"{name}/{path.name} is damaged ({error}); it was left out.")
            return None

    def _read_lines(self, path: Path, name: str) -> tuple[dict[str, Any], ...]:
        """The epochs in order, each once; what cannot be read is noted."""
        try:
            text = path.read_bytes().decode(errors="replace") if path.exists() else ""
        except OSError as error:
            self.notes.append(f"{name}/metrics.jsonl cannot be read ({error.strerror}).")
            return ()
        lines: dict[int, dict[str, Any]] = {}
        texts = text.split("\n")
        for count, text_line in enumerate(texts, 1):
            if not text_line.strip():
                continue
            line = None
            with suppress(ValueError, RecursionError):
                line = json.loads(text_line)
            if line is None and self.live and count == len(texts):
                continue  # it is being written
            if not isinstance(line, dict) or not isinstance(line.get("epoch"), int) or not 1 <= line["epoch"] <= _LARGEST:
                self.notes.append(f"{name}/metrics.jsonl: line {count} is damaged or unfinished; it was left out.")
            else:
                lines[line["epoch"]] = line
        return tuple(lines[epoch] for epoch in sorted(lines))

    def _load(self, path: Path, name: str) -> dict[str, Any] | None:
        try:
            content = _clean(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not JSON"
            self.notes.append(f"{name}/{path.name} cannot be read ({why}); it was left out.")
            return None
        if not isinstance(content, dict):
            self.notes.append(f"{name}/{path.name} is not a JSON object; it was left out.")
            return None
        return content


def _written(place: Path) -> float:
    times = [0.0]
    for name in ("run.json", "metrics.jsonl"):
        with suppress(OSError):
            times.append((place / name).stat().st_mtime)
    return max(times)


def _entries(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    runs = content.get("runs")
    entries = [e for e in runs if isinstance(e, dict) and isinstance(e.get("folder"), str)] if isinstance(runs, list) else []
    return [(e["folder"], settings if isinstance(settings := e.get("settings"), dict) else {}) for e in entries]


def _settings(found: dict[str, Any]) -> dict[str, Any]:
    """The same with the mesh, where there is one, written in one way.

    >>> _settings({"mesh": "pipeline=2,data=1"}), _settings({"mesh": "¿"}), _settings({"mesh": None, "lr": 1})
    ({'mesh': 'pipeline=2'}, {'mesh': '¿'}, {'lr': 1})
    """
    mesh = found.get("mesh")
    others = {name: value for name, value in found.items() if name != "mesh"}
    if not isinstance(mesh, str) or not mesh.strip():
        return others
    with suppress(HocketError, ValueError):
        mesh = str(Mesh.parse(mesh))
    return {**others, "mesh": mesh}


def _missing(run: RunRecord, furthest: int) -> str:
    """Why a run that did not fail is unfinished; empty if it is finished.

    A run ends at its last epoch or at ``max_steps``; a study marks it ``finished``. Lines have no step, so a run without that mark
    that ``max_steps`` ends counts as finished when it has as many epochs as the longest run with the same settings.
    """
    planned, last = run.settings.get("epochs"), run.last_epoch
    wanted = furthest if run.settings.get("max_steps") is not None else planned if isinstance(planned, int) else last
    if last == 0:
        return "no epoch was recorded"
    if last < wanted and run.settings.get("finished") is not True:
        return f"{last} of {wanted} epochs were recorded"
    return f"{last - len(run.lines)} of {last} epochs are missing from its metrics" if len(run.lines) < last else ""


def _length(run: RunRecord) -> tuple[Any, ...]:
    return tuple(str(run.settings.get(name)) for name in ("data", "workers", "batch", "epochs", "max_steps"))


def _clean(value: Any) -> Any:
    """The same with control characters and lone surrogates replaced."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def _name(place: Path, top: Path) -> str:
    """A folder's name for display: relative to the folder that the user named."""
    root = top.resolve().name or str(top)
    inner = os.path.relpath(place, top)
    return str(_clean(root if inner == "." else f"{root}/{inner}"))
