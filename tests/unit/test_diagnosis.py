"""Laws of diagnoses: each planted fault is found, at the process that has it, and a healthy cluster has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hocket.supervisor.diagnosis import FAIL, OK, WARN, diagnose
from hocket.supervisor.doctor import gather

PAIRS = {0: {1: (0.001, 0.01)}, 1: {0: (0.002, -0.01)}}


@pytest.fixture
def facts() -> dict[int, dict[str, Any]]:
    """Two healthy hosts."""
    own = gather({}, 1)
    healthy = {"files": 4096, "shm_bytes": 1 << 34, "cores": 8, "threads": 4, "gpus": 0, "compiler": True}
    folder = {"path": "/out", "free_bytes": 1 << 40, "shared": True, "error": ""}
    return {
        rank: copy.deepcopy({**own, **healthy, "host": f"h{rank}", "boot": f"b{rank}", "folder": folder})
        | {"interface": {"name": "eth0", "address": f"10.0.0.{rank}", "error": ""}}
        for rank in range(2)
    }


def test_a_healthy_cluster_is_well(facts: dict[int, Any]) -> None:
    assert {found.level for found in diagnose(facts, 2, PAIRS, "")} == {OK}


def _nccl(facts: dict[int, Any], **second: Any) -> None:
    for one in facts.values():
        one.update(gpus=1, gpu="A100", nccl="2.27")
    facts[1].update(second)


FAULTS: list[tuple[str, str, str, Callable[[dict[int, Any]], Any]]] = [
    ("versions", FAIL, "2 on process 1", lambda f: f[1]["versions"].update(torch="2")),
    ("versions", WARN, "3.11 on process 1", lambda f: f[1]["versions"].update(python="3.11")),
    ("processes", FAIL, "process 1 of 2 did not come", lambda f: f.pop(1)),
    ("open files", WARN, "process 1 may open 64", lambda f: f[1].update(files=64)),
    ("compiler", WARN, "no C++ compiler on process 1", lambda f: f[1].update(compiler=False)),
    ("shared memory", WARN, "64.0 MB free in /dev/shm on h1", lambda f: f[1].update(shm_bytes=64_000_000)),
    ("output folder", FAIL, "process 1 cannot write", lambda f: f[1]["folder"].update(error="Permission denied")),
    ("output folder", WARN, "not the same folder on process 1", lambda f: f[1]["folder"].update(shared=False)),
    ("output folder", WARN, "1.0 MB free", lambda f: f[0]["folder"].update(free_bytes=10**6)),
    ("devices", FAIL, "process 1 on h1 sees no GPU", lambda f: _nccl(f, gpus=0)),
    ("devices", WARN, "2 processes on h1 share 1 GPU", lambda f: _nccl(f, per_host=2)),
    ("devices", FAIL, "no NCCL on process 1", lambda f: _nccl(f, nccl="")),
    ("cores", WARN, "2 processes of 8 threads on 8 cores of h1", lambda f: f[1].update(per_host=2, threads=8)),
    ("ports", FAIL, "process 1 cannot listen", lambda f: f[1]["ports"].update(error="denied")),
    ("interface", FAIL, "127.0.1.1", lambda f: f[1]["interface"].update(address="127.0.1.1")),
    ("interface", FAIL, "no such", lambda f: f[1]["interface"].update(error="no such")),
]


@pytest.mark.parametrize("subject, level, text, plant", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(
    facts: dict[int, Any], subject: str, level: str, text: str, plant: Callable[[dict[int, Any]], Any]
) -> None:
    plant(facts)
    pairs = {rank: row for rank, row in PAIRS.items() if rank in facts}
    found = {one.subject: one for one in diagnose(facts, 2, pairs, "")}
    assert (found[subject].level, text in found[subject].text) == (level, True), str(found[subject])
    assert found[subject].remedy
    assert [name for name, one in found.items() if one.level != OK] == [subject]


@pytest.mark.parametrize("subject, pairs, exchange", [
    ("reachability", {0: {1: "timed out"}, 1: {0: (0.1, 0.0)}}, None),
    ("reachability", {0: {1: (0.1, 0.0)}}, ""),
    ("clocks", {0: {1: (0.001, -7.0)}, 1: {0: (0.001, 7.0)}}, ""),
    ("exchange", PAIRS, "Connection refused"),
])  # fmt: skip
def test_what_links_can_do_wrong(facts: dict[int, Any], subject: str, pairs: Any, exchange: str | None) -> None:
    found = {one.subject: one for one in diagnose(facts, 2, pairs, exchange)}
    assert found[subject].level != OK
    assert found[subject].remedy
