"""What real processes do for tests/process/test_mesh.py: train on meshes, and return wholes that one process can check."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import hocket
from hocket.models import cnn, cross_entropy, gpt, mlp, vgg11
from hocket.session import _Session
from hocket.train.split_job import split_job
from hocket.train.split_replicas import MeshReplica

STEPS = 5
DEVICE = "cpu"
"""Where models and samples lie; :func:`main` sets it."""


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return {
        "mlp": lambda: mlp(48, 6, hidden=(32, 16)),
        "cnn": lambda: cnn((1, 8, 8), 10),
        "vgg11": lambda: vgg11((3, 32, 32), 10),
        "gpt": lambda: gpt(16, context=8, layers=2, heads=4, width=32, dropout=0.0),
        "drop": lambda: gpt(16, context=8, layers=2, heads=4, width=32, dropout=0.2),
        "tied": Autoencoder,
    }[name]().to(DEVICE)


class Autoencoder(nn.Module):
    """Its first and last layers share their weights, under two names; one buffer is saved, and one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.leave.weight = self.enter.weight
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.enter(x.flatten(1)[:, :16])))
        return self.leave(torch.relu(self.inner(hidden * self.scale)))[:, :6]


def batch(name: str, step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """The mini-batch of all replicas together at a step."""
    draw = torch.Generator().manual_seed(100 + step)
    if name in ("gpt", "drop"):
        tokens = torch.randint(0, 16, (samples, 9), generator=draw)
        return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)
    shape, classes = {"mlp": ((3, 4, 4), 6), "tied": ((3, 4, 4), 6), "cnn": ((1, 8, 8), 10), "vgg11": ((3, 32, 32), 10)}[name]
    x, y = torch.randn(samples, *shape, generator=draw), torch.randint(0, classes, (samples,), generator=draw)
    return x.to(DEVICE), y.to(DEVICE)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())  # two groups, as people have them
    groups = [{"params": [p for _, p in named if p.dim() > 1]}, {"params": [p for _, p in named if p.dim() == 1], "lr": 0.01}]
    return torch.optim.SGD([g for g in groups if g["params"]], 0.02, momentum=0.9)


def alone(name: str, steps: int = STEPS, samples: int = 8) -> tuple[dict[str, Tensor], list[float]]:
    """The same training on one process, in plain PyTorch."""
    model = build(name)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        x, y = batch(name, step, samples)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {n: t.detach().clone() for n, t in model.state_dict().items()}, losses


STAGED = ("schedule", "num_microbatches", "stages_per_rank", "cut", "measure")


