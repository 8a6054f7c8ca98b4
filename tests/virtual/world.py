"""A tiny world for laws: a small model, fixed data, and virtual workers stepped one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.cluster import VirtualCluster
from hocket.cluster.layout import BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES, Buckets
from hocket.strategy import Strategy
from hocket.train.replicas import StackedReplicas

FEATURES, CLASSES, BATCH = 4, 3, 4


class Tiny(nn.Module):
    """43 parameters in four tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def seeded(make: Callable[[], nn.Module] = Tiny, seed: int = 0) -> nn.Module:
    """A model with fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def data(steps: int, workers: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs ``[steps, workers, batch, features]`` of three overlapping classes, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (steps, workers, BATCH), generator=generator)
    x = torch.randn(steps, workers, BATCH, FEATURES, generator=generator) + 2 * F.one_hot(y, FEATURES)
    return x, y


def sgd(lr: float = 0.2, **options: float) -> Callable:
    return lambda params: torch.optim.SGD(params, lr, **options)


PLAIN_SGD = sgd()


class World:
    """``workers`` virtual workers at work on one strategy; ``step()`` feeds them the next batch."""

    def __init__(
        self,
        strategy: str | Strategy,
        workers: int = 4,
        *,
        make: Callable[[], nn.Module] = Tiny,
        optimizer: Callable = PLAIN_SGD,
        steps: int = 64,
        seed: int = 0,
        caps: tuple[int, int] = (BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES),
        loss: Callable = F.cross_entropy,
        **options: object,
    ) -> None:
        self.cluster = VirtualCluster(workers)
        self.replicas = StackedReplicas(
            seeded(make),
            loss,
            optimizer,
            Strategy.parse(strategy),
            self.cluster,
            seed=seed,
            buckets=Buckets(*caps),
            **options,
        )
        self.x, self.y = data(steps, workers)
        self.at = 0
        self.losses: list[float] = []

    @property
    def rows(self) -> Tensor:
        """All weights ``[workers, values]``."""
        return torch.cat([w.double() for w in self.replicas.weights], 1)

    @property
    def sent(self) -> list[int]:
        """Bytes sent by each worker so far."""
        return self.cluster.ledger.bytes_sent.tolist()

    def step(self, count: int = 1) -> World:
        for _ in range(count):
            keys = torch.arange(self.cluster.size) + 1000 * self.at
            losses = self.replicas.step(self.x[self.at], self.y[self.at], keys, [1.0] * self.cluster.size)
            self.losses.append(losses.mean().item())
            self.at += 1
        return self


def plain(
    world: World, worker: int = 0, steps: int = 8, make: Callable[[], nn.Module] = Tiny, optimizer: Callable = PLAIN_SGD
) -> Tensor:
    """What ordinary training of one model on this worker's data gives, as a row in the world's layout."""
    model = seeded(make)
    opt = optimizer(list(model.parameters()))
    for t in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(world.x[t, worker]), world.y[t, worker]).backward()
        opt.step()
    return row_of(model, world)


def row_of(model: nn.Module, world: World) -> Tensor:
    """A model's parameters as a row in the world's layout."""
    named = dict(model.named_parameters())
    return torch.cat([named[s.name].detach().double().flatten() for b in world.replicas.layout.buckets for s in b.slots])


def gradients(rows: Tensor, world: World, step: int) -> Tensor:
    """Each worker's gradient at its own row, computed by an ordinary model."""
    model, out = seeded(), []
    named = dict(model.named_parameters())
    for worker, row in enumerate(rows):
        at = 0
        for b in world.replicas.layout.buckets:
            for s in b.slots:
                named[s.name].data = row[at : at + s.size].float().view(s.shape)
                at += s.size
        model.zero_grad()
        F.cross_entropy(model(world.x[step, worker]), world.y[step, worker]).backward()
        out.append(torch.cat([named[s.name].grad.double().flatten() for b in world.replicas.layout.buckets for s in b.slots]))
    return torch.stack(out)
