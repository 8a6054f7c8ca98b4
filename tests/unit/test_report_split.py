"""Split models in the report: what went along each axis, rows by mesh, checked timelines, nothing where nothing is split."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from browser.study import split_runs, ten_runs, timeline, write_run, write_split
from hocket.report import Row, build
from hocket.report.charts import styles
from hocket.report.read import LARGEST_TIMELINE, Measured
from hocket.report.rows import BASELINE

MESH = "data=2,pipeline=2"
ON_MESH = f"{BASELINE} on {MESH}"


def rows_of(folder: Path) -> dict[str, Row]:
    return {row.label: row for row in build([folder], folder / "out", png=False).rows}


def page_of(folder: Path) -> str:
    return html.unescape((folder / "out" / "report.html").read_text())


def epoch(number: int, pipeline: Any, sent: int = 10) -> dict[str, Any]:
    """A line of metrics with what went along the pipeline."""
    return {"epoch": number, "accuracy": 0.5, "seconds": 1.0, "bytes_sent": sent, "axes": {"pipeline": pipeline}}


def test_axes_are_summed_over_epochs_and_are_means_over_seeds(tmp_path: Path) -> None:
    for seed, sent in ((0, 100), (1, 300)):
        lines = [epoch(k, {"bytes_sent": sent, "exchanges": 1, "seconds": sent / 1000}) for k in (1, 2)]
        write_run(tmp_path / str(seed), BASELINE, lines, epochs=2, workers=2, mesh=MESH, seed=seed)
        (tmp_path / str(seed) / "timeline.json").write_text(json.dumps({**timeline(), "bubble_share": 0.1 + 0.2 * seed}))
    row = rows_of(tmp_path)[ON_MESH]
    assert list(row.comm_stats) == ["pipeline"]
    figures = row.comm_stats["pipeline"]
    assert (figures.bytes_sent.mean, figures.seconds.mean) == pytest.approx((400, 0.4))  # type: ignore[union-attr]
    assert figures.bytes_sent.spread == pytest.approx(282.8, abs=0.1)  # type: ignore[union-attr]
    assert row.bubble is not None
    assert row.bubble.mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    "found", [None, 7, [], {}, {"bytes_sent": "many"}, {"bytes_sent": float("nan")}, {"bytes_sent": 10**400}], ids=str
)
def test_an_epoch_without_a_figure_leaves_no_sum(tmp_path: Path, found: Any) -> None:
    lines = [epoch(1, {"bytes_sent": 5, "exchanges": 1, "seconds": 1.0}), epoch(2, found)]
    write_run(tmp_path / "run", BASELINE, lines, epochs=2, workers=2, mesh=MESH)
    assert rows_of(tmp_path)[ON_MESH].comm_stats == {}
    assert "No bytes were recorded by axis." in page_of(tmp_path)


def test_each_mesh_has_a_row_and_a_label(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", BASELINE, workers=2)
    write_split(tmp_path / "a", MESH)
    write_split(tmp_path / "b", "pipeline=2,data=2", seed=1)  # the same, written otherwise
    write_split(tmp_path / "c", "data=2,tensor=2")
    write_split(tmp_path / "d", "data=2,pipeline=4", pipe="gpipe")
    write_split(tmp_path / "e", "data=2,pipeline=4")
    rows = rows_of(tmp_path)
    assert set(rows) == {
        BASELINE,
        ON_MESH,
        f"{BASELINE} on data=2,tensor=2",
        f"{BASELINE} on data=2,pipeline=4",
        f"{BASELINE} on data=2,pipeline=4 · pipe gpipe",
    }
    assert {row.strategy for row in rows.values()} == {BASELINE}
    assert rows[ON_MESH].seeds == (0, 1)
    assert [label for label, style in styles(list(rows.values())).items() if style.baseline] == [BASELINE]


def test_split_models_are_compared_with_those_that_are_not(tmp_path: Path) -> None:
    write_split(tmp_path / "bulk", MESH)
    write_split(tmp_path / "local", MESH, strategy="local(4) + allreduce")
    report = build([tmp_path], tmp_path / "out", png=False)
    assert {row.times_fewer for row in report.rows} == {1.0}
    assert any(f"of {ON_MESH}" in answer for answer in report.answers)
    write_run(tmp_path / "plain", BASELINE, workers=2)
    rows = rows_of(tmp_path)
    sent = {label: row.bytes_sent.mean for label, row in rows.items() if row.bytes_sent}
    for label, row in rows.items():
        assert row.times_fewer == pytest.approx(sent[BASELINE] / sent[label])


def test_what_is_kept_in_parts_is_no_baseline_for_what_is_whole(tmp_path: Path) -> None:
    """Sharded workers send more."""
    write_run(tmp_path / "sharded", BASELINE, [epoch(1, None, 1500)], epochs=1, shard="full")
    write_run(tmp_path / "local", "local(4) + allreduce", [epoch(1, None, 100)], epochs=1)
    assert {label: row.times_fewer for label, row in rows_of(tmp_path).items()} == {BASELINE: 1, "local(4) + allreduce": None}
    write_run(tmp_path / "whole", BASELINE, [epoch(1, None, 1000)], epochs=1)
    found = {(row.strategy, row.parts[1]): row.times_fewer for row in rows_of(tmp_path).values()}
    assert found == {(BASELINE, "full"): pytest.approx(1000 / 1500), (BASELINE, ""): 1, ("local(4) + allreduce", ""): 10}


def test_the_table_has_columns_for_what_there_is(tmp_path: Path) -> None:
    def cells() -> dict[str, dict[str, str]]:
        build([tmp_path], tmp_path / "out", png=False)
        found = csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines())
        return {row["strategy"]: {k: v for k, v in row.items() if k in ("pipeline_mb", "tensor_mb", "bubble")} for row in found}

    split_runs(tmp_path)
    found = cells()
    assert found[BASELINE] == {"pipeline_mb": "", "bubble": ""}
    assert float(found[ON_MESH].pop("bubble")) == pytest.approx(100 * timeline()["bubble_share"])
    assert found[ON_MESH] == {"pipeline_mb": "50"}
    assert "pipeline (MB) | bubble (%)" in (tmp_path / "out" / "table.md").read_text()
    write_split(tmp_path / "tensor", "data=2,tensor=2")
    assert cells()[f"{BASELINE} on data=2,tensor=2"] == {"pipeline_mb": "0", "tensor_mb": "80", "bubble": ""}


def test_where_nothing_is_split_nothing_speaks_of_it(tmp_path: Path) -> None:
    ten_runs(tmp_path)
    write_run(tmp_path / "older", BASELINE, mesh=None)
    (tmp_path / "older" / "timeline.json").write_text("not of a split model")
    report = build([tmp_path], tmp_path / "out", png=False)
    assert not report.notes
    assert not re.search(
        r"Split models|id=\"split\"|\{\{|[Bb]ubble|pipeline", re.sub(r"<style>.*?</style>", "", page_of(tmp_path), flags=re.S)
    )


def test_the_section_tells_the_timeline_in_words(tmp_path: Path) -> None:
    found = {**timeline("zero-bubble", 2, 4), "bubble_share": 0.123, "communication_share": 0.045}
    write_split(tmp_path / "run", MESH, found, pipe="zero-bubble", micro=4)
    rows_of(tmp_path)
    page = page_of(tmp_path)
    assert "of 2 processes (schedule zero-bubble, 4 micro-batches)" in page
    assert "The bubble is 12.3\u00a0%" in page
    assert "Communication is 4.5\u00a0%" in page
    assert page.count("<rect ") == 2 + sum(len(row) for row in found["rows"])
    assert re.findall(r"</i>([^<]+)<", page) == ["forward", "backward, inputs", "backward, weights", "idle"]


SPAN = ["F", 0, 0, 0.0, 1.0]
DAMAGED: dict[str, Any] = {
    "no JSON": "{",
    "not an object": [1],
    "deep": "[" * 100_000,
    "no shares": {"rows": [[SPAN]]},
    "a share of 2": {**timeline(), "bubble_share": 2},
    "a share that is no number": {**timeline(), "communication_share": float("nan")},
    "no rows": {**timeline(), "rows": None},
    "no action": {**timeline(), "rows": [[], []]},
    "no time": {**timeline(), "rows": [[["F", 0, 0, 0, 0]]]},
    "a kind that there is not": {**timeline(), "rows": [[["<b>", 0, 0, 0.0, 1.0]]]},
    "an end before its start": {**timeline(), "rows": [[["F", 0, 0, 1.0, 0.5]]]},
    "a huge time": {**timeline(), "rows": [[["F", 0, 0, 0.0, 10**400]]]},
    "a huge number": {**timeline(), "rows": [[["F", 0, 10**400, 0.0, 1.0]]]},
    "out of order": {**timeline(), "rows": [[["F", 0, 1, 2.0, 3.0], SPAN]]},
    "short": {**timeline(), "rows": [[SPAN[:4]]]},
    "too many processes": {**timeline(), "rows": [[SPAN]] * 1000},
}


@pytest.mark.parametrize("found", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_timeline_is_noted_and_left_out(tmp_path: Path, found: Any) -> None:
    run = write_split(tmp_path / "run", MESH)
    (run / "timeline.json").write_text(found if isinstance(found, str) else json.dumps(found))
    report = build([tmp_path], tmp_path / "out", png=False)
    (note,) = report.notes
    assert re.fullmatch(r"\S+/run/timeline\.json (is damaged|cannot be read|is not a JSON object).*; it was left out\.", note)
    assert report.rows[0].measured is None
    assert note in page_of(tmp_path)
    assert "<figure><figcaption><p>Measured" not in page_of(tmp_path)
    assert "Split models" in page_of(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    run = write_split(tmp_path / "run", MESH, timeline())
    with (run / "timeline.json").open("r+b") as file:
        file.truncate(LARGEST_TIMELINE + 1)
    assert "larger than 16 MiB" in build([tmp_path], tmp_path / "out", png=False).notes[0]


def test_of_a_long_timeline_the_beginning_is_drawn(tmp_path: Path) -> None:
    found = timeline("gpipe", 4, 1000)
    write_split(tmp_path / "run", "pipeline=4", found, workers=1)
    rows_of(tmp_path)
    page = page_of(tmp_path)
    drawn = page.count("<rect ") - 4
    assert 1000 < drawn <= 2000
    assert f"The first {drawn:,} of 8,000 actions are drawn." in page
    begun = Measured.of(found).beginning(10)
    assert sum(map(len, begun.rows)) <= 10
    assert begun.rows[0][0] == Measured.of(found).timeline.rows[0][0]


def test_hostile_texts_of_split_runs_stay_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    write_split(tmp_path / "run", hostile, timeline(), pipe=hostile, micro=hostile)
    build([tmp_path], tmp_path / "out", png=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<script") == 2
    assert f"on {html.escape(hostile)}</h3>" in page
    assert f"schedule {html.escape(hostile)}" in page
    for mesh in ("data=²", "data=" + "9" * 5000, 7, ["pipeline=2"]):
        write_run(tmp_path / "odd", BASELINE, workers=2, mesh=mesh)
        assert rows_of(tmp_path)


def test_timelines_are_pictures_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for mesh, found in (("pipeline=2", timeline()), ("pipeline=4", timeline("interleaved", 4, 8))):
        run = write_run(
            tmp_path / mesh, f"local($1^{{$) {'x' * 200}", [], workers=1, mesh=mesh
        )  # without epochs no other chart is drawn
        (run / "timeline.json").write_text(json.dumps(found))
    build([tmp_path], tmp_path / "out")
    pictures = sorted((tmp_path / "out" / "charts").iterdir())
    assert [path.name for path in pictures] == [f"digits-mlp-1-real-pipeline-{stages}-timeline.png" for stages in (2, 4)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    (tmp_path / "pipeline=4" / "timeline.json").unlink()
    build([tmp_path], tmp_path / "out")
    assert [path.exists() for path in pictures] == [True, False]
