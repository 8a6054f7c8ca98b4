"""Codes in loops that people write: parameters used in turn, votes, a GradScaler, complex and float64 parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.cluster import VirtualCluster
from hocket.compression import Sign
from hocket.compression.base import Context
from hocket.strategy import Strategy
from hocket.topology import AllReduce
from hocket.train.replicas import StackedReplicas
from loops.harness import Loop, flat

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

# --- a parameter that nobody uses in a step ------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two heads, of which one has a gradient of ones in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ParameterList([nn.Parameter(torch.zeros(50)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * self.heads[int(x.flatten()[0]) % 2].sum()


STEPS = 60


def in_turn(rank: int, strategy: str, set_to_none: bool) -> Tensor:
    """How far the two heads went, of what their gradients add up to."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    job = hocket.parallelize(model, optimizer, strategy)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        (model(torch.tensor(float(step))) / max(step, 1)).backward()
        optimizer.step()
    job.detach()
    return -flat(model) / (STEPS // 2)


@pytest.mark.parametrize("code", ["randomk(0.1)", "topk(0.1)", "dgc(0.1, momentum=0.0)"])
def test_a_residual_arrives_also_when_nobody_uses_its_parameter(loop: Loop, code: str) -> None:
    with_none = loop(in_turn, strategy=f"bulk + {code}", set_to_none=True)
    with_zeros = loop(in_turn, strategy=f"bulk + {code}", set_to_none=False)
    assert torch.equal(with_none[0], with_none[1])
    assert torch.equal(with_none[0], with_zeros[0])
    assert float(with_none[0].mean()) > 0.6


def test_virtual_workers_hear_residuals_as_real_ones_do(loop: Loop) -> None:
    cluster, strategy = VirtualCluster(2), Strategy.parse("bulk + randomk(0.1)")
    loss, sgd = lambda out, step: out / max(float(step), 1.0), lambda params: torch.optim.SGD(params, 1.0)
    replicas = StackedReplicas(Heads(), loss, sgd, strategy, cluster)
    for step in range(STEPS):
        x = [torch.tensor(float(step))] * 2
        replicas.step(x, x, torch.zeros(2, dtype=torch.int64), [1.0, 1.0])
    with replicas.averaged() as model:
        found = -flat(model) / (STEPS // 2)
    assert torch.equal(found, loop(in_turn, strategy=str(strategy), set_to_none=True)[0])


# --- votes -----------------------------------------------------------------------------------------------------------------------


def noise(step: int, workers: int) -> Tensor:
    return torch.randn(workers, 500, generator=torch.Generator().manual_seed(step))


def context(step: int, workers: Tensor, world: int) -> Context:
    return Context(0, step, step, 0, workers, world=world)


def votes(workers: int, steps: int = 40) -> Tensor:
    """What virtual workers hear of noise without a mean."""
    cluster = VirtualCluster(workers)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    everyone = torch.arange(workers)
    heard = [channel.coded(Sign(vote=True), noise(t, workers), {}, context(t, everyone, workers)).mixed for t in range(steps)]
    return torch.stack(heard)


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_a_tie_is_no_gradient(workers: int) -> None:
    heard = votes(workers)
    assert float(heard.mean().abs()) < 0.02
    assert float(heard.abs().mean()) > 0.3


def voted(rank: int) -> Tensor:
    cluster = hocket.session._Session.cluster
    assert cluster is not None
    channel = AllReduce().bind(cluster, cluster.world, 0)
    own = torch.tensor([rank])
    rows = [noise(t, cluster.size)[rank : rank + 1] for t in range(5)]
    return torch.stack([channel.coded(Sign(vote=True), r, {}, context(t, own, cluster.size)).mixed for t, r in enumerate(rows)])


def test_real_workers_decide_ties_as_virtual_ones_do(loop: Loop) -> None:
    found = torch.cat(loop(voted, 4), 1)
    assert torch.equal(found, votes(4, 5))


# --- a GradScaler ----------------------------------------------------------------------------------------------------------------

CODES = ["threshold(0.01)", "dgc(0.1, momentum=0.5, clip=1)", "topk(0.1)", "sign"]


def scaled(rank: int, code: str) -> dict[str, Tensor]:
    """The same loop with and without a scaler, whose factor grows in the second step and falls in the fourth."""
    found = {}
    for scaling in (False, True):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaling)
        job = hocket.parallelize(model, optimizer, f"bulk + {code}", scaler=amp if scaling else None)
        torch.manual_seed(rank)
        for step in range(8):
            optimizer.zero_grad()
            amp.scale(model(torch.randn(5, 12)).square().mean()).backward()
            amp.step(optimizer)
            amp.update(512.0 if step == 3 and scaling else None)
        job.detach()
        found[str(scaling)] = flat(model)
    return found


@pytest.mark.parametrize("code", CODES)
def test_codes_see_gradients_without_the_scalers_factor(loop: Loop, code: str) -> None:
    for worker in loop(scaled, code=code):
        assert torch.allclose(worker["True"], worker["False"], atol=1e-7)


# --- other numbers ---------------------------------------------------------------------------------------------------------------


class Numbers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6, 4, dtype=dtype))


