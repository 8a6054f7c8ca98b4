"""How it was run: commands, versions, common settings, how rates were chosen, and what failed or was not finished."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from hocket.report.figures import lr_text, percent, plain
from hocket.report.read import FAILED, FINISHED, Reading, number
from hocket.report.rows import Row

# Settings that the table shows, or that mean nothing to a reader.
_SHOWN = {"strategy", "workers", "virtual", "data", "model", "seed", "lr", "rate", "failure", "finished"}
_INNER = {"versions", "citations", "buckets", "cluster", "spec", "exchange", "steps", "parameters"}


def provenance(rows: Sequence[Row], reading: Reading) -> str:
    """The section as HTML."""
    failed = [f"{r.label} ({r.facet}): {r.reason}" for r in rows if r.state == FAILED]
    unfinished = [f"{r.label} ({r.facet}): {r.reason or r.state}" for r in rows if r.state not in (FINISHED, FAILED)]
    notes = [n for study in reading.studies for n in study.notes] + reading.notes
    commands = dict.fromkeys(s.command for s in reading.studies if s.command)
    blocks = [
        _block("Commands", "".join(f"<pre><code>{html.escape(c)}</code></pre>" for c in commands)),
        _block("Failed runs", _list(failed)),
        _block("Unfinished runs, not ranked", _list(unfinished)),
        _block("Notes", _list(dict.fromkeys(notes))),
        _block("Settings common to all runs", _pairs(_common(reading))),
        _block("Clusters that seconds are predicted for", _list(_clusters(rows))),
        _block("Learning rates", _rates(rows)),
        _block("Versions", _list(_versions(reading))),
    ]
    return "\n".join(b for b in blocks if b)


def _common(reading: Reading) -> list[tuple[str, str]]:
    settings = [run.settings for run in reading.runs]
    names = [name for name in settings[0] if name not in _SHOWN | _INNER]
    same = [name for name in names if len({json.dumps(s.get(name), sort_keys=True, default=str) for s in settings}) == 1]
    return [(name, _said(settings[0][name])) for name in same if settings[0][name] is not None]


def _clusters(rows: Sequence[Row]) -> list[str]:
    """Each described cluster with the values it sets."""
    found: dict[str, None] = {}
    for row in rows:
        spec = row.settings.get("spec")
        if row.facet.cluster and isinstance(spec, dict):
            said = ", ".join(f"{name} {_said(value)}" for name, value in spec.items() if name != "name" and value is not None)
            found[f"{row.facet.cluster}: {said}"] = None
    return list(found)


def _rates(rows: Sequence[Row]) -> str:
    """Searched rates one by one, given rates in one sentence."""
    swept = [(row, row.settings["rate"]) for row in rows if isinstance(row.settings.get("rate"), dict)]
    given = sorted({row.lr for row in rows if not isinstance(row.settings.get("rate"), dict) and row.lr is not None})
    text = ""
    if given:
        which = "The other rates" if swept else "Rates"
        text = f"<p>{which} were given, not searched: {html.escape(', '.join(lr_text(g) for g in given))}.</p>"
    if not swept:
        return text
    lines = [f"{row.label} ({row.facet}): {_sweep(found)}" for row, found in swept]
    by = "lowest training loss" if any(isinstance(found.get("losses"), dict) for _, found in swept) else "highest accuracy"
    listed = f"<details><summary>The {len(lines)} sweeps</summary>{_list(lines)}</details>" if len(lines) > 8 else _list(lines)
    return f"<p>Chosen by a short sweep, for the {by} at its end.</p>{listed}{text}"


def _sweep(found: dict[str, Any]) -> str:
    """The rate chosen, and the result of each rate tried."""
    tried, losses = (part if isinstance(part := found.get(name), dict) else {} for name in ("tried", "losses"))
    shown = []
    for name in dict.fromkeys((*losses, *tried)):
        loss, accuracy = number(losses.get(name)), number(tried.get(name))
        figures = ([f"loss {plain(loss)}"] if loss is not None else []) + ([percent(accuracy)] if accuracy is not None else [])
        shown.append(f"{name} ({', '.join(figures) or 'diverged'})")
    length = f", {found['epochs']} epochs each" if number(found.get("epochs")) else ""
    lost = given if isinstance(given := found.get("given_up"), dict) else {}
    ends = [f"{name} ({'diverged' if number(loss) is None else f'loss {plain(number(loss))}'})" for name, loss in lost.items()]
    left = f"; given up after a whole training: {', '.join(ends)}" if ends else ""
    return f"{_said(found.get('chosen'))}; tried: {', '.join(shown)}{length}{left}"


def _versions(reading: Reading) -> list[str]:
    found: dict[str, None] = {}
    for run in reading.runs:
        versions = run.settings.get("versions")
        if isinstance(versions, dict):
            found[", ".join(f"{name} {value}" for name, value in versions.items())] = None
    return list(found)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return lr_text(value) if isinstance(value, float) else str(value)


def _block(title: str, content: str) -> str:
    return f"<div><h3>{html.escape(title)}</h3>{content}</div>" if content else ""


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _pairs(pairs: list[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="pairs">{items}</dl>' if items else ""
