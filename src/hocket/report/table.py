"""The table of rows; the page, Markdown and CSV have the same columns."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hocket.report.figures import NONE, around, lr_text, plain, times, whole
from hocket.report.read import FINISHED
from hocket.report.rows import Figure, Row
from hocket.report.staleness import Staleness

Value = float | str | None
_FACET = ("data", "model", "workers", "kind", "clock")


@dataclass(frozen=True)
class Column:
    """A column: ``name`` heads it in CSV, ``title`` and ``unit`` elsewhere; ``value`` sorts, ``text`` is read."""

    name: str
    title: str
    value: Callable[[Row], Value]
    text: Callable[[Row], str]
    unit: str = ""
    spread: Callable[[Row], float | None] | None = None

    @property
    def numeric(self) -> bool:
        """Whether it holds numbers."""
        return self.name not in ("strategy", "study", "data", "model", "kind", "clock", "seeds", "state")


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns for these rows; ``study`` only where there are several, the facet's own ones first where there are several.

    ``clock`` says where seconds come from; the column exists if some are predicted. Staleness, lost batches, bytes along the axes
    of split models and the bubble of pipelines have columns if some run recorded them.
    """
    found = [
        Column("strategy", "strategy", lambda r: r.label, lambda r: r.label),
        _figure("accuracy", "accuracy", "%", lambda r: r.accuracy, 100, 1),
        _figure("accuracy_worst", "worst replica", "%", lambda r: r.worst, 100, 1),
        Column("epochs", "epochs", lambda r: float(r.epochs), lambda r: str(r.epochs)),
        _figure("seconds", "seconds", "", lambda r: r.seconds),
        _figure("compute_s", "compute", "s", lambda r: r.compute),
        _figure("wait_s", "wait", "s", lambda r: r.wait),
        _figure("transfer_s", "transfer", "s", lambda r: r.transfer),
        Column("sent_mb_per_worker", "sent per worker", _mb, lambda r: plain(_mb(r)), "MB"),
        Column("times_fewer_bytes", "fewer bytes", lambda r: r.times_fewer, lambda r: times(r.times_fewer), "× vs bulk"),
        _staleness("median", lambda a: a.median),
        _staleness("mean", lambda a: a.mean, plain),
        _staleness("largest", lambda a: a.largest),
        _figure("lost", "lost batches", "", lambda r: r.lost),
        _figure("pipeline_mb", "pipeline", "MB", lambda r: _sent_along(r, "pipeline"), 1e-6),
        _figure("tensor_mb", "tensor", "MB", lambda r: _sent_along(r, "tensor"), 1e-6),
        _figure("bubble", "bubble", "%", lambda r: r.bubble, 100, 1),
        Column("data", "data", lambda r: r.facet.data, lambda r: r.facet.data),
        Column("model", "model", lambda r: r.facet.model, lambda r: r.facet.model),
        Column("workers", "workers", lambda r: float(r.facet.workers), lambda r: str(r.facet.workers)),
        Column("kind", "kind", lambda r: r.facet.kind, lambda r: r.facet.kind),
        Column("clock", "seconds are", _clock, lambda r: _clock(r) or NONE),
        Column("seeds", "seeds", _seeds, _seeds),
        Column("rate", "rate", lambda r: r.lr, lambda r: lr_text(r.lr)),
        Column("study", "study", lambda r: r.study, lambda r: r.study or NONE),
        Column("state", "state", _state, _state),
    ]
    if len({r.study for r in rows}) < 2:
        found = [c for c in found if c.name != "study"]
    if not any(r.facet.cluster for r in rows):
        found = [c for c in found if c.name != "clock"]
    if not any(r.staleness for r in rows):
        found = [c for c in found if not c.name.startswith("staleness")]
    if not any(r.lost and r.lost.mean > 0 for r in rows):
        found = [c for c in found if c.name != "lost"]
    for axis in ("pipeline", "tensor"):
        if not any((sent := _sent_along(r, axis)) and sent.mean > 0 for r in rows):
            found = [c for c in found if c.name != f"{axis}_mb"]
    if not any(r.bubble for r in rows):
        found = [c for c in found if c.name != "bubble"]
    if len({r.facet for r in rows}) > 1:
        found.sort(key=lambda c: 0 if c.name == "strategy" else 1 if c.name in _FACET else 2)
    return found


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure with all its digits; spreads and folders in columns of their own."""
    shown = columns(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [name for c in shown for name in ((c.name, f"{c.name}_spread") if c.spread else (c.name,))]
    writer.writerow([*heads, "folders"])
    for row in rows:
        cells: list[Value] = []
        for column in shown:
            cells.append(column.value(row))
            if column.spread:
                cells.append(column.spread(row))
        texts = ["" if c is None else f"{c:.10g}" if isinstance(c, float) else _inert(c) for c in cells]
        writer.writerow([*texts, _inert("; ".join(row.folders))])
    return out.getvalue()


def _inert(text: str) -> str:
    """Text that no spreadsheet reads as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def as_markdown(rows: Sequence[Row]) -> str:
    """A table for people."""
    shown = columns(rows)
    lines = ["| " + " | ".join(f"{c.title} ({c.unit})" if c.unit else c.title for c in shown) + " |"]
    lines.append("|" + "|".join("---:" if c.numeric else "---" for c in shown) + "|")
    for row in rows:
        lines.append("| " + " | ".join(_escaped(c.text(row)) for c in shown) + " |")
    return "\n".join(lines) + "\n"


