"""``hocket train --mesh`` and ``hocket pipeline show`` as a stranger runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from process.launch import Hocket
from process.test_cli import metrics_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
SMALL = ["--model", "cnn", "--batch-size", "120", "--lr", "0.05", "--momentum", "0.9", "--seed", "3"]


def test_a_run_goes_on_split_otherwise_and_ends_where_an_unsplit_one_does(hocket: Hocket, tmp_path: Path) -> None:
    whole, split, plan = tmp_path / "whole", tmp_path / "split", tmp_path / "plan.toml"
    plan.write_text('3 = "gather"\n7 = "columns"\n"9" = "rows"\n')
    stages = ["--mesh", "pipeline=2", "--pipe", "gpipe", "--num-microbatches", "2", "--cut", "2"]
    ways = ([], stages, ["--mesh", "tensor=2", "--plan", str(plan)])
    for number, mesh in enumerate(ways, 1):
        resumed = ["--resume"] if number > 1 else []
        ended = hocket("train", *SMALL, "--epochs", str(number), "--out", str(split), *mesh, *resumed)
        assert ended.returncode == 0, ended.stderr
        described = json.loads((split / "run.json").read_text())
        assert described["cut"] == ("2" if number == 2 else None)
    assert described["plan"] == {"3": "gather", "7": "columns", "9": "rows"}
    assert hocket("train", *SMALL, "--epochs", "3", "--out", str(whole)).returncode == 0
    one, other = metrics_of(whole), metrics_of(split)
    assert [m["loss"] for m in other] == pytest.approx([m["loss"] for m in one], abs=1e-4)
    assert [m["accuracy"] for m in other] == pytest.approx([m["accuracy"] for m in one], abs=0.01)
    assert [m.get("axes", {}).get("pipeline", {}).get("bytes_sent", 0) > 0 for m in other] == [False, True, False]
    assert other[2]["axes"]["tensor"]["bytes_sent"] > 0
    timeline = json.loads((split / "timeline.json").read_text())
    assert len(timeline["rows"]) == 2
    assert {action[0] for row in timeline["rows"] for action in row} == {"F", "B"}


def test_explain_shows_who_holds_what_and_trains_nothing(hocket: Hocket, tmp_path: Path) -> None:
    stages = ["--mesh", "pipeline=2", "--pipe", "interleaved", "--stages-per-rank", "2", "--cut", "0,3,7", "--measure", "flops"]
    ended = hocket("train", *SMALL, *stages, "--explain", "--out", str(tmp_path / "none"))
    assert ended.returncode == 0, ended.stderr
    for words in ("kB after it", "stage 3", "process 0 · stage 0", "activations", "estimated from operations"):
        assert words in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert [row[-1] for row in rows if len(row) == 6 and row[0].isdigit()] == list("0111222233")
    assert not (tmp_path / "none").exists()


def test_workers_may_keep_everything_in_parts(hocket: Hocket, tmp_path: Path) -> None:
    ended = hocket("train", *SMALL, "--workers", "2", "--fsdp", "--epochs", "1", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "2 workers, all in parts (MB by formula)" in " ".join(ended.stdout.split())
    assert json.loads((tmp_path / "run.json").read_text())["shard"] == "full"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "pipelin=2"], "did you mean 'pipeline'?"),
        (["--mesh", "data=2", "--workers", "3"], "leave --workers out"),
        (["--mesh", "pipeline=2", "--pipe", "1f2b"], "did you mean '1f1b'?"),
        (["--mesh", "tensor=2", "--num-microbatches", "4"], "add pipeline=2"),
        (["--pipe", "gpipe"], "add --mesh"),
        (["--mesh", "pipeline=2", "--virtual"], "leave --virtual"),
        (["--mesh", "data=2,pipeline=2", "--strategy", "async + server"], "hocket.parallelize"),
        (["--mesh", "pipeline=2", "--processes", "2"], "leave --processes out"),
        (["--explain"], "add --mesh"),
    ],
)
def test_a_bad_mesh_meets_one_sentence(hocket: Hocket, arguments: list[str], words: str) -> None:
    ended = hocket("train", "--max-steps", "1", *arguments)
    assert ended.returncode != 0
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def test_a_schedule_is_drawn_with_its_bubble(hocket: Hocket) -> None:
    ended = hocket("pipeline", "show", "--schedule", "1f1b", "--stages", "4", "--num-microbatches", "8")
    assert "27.3 %" in ended.stdout
    assert "did you mean" in hocket("pipeline", "show", "--schedule", "gpip").stderr
