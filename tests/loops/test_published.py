"""Published training loops on two real processes: bulk equals DDP, every other strategy trains or refuses with its sentence."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import hocket
from loops.harness import Loop
from loops.published import LOOPS, Parallel
from loops.strategies import STRATEGIES

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def everything(rank: int, published: str) -> dict[str, dict[str, Any]]:
    """One loop under DDP and all strategies, one after the other, on the same data."""
    loop, found = LOOPS[published], {}
    for strategy in ("ddp",) * loop.ddp + STRATEGIES:
        torch.manual_seed(7)
        parallel = Parallel(strategy, rank)
        result: dict[str, Any] = {"losses": [], "weights": [], "refused": ""}
        try:
            for loss in loop.run(parallel):
                result["losses"].append(loss)
                if len(result["losses"]) == 1:
                    torch.manual_seed(100 + rank)
            result["weights"] = parallel.finish()
        except hocket.HocketError as error:
            result["refused"] = str(error)
            for job in parallel.jobs:
                job.detach()
        found[strategy] = result
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_a_published_loop(loop: Loop, name: str) -> None:
    published = LOOPS[name]
    workers = loop(everything, published=name, timeout_s=240.0)
    for strategy in STRATEGIES:
        results = [worker[strategy] for worker in workers]
        words = next((text for key, text in published.refused.items() if key in ("", strategy)), None)
        if words is not None:
            assert all(words in result["refused"] for result in results), (strategy, results)
            continue
        assert [result["refused"] for result in results] == [""] * len(results), strategy
        for mine, theirs in zip(results[0]["weights"], results[1]["weights"], strict=True):
            assert torch.equal(mine, theirs), f"{strategy}: after finish() all workers have the same weights"
            assert bool(torch.isfinite(mine).all()), strategy
        mean = torch.tensor([result["losses"] for result in results]).mean(0)
        if published.learns:
            assert mean[-4:].mean() < mean[0], f"{strategy}: {mean.tolist()}"
    if published.ddp and "bulk" not in published.refused:
        for worker in workers:
            for ours, theirs in zip(worker["bulk"]["weights"], worker["ddp"]["weights"], strict=True):
                apart = float((ours.double() - theirs.double()).abs().max())
                assert apart <= published.tolerance, f"bulk is {apart:g} from DDP"


def test_the_page_lists_all_loops() -> None:
    made = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "loops_page.py"))
    assert made["PAGE"].read_text() == made["page"](), "python scripts/loops_page.py writes it"
