"""Adaptive optimisers in loops on two processes: updates and momentum under a GradScaler, accumulation, an audit, a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from loops.harness import Loop, flat

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

STEPS, STOP, BAD = 8, 4, 5
CASES = {
    "updates": ("bulk + sign", lambda params: torch.optim.AdamW(params, 0.01)),
    "momentum": ("bulk + sign", lambda params: hocket.OneBitAdam(params, 0.01, freeze_step=2)),
    "plain momentum": ("bulk + exchange=momentum", lambda params: hocket.OneBitAdam(params, 0.01, freeze_step=2)),
}


def start(case: str, model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, hocket.Job]:
    strategy, optimizer = CASES[case]
    made = optimizer(list(model.parameters()))
    return made, hocket.parallelize(model, made, strategy, accumulate=2, **options)


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def steps(rank: int, model: nn.Module, optimizer: Any, scaler: Any, span: range, bad: int = -1) -> None:
    """Two backward passes and a clipped step each; in step ``bad`` worker 1's loss is infinite."""
    for step in span:
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
            loss = model(x).square().mean() / 2
            scaler.scale(loss * torch.inf if (rank, step) == (1, bad) else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def trained(rank: int, case: str) -> dict[str, Any]:
    """The weights of an audited loop, of a scaled one, of one that was stopped, and of scaled ones that skip a step."""
    found: dict[str, Any] = {}
    for scaled in (False, True):
        model, scaler = net(), torch.amp.GradScaler("cpu", enabled=scaled, init_scale=4.0)
        optimizer, job = start(case, model, scaler=scaler if scaled else None, check=True if scaled else "audit")
        steps(rank, model, optimizer, scaler, range(STEPS))
        found["strategy"] = str(job.strategy)
        job.detach()
        found["scaled" if scaled else "whole"], found["gives back"] = flat(model), getattr(optimizer, "takes_momentum", False)
    found |= {"resumed": _resumed(rank, case), "skipped": _skipped(rank, case)}
    return found


def _resumed(rank: int, case: str) -> Tensor:
    first, off = net(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer, job = start(case, first)
    steps(rank, first, optimizer, off, range(STOP))
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), job.state_dict()))
    job.detach()
    second = net()
    optimizer, job = start(case, second)
    second.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    job.load_state_dict(saved[2])
    steps(rank, second, optimizer, off, range(STOP, STEPS))
    job.detach()
    return flat(second)


def _skipped(rank: int, case: str) -> tuple[Tensor, float]:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, job = start(case, model, scaler=scaler)
    steps(rank, model, optimizer, scaler, range(STEPS), BAD)
    job.detach()
    return flat(model), max(float(state["step"]) for state in optimizer.state.values())


@pytest.mark.parametrize("case", CASES)
def test_a_loop_with_an_adaptive_optimiser(loop: Loop, case: str) -> None:
    first, second = loop(trained, case=case)
    for name in ("whole", "scaled", "resumed"):
        assert torch.equal(first[name], second[name]), f"{name}: replicas are equal after every step"
        torch.testing.assert_close(first[name], first["whole"], rtol=1e-5, atol=1e-6)
    assert torch.equal(first["resumed"], first["whole"])
    assert not first["gives back"], "without a job the optimiser takes gradients"
    assert first["strategy"].endswith(case.split()[-1])
    (weights, count), (others, _) = first["skipped"], second["skipped"]
    assert count == STEPS - 1
    assert torch.equal(weights, others)
    assert bool(torch.isfinite(weights).all())
    assert not torch.equal(weights, first["scaled"])
