"""What real workers do for tests/process/test_fsdp_replicas.py: two replicas of two processes, each split by ``fully_shard``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hocket
from hocket.cluster.dtensor import local
from process.cases import refusal

STEPS = 5
SHARE = (2, 6, 3, 5)
"""Samples of each process where they differ."""


class Net(nn.Module):
    """Rows that two processes cannot share evenly, and a parameter of which one process has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 15), nn.Tanh(), nn.Linear(15, 9), nn.Tanh())
        self.head = nn.Linear(9, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """The logits; with targets also the loss, which is computed from them."""
        logits = self.head(self.body(x)) * self.scale
        return logits if y is None else (F.cross_entropy(logits, y), logits)


def net() -> nn.Module:
    torch.manual_seed(7)
    return Net()


def sharded(mesh: Any, model: nn.Module | None = None) -> nn.Module:
    model = net() if model is None else model
    for block in (model.body[0], model.body[2]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hosts() -> Any:
    """Two hosts of two processes."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.02)


def samples(step: int, rank: int, count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 12, generator=generator), torch.randint(5, (count,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range = range(STEPS), parts: int = 1) -> None:
    for t in steps:
        optimizer.zero_grad()
        for part in range(parts):
            x, y = samples(parts * t + part, rank)
            (F.cross_entropy(model(x), y) / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def whole(model: nn.Module) -> Tensor:
    """All weights of this process's replica; its processes call it together."""
    model.reshard()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def own(model: nn.Module) -> Tensor:
    """What this process holds."""
    return torch.cat([local(p).detach().flatten() for p in model.parameters()]).clone()


def by_torch(rank: int, parts: int = 1) -> Tensor:
    """PyTorch's own hybrid sharding."""
    model = sharded(hosts())
    train(model, adamw(model), rank, parts=parts)
    return whole(model)


def bulk(rank: int, accumulate: int) -> dict[str, Any]:
    model = sharded(hosts()["shard"])
    optimizer = adamw(model)
    job = hocket.parallelize(model, optimizer, accumulate=accumulate)
    train(model, optimizer, rank, parts=accumulate)
    figures = job.summary(all_workers=True)
    job.finish()
    return {"hocket": whole(model), "torch": by_torch(rank, accumulate), "start": flat(net()), "exchanges": figures["exchanges"]}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def weighed(rank: int) -> dict[str, Any]:
    """Each process has another number of samples: together they are one mini-batch."""
    model, alone = sharded(hosts()["shard"]), net()
    optimizer, alone_optimizer = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
    job = hocket.parallelize(model, optimizer)
    job.weight = SHARE[rank] * 4 / sum(SHARE)
    for t in range(STEPS):
        parts = [samples(t, worker, count) for worker, count in enumerate(SHARE)]
        alone_optimizer.zero_grad()
        F.cross_entropy(alone(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        alone_optimizer.step()
        optimizer.zero_grad()
        x, y = parts[rank]
        loss = model(x, y)[0] if t % 2 else F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return {"hocket": whole(model), "alone": flat(alone)}


def steps(rank: int, strategy: str) -> dict[str, Any]:
    """The weights of this process's replica after every step; what its model computes, the mean model, and the last one."""
    model = sharded(hosts()["shard"])
    with torch.no_grad():
        for p in model.parameters():  # replicas begin as the first one
            local(p).add_(rank // 2)
    optimizer = adamw(model)
    job = hocket.parallelize(model, optimizer, strategy)
    found: dict[str, Any] = {"start": flat(net()), "weights": []}
    for t in range(STEPS):
        train(model, optimizer, rank, range(t, t + 1))
        found["weights"].append(whole(model))
    found["sent"] = job.summary(all_workers=True)["bytes_sent"]
    model.seen.fill_(rank)
    x, _ = samples(0, 0)
    with torch.no_grad():
        found["own"] = model(x)  # gathers weights, and keeps them
        with job.averaged() as mean:
            found["mean"], found["mean seen"] = mean(x), mean.seen.clone()
        found["own again"] = model(x)
        job.finish()
        found["finished"] = model(x)
    return {**found, "last": whole(model)}


def unsharded(rank: int, strategy: str) -> dict[str, Any]:
    """The same with two workers that have whole models; each computes what the two processes of a replica compute."""
    model = net()
    optimizer = adamw(model)
    job = hocket.parallelize(model, optimizer, strategy)
    found: dict[str, Any] = {"weights": []}
    for t in range(STEPS):
        optimizer.zero_grad()
        parts = [samples(t, 2 * rank + half) for half in range(2)]
        F.cross_entropy(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found["weights"].append(flat(model))
    x, _ = samples(0, 0)
    with torch.no_grad():
        found["own"] = model(x)
        with job.averaged() as mean:
            found["mean"] = mean(x)
    job.finish()
    return found


def resumed(rank: int, strategy: str) -> dict[str, Any]:
    """A training that is saved by every process and goes on in a new job; and another that begins with the whole state."""

    def begun() -> tuple[nn.Module, torch.optim.Optimizer, hocket.Job]:
        model = sharded(hosts()["shard"])
        optimizer = adamw(model)
        return model, optimizer, hocket.parallelize(model, optimizer, strategy)

    model, optimizer, job = begun()
    train(model, optimizer, rank, range(3))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": job.state_dict()})
    full = [job.full_state()]
    found: dict[str, Any] = {"entry": list(saved["job"]), "has full": full[0] is not None}
    dist.broadcast_object_list(full, src=0)
    train(model, optimizer, rank, range(3, 6))
    found["on"] = own(model)
    job.detach()
    model, optimizer, job = begun()
    for part, state in ((model, saved["model"]), (optimizer, saved["optimizer"]), (job, saved["job"])):
        part.load_state_dict(state)
    train(model, optimizer, rank, range(3, 6))
    found["again"] = own(model)
    job.detach()
    model, optimizer, job = begun()
    job.load_full_state(full[0])
    plain = net()
    plain.load_state_dict(full[0]["model"])
    plain_optimizer = adamw(plain)
    plain_optimizer.load_state_dict(full[0]["optimizer"])
    found |= {"loaded": whole(model), "plain": flat(plain)}
    found["moments"] = [
        torch.equal(optimizer.state[p]["exp_avg"].full_tensor(), plain_optimizer.state[q]["exp_avg"])
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    job.detach()
    return found


def single(rank: int) -> dict[str, Any]:
    """One replica of all processes: PyTorch's own FSDP2, and nothing to exchange."""
    found = []
    for parallel in (True, False):
        model = sharded(init_device_mesh("cpu", (4,)))
        optimizer = adamw(model)
        if parallel:
            hocket.parallelize(model, optimizer, "local(2) + qsgd(4)")
        train(model, optimizer, rank)
        found.append(whole(model))
    return {"hocket": found[0], "torch": found[1]}


def refused(rank: int) -> dict[str, Any]:
    mesh = hosts()

    def of(where: Any, strategy: str = "bulk", **options: Any) -> str:
        model = sharded(where)
        return refusal(lambda: hocket.parallelize(model, adamw(model), strategy, **options))

    half = net()
    fully_shard(half.body, mesh=mesh["shard"])
    mixed = net()
    fully_shard(mixed, mesh=mesh["shard"], ignored_params={mixed.scale})
    with torch.device("meta"):
        unborn = net()
    fully_shard(unborn, mesh=mesh["shard"])
    return {
        "two": of(mesh),
        "crossed": of(mesh["replicate"]),
        "async": of(mesh["shard"], "async + server"),
        "acco": of(mesh["shard"], "acco"),
        "sum": of(mesh["shard"], "bulk + server(role=sum)"),
        "scaler": of(mesh["shard"], scaler=torch.amp.GradScaler("cpu")),
        "audit": of(mesh["shard"], check="audit"),
        "sharding": of(mesh["shard"], sharding="fsdp"),
        "mesh": of(mesh["shard"], mesh="data=2,tensor=2"),
        "half": refusal(lambda: hocket.parallelize(half, adamw(half))),
        "mixed": refusal(lambda: hocket.parallelize(mixed, adamw(mixed))),
        "unborn": refusal(lambda: hocket.parallelize(unborn, adamw(unborn))),
    }


def main(rank: int, folder: str, cases: list[list[Any]]) -> None:
    hocket.init(device="cpu")
    results = {}
    for name, *arguments in cases:
        results[" ".join(map(str, [name, *arguments]))] = globals()[name](rank, *arguments)
        hocket.shutdown()
        hocket.init(device="cpu")
    torch.save(results, f"{folder}/{rank}.pt")
