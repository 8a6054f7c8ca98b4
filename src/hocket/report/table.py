"""The table of rows; the page, Markdown and CSV have the same columns."""

import csv
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.report.figure import Figure
from hocket.report.figures import NONE, lr_text, plain, times, whole
from hocket.report.read import FINISHED
from hocket.report.rows import Row

_FACET = ("data", "model", "workers", "kind", "clock")
_WORDS = ("strategy", "study", "data", "model", "kind", "clock", "seeds", "state", "slowest_worker")


@dataclass(frozen=True)
class Column:
    """A column: ``name`` heads it in CSV, ``title`` and ``unit`` elsewhere; ``value`` sorts, ``text`` is read."""

    name: str
    title: str
    get: Callable[[Row], Figure | float | str | None]
    unit: str = ""
    form: Callable[[float], str] = plain
    scale: float | None = None
    """What figures with a spread are multiplied by; None: it holds no such figures."""
    digits: int | None = None
    needed: Callable[[Row], Any] | None = None
    """The column is left out unless this is true of some row."""

    @property
    def numeric(self) -> bool:
        return self.name not in _WORDS

    def figure(self, row: Row) -> Figure | None:
        """A row's figure in this column, with its spread; None where it has none."""
        found = self.get(row)
        return found.scaled(self.scale or 1) if isinstance(found, Figure) else None

    def value(self, row: Row) -> float | str | None:
        """A row's figure in this column, without its spread."""
        found = self.figure(row) or self.get(row)
        return found.mean if isinstance(found, Figure) else found

    def text(self, row: Row) -> str:
        """A row's figure as text for people."""
        figure, value = self.figure(row), self.value(row)
        if figure is not None:
            return figure.text(self.digits)
        return NONE if value is None else value or NONE if isinstance(value, str) else self.form(value)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns for these rows; ``study`` only where there are several, the facet's own ones first where there are several.

    ``clock`` says where seconds come from; the column exists if some are predicted. Staleness, lost batches, bytes along the axes
    of split models and the bubble of pipelines have columns if some run recorded them.
    """
    found = [c for c in _COLUMNS if c.needed is None or any(c.needed(row) for row in rows)]
    if len({r.study for r in rows}) < 2:
        found = [c for c in found if c.name != "study"]
    if len({r.facet for r in rows}) > 1:
        found.sort(key=lambda c: 0 if c.name == "strategy" else 1 if c.name in _FACET else 2)
    return found


def _along(axis: str) -> Column:
    def get(row: Row) -> Figure | None:
        return row.comm_stats[axis].bytes_sent if axis in row.comm_stats else None

    return Column(f"{axis}_mb", axis, get, "MB", scale=1e-6, needed=lambda r: (sent := get(r)) and sent.mean > 0)


def _staleness(name: str, form: Callable[[float], str] = whole) -> Column:
    def get(row: Row) -> float | None:
        return None if row.staleness is None else float(getattr(row.staleness, name))

    return Column(f"staleness_{name}", "staleness", get, name, form, needed=lambda r: r.staleness)


def _median_step(row: Row) -> float | None:
    return None if row.stragglers is None else row.stragglers.median_s


def _left_out(row: Row) -> bool:
    return row.data_skipped is not None and row.data_skipped.mean > 0


_COLUMNS = (
    Column("strategy", "strategy", lambda r: r.label),
    Column("accuracy", "accuracy", lambda r: r.accuracy, "%", scale=100, digits=1),
    Column("accuracy_worst", "worst replica", lambda r: r.worst, "%", scale=100, digits=1),
    Column("test_loss", "test loss", lambda r: r.test_loss, scale=1, needed=lambda r: r.test_loss),
    Column("perplexity", "perplexity", lambda r: r.perplexity, scale=1, needed=lambda r: r.perplexity),
    Column("epochs", "epochs", lambda r: float(r.epochs), form="{:.0f}".format),
    Column("seconds", "seconds", lambda r: r.seconds, scale=1),
    Column("tokens_per_s", "tokens/s", lambda r: r.tokens_per_s, scale=1, needed=lambda r: r.tokens_per_s),
    Column("compute_s", "compute", lambda r: r.compute, "s", scale=1),
    Column("wait_s", "wait", lambda r: r.wait, "s", scale=1),
    Column("transfer_s", "transfer", lambda r: r.transfer, "s", scale=1),
    Column("data_wait_s", "data wait", lambda r: r.data_wait, "s", scale=1, needed=lambda r: r.data_wait),
    Column("data_mb", "data read", lambda r: r.data_bytes, "MB", scale=1e-6, needed=lambda r: r.data_bytes),
    Column(
        "data_skipped",
        "left out",
        lambda r: r.data_skipped,
        "samples",
        scale=1,
        needed=_left_out,
    ),
    Column("step_p50_s", "step", _median_step, "p50, s", needed=_median_step),
    Column("slowest_worker", "slowest", lambda r: str(r.stragglers or ""), "p50 / p99, s", needed=lambda r: r.stragglers),
    Column("sent_mb_per_worker", "sent per worker", lambda r: r.mb_per_worker, "MB"),
    Column("times_fewer_bytes", "fewer bytes", lambda r: r.times_fewer, "× vs bulk", times),
    _staleness("median"),
    _staleness("mean", plain),
    _staleness("largest"),
    Column("lost", "lost batches", lambda r: r.lost, scale=1, needed=lambda r: r.lost and r.lost.mean > 0),
    _along("pipeline"),
    _along("tensor"),
    Column("bubble", "bubble", lambda r: r.bubble, "%", scale=100, digits=1, needed=lambda r: r.bubble),
    Column("data", "data", lambda r: r.facet.data),
    Column("model", "model", lambda r: r.facet.model),
    Column("workers", "workers", lambda r: float(r.facet.workers), form="{:.0f}".format),
    Column("kind", "kind", lambda r: r.facet.kind),
    Column("clock", "seconds are", lambda r: r.facet.clock, needed=lambda r: r.facet.cluster),
    Column("seeds", "seeds", lambda r: ", ".join(str(s) for s in r.seeds) or NONE),
    Column("rate", "rate", lambda r: r.lr, form=lr_text),
    Column("study", "study", lambda r: r.study),
    Column("state", "state", lambda r: r.state if r.state == FINISHED or not r.reason else f"{r.state}: {r.reason}"),
)


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure with all its digits; spreads and folders in columns of their own."""
    shown = columns(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*(f"{c.name}{end}" for c in shown for end in (["", "_spread"] if c.scale else [""])), "folders"])
    for row in rows:
        cells: list[float | str | None] = []
        for column in shown:
            figure = column.figure(row)
            cells += [column.value(row), *([figure.spread if figure else None] if column.scale else [])]
        writer.writerow([_inert(c) if isinstance(c, str) else _exact(c) for c in (*cells, "; ".join(row.folders))])
    return out.getvalue()


