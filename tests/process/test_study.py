"""``hocket study`` as a stranger runs it: real processes, Ctrl-C, going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from process.launch import Hocket, Nursery, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]

STUDY = """
title = "Two"
workers = 2
batch_size = 50
epochs = {epochs}
model = "mlp"
virtual = {virtual}
strategies = ["bulk + allreduce", "local(4) + gossip"]
[[run]]
strategy = "bulk + hierarchical(size=3)"
"""


def figures(place: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        p.parent.name: [
            {k: v for k, v in json.loads(line).items() if not k.endswith("_s") and k != "seconds"}
            for line in p.read_text().splitlines()
        ]
        for p in sorted(place.glob("runs/*/metrics.jsonl"))
    }


def file(tmp_path: Path, virtual: bool, epochs: int = 1) -> str:
    path = tmp_path / "two.toml"
    path.write_text(STUDY.format(virtual=str(virtual).lower(), epochs=epochs))
    return str(path)


def test_real_processes_one_failure_a_table_and_a_page(hocket: Hocket, tmp_path: Path) -> None:
    what = [file(tmp_path, virtual=False), "--device", "cpu"]
    ended = hocket("study", *what, "--out", str(tmp_path / "real"))
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "[1/3] bulk + allreduce: accuracy" in ended.stderr
    assert "[3/3] bulk + hierarchical(size=3): failed: " in ended.stderr
    assert "do not divide into hosts of 3" in ended.stdout
    assert "local(4) + gossip" in ended.stdout
    assert str(tmp_path / "real" / "report.html") in ended.stdout
    assert (tmp_path / "real" / "report.html").is_file()
    runs = [json.loads(p.read_text()) for p in sorted((tmp_path / "real").glob("runs/*/run.json"))]
    assert [bool(run.get("failure")) for run in runs] == [False, True, False]
    assert {run["cluster"]["processes"] for run in runs if "failure" not in run} == {2}
    assert not list(tmp_path.rglob("*.pt"))
    assert "hosts of 3" in next((tmp_path / "real").glob("runs/*/output.txt")).read_text()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("real/runs/*/*")}
    again = hocket("study", *what, "--out", str(tmp_path / "real"))
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("(from before)") == 3
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("real/runs/*/*")} == before


@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_leaves_no_process_and_goes_on(
    nursery: Nursery, tmp_path: Path, virtual: bool, number: signal.Signals
) -> None:
    long = file(tmp_path, virtual, epochs=100_000)
    place = tmp_path / "out"
    arguments = ["study", long, "--device", "cpu", "--out", str(place), "--max-steps", "1000000"]
    started = nursery.command(arguments, tmp_path / "said", tmp_path)
    assert eventually(lambda: started.poll() is not None or any(place.glob("runs/*/metrics.jsonl")), 120), "it did not start"
    assert started.poll() is None, started.said()
    others = psutil.Process(started.pid).children(recursive=True)
    assert virtual or len(others) >= 3, "a launcher and two workers"
    os.killpg(started.pid, number)  # what a terminal does
    ended = started.ended(60)
    said = ended.stderr
    assert ended.returncode == 130, said
    assert "Traceback" not in said, said
    assert "hocket: interrupted; 0 of 3 runs done; the same command goes on." in said
    assert not psutil.wait_procs(others, timeout=20)[1]
    assert len(json.loads((place / "study.json").read_text())["runs"]) == 3
    assert not figures(place), "what was broken off leaves nothing"
    assert not list(place.rglob("*.tmp"))


def test_going_on_after_ctrl_c_gives_the_page_and_the_same_figures(nursery: Nursery, tmp_path: Path) -> None:
    def watched(name: str, place: Path, stop_after: int | None) -> subprocess.CompletedProcess[str]:
        arguments = [
            "study",
            "ten",
            "--model",
            "mlp",
            "--batch-size",
            "20",
            "--epochs",
            "2",
            "--max-steps",
            "8",
            "--out",
            str(place),
        ]
        started = nursery.command(arguments, tmp_path / name, tmp_path)
        if stop_after is not None:
            assert eventually(lambda: started.said().count("\n") >= stop_after, 120), started.said()
            os.killpg(started.pid, signal.SIGINT)
        return started.ended()

    whole = watched("straight", tmp_path / "whole", None)
    assert whole.returncode == 0, whole.stderr
    first = watched("first", tmp_path / "parts", 3)
    assert first.returncode == 130, first.stderr
    assert "of 10 runs done; the same command goes on." in first.stderr
    assert (tmp_path / "parts" / "report.html").is_file(), "a page of what is done"
    second = watched("second", tmp_path / "parts", None)
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("(from before)") >= 3
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")


@pytest.mark.slow
def test_the_demo_ends_with_tables_answers_and_a_page(nursery: Nursery, tmp_path: Path) -> None:
    """With fewer strategies: all of them are tested elsewhere."""
    arguments = ["demo", "--workers", "2", "--virtual", "3", "--epochs", "1", "--out", str(tmp_path / "demo")]
    ended = nursery.command(arguments, tmp_path / "said", tmp_path, program="short_demo").ended()
    assert ended.returncode == 0, ended.stderr
    assert "failed" not in ended.stderr
    for words in ("2 real workers", "3 virtual workers", "• Most accurate", str(tmp_path / "demo" / "report.html")):
        assert words in ended.stdout, ended.stdout
    assert (tmp_path / "demo" / "report.html").is_file()


def test_another_study_in_the_folder_is_one_sentence(hocket: Hocket, tmp_path: Path) -> None:
    small = ["--model", "mlp", "--max-steps", "1", "--out", str(tmp_path / "out")]
    assert hocket("study", file(tmp_path, virtual=True), *small).returncode == 0
    ended = hocket("study", file(tmp_path, virtual=True, epochs=2), *small)
    assert ended.returncode == 2
    assert ended.stderr.startswith("hocket: ")
    assert "epochs is 1 there and 2 here" in ended.stderr
    assert "Traceback" not in ended.stderr
