"""Virtual workers equal real processes: same bits, same bytes, whoever hosts whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from process.equality import CASES, WORKERS
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

EXACT = ["live", "rows", "two rows each"]
RING_TOLERANCE = 1e-4
"""Of the way a worker has gone since the start, for Gloo's ring instead of a sum in worker order (largest seen 4e-6)."""


@pytest.fixture(scope="module")
def outcomes(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Per way of hosting and case: the rows of all four workers."""
    folder = tmp_path_factory.mktemp("equality")
    virtual = nursery.start("process.equality:virtual", 1, folder / "virtual")
    four = nursery.start("process.equality:real", 4, folder / "four", workers=WORKERS, kinds=["live", "rows", "live ring"])
    assert four.wait(300, together=True) == [0] * 4, four.said()
    two = nursery.start("process.equality:real", 2, folder / "two", workers=WORKERS, kinds=["two rows each"])
    assert two.wait(200, together=True) == [0] * 2, two.said()
    assert virtual.wait(200) == [0], virtual.said()
    found: dict[str, Any] = virtual.results()[0]
    for group in (four, two):
        results = group.results()
        for kind in results[0]:
            found[kind] = {
                name: {part: torch.cat([r[kind][name][part] for r in results]) for part in first}
                for name, first in results[0][kind].items()
            }
    return found


def test_the_table_is_broad() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_and_bytes_do_not_depend_on_who_hosts_whom(outcomes: dict[str, Any], case: Any, kind: str) -> None:
    real, virtual = outcomes[kind][case.name], outcomes["virtual"][case.name]
    for part in ("weights", "buffers", "mean"):
        assert torch.equal(real[part], virtual[part]), f"{part} differ by {(real[part] - virtual[part]).abs().max()}"
    assert real["sent"].tolist() == virtual["sent"].tolist()
    assert (real["sent"] > 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ring_of_gloo_stays_within_rounding(outcomes: dict[str, Any], case: Any) -> None:
    real, virtual = outcomes["live ring"][case.name], outcomes["virtual"][case.name]
    way = (virtual["weights"] - outcomes["start"][case.name]).norm()
    assert (real["weights"] - virtual["weights"]).norm() <= RING_TOLERANCE * way
    assert way > 0.1
    assert torch.isfinite(virtual["weights"]).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.strategy.startswith("bulk + ") and "gossip" not in c.strategy][:20])
def test_bulk_all_reduce_keeps_replicas_equal(outcomes: dict[str, Any], case: Any) -> None:
    rows = outcomes["live"][case.name]["weights"]
    assert torch.equal(rows, rows[:1].expand_as(rows))
