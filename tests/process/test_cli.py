"""The command as a stranger runs it: real processes, one sentence for every mistake, records that are whole, no orphans."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hocket.cli.main import _Interruption
from process import launch
from process.launch import Hocket

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "-m", "hocket.cli.main"]
ENVIRON = {**launch.ENVIRON, "COLUMNS": "120"}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what differs from run to run."""
    return [{k: v for k, v in m.items() if not k.endswith("_s") and k not in ("seconds", "step_times")} for m in metrics]


SMALL = [
    "--model",
    "cnn",
    "--batch-size",
    "32",
    "--lr",
    "0.05",
    "--momentum",
    "0.9",
    "--max-steps",
    "14",
    "--epochs",
    "2",
    "--seed",
    "3",
]


def test_the_same_seed_gives_the_same_figures_on_real_and_on_virtual_workers(hocket: Hocket, tmp_path: Path) -> None:
    strategy = ["--strategy", "local(3) + gossip + topk(0.1)"]
    for name, where in (
        ("real", ["--workers", "4", "--exact"]),
        ("virtual", ["--workers", "4", "--virtual"]),
        ("hosted", ["--workers", "4", "--processes", "2", "--exact"]),
    ):
        ended = hocket("train", *SMALL, *strategy, *where, "--out", str(tmp_path / name))
        assert ended.returncode == 0, ended.stderr
    real, virtual, hosted = (metrics_of(tmp_path / n) for n in ("real", "virtual", "hosted"))
    assert timeless(real) == timeless(virtual) == timeless(hosted)
    assert all(m["seconds"] is None and m["wait_s"] is None for m in virtual), "virtual workers have no clocks"
    assert all(m["seconds"] == pytest.approx(m["compute_s"] + m["wait_s"] + m["transfer_s"]) for m in real)
    run = json.loads((tmp_path / "real" / "run.json").read_text())
    assert run["strategy"] == "local(3) + gossip + topk(0.1)"
    assert run["seed"] == 3
    assert run["cluster"]["workers"] == 4
    assert run["versions"]["torch"]
    assert [list(b["parameters"]) for b in run["buckets"]]


def test_resuming_equals_never_having_stopped(hocket: Hocket, tmp_path: Path) -> None:
    base = [
        "train",
        "--model",
        "cnn",
        "--batch-size",
        "32",
        "--workers",
        "3",
        "--virtual",
        "--strategy",
        "local(4) + topk(0.1)",
        "--seed",
        "1",
    ]
    whole = hocket(*base, "--epochs", "2", "--lr-schedule", "constant", "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    first = hocket(*base, "--epochs", "1", "--lr-schedule", "constant", "--out", str(tmp_path / "parts"))
    assert first.returncode == 0, first.stderr
    second = hocket(*base, "--epochs", "2", "--lr-schedule", "constant", "--out", str(tmp_path / "parts"), "--resume")
    assert second.returncode == 0, second.stderr
    parts, unbroken = timeless(metrics_of(tmp_path / "parts")), timeless(metrics_of(tmp_path / "whole"))
    assert parts[1]["loss"] == unbroken[1]["loss"]
    assert parts[1]["accuracy"] == unbroken[1]["accuracy"]
    assert parts[1]["test_loss"] == unbroken[1]["test_loss"] > 0
    assert re.search(r"test accuracy +\d+\.\d %, test loss", whole.stdout)


def test_a_described_cluster_gives_virtual_workers_seconds_that_survive_a_stop(hocket: Hocket, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[compute]\nstep = "20ms"\njitter = 0.1\n[link]\nbandwidth = "100Mbit"\nlatency = "1ms"\n')
    slow = ["--cluster", str(tmp_path / "mine.toml"), "--slowdown", "1,1,4"]
    base = ["train", "--model", "cnn", "--batch-size", "100", "--workers", "3", "--virtual", "--strategy", "local(4)", *slow]
    whole = hocket(*base, "--epochs", "2", "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    assert "s (predicted for mine with slowdown 1,1,4)" in " ".join(whole.stdout.split())
    for epochs, more in (("1", []), ("2", ["--resume"])):
        ended = hocket(*base, "--epochs", epochs, "--out", str(tmp_path / "parts"), *more)
        assert ended.returncode == 0, ended.stderr
    parts, unbroken = metrics_of(tmp_path / "parts"), metrics_of(tmp_path / "whole")
    for name in ("seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s"):
        assert [m[name] for m in parts] == [m[name] for m in unbroken]
    assert all(m["seconds"] == pytest.approx(m["compute_s"] + m["wait_s"] + m["transfer_s"]) for m in unbroken)
    assert sum(m["compute_s"] for m in unbroken) == pytest.approx(9.6 * 0.02 * 2, rel=0.1)  # a mean over 1, 1 and 4
    run = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert run["spec"]["name"] == "mine"
    assert run["spec"]["latency_s"] == 1e-3
    assert run["spec"]["slowdown"] == [1, 1, 4]
    (tmp_path / "mine.toml").write_text('[compute]\nstep = "30ms"\n')
    other = hocket(*base, "--epochs", "3", "--out", str(tmp_path / "parts"), "--resume")
    assert other.returncode != 0
    assert "spec step_s 0.02, not 0.03" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "gosip"], ["gosip", "did you mean 'gossip'"]),
        (["--strategy", "local(4) + dgc(0.01)"], ["dgc", "cannot carry weights"]),
        (["--strategy", "qsgd(99)"], ["qsgd(99)", "2 to 8"]),
        (["--data", "cifar11"], ["cifar11", "did you mean"]),
        (["--data", "cifar10", "--data-dir", "{tmp}"], ["cifar", "{tmp}"]),
        (["--model", "cn"], ["cn", "did you mean 'cnn'"]),
        (["--model", "gpt"], ["gpt", "tokens"]),
        (["--optimizer", "sdg"], ["sdg", "did you mean 'sgd'"]),
        (["--device", "tpu"], ["tpu", "cpu or cuda"]),
        (["--workers", "0"], ["at least one"]),
        (["--workers", "2000", "--virtual"], ["2000", "1437"]),
        (["--lr-schedule", "cosin", "--virtual"], ["cosin", "cosine"]),
        (["--batch-size", "0"], ["batch", "at least 1"]),
        (["--resume"], ["--out"]),
        (["--workers", "2", "--processes", "3"], ["--processes 3"]),
        (["--data", "no_such_module:factory"], ["no_such_module"]),
        (["--nonfinite", "ignore", "--virtual"], ["ignore", "skip"]),
        (["--lr", "-1"], ["--lr"]),
        (["--cluster", "1gbit"], ["--cluster 1gbit", "virtual workers", "--virtual"]),
        (["--cluster", "1gbi", "--virtual"], ["1gbi", "did you mean '1gbit'"]),
        (["--cluster", "{tmp}", "--virtual"], ["{tmp}", "no such file"]),
        (["--slowdown", "1,0.5", "--workers", "2"], ["--slowdown 1,0.5", "only be made slower"]),
        (["--slowdown", "1,4", "--virtual"], ["--slowdown 1,4", "--cluster"]),
        (["--slowdown", "1;4", "--virtual", "--cluster", "1gbit"], ["--slowdown 1;4", "1,1,1,4"]),
        (["--slowdown", "1,-4", "--virtual", "--cluster", "1gbit"], ["--slowdown 1,-4", "above 0"]),
    ],
)
def test_every_mistake_meets_one_sentence(hocket: Hocket, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    filled = [a.format(tmp=tmp_path) for a in arguments]
    environ = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    out = [] if "--resume" in filled else ["--out", str(tmp_path / "out")]
    ended = hocket("train", "--max-steps", "1", *filled, *out, environ=environ)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("hocket: ")]
    assert len(said) == 1, ended.stderr
    for word in words:
        assert word.format(tmp=tmp_path) in ended.stderr
    assert not (tmp_path / "out" / "run.json").exists(), "nothing half-written"


