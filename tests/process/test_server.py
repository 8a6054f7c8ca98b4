"""Servers and workers as real processes: what they compute, and what becomes of them when some die, stop, lie or come late."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from torch import Tensor
from typer.testing import CliRunner

from hocket.cli.main import app
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.drivers import shard_process
from hocket.drivers.snapshots import Snapshots
from hocket.errors import HocketError
from hocket.train.run import make_training
from hocket.train.settings import RunSettings
from hocket.transport import Envelope, Kind, pack
from process.launch import ENVIRON, Nursery, eventually, offspring
from process.served import LIMIT_S, Service

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

SMALL: dict[str, Any] = {"model": "process.served:small", "batch_size": 32, "workers": 3, "seed": 1}


def settings(strategy: str, **changes: Any) -> RunSettings:
    return RunSettings.of(**(SMALL | {"strategy": strategy} | changes))


def flat(rows: list[Tensor]) -> Tensor:
    return torch.cat([row.flatten() for row in rows])


def virtual(given: RunSettings) -> Tensor:
    """The weights that virtual workers end with under bulk + allreduce."""
    training = make_training(given, VirtualCluster(given.workers.count), load("digits"))
    for _ in training.run():
        pass
    return flat([w[:1] for w in training.replicas.weights])  # type: ignore[union-attr]


# --- what they compute -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bulk + server(shards=2)", "ssp(0) + server(shards=3)"])
def test_the_classical_scheme_equals_bulk(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"epochs": 2, "momentum": 0.9, "lr": 0.05, "lr_schedule": "cosine", "workers": 2}  # uneven at the end
    expected = virtual(settings("bulk", virtual=True, engine="loop", **options))
    with Service(nursery, tmp_path, settings(strategy, **options)) as service:
        status = service.ends()
        found = flat(service.weights())
    assert torch.equal(found, expected), f"they differ by {(found - expected).abs().max():.2e}"
    assert status["staleness"] == {"0": status["progress"]}
    assert status["lost"] == 0
    assert status["refused"] == {}


FREE = [
    "async + server",
    "async(overlap=True) + server(shards=2)",
    "ssp(2) + server(shards=2)",
    "downpour(push=3, fetch=2, warm=4) + server(shards=2, optimizer=adagrad)",
    "async + server(fetch=bf16) + topk(0.05)",
]  # on a busy machine a worker may push a gradient that is fifty updates old at the very end: small steps


@pytest.mark.parametrize("strategy", FREE)
def test_those_who_do_not_wait_learn_too(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    with Service(nursery, tmp_path, settings(strategy, epochs=15, lr=0.05)) as service:
        status = service.ends()
        accuracy = service.accuracy()
    assert accuracy > 0.85, status
    assert status["progress"] == 15 * 15 * 3
    pushes = sum(status["staleness"].values())
    assert pushes == pytest.approx(status["progress"] / (3 if "push=3" in strategy else 1), abs=3)
    whole = 4 * sum(service.slices.sizes)
    sent = status["workers"]["0"]["bytes_sent"] / status["workers"]["0"]["exchanges"]
    if "topk" in strategy:
        assert sent < 0.5 * whole + 0.2 * whole + 1000, "half precision one way, a twentieth the other"
    elif "downpour" not in strategy:
        assert sent == pytest.approx(2 * whole * 1.033 + 700 * service.slices.shards, rel=0.02)


@pytest.mark.parametrize("strategy", ["stale(3) + allreduce", "stale(4) + server(shards=2)", "aedit(0.05, 1, 0) + server(2)"])
def test_those_who_meet_now_and_then_learn_too(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    with Service(nursery, tmp_path, settings(strategy, epochs=10, lr=0.1, slowdown="1,1,3")) as service:
        status = service.ends()
        accuracy = service.accuracy()
    assert accuracy > 0.85, status
    assert status["progress"] == 10 * 15 * 3
    assert status["lost"] == 0
    assert len(service.shards) == (3 if "allreduce" in strategy else 2)
    assert set(status["workers"]) == {"0", "1", "2"}


def test_a_loop_of_ones_own_on_hooks(nursery: Nursery, tmp_path: Path) -> None:
    strategies = ["bulk", "bulk + server(shards=2)", "async + server + topk(0.1)"]
    hooks = nursery.start("process.served:on_hooks", 3, tmp_path / "hooks", strategies=strategies)
    passes = nursery.start("process.served:accumulating", 2, tmp_path / "passes")
    single = nursery.start("process.served:alone", 1, tmp_path / "alone")
    left = nursery.start("process.served:unfinished", 2, tmp_path / "left")
    assert hooks.wait(LIMIT_S) == [0, 0, 0], hooks.said()
    results = hooks.results()
    for text in strategies:
        for other in results[1:]:
            assert torch.equal(results[0][text]["weights"], other[text]["weights"]), "all end with the same truth"
    bulk, served, free = (results[0][text] for text in strategies)
    assert torch.allclose(served["weights"], bulk["weights"], atol=1e-7)
    assert torch.allclose(served["during"], bulk["weights"], atol=1e-7)
    assert not torch.allclose(free["weights"], bulk["weights"], atol=1e-3)
    assert served["summary"]["bytes_sent"] > 6 * 3 * 2 * 4 * 1210
    assert served["summary"]["seconds"] == pytest.approx(
        sum(served["summary"][name] for name in ("compute_s", "wait_s", "transfer_s"))
    )
    assert passes.wait(LIMIT_S) == [0, 0], passes.said()
    for found in passes.results():
        assert torch.allclose(*found["weights"], atol=1e-7)
        assert "GradScaler" in found["sentence"]
    assert left.wait(LIMIT_S) == [0, 0], left.said()
    assert single.wait(LIMIT_S) == [0], single.said()
    for text, (ours, plain, sent) in single.results()[0].items():
        if "optimizer" in text:
            assert torch.allclose(ours, plain, atol=1e-7)
            assert sent > 0
        else:
            assert torch.equal(ours, plain)
            assert sent == 0


def test_servers_that_run_already_and_no_launcher(nursery: Nursery, tmp_path: Path) -> None:
    shard = nursery.start("process.served:shard", 1, tmp_path / "shard", arguments=["--bind", "tcp://127.0.0.1:0"])
    path = tmp_path / "shard" / "0.out"
    assert eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    address = json.loads(path.read_text())["address"]
    arguments = {"servers": address, "workers": 2, "strategy": "bulk + server", "steps": 4}
    workers = nursery.start("process.served:by_address", 2, tmp_path / "workers", **arguments)
    assert workers.wait(LIMIT_S) == [0, 0], workers.said()
    first, second = workers.results()
    assert torch.equal(first, second)
    assert shard.wait(LIMIT_S) == [0], "it ends when all have left"


# --- who dies, stops, comes late -----------------------------------------------------------------------------------------------


SLOW: dict[str, Any] = {"epochs": 4, "slowdown": "15", "lr": 0.1}  # about 15 ms a step
PER_EPOCH = 15 * 3


@pytest.mark.parametrize(
    "strategy", ["bulk + server(shards=2)", "ssp(2) + server", "async + server(shards=2)", "stale(3) + server"]
)
def test_a_killed_worker_ends_nothing_and_another_takes_its_place(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    chance = random.Random(strategy)
    epochs = 12 if "async" in strategy else 4  # without waiting they are done sooner
    with Service(nursery, tmp_path, settings(strategy, **(SLOW | {"epochs": epochs})), liveness_timeout_s=1.0) as service:
        assert service.reaches(chance.randrange(5, PER_EPOCH)), service.said()
        time.sleep(chance.random() / 30)
        service.kill(service.workers[1])
        assert eventually(lambda: service.status()["here"] == [0, 2], LIMIT_S), service.said()
        assert "worker 1 has been silent" in service.said()
        service.workers[1] = service.start_worker(1)
        assert eventually(lambda: 1 in service.status()["here"], LIMIT_S), service.said()
        status = service.ends()
        assert service.accuracy() > 0.8
    assert status["progress"] == epochs * PER_EPOCH
    if (
        "bulk" in strategy or "ssp" in strategy
    ):  # the others went on: rounds that it missed are lost, but nobody else's part of them
        assert 1 <= status["lost"] <= epochs * PER_EPOCH // 3
    else:  # a push on its way or waiting, and what came with the last answer
        assert 1 <= status["lost"] <= (6 if "stale" in strategy else 2) * service.said().count("has been silent")
    assert status["workers"]["1"]["exchanges"] > 0


@pytest.mark.parametrize("strategy, place", [("async + server(shards=2)", 0), ("bulk + server(shards=2)", 1)])
def test_a_killed_shard_comes_back_from_its_snapshot(nursery: Nursery, tmp_path: Path, strategy: str, place: int) -> None:
    with Service(nursery, tmp_path, settings(strategy, **SLOW), snapshot_s=0.25) as service:
        assert service.reaches(30), service.said()
        service.kill(service.shards[place])
        if place:
            newest = sorted((tmp_path / "snapshots").glob("shard-1-*.pt"), key=lambda p: p.stat().st_mtime)[-1]
            newest.write_bytes(newest.read_bytes()[:100])
        service.restart(place)
        service.ends()
        assert service.accuracy() > 0.8
        status = service.status()
        said = service.shards[place].said()
    assert ("damaged" in said) == bool(place)
    assert status["progress"] >= 4 * PER_EPOCH
    if not place:
        assert 0 <= status["lost"] < 60, "what came after the last snapshot"


def test_a_shard_without_a_snapshot_gets_the_weights_that_a_worker_has(nursery: Nursery, tmp_path: Path) -> None:
    with Service(nursery, tmp_path, settings("ssp(2) + server", **SLOW)) as service:
        assert service.reaches(60)
        service.kill(service.shards[0])
        service.restart(0)
        service.ends()
        assert service.accuracy() > 0.8


@pytest.mark.parametrize("strategy", ["bulk + server", "ssp(1) + server(shards=2)", "stale(2) + server(shards=2)"])
def test_a_stopped_worker_is_not_waited_for_and_may_return(nursery: Nursery, tmp_path: Path, strategy: str) -> None:
    with Service(nursery, tmp_path, settings(strategy, **SLOW), liveness_timeout_s=1.0) as service:
        assert service.reaches(20)
        os.kill(service.workers[2].pids[0], signal.SIGSTOP)
        assert eventually(lambda: service.status()["here"] == [0, 1], LIMIT_S), service.said()
        before = service.status()["progress"]
        assert service.reaches(before + 12), "the others go on"
        os.kill(service.workers[2].pids[0], signal.SIGCONT)
        assert eventually(lambda: 2 in service.status()["here"], LIMIT_S), service.said()
        status = service.ends()
    assert "worker 2 is back" in service.said()
    assert 1 <= status["lost"] <= SLOW["epochs"] * PER_EPOCH // 3, "its own part of the rounds that it missed"


def test_one_that_stops_before_all_have_checked_their_models_is_missed(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.served:one_stops", 2, tmp_path)
    try:
        assert eventually(lambda: group.poll()[0] is not None, LIMIT_S), "it would wait for half an hour"
    finally:
        os.kill(group.pids[1], signal.SIGKILL)
    assert group.wait(LIMIT_S)[0] == 1
    assert "Worker 1 (process 1) died, ended early or stopped answering" in group.said(0)


def test_a_shard_that_stops_for_a_while_changes_nothing(nursery: Nursery, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "momentum": 0.9, "lr": 0.05}
    expected = virtual(settings("bulk", virtual=True, engine="loop", **options))
    with Service(nursery, tmp_path, settings("bulk + server(shards=2)", slowdown="15", **options)) as service:
        assert service.reaches(10)
        os.kill(service.shards[1].pids[0], signal.SIGSTOP)
        time.sleep(4.5)  # workers say hello again, twice, and repeat what they asked
        os.kill(service.shards[1].pids[0], signal.SIGCONT)
        status = service.ends()
        found = flat(service.weights())
    assert torch.equal(found, expected), f"they differ by {(found - expected).abs().max():.2e}"
    assert status["lost"] == 0


# --- strangers ---------------------------------------------------------------------------------------------------------------


def test_a_flood_of_garbage_changes_no_bit_of_a_training(nursery: Nursery, tmp_path: Path) -> None:
    """Thousands of made-up messages, some of them almost right, while two shards serve three workers."""
    options: dict[str, Any] = {"epochs": 2, "momentum": 0.9, "lr": 0.05}
    expected = virtual(settings("bulk", virtual=True, engine="loop", **options))
    with Service(nursery, tmp_path, settings("bulk + server(shards=2)", slowdown="15", **options)) as service:
        assert service.reaches(6)
        chance, sent = random.Random(0), 0
        with zmq.Context() as context:
            sockets = [context.socket(zmq.DEALER) for _ in service.addresses]
            for socket, address in zip(sockets, service.addresses, strict=True):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
            while service.status()["progress"] < 60:
                for socket in sockets:
                    for _ in range(200):
                        frames = [bytes(frame) for frame in pack(_stranger(chance), service.job)]
                        if chance.random() < 0.5:
                            frames[chance.randrange(len(frames))] = chance.randbytes(chance.randrange(60))
                        with contextlib.suppress(zmq.Again):
                            socket.send_multipart(frames, zmq.NOBLOCK)
                            sent += 1
            for socket in sockets:
                socket.close()
        status = service.ends()
        found = flat(service.weights())
    assert torch.equal(found, expected), f"they differ by {(found - expected).abs().max():.2e}"
    assert status["lost"] == 0
    assert sum(status["refused"].values()) > 100, (sent, status["refused"])


def _stranger(chance: random.Random) -> Envelope:
    """Well-formed, of the right job, and from nobody who belongs to it."""
    kind = chance.choice(list(Kind))
    whole = {"job_config": chance.choice([{}, 5, None]), "pushed": 1e308, "lrs": [1], "parts": [[1, 0]], "batch_ids": ["x"]}
    whole |= {"epoch": "x", "holds": [chance.choice([3, "x"])]}
    metadata = {name: value for name, value in whole.items() if chance.random() < 0.7}
    step = chance.randrange(-5, 50)
    return Envelope(
        kind, chance.randrange(-3, 5), step=step, number=chance.randrange(9), metadata=metadata, tensors=(torch.ones(3),)
    )


# --- who does not belong -------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(nursery: Nursery, tmp_path: Path) -> Iterator[Service]:
    with Service(nursery, tmp_path, settings("async + server", **(SLOW | {"epochs": 20}))) as service:
        assert service.reaches(1)
        yield service


def test_those_of_another_job_are_refused_in_one_sentence(running: Service) -> None:
    wrong = {
        "Your model has other parameters than the job's": running.start_worker(1, model="process.served:other"),
        "The job has strategy async + server": running.start_worker(1, strategy="ssp(2) + server"),
        "The job has seed 1": running.start_worker(1, seed=2),
        "There is no worker 7": running.start_worker(7),
    }
    for sentence, group in wrong.items():
        assert group.wait(LIMIT_S) == [1]
        assert f"HocketError: Shard 0 at {running.addresses[0]}: {sentence}" in group.said(), sentence
    status = running.status()
    assert {"model": 1, "strategy": 1, "seed": 1, "worker": 1}.items() <= status["refused"].items()
    assert status["here"] == [0, 1, 2]
    assert running.reaches(status["progress"] + 5), "nobody else is disturbed"


def test_a_taken_port_is_named(nursery: Nursery, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        group = nursery.start("process.served:shard", 1, tmp_path, arguments=["--bind", bind])
        assert group.wait(LIMIT_S) == [2]
    assert f"The port of {bind} is taken" in group.said()


def test_snapshots_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HocketError, match="choose another"):
        Snapshots(tmp_path / "file" / "snapshots", 0)


# --- the command -------------------------------------------------------------------------------------------------------------


TRAIN = ["train", "--model", "process.served:small", "--batch-size", "32", "--lr", "0.1"]
SHARD, WORKER = "hocket.drivers.shard_process", "hocket.supervisor.worker_process"


def nobody_is_left(family: list[psutil.Process]) -> bool:
    return eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), 15)


def test_the_command_survives_the_loss_of_a_worker_and_of_a_shard(nursery: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--strategy", "async + server(shards=2)", "--workers", "2", "--epochs", "6", "--slowdown", "10,20"]
    arguments += ["--snapshot", "0.5", "--replace", "--out", str(out)]
    with nursery.command([*TRAIN, *arguments], tmp_path / "said", Path.cwd()) as run:
        assert eventually(lambda: (out / "metrics.jsonl").exists(), LIMIT_S), run.said()
        offspring(run.pid, WORKER)[0].kill()
        offspring(run.pid, SHARD)[1].kill()
        ended = run.ended(90)
    errors = ended.stderr
    assert ended.returncode == 0, errors
    assert "worker 0 was ended by SIGKILL; another takes its place." in errors
    assert "shard 1 died and is back from its snapshot." in errors
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["epoch"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["accuracy"] > 0.85
    assert 0 < metrics[-1]["test_loss"] < metrics[0]["test_loss"]
    assert all(m["seconds"] == pytest.approx(m["compute_s"] + m["wait_s"] + m["transfer_s"]) for m in metrics)
    assert all(m["staleness"] and m["bytes_sent"] > 0 and m["loss"] > 0 for m in metrics)
    assert sum(m["lost"] for m in metrics) >= 1
    described = json.loads((out / "run.json").read_text())
    assert described["cluster"]["backend"] == "zeromq"
    assert sum(n for m in metrics for n in m["staleness"].values()) <= described["steps"] * 2, "every push is counted once"
    assert all(m["wall_s"] > 0 for m in metrics)
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "metrics.jsonl", "model.safetensors", "run.json"]
    assert "2 workers and 2 shards" in ended.stdout


def test_an_interruption_leaves_nobody_and_a_dead_supervisor_neither(nursery: Nursery, tmp_path: Path) -> None:
    arguments = [*TRAIN, "--strategy", "async + server(optimizer=adagrad)", "--workers", "1", "--epochs", "100000"]
    outs = [tmp_path / str(n) for n in range(2)]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(nursery.command([*arguments, "--out", str(out)], tmp_path / f"said {out.name}", Path.cwd()))
            for out in outs
        ]
        assert eventually(lambda: all((out / "metrics.jsonl").exists() for out in outs), LIMIT_S), "they train"
        assert all(len(offspring(run.pid, SHARD)) == len(offspring(run.pid, WORKER)) == 1 for run in runs)
        family = [child for run in runs for child in psutil.Process(run.pid).children(recursive=True)]
        os.killpg(runs[0].pid, signal.SIGINT)  # as a terminal does
        os.kill(runs[1].pid, signal.SIGKILL)
        ended = runs[0].ended(30)
        assert ended.returncode == 130, ended.stderr
        assert ended.stderr.rstrip().endswith("hocket: interrupted."), ended.stderr
        assert nobody_is_left(family)


def test_being_ended_politely_counts_as_an_interruption_and_leaves_no_folder(tmp_path: Path) -> None:
    """With interpreters of their own, as a stranger has them."""
    arguments = [*TRAIN, "--strategy", "async + server(optimizer=adagrad)", "--workers", "1", "--epochs", "100000"]
    run = subprocess.Popen(
        [sys.executable, "-m", "hocket.cli.main", *arguments],
        env={**ENVIRON, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert eventually(lambda: list(tmp_path.glob("hocket-*")) and offspring(run.pid, SHARD), LIMIT_S)
        family = psutil.Process(run.pid).children(recursive=True)
        run.terminate()
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 130, errors
        assert nobody_is_left(family)
        assert not list(tmp_path.glob("hocket-*"))
    finally:
        run.kill()
        run.wait()


REFUSED = {
    "--strategy 'async + server(shards=5000)'": "at most as many shards",
    "--strategy 'async + server' --resume": "--resume needs --out",
    "--strategy 'async + server' --resume --out somewhere": "There is no run in somewhere to go on with",
    "--strategy 'async + server' --out somewhere --keep 1": "at least 2 checkpoints are kept",
    "--strategy 'async + server' --processes 1": "leave --processes 1 out",
    "--strategy 'async + server' --liveness-timeout 0": "seconds are above 0",
    "--strategy 'async + server' --keys nowhere": "There are no keys at nowhere",
    "--strategy 'async + server' --slowdown 0.5": "at least 1",
    "--strategy bulk --slowdown 0.5": "at least 1",
    "--strategy 'async + server' --optimizer adafactor": "computes with whole tensors",
    "--strategy 'async + server' --virtual --keys nowhere --replace": "--keys, --replace: async + server(1) on virtual workers",
    "--strategy 'bulk + server(role=sum)' --liveness-timeout 3": "--liveness-timeout: bulk + server(1, sum) does not use it",
    "--strategy bulk --snapshot -1": "--snapshot: bulk + allreduce does not use it",
    "--strategy bulk --hang-timeout 7": "--hang-timeout 7 is for elastic runs; add --elastic 2:8, or leave it out",
}


@pytest.mark.parametrize("arguments", [["--place", "-1"], ["--liveness-timeout", "0"]])
def test_a_shard_of_its_own_refuses_what_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="2"):
            shard_process.main(arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "shards count from 0, the liveness timeout is above 0 seconds." in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_real_processes_cannot_do_is_said_before_any_is_started(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    given = ["train", "--model", "process.served:small", "--workers", "2", *shlex.split(arguments)]
    ended = CliRunner().invoke(app, given)
    assert isinstance(ended.exception, HocketError), ended.exception
    assert REFUSED[arguments] in str(ended.exception)
