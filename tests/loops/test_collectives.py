"""The user's own collectives beside a job's, and two jobs in one process: no exchange meets another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hocket
from loops.harness import Loop, flat

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

STRATEGIES = ["bulk", "local(1)", "local(1) + gossip", "local(1) + topk(0.2)", "local(1) + hierarchical(size=2)", "diloco(2)"]


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr)


def metrics(rank: int, strategy: str, steps: int, **options: Any) -> dict[str, Any]:
    """Each step sums a loss, and a metric as large as the model's bucket, over all workers; at learning rate 0 nothing moves."""
    model = net()
    optimizer, start = sgd(model, lr=0.0), flat(model)
    job = hocket.parallelize(model, optimizer, strategy, **options)
    size, wrong = int(start.numel()), 0
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 12)).square().mean().backward()
        optimizer.step()
        for length in (1, size):
            metric = torch.full((length,), float(step * (rank + 1)))
            dist.all_reduce(metric)
            wrong += int((metric != step * sum(range(1, dist.get_world_size() + 1))).any())
    job.finish()
    moved = 0.0 if options else float((flat(model) - start).abs().max())
    return {"wrong": wrong, "moved": moved}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_are_summed_beside_exchanges(loop: Loop, strategy: str) -> None:
    for worker in loop(metrics, 4 if "hierarchical" in strategy else 2, strategy=strategy, steps=60):
        assert worker == {"wrong": 0, "moved": pytest.approx(0, abs=1e-6)}


@pytest.mark.parametrize("options", [{"mesh": "data=2,tensor=2"}, {"mesh": "data=4"}, {"sharding": "zero1"}, {"sharding": "fsdp"}])
def test_metrics_are_summed_beside_split_models(loop: Loop, options: dict[str, str]) -> None:
    strategy = "bulk" if "sharding" in options else "local(1)"
    for worker in loop(metrics, 4, strategy=strategy, steps=20, **options):
        assert worker["wrong"] == 0


class Contrastive(nn.Module):
    """Gathers the embeddings of all workers, so its backward pass has a collective."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.last, self.first = nn.Linear(6, 4), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        own = self.last(torch.tanh(self.first(x)))
        everyone = torch.cat(collectives.all_gather(own))
        return F.cross_entropy(own @ everyone.t(), torch.arange(len(own)))


def contrastive(rank: int) -> dict[str, Tensor]:
    ours, theirs = Contrastive(), Contrastive()
    wrapped, optimizers = DistributedDataParallel(theirs), (sgd(ours), sgd(theirs))
    start = flat(ours)
    job = hocket.parallelize(ours, optimizers[0], "bulk", buckets=hocket.Buckets(1, 1))
    for model, optimizer in ((ours, optimizers[0]), (wrapped, optimizers[1])):
        torch.manual_seed(rank)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(5, 12)).backward()
            optimizer.step()
    job.finish()
    return {"ours": flat(ours), "theirs": flat(theirs), "start": start}


def test_a_collective_in_the_backward_pass_equals_ddp(loop: Loop) -> None:
    for worker in loop(contrastive):
        assert float((worker["ours"] - worker["start"]).norm()) > 0.05
        assert torch.allclose(worker["ours"], worker["theirs"], atol=1e-6)


def many_jobs(rank: int) -> dict[str, Any]:
    """Jobs come and go; each leaves no group behind."""
    before, sums = len(dist.distributed_c10d._world.pg_map), []
    for _ in range(12):
        model = net()
        optimizer = sgd(model)
        job = hocket.parallelize(model, optimizer, "local(2) + hierarchical(size=2)")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 12) * rank).square().mean().backward()
            optimizer.step()
        job.finish()
        sums.append(job.summary(all_workers=True)["exchanges"])
    return {"left": len(dist.distributed_c10d._world.pg_map) - before, "sums": sums}


def test_a_job_that_ended_leaves_no_group_behind(loop: Loop) -> None:
    for worker in loop(many_jobs, 4):
        assert worker["left"] == 0
        assert len(set(worker["sums"])) == 1


# --- two jobs ----------------------------------------------------------------------------------------------------------------


class Four(nn.Module):
    """Four parameters of one size; worker 1 does not use the last one, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(4)])

    def forward(self, rank: int) -> Tensor:
        used = self.values if rank == 0 else self.values[:3]
        return sum(((k + 1) * (rank + 1) * p.sum() for k, p in enumerate(used)), torch.zeros(()))


def two_jobs(rank: int, strategies: list[str]) -> list[list[float]]:
    """The gradients of the four parameters after each backward pass; two jobs have two of them each."""
    model, found = Four(), []
    optimizers = [torch.optim.SGD([model.values[k], model.values[k + 2]], 0.0) for k in (0, 1)]
    one = {"buckets": hocket.Buckets(1, 1)}
    jobs = [hocket.parallelize(model, o, s, **one) for o, s in zip(optimizers, strategies, strict=True)]
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rank).backward()
        found.append([float(p.grad.mean()) for p in model.values if p.grad is not None])
        for optimizer in optimizers:
            optimizer.step()
    for job in jobs:
        job.finish()
    return found


@pytest.mark.parametrize("strategies", [["bulk", "bulk"], ["bulk", "bulk + topk(1.0, feedback=False)"]])
def test_two_jobs_in_one_process_have_an_order_each(loop: Loop, strategies: list[str]) -> None:
    for worker in loop(two_jobs, strategies=strategies):
        assert worker == [pytest.approx([1.5, 3.0, 4.5, 2.0])] * 20


def adversaries(rank: int) -> dict[str, Any]:
    """A GAN: the generator's backward pass goes through the discriminator, each has a job of its own."""
    torch.manual_seed(7)
    generator, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    makers = sgd(generator), sgd(judge)
    jobs = [hocket.parallelize(m, o, "bulk") for m, o in zip((generator, judge), makers, strict=True)]
    torch.manual_seed(rank)
    for _ in range(10):
        noise, real = torch.randn(5, 4), torch.randn(5, 6)
        makers[1].zero_grad()
        (judge(generator(noise).detach()).mean() - judge(real).mean()).backward()
        makers[1].step()
        makers[0].zero_grad()
        (-judge(generator(noise)).mean()).backward()
        makers[0].step()
    for job in jobs:
        job.detach()
    return {"generator": flat(generator), "judge": flat(judge)}


def test_adversaries_stay_equal_on_all_workers(loop: Loop) -> None:
    first, second = loop(adversaries)
    assert torch.equal(first["generator"], second["generator"])
    assert torch.equal(first["judge"], second["judge"])