def _exact(value: float | str | None) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else value


def _inert(text: str) -> str:
    """Text that no spreadsheet reads as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def as_markdown(rows: Sequence[Row]) -> str:
    """A table for people."""
    shown = columns(rows)

    def cell(text: str) -> str:
        """Text that cannot break out of a Markdown cell or become HTML."""
        return html.escape(text.replace("\\", "\\\\"), quote=False).replace("|", "\\|").replace("\n", " ")

    titles = [f"{c.title} ({c.unit})" if c.unit else c.title for c in shown]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, *([cell(c.text(row)) for c in shown] for row in rows))]
    lines.insert(1, f"|{'|'.join('---:' if c.numeric else '---' for c in shown)}|")
    return "\n".join(lines) + "\n"


def as_html(rows: Sequence[Row]) -> tuple[str, str]:
    """The head and the body; ``data-v`` holds what a cell sorts by."""
    shown = columns(rows)
    head = ""
    for column in shown:
        unit = f' <span class="unit">{html.escape(column.unit)}</span>' if column.unit else ""
        head += f'<th scope="col" data-name="{column.name}"{_class(column)}>{html.escape(column.title)}{unit}</th>'
    body = []
    for index, row in enumerate(rows):
        unranked = "" if row.ranked else ' class="unranked"'
        body.append(f'<tr data-row="{index}"{unranked}>{"".join(_cell(column, row) for column in shown)}</tr>')
    return f"<tr>{head}</tr>", "\n".join(body)


def _cell(column: Column, row: Row) -> str:
    key, text = html.escape(_exact(column.value(row))), html.escape(column.text(row))
    if column.name == "strategy":
        return f'<th scope="row" data-v="{key}">{text}</th>'
    return f'<td data-v="{key}"{_class(column)}>{text}</td>'


def _class(column: Column) -> str:
    names = ["number"] * column.numeric + ["word"] * (column.name in ("state", "study")) + ["of-facet"] * (column.name in _FACET)
    return f' class="{" ".join(names)}"' if names else ""