def as_html(rows: Sequence[Row]) -> tuple[str, str]:
    """The head and the body; ``data-v`` holds what a cell sorts by."""
    shown = columns(rows)
    head = "".join(_head(c) for c in shown)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(_cell(column, row) for column in shown)
        unranked = "" if row.ranked else ' class="unranked"'
        body.append(f'<tr data-row="{index}"{unranked}>{cells}</tr>')
    return f"<tr>{head}</tr>", "\n".join(body)


def _head(column: Column) -> str:
    unit = f' <span class="unit">{html.escape(column.unit)}</span>' if column.unit else ""
    return f'<th scope="col" data-name="{column.name}"{_class(column)}>{html.escape(column.title)}{unit}</th>'


def _cell(column: Column, row: Row) -> str:
    value, text = column.value(row), html.escape(column.text(row))
    key = "" if value is None else html.escape(f"{value:.10g}" if isinstance(value, float) else value)
    if column.name == "strategy":
        return f'<th scope="row" data-v="{key}">{text}</th>'
    return f'<td data-v="{key}"{_class(column)}>{text}</td>'


def _class(column: Column) -> str:
    names = ["number"] * column.numeric + ["word"] * (column.name in ("state", "study")) + ["of-facet"] * (column.name in _FACET)
    return f' class="{" ".join(names)}"' if names else ""


def _figure(
    name: str, title: str, unit: str, get: Callable[[Row], Figure | None], scale: float = 1, digits: int | None = None
) -> Column:
    def value(row: Row) -> Value:
        figure = get(row)
        return None if figure is None else figure.mean * scale

    def spread(row: Row) -> float | None:
        figure = get(row)
        return None if figure is None or figure.spread is None else figure.spread * scale

    def text(row: Row) -> str:
        mean = value(row)
        return around(mean, spread(row), digits) if isinstance(mean, float) else NONE

    return Column(name, title, value, text, unit, spread)


def _staleness(name: str, get: Callable[[Staleness], float], form: Callable[[float], str] = whole) -> Column:
    def value(row: Row) -> Value:
        return None if row.staleness is None else float(get(row.staleness))

    def text(row: Row) -> str:
        return NONE if row.staleness is None else form(get(row.staleness))

    return Column(f"staleness_{name}", "staleness", value, text, name)


def _clock(row: Row) -> str:
    return row.facet.predicted if row.facet.virtual else "measured"


def _seeds(row: Row) -> str:
    return ", ".join(str(s) for s in row.seeds) or NONE


def _mb(row: Row) -> float | None:
    return None if row.per_worker is None else row.per_worker / 1e6


def _sent_along(row: Row, axis: str) -> Figure | None:
    return row.comm_stats[axis].bytes_sent if axis in row.comm_stats else None


def _state(row: Row) -> str:
    return row.state if row.state == FINISHED or not row.reason else f"{row.state}: {row.reason}"


def _escaped(text: str) -> str:
    """Text that cannot break out of a Markdown cell or become HTML."""
    return html.escape(text.replace("\\", "\\\\"), quote=False).replace("|", "\\|").replace("\n", " ")
