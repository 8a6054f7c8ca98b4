"""Models split over a tensor axis beside the same models whole, for tests/process/test_tensor.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.cluster.join import join
from hocket.models import cnn, cross_entropy, gpt, mlp, vgg11
from hocket.split import Axis, Mesh, init_mesh
from hocket.split.branches import Branches
from hocket.split.draws import Draws
from hocket.split.dropout import prepare_dropout
from hocket.split.tensor import split_tensor

STEPS = 5


class Encoder(nn.Module):
    """A transformer of torch's own layers, with both kinds of masks."""

    def __init__(self, batch_first: bool, dropout: float = 0.1, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.token = nn.Embedding(16, 16, padding_idx=3)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout, F.gelu, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first)
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 3
        padding[:, 0] = False
        x = self.token(tokens)
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).isinf()
        if self.batch_first:
            x = self.encoder(x, causal, padding)
        else:
            x = self.encoder(x.transpose(0, 1), causal, padding).transpose(0, 1)
        return self.head(x)


class Crossing(nn.Module):
    """Attention between two sequences that also shows where it looks, with a mask for each sample and head."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.average = average
        self.into = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, bias=average)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        other = self.into(x).transpose(0, 1)
        mask = (torch.arange(x.shape[0] * 4).view(-1, 1, 1) + torch.eye(3, 5)) % 3 * 0.5
        out, looked = self.attention(other[:3], other, other, attn_mask=mask, average_attn_weights=self.average)
        return self.head(out.mean(0)) + looked.flatten(1)[:, :4]


class Gated(nn.Module):
    """``down(silu(gate(x)) · up(x))``, with dropout inside, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.gate, self.up, self.down, self.dropout = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8), nn.Dropout(0.2)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        return self.head(x + self.down(self.dropout(F.silu(self.gate(x)) * self.up(x))))


class Wilful(nn.Module):
    """It looks at values, so nobody can trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden if float(hidden.detach().sum()) > 0 else -hidden)


def images(channels: int, side: int, batch: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, channels, side, side), torch.randint(4, (batch,))


def texts(vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (2, 8)), torch.randint(vocabulary, (2, 8))


def values(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, *shape), torch.randint(4, (8,))


def stacked() -> nn.Module:
    return mlp(48, 10, (32, 16, 24))


def normed() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, 2, 1, padding_mode="circular", bias=False)
    normed = nn.Sequential(first, nn.BatchNorm2d(8), nn.Dropout2d(0.3), nn.ReLU())
    return nn.Sequential(normed, nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 4))


def branches(join: str) -> nn.Module:
    wide = [8] * 4 if join != "cat" else [3, 8, 5, 2, 6]
    towers = [nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, w)) for w in wide]
    return nn.Sequential(nn.Linear(6, 12), Branches(*towers, join=join), nn.Linear(24 if join == "cat" else 8, 4))


@dataclass
class Case:
    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    plan: Mapping[str, str] | None = None
    lr: float = 0.1


CASES: dict[str, Case] = {
    "mlp": Case(lambda: mlp(48, 10, (32, 32)), lambda: values(48)),
    "cnn": Case(lambda: cnn((3, 8, 8), 10), lambda: images(3, 8)),
    "vgg11": Case(lambda: vgg11((3, 32, 32), 10), lambda: images(3, 32, 1), lr=0.002),
    "gpt": Case(lambda: gpt(64, 8, 2, 4, 16), lambda: texts(64)),
    "gpt, dropout": Case(lambda: gpt(64, 8, 2, 4, 16, dropout=0.2), lambda: texts(64)),
    "gpt, odd vocabulary": Case(lambda: gpt(65, 8, 1, 4, 16), lambda: texts(65)),
    "encoder": Case(lambda: Encoder(batch_first=True), lambda: texts(16)),
    "encoder, sequence first": Case(lambda: Encoder(batch_first=False, norm_first=True), lambda: texts(16)),
    "crossing": Case(lambda: Crossing(average=True), lambda: values(5, 6)),
    "crossing, all heads shown": Case(lambda: Crossing(average=False), lambda: values(5, 6)),
    "gated, tied": Case(Gated, lambda: texts(16)),
    "untraceable": Case(Wilful, lambda: values(6)),
    "normed": Case(normed, lambda: images(3, 8)),
    "branches, sum": Case(lambda: branches("sum"), lambda: values(6)),
    "branches, mean": Case(lambda: branches("mean"), lambda: values(6)),
    "branches, cat": Case(lambda: branches("cat"), lambda: values(6)),
    "rotate, rows": Case(stacked, lambda: values(48), {"1": "columns", "[35]": "rotate", "7": "rows"}),
    "rotate, closed": Case(stacked, lambda: values(48), {"1": "columns", "3": "rotate", "5": "rotate"}),
    "classical": Case(stacked, lambda: values(48), {"[135]": "gather"}),
    "gpt, rotate": Case(
        lambda: gpt(64, 8, 1, 4, 16),
        lambda: texts(64),
        {"*.perceptron.into": "columns", "*.perceptron.out": "rotate", "*.attention": "heads"},
    ),
}


def train(model: nn.Module, draws: Draws, x: Tensor, y: Tensor, lr: float, axis: Axis) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses and communication of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, comm_stats = [], []
    for step in range(STEPS):
        draws.step = step
        axis.comm_stats.take()
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        stats = axis.comm_stats.take()
        comm_stats.append((stats.bytes_sent, stats.exchanges))
    return losses, comm_stats


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        out = model(x)
    model.train()
    return out


def outcome(case: Case, axis: Axis) -> dict[str, Any]:
    """How the split training differs from the whole one, as this process sees it."""
    torch.manual_seed(1)
    whole = case.build()
    split = copy.deepcopy(whole)
    x, y = case.data()
    draws, own_draws = Draws(seed=5), Draws(seed=5)
    prepare_dropout(whole, draws)
    if axis.size == 2:  # the order makes no difference
        parts = split_tensor(split, axis, case.plan)
        prepare_dropout(split, own_draws)
    else:
        prepare_dropout(split, own_draws)
        parts = split_tensor(split, axis, case.plan)
    expected, _ = train(whole, draws, x, y, case.lr, axis)
    losses, comm_stats = train(split, own_draws, x, y, case.lr, axis)
    full_state, held = dict(whole.named_parameters()), dict(split.named_parameters())
    assert list(held) == [name for name in full_state if name in held]
    assert parts.keys() == held.keys()
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "moved": abs(losses[-1] - losses[0]),
        "weights": max(float((parts[n].take(full_state[n].detach()) - p.detach()).abs().max()) for n, p in held.items()),
        "evaluation": float((evaluated(split, x) - evaluated(whole, x)).abs().max()),
        "same": {n: fingerprint(p) for n, p in held.items() if parts[n].whole},
        "parts": {n: (tuple(p.shape), parts[n].dim, parts[n].ranges) for n, p in held.items()},
        "shapes": {n: tuple(p.shape) for n, p in full_state.items()},
        "comm_stats": comm_stats,
    }


def fingerprint(values: Tensor) -> int:
    """Of all bits."""
    bits = values.detach().contiguous().view(torch.int32).flatten().to(torch.int64)
    return int((bits * torch.arange(1, bits.numel() + 1)).sum())


def real(rank: int, folder: str) -> None:
    join(device="cpu").close()
    axis = init_mesh(Mesh(tensor=dist.get_world_size())).tensor
    assert axis.place == rank
    results = {name: outcome(case, axis) for name, case in CASES.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
