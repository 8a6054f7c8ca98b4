"""The page: page.html with page.css, page.js and the data inserted, as one self-contained file.

Answers and tables are static HTML and need no script. Text reaches the page escaped, data as JSON that cannot end its own script
element, and the script inserts text only as text nodes.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from hocket.report.answers import Answer, basis
from hocket.report.figures import around, lr_text, megabytes, plain, times, whole
from hocket.report.provenance import provenance
from hocket.report.read import Reading
from hocket.report.rows import Facet, Figure, Point, Row
from hocket.report.series import styles
from hocket.report.split import split_section
from hocket.report.staleness import column_edges, column_of
from hocket.report.table import as_html, columns
from hocket.version import __version__

_MOST_POINTS = 200


def make_page(title: str, rows: Sequence[Row], answers: Mapping[Facet, list[Answer]], reading: Reading, pictures: bool) -> str:
    """The whole page."""
    facets = list(answers)
    head, body = as_html(rows)
    parts = {
        "title": html.escape(title),
        "summary": html.escape(_summary(rows, reading)),
        "version": html.escape(__version__),
        "css": _source("page.css"),
        "js": _source("page.js"),
        "data": _safe_json(_data(rows, facets)),
        "answers": "\n".join(_facet_answers(i, f, answers[f], rows) for i, f in enumerate(facets)),
        "noscript": "The charts need scripts; answers and tables do not."
        + (" The same charts are PNG files in charts/, beside this page." if pictures else ""),
        "split": split_section(rows),
        "table_head": head,
        "table_body": body,
        "table_note": _table_note(rows),
        "provenance": provenance(rows, reading),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


def _source(name: str) -> str:
    return files("hocket.report").joinpath(name).read_text(encoding="utf-8")


def _safe_json(data: Any) -> str:
    """JSON inside a script element: ``<`` could end it, the two separators end a line for old parsers."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _summary(rows: Sequence[Row], reading: Reading) -> str:
    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    parts = [count(len(reading.runs), "run", "runs"), count(len({r.strategy for r in rows}), "strategy", "strategies")]
    parts.append(count(len({r.facet.data for r in rows}), "data set", "data sets"))
    workers = sorted({r.facet.workers for r in rows})
    listed = f"{', '.join(str(w) for w in workers[:-1])} and {workers[-1]}" if len(workers) > 1 else str(workers[0])
    parts.append(f"{listed} worker{'s' if workers != [1] else ''}")
    return " · ".join(parts)


def _facet_answers(index: int, facet: Facet, answers: list[Answer], rows: Sequence[Row]) -> str:
    cards = "\n".join(_answer(a) for a in answers)
    kind = html.escape(basis(rows, facet))
    return (
        f'<div class="facet" data-facet="{index}"><h2>{html.escape(str(facet))} <span class="basis">{kind}</span></h2>\n'
        f'<div class="answers">{cards}</div></div>'
    )


def _table_note(rows: Sequence[Row]) -> str:
    """Notes on the columns that only some reports have."""
    note = ""
    if any(r.staleness for r in rows):
        note += (
            " Staleness: how many updates (without servers: contributions of others) lie between the weights that a gradient"
            " was computed at and its own."
        )
    if any(r.lost and r.lost.mean > 0 for r in rows):
        note += " “Lost batches” are mini-batches whose gradients were lost through faults; they count as done."
    if any(r.comm_stats for r in rows):
        note += (
            " Where models are split, a worker is a replica, on several processes: its bytes are those of all of them along"
            " all axes, and what they wait for along pipeline and tensor is part of the seconds but not of “wait”."
        )
    if any(r.bubble for r in rows):
        note += " “Bubble” is the share of time, but for communication, in which the processes of a pipeline were idle."
    return note


def _answer(answer: Answer) -> str:
    text = {name: html.escape(str(getattr(answer, name))) for name in ("question", "strategy", "figure", "detail")}
    if not answer.question:
        return f'<p class="answer verdict">{text["detail"]}</p>'
    question = f'<span class="question">{text["question"]}</span>'
    if not answer.strategy:
        detail = text["detail"][:1].upper() + text["detail"][1:]
        return f'<p class="answer empty">{question} <span class="detail">{detail}</span></p>'
    detail = f' <span class="detail">{text["detail"]}</span>' if answer.detail else ""
    return (
        f'<p class="answer">{question} <strong class="figure">{text["figure"]}</strong> '
        f'<span class="strategy">{text["strategy"]}</span>{detail}</p>'
    )


