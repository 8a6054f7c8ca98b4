"""``hocket train --optimizer sandblaster`` as a stranger runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.errors import HocketError
from process.launch import Hocket
from process.test_cli import metrics_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SMALL = ["train", "--optimizer", "sandblaster", "--workers", "3", "--epochs", "3", "--weight-decay", "0.001", "--exact"]
SMALL += ["--model", "cnn"]  # exact sums are slow


def test_real_and_virtual_workers_come_to_the_same(hocket: Hocket, tmp_path: Path) -> None:
    for name, where in (("real", []), ("virtual", ["--virtual", "--slowdown", "1,1,4"])):
        done = hocket(*SMALL, *where, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "Sandblaster L-BFGS" in done.stdout
    real, virtual = (metrics_of(tmp_path / name) for name in ("real", "virtual"))
    assert [m["loss"] for m in real] == [m["loss"] for m in virtual]
    assert real[-1]["accuracy"] == virtual[-1]["accuracy"] > 0.3
    assert real[-1]["test_loss"] == virtual[-1]["test_loss"] > 0
    assert all(m["bytes_coordinator"] < 0.01 * m["bytes_sent"] for m in (*real, *virtual))
    assert json.loads((tmp_path / "virtual" / "run.json").read_text())["spec"]["slowdown"] == [1, 1, 4]


MISTAKES = {
    "a strategy": (["--strategy", "local(4)"], "server(shards=n)"),
    "real workers that are to be faster": (["--slowdown", "1,1,0.5"], "at least 1"),
    "resume": (["--resume", "--out", "x"], "--resume"),
    "a device for real workers": (["--device", "cuda"], "--virtual"),
    "a model with dropout or batch statistics": (
        ["--model", "resnet20", "--data", "digits"],
        "(BatchNorm2d) uses statistics of each portion",
    ),
}


IGNORED = {
    "--momentum 0.9 --lr-schedule cosine --warmup 1": "--momentum, --lr-schedule, --warmup: ",
    "--batch-size 7 --no-augment --max-steps 3": "--batch-size, --max-steps, --no-augment: ",
    "--strategy server(shards=2,optimizer=adagrad,fetch=bf16)": "server(optimizer=…), server(fetch=…): ",
}


@pytest.mark.parametrize("arguments", IGNORED)
def test_what_it_would_ignore_is_refused(arguments: str) -> None:
    ended = CliRunner().invoke(app, [*SMALL, "--virtual", *arguments.split()])
    assert isinstance(ended.exception, HocketError), ended.exception
    assert IGNORED[arguments] in str(ended.exception)
    assert "leave" in str(ended.exception)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_meet_one_sentence(hocket: Hocket, name: str, tmp_path: Path) -> None:
    arguments, word = MISTAKES[name]
    done = hocket(*SMALL, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert not list(tmp_path.iterdir())
