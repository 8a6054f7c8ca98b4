"""What workers of the tests of integrations run: DDP's hook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hocket
from hocket.cluster.layout import Buckets

DDP_CODES = ("topk(0.1) | qsgd(4)", "sign", "lowrank(2)", "qsgd(4)", "topk(0.1, feedback=ef21)", "none")


def net() -> nn.Sequential:
    """Without biases, gradients arrive in the reverse of the order of registration: then DDP's buckets are ours."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16, False), nn.Tanh(), nn.Linear(16, 12, False), nn.Tanh(), nn.Linear(12, 3, False)]
    return nn.Sequential(*layers)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, which: range) -> None:
    for step in which:
        draw = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(5, 6, generator=draw), torch.randint(3, (5,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def hooked(code: str, model: nn.Module | None = None) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
    """A DDP model with the hook. Every parameter is a bucket from the first step on: DDP does not arrange buckets anew where it
    looks for unused parameters."""
    wrapped = DistributedDataParallel(model or net(), bucket_cap_mb=1e-6, find_unused_parameters=model is None)
    state, hook = hocket.ddp_hook(code)
    wrapped.register_comm_hook(state, hook)
    momentum = 0.9 if model is None else 0.0
    return wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=momentum), state


def parallelized(code: str, rank: int) -> Tensor:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = hocket.parallelize(model, optimizer, f"bulk + {code}", buckets=Buckets(1, 1))
    steps(model, optimizer, rank, range(6))
    job.finish()
    return flat(model)


def ddp(rank: int, folder: str) -> None:
    """Every law of the hook, in one group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for code in DDP_CODES:
        model, optimizer, state = hooked(code)
        steps(model, optimizer, rank, range(6))
        found[code] = {
            "ddp": flat(model),
            "ours": parallelized(code, rank),
            "bytes": state.summary()["bytes_sent"],
            "step": state.step,
        }
    found["resumed"] = resumed(rank)
    found["rebuilt"] = rebuilt(rank)
    found["overflow"] = overflow(rank, range(2), range(3, 6), None), overflow(rank, range(3), range(3, 6), 2)
    found["refused"] = refused(rank)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def resumed(rank: int) -> Tensor:
    """A training that stops after three steps, and one that goes on with what it saved."""
    model, optimizer, state = hooked(DDP_CODES[0])
    steps(model, optimizer, rank, range(3))
    saved = model.module.state_dict(), optimizer.state_dict(), state.state_dict()
    model, optimizer, state = hooked(DDP_CODES[0])
    for one, kept in zip((model.module, optimizer, state), saved, strict=True):
        one.load_state_dict(kept)
    steps(model, optimizer, rank, range(3, 6))
    return flat(model)


def overflow(rank: int, before: range, after: range, bad: int | None) -> Tensor:
    """A training with a GradScaler, if worker 1 has an overflow in step ``bad``; else one without."""
    model = DistributedDataParallel(net(), find_unused_parameters=True)
    scaler = None if bad is None else torch.amp.GradScaler("cpu", init_scale=2.0**8)
    model.register_comm_hook(*hocket.ddp_hook("topk(0.1)", scaler=scaler))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in (*before, *after):
        if scaler is None:
            steps(model, optimizer, rank, range(step, step + 1))
            continue
        draw = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(5, 6, generator=draw), torch.randint(3, (5,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (torch.inf if step == bad and rank == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(model)


class Sloped(nn.Module):
    """Its gradients do not depend on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=torch.float32)) for n in (7, 20, 9)])

    def forward(self, slope: Tensor) -> Tensor:
        return torch.cat(list(self.parts)) @ slope


def rebuilt(rank: int) -> dict[str, Any]:
    """What was delivered, what is owed, and what was computed, where DDP arranges one bucket as three after the first step."""
    model, optimizer, state = hooked("topk(0.2)", Sloped())
    slopes, arranged = torch.randn(5, 36, generator=torch.Generator().manual_seed(rank)), []
    for slope in slopes:
        optimizer.zero_grad()
        model(slope).backward()
        optimizer.step()
        arranged.append(list(state._buckets))
    state._take_apart()
    owed = torch.cat([state._moved[number]["error"] for number in range(3)], 1)[0]
    return {"arranged": arranged, "delivered": -flat(model) / 0.1, "owed": owed, "computed": slopes.sum(0)}


def refused(rank: int) -> list[str]:
    said = []
    for code in ("local(4)", "gossip", "async + server", "bulk + server(role=sum)"):
        try:
            hocket.ddp_hook(code)
        except hocket.HocketError as error:
            said.append(str(error))
    model, optimizer, state = hooked("sign")
    steps(model, optimizer, rank, range(2))
    other = DistributedDataParallel(net())
    other.register_comm_hook(state, hocket.ddp_hook("sign")[1])
    try:
        steps(other, torch.optim.SGD(other.parameters(), 0.1), rank, range(1))
    except Exception as error:
        said.append(str(error))
    try:
        hooked("qsgd(4)")[2].load_state_dict(state.state_dict())
    except hocket.HocketError as error:
        said.append(str(error))
    model, _, _ = hooked("sign")
    try:
        model(torch.full((2, 6), torch.nan)).sum().backward()
    except Exception as error:
        said.append(str(error))
    return said