def _data(rows: Sequence[Row], facets: list[Facet]) -> dict[str, Any]:
    """What the charts are drawn from."""
    looks = styles(rows)
    labels = sorted(looks, key=lambda label: looks[label].number)
    place = {label: i for i, label in enumerate(labels)}
    shown = columns(rows)
    edges = [column_edges(row.staleness for row in rows if row.facet == f) for f in facets]
    return {
        "facets": [
            {
                "data": f.data,
                "model": f.model,
                "workers": f.workers,
                "kind": f.kind,
                "study": f.study,
                "cluster": f.cluster,
                "staleness": columns,
            }
            for f, columns in zip(facets, edges, strict=True)
        ],
        "series": [{"label": label, **vars(looks[label])} for label in labels],
        "rows": [
            {
                "facet": facets.index(row.facet),
                "series": place[row.label],
                "ranked": row.ranked,
                "state": row.state,
                "frontier": row.on_frontier,
                "accuracy": _mean(row.accuracy),
                "mb": None if row.per_worker is None else row.per_worker / 1e6,
                "seconds": _mean(row.seconds),
                "compute": _mean(row.compute),
                "wait": _mean(row.wait),
                "transfer": _mean(row.transfer),
                "curve": [_point(p, row.facet.workers) for p in _thinned(row.curve)],
                "staleness": _staleness(row, edges[facets.index(row.facet)]),
                "tip": _tip(row),
                "text": " ".join(c.text(row) for c in shown if not c.numeric).lower(),
            }
            for row in rows
        ],
    }


def _thinned(curve: Sequence[Point]) -> list[Point]:
    """At most as many epochs as a plot can show, with the first and the last."""
    count = len(curve)
    places = range(count) if count <= _MOST_POINTS else {round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)}
    return [curve[i] for i in sorted(places)]


def _point(point: Point, workers: int) -> list[float | None]:
    """epoch, accuracy, spread, seconds, MB per worker; digits beyond what a plot shows are left out."""
    accuracy = point.accuracy
    sent = None if point.bytes_sent is None else point.bytes_sent / max(1, workers) / 1e6
    figures = (point.epoch, _mean(accuracy), accuracy.spread if accuracy else None, point.seconds, sent)
    return [None if f is None else float(f"{f:.7g}") for f in figures]


def _staleness(row: Row, edges: list[int]) -> dict[str, Any] | None:
    """The histogram of staleness."""
    if row.staleness is None:
        return None
    middle = column_of(row.staleness.middle, edges)
    return {"counts": row.staleness.columns(edges), "middle": middle, "mean": row.staleness.mean, "text": str(row.staleness)}


def _tip(row: Row) -> list[list[str]]:
    """A row's figures as the tooltip shows them."""

    def percent(figure: Figure | None) -> str:
        spread = None if figure is None or figure.spread is None else figure.spread * 100
        return "–" if figure is None else f"{around(figure.mean * 100, spread, 1)} %"

    pairs = [["accuracy", percent(row.accuracy)]]
    if row.worst and row.accuracy and row.worst.mean != row.accuracy.mean:
        pairs.append(["worst replica", percent(row.worst)])
    parts = [("seconds", row.seconds), ("compute", row.compute), ("wait", row.wait), ("transfer", row.transfer)]
    pairs += [[name, f"{around(figure.mean, figure.spread)} s"] for name, figure in parts if figure]
    pairs.append(["sent per worker", megabytes(row.per_worker)])
    if row.times_fewer is not None:
        pairs.append(["fewer bytes", times(row.times_fewer)])
    if row.staleness is not None:
        pairs += [["median staleness", whole(row.staleness.median)], ["mean staleness", plain(row.staleness.mean)]]
        pairs.append(["largest staleness", whole(row.staleness.largest)])
    if row.bubble is not None:
        pairs.append(["bubble", percent(row.bubble)])
    if row.lost and row.lost.mean > 0:
        pairs.append(["lost batches", around(row.lost.mean, row.lost.spread)])
    pairs.append(["rate", lr_text(row.lr)])
    if not row.ranked:
        pairs.append(["state", row.state])
    source = "virtual" if row.facet.virtual else "measured"
    pairs.append(["figures", f"{source}, seconds {row.facet.predicted}" if row.facet.cluster else source])
    return pairs


def _mean(figure: Figure | None) -> float | None:
    return None if figure is None else figure.mean
