"""What real workers do for tests/process/test_sharded.py: sharded training beside unsharded training, on the same samples."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data import load
from hocket.errors import NonFiniteGradient
from hocket.models import cross_entropy, gpt, mlp
from hocket.split.sharded import ShardedState
from hocket.strategy import Strategy
from hocket.train.run import explanation, run
from hocket.train.runtimes.fsdp import FsdpRuntime
from hocket.train.settings import RunSettings
from hocket.train.split_replicas import FullReplica
from process.cases import flat, refusal

STEPS = 5
FOLDER = Path()
"""Where runs leave their records; :func:`main` sets it."""
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
}


def small(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return mlp(20, 10, (24, 16, 16)) if kind == "mlp" else gpt(11, context=8, layers=3, heads=2, width=16)


def samples(kind: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "mlp":
        return torch.randn(6, 20, generator=generator), torch.randint(10, (6,), generator=generator)
    tokens = torch.randint(11, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def grouped(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.dim() > 1])
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.03})
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, rank: int, steps: range, schedule: Any = None) -> None:
    for t in steps:
        optimizer.zero_grad()
        x, y = samples(kind, t, rank)
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()


def unsharded(kind: str, name: str, rank: int, strategy: str = "bulk + allreduce") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small(kind)
    optimizer = grouped(model, name)
    job = hocket.parallelize(model, optimizer, strategy)
    train(model, optimizer, kind, rank, range(STEPS), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    job.detach()
    return model, optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of optimiser state that this worker holds."""
    held = (t for state in optimizer.state.values() for t in state.values())
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))


