"""The page of runs that are still going on: the report's own text, with the progress of each run, read anew whenever a file
changes."""

from __future__ import annotations

import html
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hocket.errors import HocketError
from hocket.report.answers import WITHIN, Answer, answers_of
from hocket.report.figures import percent, plain
from hocket.report.page import fill, page_data, parts_of, source
from hocket.report.read import FAILED, FINISHED, PLANNED, Reading, RunRecord, number, read
from hocket.report.rows import Facet, Row, make_rows

_FILES = ("run.json", "metrics.jsonl", "study.json", "timeline.json", "rates.json")
_ELSEWHERE = ("checkpoints", "charts", "state")
"""Folders of runs that hold none."""
_MOST_LISTED, _FEW = 24, 12
_WAIT_S, _SHARE = 1.0, 4.0
"""Files are looked at once in so many seconds, or in so many times as long as reading them takes."""


class LivePage:
    """The page of the runs under a folder, for all who look at it; nothing is written there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closed = False
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._seen: Any = None
        self._parts, self._data = look(folder)
        self._version, self._problem = 1, ""

    def html(self) -> str:
        """The whole page as it is now."""
        self.refresh()
        with self._changed:
            script = f"<script>\n{source('live.js')}</script>\n"
            more = {
                "eyebrow": "Hocket watch",
                "policy": "; connect-src 'self'",
                "noscript": "Charts, and following the runs, need scripts; answers and tables do not: load the page again.",
                "predicted": "",
                "footer": "Nothing is fetched but the figures, from the process that serves this page.",
                "live_js": script,
            }
            progress = (
                '\n<section id="progress" aria-label="Progress"><div id="runs-now">'
                f'{self._parts["progress"]}</div><p id="connection" class="note" role="status"></p></section>'
            )
            return fill({**self._parts, **more, "progress": progress}, self._data)

    def refresh(self) -> float:
        """Read the files again if one of them has changed; the seconds that it took."""
        begun = time.monotonic()
        with self._reading:
            seen = list(_signature(self.folder))
            if seen != self._seen:
                self._seen = seen
                self._read()
        return time.monotonic() - begun

    def _read(self) -> None:
        problem = ""
        try:
            parts, data = look(self.folder)
        except (HocketError, OSError) as error:  # a study that starts a run again empties its folder
            parts, data, problem = self._parts, self._data, str(error)
        with self._changed:
            self._parts, self._data, self._problem = parts, data, problem
            self._version += 1
            self._changed.notify_all()

    def wait(self, version: int, seconds: float) -> tuple[int, str]:
        """The newest version's number and its parts as one line of JSON, once it is not ``version`` or the seconds are over."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._version != version, seconds)
            changes = {"parts": self._parts, "data": self._data, "problem": self._problem} if self._version != version else {}
            return self._version, json.dumps(changes, allow_nan=False)

    def follow(self) -> None:
        """Read the files again and again, until :meth:`close`."""
        took = 0.0
        while not self.closed:
            with self._changed:
                self._changed.wait_for(lambda: self.closed, max(_WAIT_S, _SHARE * took))
            if not self.closed:
                took = self.refresh()

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


