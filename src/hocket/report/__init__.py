"""Finished runs as tables, charts and one self-contained HTML page that begins with answers.

``read`` reads the files of runs, ``rows`` makes one row per configuration, ``answers`` says which strategy to choose, ``table``,
``charts`` and ``page`` show it, and :func:`build` writes it all.
"""

import errno
import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hocket.errors import HocketError, nearest
from hocket.extras import require
from hocket.picture import Chart
from hocket.report import charts
from hocket.report.answers import WITHIN, Answer, answers_of, basis
from hocket.report.page import make_page
from hocket.report.read import read
from hocket.report.rows import Facet, Row, make_rows
from hocket.report.table import as_csv, as_html, as_markdown

__all__ = ["build", "Report", "Row"]


@dataclass
class Report:
    """What was built: ``path`` is the page."""

    path: Path
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """What could not be read or made."""
    by_facet: dict[Facet, list[Answer]] = field(default_factory=dict)

    def plot(self, chart: str = "accuracy", facet: Facet | None = None) -> Chart:
        """One of the charts, to show in a notebook or to save: accuracy, frontier, bars, staleness or workers.

        ``facet`` is one of ``by_facet``, the first unless it is given. Needs matplotlib (``hocket[plot]``).
        """
        require("matplotlib", "plot")
        if chart not in charts.NAMES:
            raise HocketError(f"There is no chart '{chart}'{nearest(chart, charts.NAMES)}; there are {', '.join(charts.NAMES)}.")
        chosen = next(iter(self.by_facet)) if facet is None else facet
        picture = charts.one(self.rows, chosen, chart)
        if picture is None:
            raise HocketError(f"The runs of {chosen} recorded nothing for the chart '{chart}'; choose another.")
        return Chart(picture)

    def _repr_html_(self) -> str:
        head, body = as_html(self.rows)
        answers = "".join(f"<p>{html.escape(answer)}</p>" for answer in self.answers)
        return f"<div>{answers}<table><thead>{head}</thead><tbody>{body}</tbody></table></div>"

    @property
    def answers(self) -> list[str]:
        """Plain sentences; where there are several facets each begins with its own."""
        heads = {facet: f"{facet} ({basis(self.rows, facet)}): " if len(self.by_facet) > 1 else "" for facet in self.by_facet}
        return [f"{heads[facet]}{answer}" for facet, found in self.by_facet.items() for answer in found]


def build(
    folders: Sequence[Path],
    out: Path,
    title: str | None = None,
    png: bool = True,
    predicted: Callable[[Sequence[Row]], str] = lambda _: "",
) -> Report:
    """Write ``report.html``, ``table.csv``, ``table.md`` and ``charts/*.png`` into ``out`` from the runs under ``folders``.

    ``title`` defaults to the study's own. Without matplotlib (the extra ``hocket[plot]``) the PNG files are left out, and the page
    says so. ``predicted`` makes a section of predictions, as HTML (:func:`hocket.prediction.whatif.what_if`).
    """
    reading, out = read([Path(f) for f in folders]), Path(out)
    rows = make_rows(reading.runs)
    asked = {study.within for study in reading.studies}
    within = asked.pop() if len(asked) == 1 else None
    answers = {f: answers_of(f, rows, WITHIN if within is None else within) for f in sorted({row.facet for row in rows})}
    pictures = charts.draw(rows) if png and charts.available() else {}
    if png and not charts.available():
        reading.notes.append("There are no PNG charts, because matplotlib is not installed (pip install 'hocket[plot]').")
    titles = [study.title for study in reading.studies]
    title = title or (" and ".join(titles) if len(titles) <= 2 else f"{len(titles)} studies") or "Hocket report"
    files = {"table.csv": as_csv(rows).encode(), "table.md": as_markdown(rows).encode()}
    files |= {f"charts/{name}": content for name, content in pictures.items()}
    files["report.html"] = make_page(title, rows, answers, reading, bool(pictures), predicted(rows)).encode()
    _write(out, files)
    for chart in (out / "charts").glob("*.png") if pictures else ():
        if charts.ours(chart.name) and chart.name not in pictures:  # charts of runs that no longer exist
            chart.unlink(missing_ok=True)
    return Report(out / "report.html", rows, reading.notes, answers)


def _write(out: Path, files: dict[str, bytes]) -> None:
    """Put ``files`` (by their path below ``out``) into place: all are written first, then all are renamed."""
    temporary: dict[Path, Path] = {}
    path = out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path, written = out / name, out / f"{name}.tmp"
            path.parent.mkdir(exist_ok=True)
            temporary[written] = path
            written.write_bytes(content)
        for written, path in temporary.items():
            os.replace(written, path)
    except OSError as error:
        room = "make room there, or " if error.errno == errno.ENOSPC else ""
        raise HocketError(f"Cannot write {path} ({error.strerror}); {room}choose another folder to write to.") from None
    finally:
        for written in temporary:
            written.unlink(missing_ok=True)