def state(rank: int, kind: str, name: str, strategy: str = "bulk + allreduce") -> dict[str, Any]:
    """Training with sharded state, and its checkpoint taken up by an unsharded and by a sharded training."""
    plain, plain_optimizer = unsharded(kind, name, rank, strategy)
    model = small(kind)
    optimizer = grouped(model, name)
    job = hocket.parallelize(model, optimizer, strategy)
    sharded = ShardedState(model, optimizer, job.cluster, job.layout, job.weights)
    job.summary(all_workers=True)
    train(model, optimizer, kind, rank, range(STEPS), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    found = {"plain": flat(plain), "sharded": flat(model), "state": state_bytes(optimizer), "start": flat(small(kind))}
    found["sent"] = job.summary(all_workers=True)["bytes_sent"]
    found["weights"] = sum(p.numel() * p.element_size() for p in model.parameters())
    found["largest"] = max(p.numel() * p.element_size() for p in model.parameters())
    found["part refused"] = refusal(optimizer.state_dict)
    found["closure refused"] = refusal(lambda: optimizer.step(lambda: 0.0))
    held = [sharded.consolidate()]
    found["consolidated"] = held[0] is not None
    torch.distributed.broadcast_object_list(held)
    found["equal state"] = same(held[0], plain_optimizer.state_dict())
    again, again_optimizer = copy.deepcopy(model), None
    again_optimizer = grouped(again, name)
    again_optimizer.load_state_dict(copy.deepcopy(held[0]))
    optimizer.load_state_dict(held[0])  # every worker keeps its part
    found["state again"] = state_bytes(optimizer)
    train(model, optimizer, kind, rank, range(STEPS, STEPS + 2))
    sharded.detach()
    job.detach()
    job = hocket.parallelize(again, again_optimizer, strategy)
    train(again, again_optimizer, kind, rank, range(STEPS, STEPS + 2))
    job.detach()
    return {**found, "on": flat(model), "on unsharded": flat(again)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def full(rank: int, kind: str, name: str) -> dict[str, Any]:
    """Training under FSDP2, and its checkpoint taken up by a plain and by a sharded training."""
    plain, _ = unsharded(kind, name, rank)
    model = small(kind)
    optimizer = grouped(model, name)
    make = lambda m, o: hocket.parallelize(m, o, sharding="fsdp")  # noqa: E731
    job = make(model, optimizer)
    train(model, optimizer, kind, rank, range(STEPS), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    summary = job.summary(all_workers=True)
    held: list[Any] = [job.full_state()]
    with job.averaged() as whole:
        found = {"plain": flat(plain), "sharded": flat(whole), "start": flat(small(kind)), "summary": summary}
    found["local"] = sum(p.to_local().numel() for p in model.parameters())
    found["all"] = sum(p.numel() for p in plain.parameters())
    torch.distributed.broadcast_object_list(held)
    found["optimisers"] = [
        refusal(lambda kind=kind: make(plain, kind(plain.parameters())))
        for kind in (torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Rprop)
    ]
    found["late"] = refusal(lambda: make(plain, grouped_with_state(plain, name)))
    other = small(kind)
    other_optimizer = grouped(other, name)
    other_job = make(other, other_optimizer)
    other_job.load_full_state(held[0])
    alone = small(kind)
    alone.load_state_dict(held[0]["model"])
    alone_optimizer = grouped(alone, name)
    alone_optimizer.load_state_dict(held[0]["optimizer"])
    plain_job = hocket.parallelize(alone, alone_optimizer)
    for m, o in ((model, optimizer), (other, other_optimizer), (alone, alone_optimizer)):
        train(m, o, kind, rank, range(STEPS, STEPS + 2))
    plain_job.detach()
    found["on"], found["on again"] = flat(job.finish()), flat(other_job.finish())
    return {**found, "on plain": flat(alone)}


def grouped_with_state(model: nn.Module, name: str) -> torch.optim.Optimizer:
    optimizer = grouped(model, name)
    model.zero_grad()
    F.mse_loss(next(model.parameters()), torch.zeros(())).backward()
    optimizer.step()
    return optimizer


def weighed(rank: int) -> dict[str, Any]:
    """Workers with different shares of the samples: 2 and 6 of 8."""
    found = {}
    for shard in ("none", "full"):
        model = small("mlp")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        if shard == "full":
            job = hocket.parallelize(model, optimizer, sharding="fsdp")
        else:
            job = hocket.parallelize(model, optimizer)
        for t in range(STEPS):
            x, y = (torch.cat(parts)[:8] for parts in zip(samples("mlp", t, 0), samples("mlp", t, 1), strict=True))
            own = slice(0, 2) if rank == 0 else slice(2, 8)
            job.weight = len(x[own]) * 2 / 8
            optimizer.zero_grad()
            F.cross_entropy(model(x[own]), y[own]).backward()
            optimizer.step()
        found[shard] = flat(job.finish())
    return found


def scaled(rank: int, name: str) -> dict[str, Any]:
    """A GradScaler, whose fourth step overflows on worker 1 alone: all skip it, sharded or not."""
    found: dict[str, Any] = {"start": flat(small("mlp"))}
    for zero in (0, 1):
        model = small("mlp")
        optimizer = grouped(model, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        job = hocket.parallelize(model, optimizer, scaler=scaler, accumulate=2, sharding="zero1" if zero else None)
        scales, weights = [], []
        for t in range(6):
            optimizer.zero_grad()
            for half in range(2):
                x, y = samples("mlp", 2 * t + half, rank)
                loss = F.cross_entropy(model(x), y) / 2
                scaler.scale(loss * float("inf") if t == 3 and rank == 1 else loss).backward()
            if t % 2:  # clipped, or left to the optimiser
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            weights.append(flat(model))
        found["state" if zero else "None"] = {"weights": weights, "scales": scales}
        if job.sharded is not None:
            found["owned"] = job.sharded.owned_bytes
        job.detach()
    return found


def gathered(rank: int, nonfinite: str, bad: int) -> dict[str, Any]:
    """Two backward passes make a step, one of them NaN on worker 1 at step ``bad``: under FSDP2 beside plain training.

    Plain training knows what FSDP2 makes of it: a parameter whose mean gradient is not finite has none in that step.
    """
    model, plain = small("mlp"), small("mlp")
    optimizer, plain_optimizer = grouped(model, "momentum"), grouped(plain, "momentum")
    job = hocket.parallelize(model, optimizer, sharding="fsdp", accumulate=2, check=hocket.Checks(nonfinite=nonfinite))
    sentence = ""
    for t in range(STEPS):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for half in range(2):
            for worker in range(2):
                x, y = samples("mlp", 2 * t + half, worker)
                (F.cross_entropy(plain(x), y) / 4).backward()
            x, y = samples("mlp", 2 * t + half, rank)
            loss = F.cross_entropy(model(x), y) / 2
            (loss * float("nan") if (t, half, rank) == (bad, 0, 1) else loss).backward()
        if t == bad:
            for p in plain.parameters():
                p.grad = torch.zeros_like(p)
        try:
            optimizer.step()
        except hocket.NonFiniteGradient as error:
            sentence = str(error)
            break
        plain_optimizer.step()
    if bad < 0:  # a step of one pass
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for worker in range(2):
            half_a_step(plain, None, worker, 2)
        half_a_step(model, optimizer, rank, 1)
        plain_optimizer.step()
    summary = job.summary(all_workers=True)
    ended = {"full": flat(job.finish()), "plain": flat(plain), "start": flat(small("mlp"))}
    return {**ended, "sentence": sentence, "nonfinite": summary["nonfinite"]}


def half_a_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int, workers: int) -> None:
    x, y = samples("mlp", 0, rank)
    (F.cross_entropy(model(x), y) / workers).backward()
    if optimizer is not None:
        optimizer.step()


def runs(rank: int) -> dict[str, Any]:
    """What ``hocket train`` does in every process: runs that stop after each epoch and go on, beside one that does not."""
    cluster = hocket.session._Session.cluster
    base = RunSettings.of(model="cnn", batch_size=120, lr=0.05, momentum=0.9, seed=3, workers=2)

    def train(name: str, *ways: dict[str, Any]) -> Any:
        for epochs, way in enumerate(ways, 1):
            settings = base.changed(epochs=epochs if len(ways) > 1 else 3, **way)
            training = run(settings, cluster, out=FOLDER / name, resume=epochs > 1)
        return training

    state, full = {"zero": 1}, {"fsdp": True}
    stages = {"mesh": "pipeline=2", "workers": 1, "pipe": "gpipe", "num_microbatches": 2}
    ways = {
        "plain": [{}],
        "state": [state, state, {**state, "mesh": "data=2"}],
        "full": [full, full],
        "stages": [{**stages, "cut": "2"}, {**stages, "cut": "2"}, {**stages, "cut": "6"}],
        "alone": [{**stages, "cut": "2"}],
    }
    found = {name: train(name, *several).metrics for name, several in ways.items()}
    found["other"] = refusal(lambda: run(base.changed(epochs=3), cluster, out=FOLDER / "full", resume=True))
    plan = FOLDER / f"plan-{rank}.toml"
    plan.write_text('3 = "gather"\n7 = "gather"\n')
    split = base.changed(workers=1, mesh="tensor=2", plan_file=str(plan))
    found["planned"] = explanation(split, cluster, load("digits"))
    saved = torch.load(FOLDER / "state" / "checkpoints" / "3" / f"process-{rank}.pt")["replicas"]["optimizer"]["state"]
    return {**found, "momenta": sum(entries["momentum_buffer"].numel() for entries in saved.values())}


class Normed(nn.Module):
    """Statistics of its own on every worker, and a gradient that may be NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.bad, self.poisoned = nn.Parameter(torch.ones(4)), False

    def forward(self, x: Tensor) -> Tensor:
        own = self.bad - self.bad.detach()  # zero, where the root's slope is infinite
        return self.last(self.norm(self.first(x))) + (own.sqrt() if self.poisoned else own).sum()


def normed(rank: int) -> dict[str, Any]:
    """The training loop's worker that keeps a part of everything: its checkpoint, and a NaN under clipping."""

    def make() -> FullReplica:
        torch.manual_seed(7)
        runtime = FsdpRuntime(hocket.session._Session.cluster)  # type: ignore[arg-type]
        return FullReplica(Normed(), cross_entropy, lambda p: torch.optim.SGD(p, 0.1), Strategy(), runtime, clip=1.0)

    replica, keys = make(), torch.zeros(1)
    for t in range(2):
        x, y = samples("mlp", t, rank)
        replica.step([x], [y], keys, [1.0])
    state = replica.state_dict()
    held = [state["whole"]]
    torch.distributed.broadcast_object_list(held)
    other = make()
    other.load_state_dict({**state, "whole": held[0]})
    own, again = ({n: b.clone() for n, b in r.model.named_buffers()} for r in (replica, other))
    found: dict[str, Any] = {"buffers": own, "again": again}
    other.model.poisoned = True
    x, y = samples("mlp", 2, rank)
    try:
        other.step([x], [y], keys, [1.0])
    except NonFiniteGradient as error:
        found["sentence"] = str(error)
    return found


def main(rank: int, folder: str, cases: list[list[Any]]) -> None:
    global FOLDER
    FOLDER = Path(folder)
    hocket.init(device="cpu")
    results = {}
    for function, *arguments in cases:
        results[" ".join(map(str, [function, *arguments]))] = globals()[function](rank, *arguments)
    torch.save(results, f"{folder}/{rank}.pt")