def look(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The parts of the page, as HTML, and what its charts are drawn from."""
    reading = read([folder], live=True)
    rows = make_rows(reading.runs)
    asked = {study.within for study in reading.studies} - {None}
    within = asked.pop() if len(asked) == 1 else None
    answers = {f: _answers(f, rows, WITHIN if within is None else within) for f in sorted({r.facet for r in rows})}
    title = " and ".join(dict.fromkeys(study.title for study in reading.studies)) or folder.resolve().name
    parts = {**parts_of(title, rows, answers, reading), "progress": _progress(reading, folder)}
    return parts, page_data(rows, list(answers), live=True)


def _answers(facet: Facet, rows: Sequence[Row], within: float) -> list[Answer]:
    """The answers from finished runs; nothing as long as there is none."""
    return answers_of(facet, rows, within) if any(row.ranked for row in rows if row.facet == facet) else []


def _signature(folder: Path) -> Iterator[tuple[str, int, int]]:
    """The files that are read, with what changes when they do."""
    for here, inner, files in os.walk(folder):
        inner[:] = sorted(name for name in inner if name not in _ELSEWHERE)
        for name in _FILES:
            if name in files:
                with suppress(OSError):  # it has just been removed
                    found = os.stat(os.path.join(here, name))
                    yield os.path.join(here, name), found.st_mtime_ns, found.st_size


# --- how far the runs are ------------------------------------------------------------------------------------------------------


def _progress(reading: Reading, folder: Path) -> str:
    """How many runs have ended, and a line for each that is running or has failed (for all, if they are few)."""
    runs = reading.runs
    over = [run for run in runs if run.state in (FINISHED, FAILED)]
    going = [run for run in runs if run not in over and run.state != PLANNED]
    failed = [run for run in runs if run.state == FAILED]
    shown = runs if len(runs) <= _FEW else [*going, *failed][:_MOST_LISTED]
    several = {
        name
        for name in ("workers", "optimizer", "seed")
        if len({str(run.settings[name]) for run in runs if name in run.settings}) > 1
    }
    lines = "".join(_line(run, several) for run in shown) + "".join(
        f"<li>{html.escape(text)}</li>" for text in _searches(folder, runs)
    )
    head = ""
    if len(runs) > 1:
        counts = {"finished": len(over) - len(failed), "failed": len(failed), "begun": len(going)}
        counts["not started"] = len(runs) - len(over) - len(going)
        text = " · ".join(f"{count} {what}" for what, count in counts.items() if count)
        head = (
            f'<p class="overall">{_bar(len(over), len(runs), "Runs that have ended")} <span>{text} of {len(runs)} runs</span></p>'
        )
    return f'{head}<ul class="now">{lines}</ul>'


def _line(run: RunRecord, several: set[str]) -> str:
    settings, epochs = run.settings, number(run.settings.get("epochs"))
    mesh = f" on {settings['mesh']}" if settings.get("mesh") else ""
    names = [f"{settings.get('strategy', '?')}{mesh}"]
    texts = {
        "workers": f"{settings.get('workers')} workers",
        "optimizer": settings.get("optimizer"),
        "seed": f"seed {settings.get('seed')}",
    }
    names += [str(text) for name, text in texts.items() if name in several]
    bar = _bar(run.last_epoch, int(epochs), "Epochs") if epochs and run.state != PLANNED else ""
    ago = f'<time data-written="{run.written:.0f}"></time>' if run.written and run.state not in (FINISHED, FAILED, PLANNED) else ""
    name, status = html.escape(", ".join(names)), html.escape(" · ".join(_status(run, epochs)))
    line = f'<span class="strategy">{name}</span> {bar} <span class="told">{status}</span> {ago}'
    return f'<li class="{run.state.replace(" ", "-")}">{line}</li>'


def _status(run: RunRecord, epochs: float | None) -> list[str]:
    """A run's epoch, how good its model is, and the remaining time at its present pace."""
    last = run.lines[-1] if run.lines else {}
    most = run.settings.get("max_steps")
    capped = most is not None and run.settings.get("finished") is not True and run.last_epoch < (epochs or 0)
    if run.state == FAILED:
        return [f"failed: {run.reason}"]
    if run.state == PLANNED:
        return ["not started"]
    if run.state == FINISHED and not capped:
        status = [f"finished, {run.last_epoch} epoch{'s' * (run.last_epoch != 1)}"]
    else:
        most_epochs = f"{'at most ' * capped}{epochs or 0:.0f}"
        status = [f"epoch {run.last_epoch} of {most_epochs}" if run.lines else "first epoch"]
        status += [f"ends at step {most}"] * capped
    quality = {"accuracy": percent, "test_loss": plain, "loss": plain}
    words = {"test_loss": "test loss", "loss": "training loss"}
    found = [
        (words.get(name, name), form(value)) for name, form in quality.items() if (value := number(last.get(name))) is not None
    ]
    status += [f"{name} {value}" for name, value in found]
    took = [seconds for line in run.lines if (seconds := number(line.get("wall_s"))) is not None]
    if took and epochs and not capped and run.last_epoch < epochs and run.state != FINISHED:
        left = sum(took) / len(took) * (epochs - run.last_epoch)
        status.append(f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left")
    return status


def _bar(value: int, most: int, name: str) -> str:
    return f'<progress value="{value}" max="{max(1, most)}" aria-label="{name}"></progress>'


def _searches(folder: Path, runs: Sequence[RunRecord]) -> list[str]:
    """The searches for learning rates that a study is making before its next run."""
    if not any(run.state == PLANNED for run in runs):
        return []
    try:
        found = json.loads((folder / "rates.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    searches = found.items() if isinstance(found, dict) else ()
    going = [(what, search) for what, search in searches if isinstance(search, dict) and search.get("chosen") is None]
    tried = {what: len(losses) if isinstance(losses := search.get("losses"), dict) else 0 for what, search in going}
    return [f"{what.rpartition(' (')[0]}: looking for the learning rate, {count} tried" for what, count in tried.items()]
