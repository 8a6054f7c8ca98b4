"""A recorded report: the same runs give the same page, tables and charts, down to labels, colours and sizes.

To record anew, after a change of the report that is meant:

    .venv/bin/python tests/golden/test_report.py
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from browser.study import free_runs, split_runs, ten_runs, write_run
from hocket.report import build, charts

RECORD = Path(__file__).with_name("report.json")


def far_runs(folder: Path) -> Path:
    """Two numbers of workers; runs that lie upon each other, one far below the frontier, and one that failed."""
    near = [(f"local({p})", 0.88) for p in (2, 4, 8, 16)]
    for index, (strategy, best) in enumerate([("bulk + allreduce", 0.9), *near, ("local(99)", 0.2)]):
        parts = {"compute_s": 1.0, "wait_s": 0.5, "transfer_s": 0.25 * index, "bytes_sent": 10**7 * (1 + (index > 4))}
        lines = [
            {
                "epoch": e,
                "accuracy": best * e / 3,
                "loss": 1.0 / e,
                "seconds": 2.0,
                "bytes_sent": 10**7 * (1 + (index > 4)),
                **parts,
            }
            for e in (1, 2, 3)
        ]
        for workers in (2, 4):
            write_run(folder / f"{index}-{workers}", strategy, lines, epochs=3, workers=workers)
    write_run(folder / "failed", "gossip", [], epochs=3, failure="It was stopped.")
    return folder


STUDIES = {"ten": ten_runs, "asynchronous": free_runs, "split": split_runs, "far": far_runs}


def described(figure: Any) -> list[str]:
    """What a figure shows, one line per artist: kind, text or data, colour, sizes."""
    names = ("text", "fontsize", "color", "facecolor", "edgecolor", "linewidth", "linestyle", "marker", "markersize", "fillstyle")
    names += ("alpha", "zorder", "visible", "xy", "width", "height", "data", "xlim", "ylim", "xscale", "label", "ha", "va")
    lines = [f"figure {tuple(figure.get_size_inches())} {figure.dpi}"]
    for artist in figure.findobj():
        found = {name: getattr(artist, f"get_{name}")() for name in names if hasattr(artist, f"get_{name}")}
        lines.append(f"{type(artist).__name__} " + " ".join(f"{name}={plain(value)}" for name, value in found.items()))
    return lines


def plain(value: Any) -> str:
    """A value without the last digits of its numbers, which differ between machines."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(plain, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def report_of(study: str, folder: Path) -> dict[str, Any]:
    """Answers and tables as text, page and charts as digests."""
    make: Any = STUDIES[study]
    report = build([make(folder / "runs")], folder, png=False)
    figures: dict[str, str] = {}
    finish = charts._finish

    def kept(figure: Any, axes: Any, left_out: int, columns: int = 2) -> bytes:
        picture = finish(figure, axes, left_out, columns)
        figures[axes.get_title(loc="left")] = digest("\n".join(described(figure)))
        return picture

    charts._finish = kept
    try:
        names = sorted(charts.draw(report.rows))
    finally:
        charts._finish = finish
    page = (folder / "report.html").read_text()
    return {
        "answers": [str(answer) for answer in report.answers],
        "table": (folder / "table.md").read_text().splitlines(),
        "csv": digest((folder / "table.csv").read_text()),
        "page": digest(page[page.index("<body") :]),
        "names": names,
        "charts": figures,
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("study", STUDIES)
def test_the_report_is_the_recorded_one(study: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report_of(study, tmp_path) == json.loads(RECORD.read_text())[study]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORD.write_text(json.dumps({s: report_of(s, Path(folder, s)) for s in STUDIES}, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(STUDIES)} reports in {RECORD}")
