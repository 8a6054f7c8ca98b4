"""Find runs and studies under folders and read their files: run.json, metrics.jsonl, timeline.json, study.json.

No file is trusted: a damaged one becomes a note in the report, not an error, if at least one run can be read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hocket.errors import HocketError
from hocket.report.timelines import LARGEST_FILE, Measured
from hocket.split.mesh import Mesh

_LARGEST = 1e100
FINISHED, UNFINISHED, FAILED, PLANNED = "finished", "unfinished", "failed", "not started"


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
    """The timeline of the processes of a pipeline."""

    def total(self, name: str) -> float | None:
        """The sum of a field over all epochs; None where any epoch lacks it."""
        return _sum([line.get(name) for line in self.lines])

    def along(self, axis: str, name: str) -> float | None:
        """The same for a field of one axis of the mesh."""
        axes = [line.get("axes") for line in self.lines]
        figures = [found.get(axis) if isinstance(found, dict) else None for found in axes]
        return _sum([found.get(name) if isinstance(found, dict) else None for found in figures])


@dataclass(frozen=True)
class Study:
    """The content of study.json besides its runs."""

    title: str
    folder: str
    command: str = ""
    preset: str | None = None
    notes: tuple[str, ...] = ()
    within: float | None = None
    """Points of accuracy that may be given up for fewer bytes, if the study names any."""


@dataclass
class Reading:
    """Everything found under the folders, and what could not be read."""

    runs: list[RunRecord] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(folders: Sequence[Path]) -> Reading:
    """All runs under ``folders``, each once, in the order of their paths."""
    if not folders:
        raise HocketError("There is no folder to report on; name at least one that holds runs.")
    reading = Reading()
    seen: dict[Path, Study | None] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise HocketError(f"{folder} {what}; name a folder that holds runs (run.json and metrics.jsonl) or a study.")
        _walk(folder, reading, seen)
    if not reading.runs:
        where = ", ".join(str(f) for f in folders)
        what = f" that can be read ({reading.notes[0].rstrip('.')})" if reading.notes else ""
        raise HocketError(f"There is no run{what} under {where}; a run is a folder with run.json, as hocket train --out leaves it.")
    reading.runs = _settle(reading.runs)
    return reading


def number(value: Any) -> float | None:
    """A finite number of plausible size, or None for anything else.

    >>> number(3), number(10**400), number("3"), number(True), number(float("nan"))
    (3.0, None, None, None, None)
    """
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST else None


def _sum(values: list[Any]) -> float | None:
    """None where there is no value, or anything that is no number."""
    known = [number(value) for value in values]
    return math.fsum(v for v in known if v is not None) if known and None not in known else None


def _walk(top: Path, reading: Reading, seen: dict[Path, Study | None]) -> None:
    """Read the runs and studies under ``top``, except for folders read before."""
    studies: dict[Path, Study] = {}
    planned: list[tuple[Path, Study, dict[str, Any]]] = []
    found: dict[Path, str] = {}
    for here, inner, files in os.walk(top, onerror=lambda e: reading.notes.append(f"{e.filename} cannot be read ({e.strerror}).")):
        inner.sort()
        place, resolved = Path(here), Path(here).resolve()
        if resolved in seen:
            if study_before := seen[resolved]:
                studies[place] = study_before
            continue
        if "study.json" in files and (read_study := _read_study(place, top, reading)):
            study, entries = read_study
            seen[resolved] = studies[place] = study
            planned += [(place / entry["folder"], study, entry["settings"]) for entry in entries]
        if "run.json" in files:
            seen.setdefault(resolved, None)
            found[place] = next((studies[p].title for p in (place, *place.parents) if p in studies), "")
    settings = {place.resolve(): entry for place, _, entry in planned}
    for place, title in found.items():
        run = _read_run(place, top, settings.get(place.resolve(), {}), reading)
        if run is not None:
            reading.runs.append(replace(run, study=title))
    for place, study, entry in planned:
        if place.resolve() not in seen:
            seen[place.resolve()] = None
            reading.runs.append(RunRecord(_name(place, top), _settings(entry), study=study.title, state=PLANNED))


def _read_study(place: Path, top: Path, reading: Reading) -> tuple[Study, list[dict[str, Any]]] | None:
    content = _load(place / "study.json", _name(place, top), reading)
    if content is None:
        return None
    title, taken = str(content.get("title") or place.resolve().name), {s.title for s in reading.studies}
    while title in taken:
        title += f" ({place.resolve().name})"
    notes = content.get("notes")
    entries = content.get("runs")
    study = Study(
        title,
        _name(place, top),
        str(content.get("command") or ""),
        content.get("preset") if isinstance(content.get("preset"), str) else None,
        tuple(str(n) for n in notes) if isinstance(notes, list) else (),
        number(content.get("within")),
    )
    reading.studies.append(study)
    return study, [
        {"folder": entry["folder"], "settings": entry.get("settings") if isinstance(entry.get("settings"), dict) else {}}
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("folder"), str)
    ]


def _read_run(place: Path, top: Path, planned: dict[str, Any], reading: Reading) -> RunRecord | None:
    name = _name(place, top)
    content = _load(place / "run.json", name, reading)
    if content is None:
        return None
    settings = _settings({**planned, **content})
    if not isinstance(settings.get("strategy"), str):
        reading.notes.append(f"{name}/run.json names no strategy, so it is not a run; it was left out.")
        return None
    lines = _read_lines(place / "metrics.jsonl", name, reading)
    measured = _read_timeline(place / "timeline.json", name, reading) if "mesh" in settings else None
    failure = settings.get("failure")
    if failure:
        return RunRecord(name, settings, lines, state=FAILED, reason=str(failure), measured=measured)
    return RunRecord(name, settings, lines, measured=measured)


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


def _read_timeline(path: Path, name: str, reading: Reading) -> Measured | None:
    if not path.exists():
        return None
    if path.is_file() and path.stat().st_size > LARGEST_FILE:
        reading.notes.append(f"{name}/{path.name} is larger than {LARGEST_FILE >> 20} MiB; it was left out.")
        return None
    content = _load(path, name, reading)
    if content is None:
        return None
    try:
        return Measured.of(content)
    except ValueError as error:
        reading.notes.append(f"{name}/{path.name} is damaged ({error}); it was left out.")
        return None


def _read_lines(path: Path, name: str, reading: Reading) -> tuple[dict[str, Any], ...]:
    """The epochs in order, each once; what cannot be read is noted."""
    try:
        text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    except OSError as error:
        reading.notes.append(f"{name}/metrics.jsonl cannot be read ({error.strerror}).")
        return ()
    lines: dict[int, dict[str, Any]] = {}
    for count, text_line in enumerate(text.split("\n"), 1):
        if not text_line.strip():
            continue
        try:
            line = json.loads(text_line)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("epoch"), int) or not 1 <= line["epoch"] <= _LARGEST:
            reading.notes.append(f"{name}/metrics.jsonl: line {count} is damaged or unfinished; it was left out.")
        else:
            lines[line["epoch"]] = line
    return tuple(lines[epoch] for epoch in sorted(lines))


def _settle(runs: list[RunRecord]) -> list[RunRecord]:
    """Say which runs are finished.

    A run ends at its last epoch or at ``max_steps``; a study marks it ``finished``. Lines have no step, so a run without that mark
    that ``max_steps`` ends counts as finished when it has as many epochs as the longest run with the same settings.
    """
    furthest: dict[tuple[Any, ...], int] = {}
    for run in runs:
        furthest[_length(run)] = max(_last(run), furthest.get(_length(run), 0))
    return [_settled(run, furthest[_length(run)]) for run in runs]


def _settled(run: RunRecord, furthest: int) -> RunRecord:
    if run.state != FINISHED:
        return run
    planned, last = run.settings.get("epochs"), _last(run)
    capped = run.settings.get("max_steps") is not None
    wanted = furthest if capped else planned if isinstance(planned, int) else last
    if run.settings.get("finished") is True:
        wanted = last
    if last == 0:
        return replace(run, state=UNFINISHED, reason="no epoch was recorded")
    if last < wanted:
        return replace(run, state=UNFINISHED, reason=f"{last} of {planned if not capped else wanted} epochs were recorded")
    if len(run.lines) < last:
        return replace(run, state=UNFINISHED, reason=f"{last - len(run.lines)} of {last} epochs are missing from its metrics")
    return run


def _last(run: RunRecord) -> int:
    return int(run.lines[-1]["epoch"]) if run.lines else 0


def _length(run: RunRecord) -> tuple[Any, ...]:
    return tuple(str(run.settings.get(name)) for name in ("data", "workers", "batch", "epochs", "max_steps"))


def _load(path: Path, name: str, reading: Reading) -> dict[str, Any] | None:
    try:
        content = _clean(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        reading.notes.append(f"{name}/{path.name} cannot be read ({why}); it was left out.")
        return None
    if not isinstance(content, dict):
        reading.notes.append(f"{name}/{path.name} is not a JSON object; it was left out.")
        return None
    return content


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
    return root if inner == "." else f"{root}/{inner}"
