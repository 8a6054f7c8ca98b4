"""Build a report: read the runs, compare them, and write page, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hocket.report import charts
from hocket.report.answers import WITHIN, Answer, answers_of, basis
from hocket.report.files import write_files
from hocket.report.page import make_page
from hocket.report.read import read
from hocket.report.rows import Facet, Row, make_rows
from hocket.report.table import as_csv, as_markdown


@dataclass
class Report:
    """What was built: ``path`` is the page."""

    path: Path
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """What could not be read or made."""
    by_facet: dict[Facet, list[Answer]] = field(default_factory=dict)

    @property
    def answers(self) -> list[str]:
        """Plain sentences; where there are several facets each begins with its own."""
        several = len(self.by_facet) > 1
        return [
            f"{facet} ({basis(self.rows, facet)}): {answer}" if several else str(answer)
            for facet, found in self.by_facet.items()
            for answer in found
        ]


def build(folders: Sequence[Path], out: Path, title: str | None = None, png: bool = True) -> Report:
    """Write ``report.html``, ``table.csv``, ``table.md`` and ``charts/*.png`` into ``out`` from the runs under ``folders``.

    ``title`` defaults to the study's own. Without matplotlib (the extra ``hocket[plot]``) the PNG files are left out, and the page
    says so.
    """
    reading = read([Path(f) for f in folders])
    rows = make_rows(reading.runs)
    facets = sorted({row.facet for row in rows})
    asked = {s.within for s in reading.studies}
    within = asked.pop() if len(asked) == 1 else None
    answers = {facet: answers_of(facet, rows, WITHIN if within is None else within) for facet in facets}
    pictures: dict[str, bytes] = {}
    if png and charts.available():
        pictures = charts.draw(rows)
    elif png:
        reading.notes.append("There are no PNG charts, because matplotlib is not installed (pip install 'hocket[plot]').")
    titles = [s.title for s in reading.studies]
    title = title or (" and ".join(titles) if len(titles) <= 2 else f"{len(titles)} studies") or "Hocket report"
    files = {
        "table.csv": as_csv(rows).encode(),
        "table.md": as_markdown(rows).encode(),
        **{f"charts/{name}": content for name, content in pictures.items()},
        "report.html": make_page(title, rows, answers, reading, bool(pictures)).encode(),
    }
    write_files(Path(out), files)
    for chart in (Path(out) / "charts").glob("*.png") if pictures else ():
        if charts.ours(chart.name) and chart.name not in pictures:  # charts of runs that no longer exist
            chart.unlink(missing_ok=True)
    return Report(Path(out) / "report.html", rows, reading.notes, answers)
