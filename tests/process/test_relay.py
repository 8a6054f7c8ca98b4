"""Small messages by way of others: equal bits and bytes from real processes and virtual workers, and the bits of direct ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.cluster import VirtualCluster
from process import relayed
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
PROCESSES = 3


@pytest.fixture(scope="module")
def outcomes(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    group = nursery.start("process.relayed:real", PROCESSES, tmp_path_factory.mktemp("relayed"))
    virtual = relayed.virtual()
    assert group.wait(150, together=True) == [0] * PROCESSES, group.said()
    return group.results(), virtual


def test_the_verbs_carry_the_same(outcomes: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    direct = VirtualCluster(relayed.WORKERS)
    direct._radix = lambda *_: None  # type: ignore[method-assign]
    all_of_them = relayed.verbs(direct)
    for worker in [*outcomes[0], outcomes[1]]:
        for name, (gathered, sent, *parts) in worker["verbs"].items():
            half = len(parts) // 2
            expected = all_of_them[name][2:]
            for k, part in enumerate(parts):
                assert torch.equal(part, expected[k][gathered if k < half else sent]), (name, k)


@pytest.mark.parametrize("strategy", relayed.STRATEGIES)
def test_bits_bytes_and_flags_are_equal(strategy: str, outcomes: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    real, virtual = [worker[strategy] for worker in outcomes[0]], outcomes[1][strategy]
    assert torch.equal(torch.cat([worker["weights"] for worker in real]), virtual["weights"])
    assert torch.cat([worker["sent"] for worker in real]).tolist() == virtual["sent"].tolist()
    assert all(torch.equal(worker["agreed"], virtual["agreed"]) for worker in real)
    direct = VirtualCluster(relayed.WORKERS)
    direct._radix = lambda *_: None  # type: ignore[method-assign]
    other = relayed.training(strategy, direct)
    assert torch.equal(other["weights"], virtual["weights"])
    assert other["sent"].sum() > virtual["sent"].sum()
