"""Workers that die, stop, leave or join while others train: those go on, in step, and what was lost is counted."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from process.elastic import EPOCHS, SAMPLES, rendezvous
from process.launch import Group, Nursery, eventually

pytestmark = pytest.mark.process
TRAIN = "process.elastic:train"


def _results(group: Group, *ranks: int) -> list[dict[str, Any]]:
    return [torch.load(group.folder / f"{rank}.pt") for rank in ranks]


def _equal(found: list[dict[str, Any]]) -> bool:
    return all(torch.equal(a, b) for one in found for a, b in zip(one["weights"], found[0]["weights"], strict=True))


@pytest.mark.parametrize(
    "strategy",
    [
        "bulk",
        "bulk + topk(0.2)",
        "local(3) + gossip",
        "local(2) + gossip + topk(0.3)",
        "diloco(4) + topk(0.3) | qsgd(4)",
        "local(2) + hierarchical(allreduce, gossip, size=2)",
    ],
)
def test_the_others_go_on_when_one_is_killed(strategy: str, nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy=strategy, fault="SIGKILL")
        codes = group.wait(30)
    assert codes == [0, -9, 0], group.said()
    found = _results(group, 0, 2)
    assert _equal(found), "all that are left have the same mean model, bit for bit"
    assert [one["lost"] for one in found] == [1, 1]
    assert program.over
    given = Counter(number for one in found for epoch in one["computed"][1:] for number in epoch)
    assert max(given.values()) <= EPOCHS - 1
    assert len(given) >= SAMPLES - 2, "after the epoch of the loss every sample is given once per epoch"
    first = Counter(number for one in found for number in one["computed"][0])
    assert max(first.values()) == 1, "what the lost worker had not finished is dealt again, nothing else"


def test_a_worker_that_was_stopped_joins_again(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3, least=3) as (program, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk + topk(0.2)", fault="SIGSTOP", at=3)
        assert eventually(lambda: len(program.generation.members) == 2), group.said()  # too few: they wait for it
        os.kill(group.pids[1], signal.SIGCONT)
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 1, 2)
    assert _equal(found)
    assert found[0]["lost"] == 1
    assert len({one["steps"] for one in found}) == 1


def test_a_worker_joins_with_the_state_of_the_others(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(2) as (_, environ):
        group = nursery.start(TRAIN, 2, tmp_path / "two", environ, strategy="bulk", epochs=80)
        assert eventually((tmp_path / "two" / "1.steps").exists), group.said()
        third = nursery.start(TRAIN, 1, tmp_path / "third", environ, strategy="bulk", epochs=80)
        assert group.wait(60) == [0, 0], group.said()
        assert third.wait(60) == [0], third.said()
    found = [*_results(group, 0, 1), *_results(third, 0)]
    assert _equal(found)
    assert found[2]["first"] > 0, "it does not begin at the first step"
    assert found[0]["joined"] == 1
    assert found[0]["steps"] == found[2]["steps"]


def test_a_worker_that_is_asked_to_hands_over_and_leaves(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(3) as (_, environ):
        group = nursery.start(TRAIN, 3, tmp_path, environ, strategy="bulk", fault="SIGTERM")
        assert group.wait(30) == [0, 0, 0], group.said()
    found = _results(group, 0, 2)
    assert not (tmp_path / "1.pt").exists()
    assert _equal(found)
    assert [(one["lost"], one["left"]) for one in found] == [(0, 1), (0, 1)]
    computed = Counter(number for one in found for epoch in one["computed"] for number in epoch)
    assert max(computed.values()) <= EPOCHS


def test_nothing_changes_where_nothing_happens(nursery: Nursery, tmp_path: Path) -> None:
    with rendezvous(2) as (_, environ):
        elastic = nursery.start(TRAIN, 2, tmp_path / "elastic", environ, strategy="bulk + topk(0.2)")
        assert elastic.wait(60) == [0, 0], elastic.said()
    plain = nursery.start(TRAIN, 2, tmp_path / "plain", strategy="bulk + topk(0.2)", elastic=False)
    assert plain.wait(60) == [0, 0], plain.said()
    both = [*_results(elastic, 0, 1), *_results(plain, 0, 1)]
    assert _equal(both)
    assert both[0]["computed"] == both[2]["computed"]


def test_the_command_replaces_a_worker_that_was_killed(nursery: Nursery, tmp_path: Path) -> None:
    arguments = ["train", "--elastic", "2:3", "--workers", "3", "--data", "digits", "--model", "mlp", "--strategy", "local(4)"]
    arguments += ["--batch-size", "16", "--epochs", "12"]
    with nursery.command([*arguments, "--out", str(tmp_path / "run")], tmp_path / "said", tmp_path) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert eventually(metrics.exists), command.group.said()
        workers = [c for c in psutil.Process(command.pid).children() if c.name() == "main"]
        workers[0].send_signal(signal.SIGKILL)
        done = command.ended(100)
    assert done.returncode == 0, done.stderr
    assert "was ended by SIGKILL" in done.stderr
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 12
    assert sum(line["lost"] for line in lines) == 1
    assert lines[-1]["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mesh", "data=2,pipeline=2"), "leave --mesh out"),
        (("--strategy", "async + server"), "leave async + server(1) out"),
        (("--workers", "9"), "starts with as many as it may have"),
    ],
)
def test_what_cannot_be_elastic_is_refused(arguments: tuple[str, ...], says: str, hocket: Any) -> None:
    done = hocket("train", "--elastic", "2:4", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
