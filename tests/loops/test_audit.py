"""``check="audit"``: the first difference between workers is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from loops.harness import Loop, refusal

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(rank: int, strategy: str, guilty: int | None, how: str, **options: Any) -> None:
    """Eight steps; before the fifth one worker does something that the others do not."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = hocket.parallelize(model, optimizer, strategy, **options)
    for step in range(8):
        if rank == guilty and step == 4:
            if how == "weight":
                model[2].bias.data[1] += 1e-3
            else:
                job.runtime._average()
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    job.finish()


def named(rank: int, **arguments: Any) -> str:
    return refusal(steps, rank, **arguments)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_worker_that_changes_a_weight_is_named(loop: Loop, guilty: int) -> None:
    sentences = loop(named, strategy="bulk", guilty=guilty, how="weight", check="audit")
    for sentence in sentences:
        assert sentence.startswith(f"Parameter 2.bias of worker {guilty} differs from worker {1 - guilty}'s after step 5: ")
        assert f"worker {guilty} changed it outside the optimiser's step" in sentence


def test_without_an_audit_the_change_goes_unnoticed(loop: Loop) -> None:
    assert loop(named, strategy="bulk", guilty=1, how="weight") == ["", ""]


def test_an_exchange_out_of_order_is_named(loop: Loop) -> None:
    """One worker alone makes the mean of the weights, so that they meet the other's next ones (``averaged()`` waits for all)."""
    sentences = loop(named, strategy="local(2)", guilty=1, how="mean", check="audit")
    for sentence in sentences:
        assert "worker 1 exchanges the mean of" in sentence
        assert "but worker 0 weights of bucket 0" in sentence


@pytest.mark.parametrize("strategy", ["bulk", "bulk + topk(0.1)", "local(2)", "bulk + gossip", "diloco(2) + threshold(keep=0.1)"])
def test_a_loop_without_a_mistake_passes(loop: Loop, strategy: str) -> None:
    assert loop(named, strategy=strategy, guilty=None, how="", check="audit") == ["", ""]


def test_weights_that_other_workers_update_are_no_difference(loop: Loop) -> None:
    """Under ZeRO-1 each worker updates a part, and sends it to the others after the step."""
    assert loop(named, strategy="bulk", guilty=None, how="", check="audit", sharding="zero1") == ["", ""]


def test_what_cannot_be_compared_is_refused(loop: Loop) -> None:
    for sentence in loop(named, strategy="async + server", guilty=None, how="", check="audit"):
        assert "step together" in sentence
    for sentence in loop(named, strategy="bulk", guilty=None, how="", check="adit"):
        assert "use True, False, 'audit' or a hocket.Checks" in sentence