def test_a_folder_with_a_run_in_it_is_not_overwritten(hocket: Hocket, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    ended = hocket("train", "--workers", "2", "--max-steps", "1", "--out", str(tmp_path))
    assert ended.returncode != 0
    assert "holds a run already" in ended.stderr
    assert (tmp_path / "run.json").read_text() == "{}"


def start_training(tmp_path: Path, *more: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A long training of three workers, once its first epoch is recorded."""
    arguments = [
        "train",
        "--model",
        "cnn",
        "--workers",
        "3",
        "--epochs",
        "1000000",
        "--batch-size",
        "64",
        "--out",
        str(tmp_path / "run"),
        *more,
    ]
    started = subprocess.Popen(
        [*COMMAND, *arguments], env={**ENVIRON, **(environ or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < deadline, "the training did not start"
        time.sleep(0.05)
    return started


def workers_of(started: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(started.pid).children(recursive=True)
    return [p for p in found if "hocket.cli.main" in p.cmdline() or p.name() == "main"]  # an interpreter of its own, or a fork


def test_a_killed_worker_ends_the_others_and_is_named(tmp_path: Path) -> None:
    started = start_training(tmp_path)
    workers = workers_of(started)
    victim = next(p for p in workers if p.environ().get("RANK") == "2")
    victim.kill()
    _, said = started.communicate(timeout=60)
    assert started.returncode != 0
    assert "rocess 2" in said, said
    assert "Traceback" not in said, said
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert len(gone) == 3


@pytest.mark.usefixtures("forked")
def test_an_interrupted_training_leaves_no_process_and_whole_records(tmp_path: Path) -> None:
    started = start_training(tmp_path)
    workers = workers_of(started)
    assert len(workers) == 3
    for p in (psutil.Process(started.pid), *workers):  # what a terminal does on Ctrl-C; the launcher repeats it to its workers
        p.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said
    assert "Traceback" not in said, said
    assert "hocket: interrupted." in said, said
    assert not psutil.wait_procs(workers, timeout=20)[1]
    assert metrics_of(tmp_path / "run"), "every line is whole"
    json.loads((tmp_path / "run" / "run.json").read_text())
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_launched_worker_leaves_quietly_however_often_it_is_interrupted(tmp_path: Path) -> None:
    started = start_training(tmp_path, "--virtual", environ={"HOCKET_LAUNCHED": "1"})
    while started.poll() is None:
        started.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # as fast as a hand never is, but not a flood that leaves it no time
            started.wait(0.005)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said
    assert "Traceback" not in said, said


def test_an_interruption_that_was_lost_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    heard = _Interruption()
    for now[0], counts in ((100.0, True), (100.1, False), (109.0, False), (111.0, True), (111.1, False)):
        with pytest.raises(KeyboardInterrupt) if counts else nullcontext():
            heard(signal.SIGINT, None)


def test_version_and_help(hocket: Hocket) -> None:
    assert subprocess.run([*COMMAND, "--version"], env=ENVIRON, capture_output=True, text=True, timeout=100).stdout.strip()
    assert "--strategy" in hocket("train", "--help").stdout