def complex_gradients(rank: int, strategy: str) -> Tensor:
    """The way after steps whose gradients are 2 (1 + i) on every worker, and those of another sign on average zero."""
    model = Numbers(torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    job = hocket.parallelize(model, optimizer, strategy)
    for _ in range(12):
        optimizer.zero_grad()
        ((2 + rank) * model.w.real + (2 + rank) * model.w.imag).sum().backward()
        optimizer.step()
    job.finish()
    return model.w.detach().clone()


@pytest.mark.parametrize(
    "strategy",
    [
        "bulk",
        "bulk + topk(1.0)",
        "bulk + lowrank(2)",
        "bulk + cast(bf16)",
        "local(2) + cast(fp16)",
        "local(2) + gossip",
        "diloco(2)",
    ],
)
def test_complex_parameters_keep_their_imaginary_part(loop: Loop, strategy: str) -> None:
    first, second = loop(complex_gradients, strategy=strategy)
    assert torch.equal(first, second)
    assert float(first.imag.mean()) < -5
    assert torch.allclose(first.real, first.imag)


def fine(rank: int, strategy: str) -> dict[str, Any]:
    """Weights of float64 with digits that float32 does not have."""
    model = Numbers(torch.float64)
    with torch.no_grad():
        model.w.fill_(1.0 + 2.0**-40)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    job = hocket.parallelize(model, optimizer, strategy)
    for _ in range(4):
        optimizer.zero_grad()
        model.w.sum().backward()
        optimizer.step()
    job.finish()
    return {"weights": model.w.detach().clone(), "sent": job.summary()["bytes_sent"]}


@pytest.mark.parametrize("strategy", ["local(2) + topk(0.5)", "local(2) + gossip + sign", "diloco(2) + qsgd(8)"])
def test_float64_weights_keep_their_digits_under_codes(loop: Loop, strategy: str) -> None:
    for worker in loop(fine, strategy=strategy):
        assert (worker["weights"] == 1.0 + 2.0**-40).all()
        assert worker["sent"] > 0


def outer(rank: int) -> dict[str, Tensor]:
    """DiLoCo on bfloat16 weights that move by one small step per period, beside the same in float32."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Numbers(dtype)
        with torch.no_grad():
            model.w.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), 2.0**-8)
        job = hocket.parallelize(model, optimizer, "diloco(1, lr=0.1, momentum=0.0)")
        for _ in range(40):
            optimizer.zero_grad()
            model.w.sum().backward()
            optimizer.step()
        job.detach()
        found[str(dtype)] = model.w.detach().float().clone()
    return found


def test_the_outer_weights_of_diloco_are_float32(loop: Loop) -> None:
    for worker in loop(outer):
        went = {dtype: 1.0 - float(w.mean()) for dtype, w in worker.items()}
        assert went["torch.float32"] == pytest.approx(40 * 0.1 * 2.0**-8, rel=1e-3)
        assert went["torch.bfloat16"] == pytest.approx(went["torch.float32"], abs=2.0**-8)


def discarding(rank: int, discards: bool) -> Tensor:
    """A step's loss, and, where ``discards``, a backward pass of another network's loss, whose gradients are thrown away."""
    model = nn.Linear(12, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = hocket.parallelize(model, optimizer, "bulk + topk(0.1)")
    own = torch.Generator().manual_seed(rank)
    for _ in range(8):
        batch, other = torch.randn(2, 5, 12, generator=own)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if discards:
            model(other).sum().backward()
    job.finish()
    return flat(model)


def test_discarded_gradients_leave_no_residual(loop: Loop) -> None:
    for plain, other in zip(loop(discarding, discards=False), loop(discarding, discards=True), strict=True):
        assert torch.equal(plain, other)