def begin(name: str, mesh: str, strategy: str = "bulk", samples: int = 8, **options: Any) -> tuple[nn.Module, Any]:
    model = build(name)
    x, _ = batch(name, 0, samples)
    placed = hocket.Mesh.parse(mesh)
    if "plan" in options:
        placed = replace(placed, plan=options.pop("plan"))
    if placed.pipeline > 1:
        options.setdefault("measure", "flops")  # the same cut every time
    staged = {name: options.pop(name) for name in STAGED if name in options}
    pipeline = hocket.Pipeline(loss=cross_entropy, sample=x[: samples // placed.data], **staged)
    job = hocket.parallelize(model, optimizer_of(model), strategy, mesh=placed, pipeline=pipeline, **options)
    return model, job


def train(job: Any, name: str, steps: range, samples: int = 8) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(name, step, samples)
        own = slice(
            job.split.place.data.place * samples // job.split.mesh.data,
            (job.split.place.data.place + 1) * samples // job.split.mesh.data,
        )
        loss = job.train(x[own], y[own])
        losses += [] if loss is None else [float(loss)]
    return losses


def equal(name: str, mesh: str, strategy: str = "bulk", **options: Any) -> dict[str, Any]:
    """Five steps on a mesh; wholes, losses, bytes by axis and what is held here."""
    _, job = begin(name, mesh, strategy, **options)
    losses = train(job, name, range(STEPS))
    ledger = job.summary(all_workers=True)
    state = job.full_state()
    tied = job.model.token.weight.detach().clone() if name == "gpt" and hasattr(job.model, "token") else None
    job.finish()
    held = {n: p.numel() for n, p in job.model.named_parameters()}
    ended = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    return {
        "whole": None if state is None else state["model"],
        "losses": losses,
        "ledger": ledger,
        "held": held,
        "ended": ended,
        "tied": tied,
        "stages": 1 if job.split.cut is None else len(job.split.cut.stages),
    }


def checkpoints(name: str, first: str, then: str, **options: Any) -> dict[str, Any]:
    """Two steps on one mesh, the rest on another, from the whole that the first one left; all processes are given it."""
    _, job = begin(name, first, **options)
    train(job, name, range(2))
    state = job.full_state()
    everyone: list[Any] = [state]
    torch.distributed.broadcast_object_list(everyone, 0)
    job.finish()
    _, other = begin(name, then, **options)
    other.load_full_state(everyone[0])
    losses = train(other, name, range(2, STEPS))
    found = other.full_state()
    other.finish()
    return {"whole": None if found is None else found["model"], "losses": losses, "saved": everyone[0]}


def resumed(name: str, mesh: str, **options: Any) -> dict[str, Any]:
    """Own parts of a checkpoint: three steps and two more in another job equal five."""
    _, job = begin(name, mesh, **options)
    train(job, name, range(3))
    sharded = job.sharded
    optimizer = job.optimizer.state_dict() if sharded is None else sharded.saved()
    saved = copy.deepcopy([job.state_dict(), job.model.state_dict(), optimizer])
    job.finish()
    _, other = begin(name, mesh, **options)
    for part, state in zip((other, other.model, other.optimizer), saved, strict=True):
        part.load_state_dict(state)
    train(other, name, range(3, STEPS))
    found = other.full_state()
    other.finish()
    return {"whole": None if found is None else found["model"]}


def elsewhere(mesh: str, cut: list[str]) -> dict[str, Any]:
    """The sentence that own parts of a checkpoint meet where the model is cut elsewhere."""
    _, job = begin("mlp", mesh)
    state = job.state_dict()
    job.finish()
    _, other = begin("mlp", mesh, cut=cut)
    try:
        other.load_state_dict(state)
    except hocket.HocketError as error:
        return {"sentence": str(error)}
    finally:
        other.finish()
    return {"sentence": ""}


def clipped(name: str, mesh: str) -> dict[str, Any]:
    """The norm of a split model's gradient, and the gradient after clipping."""
    _, job = begin(name, mesh)
    x, y = batch(name, 0)
    own = slice(job.split.place.data.place * 8 // job.split.mesh.data, (job.split.place.data.place + 1) * 8 // job.split.mesh.data)
    job.backward(x[own], y[own])
    norm = job.clip(0.1)
    again = job.clip(1e9)
    job.finish()
    return {"norm": float(norm), "again": float(again)}


def replica_of(name: str, mesh: str, strategy: str, momentum: float = 0.0) -> MeshReplica:
    """What the training loop of the command trains."""
    placed, world = hocket.Mesh.parse(mesh), _Session.cluster
    assert world is not None
    sample = batch(name, 0)[0][: 8 // placed.data]
    pipeline = hocket.Pipeline(sample=sample, measure="flops" if placed.pipeline > 1 else None, loss=cross_entropy)
    model, where = build(name), (hocket.Strategy.parse(strategy), world, placed, pipeline)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    return MeshReplica(model, cross_entropy, optimizer, lambda made: split_job(model, made, *where))


def stands_in(mesh: str) -> dict[str, Any]:
    """How far the weights here move in a step on a mini-batch that stands in for none, and in one that counts."""
    replica, (x, y) = replica_of("mlp", mesh, "local(2)"), batch("mlp", 0)
    moved = []
    for weight in (0.0, 1.0):
        before = [p.detach().clone() for p in replica.job.model.parameters()]
        replica.step([x], [y], torch.zeros(1), [weight], always=True)
        moved.append(max(float((p - b).abs().max()) for p, b in zip(replica.job.model.parameters(), before, strict=True)))
    replica.job.finish()
    return {"moved": moved}


def left(name: str, mesh: str) -> dict[str, Any]:
    """What a process has after some steps."""
    replica = replica_of(name, mesh, "gossip + topk(0.2) + exchange=gradients", momentum=0.9)
    job = replica.job
    assert job.split is not None
    for step in range(3):
        x, y = (t.chunk(job.split.mesh.data)[job.split.place.data.place] for t in batch(name, step))
        replica.step([x], [y], torch.zeros(1), [1.0])
    state = copy.deepcopy(replica.state_dict())
    job.finish()
    return {"state": state}


def taken(name: str, mesh: str, folder: str) -> dict[str, Any]:
    """What a process begins with that goes on with what others have :func:`left` in a folder."""
    replica = replica_of(name, mesh, "gossip + topk(0.2) + exchange=gradients", momentum=0.9)
    parts = hocket.Mesh.parse(mesh).parts
    part = torch.distributed.get_rank() % parts
    saved = [torch.load(path)[f"left {name}"]["state"] for path in sorted(Path(folder).glob("*.pt"))]
    replica.take_over(saved[part::parts], None)
    state = copy.deepcopy(replica.state_dict())
    replica.job.finish()
    return {"state": state, "saved": saved[part::parts]}


def untouched(mesh: str) -> dict[str, Any]:
    """Where only operations are split, the plain loop trains."""
    model = build("mlp")
    optimizer = optimizer_of(model)
    job = hocket.parallelize(model, optimizer, mesh=mesh)
    for step in range(STEPS):
        x, y = batch("mlp", step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    state = job.full_state()
    job.finish()
    return {"whole": None if state is None else state["model"]}


def sharded(**options: Any) -> dict[str, Any]:
    """The plain loop on two replicas that keep parts of the optimiser's state, or of everything."""
    model = build("mlp")
    optimizer = optimizer_of(model)
    job = hocket.parallelize(model, optimizer, **options)
    place = torch.distributed.get_rank()
    for step in range(STEPS):
        x, y = batch("mlp", step)
        optimizer.zero_grad()
        F.cross_entropy(model(x[place * 4 : place * 4 + 4]), y[place * 4 : place * 4 + 4]).backward()
        optimizer.step()
    state = sum(t.numel() for p in optimizer.state.values() for t in p.values() if isinstance(t, Tensor))
    return {"whole": {n: t.detach().clone() for n, t in job.finish().state_dict().items()}, "state": state}


def born(mesh: str | None) -> dict[str, Any]:
    """A model that was built without memory: its weights, whatever holds them."""
    with hocket.deferred():
        model = mlp(48, 6, hidden=(32, 16))
    x, _ = batch("mlp", 0)
    pipeline = hocket.Pipeline(loss=cross_entropy, sample=x)
    job = hocket.parallelize(model, optimizer_of(model), mesh=mesh, pipeline=pipeline)
    if mesh is not None:
        state = job.full_state()
        whole = None if state is None else state["model"]
    else:
        whole = {n: t.detach().clone() for n, t in model.state_dict().items()}
    job.finish()
    return {"whole": whole}


def refused(mesh: str, name: str = "mlp", **options: Any) -> dict[str, Any]:
    """The sentence that a bad wish meets."""
    try:
        begin(name, mesh, **options)
    except hocket.HocketError as error:
        return {"sentence": str(error)}
    return {"sentence": ""}


def refused_sharding(**options: Any) -> dict[str, Any]:
    """The sentence that sharding meets here, where it is refused."""
    model = build("mlp")
    try:
        hocket.parallelize(model, optimizer_of(model), **options).finish()
    except hocket.HocketError as error:
        return {"sentence": str(error)}
    return {"sentence": ""}


_ALL = (
    equal,
    checkpoints,
    resumed,
    elsewhere,
    clipped,
    stands_in,
    left,
    taken,
    untouched,
    sharded,
    born,
    refused,
    refused_sharding,
)
CASES = {f.__name__: f for f in _ALL}


def main(rank: int, folder: str, wanted: list[tuple[str, str, dict[str, Any]]], device: str = "cpu") -> None:
    """Run cases ``(label, function, arguments)`` one after another and save what they return, on the CPU."""
    global DEVICE
    DEVICE = device
    torch.backends.cudnn.allow_tf32 = False
    hocket.init(backend="gloo", device=device)
    results = {}
    for label, function, arguments in wanted:
        results[label] = tree_map_only(Tensor, Tensor.cpu, CASES[function](**arguments))
    torch.save(results, f"{folder}/{rank}.pt")
