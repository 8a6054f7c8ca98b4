"""The published loops that are a model, a loss, a data set and one optimiser, as ``hocket.simulate`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops import published
from loops.published import blobs, mlp, words

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
WORKERS = 2


@dataclass(frozen=True)
class Simulated:
    """A loop on virtual workers, and what is expected of it."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Any, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    batch_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    equal: bool = True
    """Whether ``bulk`` equals a plain loop (not where a model draws numbers, which are seeded per worker)."""
    refused: str = ""
    """Words of the sentence with which every strategy refuses it."""


def _points(features: int = 8, size: int = 16, steps: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    pairs = [pair for rank in range(WORKERS) for pair in blobs(rank, steps, size, features)]
    return torch.cat([x for x, _ in pairs]).to(dtype), torch.cat([y for _, y in pairs])


def _tokens(steps: int = 6) -> Tensor:
    return torch.cat([tokens for rank in range(WORKERS) for tokens in words(rank, steps)])


def _next_words() -> tuple[Tensor, Tensor]:
    tokens = _tokens()
    return tokens[:, :-1], tokens[:, 1:]


def _of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _images() -> tuple[Tensor, Tensor]:
    x, y = _points(48)
    return x.view(-1, 3, 4, 4), y


def _convolutions() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def _variational(found: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    out, mean, log_var = found
    return F.mse_loss(out, x) - 0.01 * (1 + log_var - mean.square() - log_var.exp()).mean()


def _hugging_face(name: str) -> Simulated:
    """Of the loop of that name: the model it makes, and what it gives to it."""
    caught: list[Any] = []

    def catch(_: Any, model: nn.Module, labels: Callable[[Tensor], dict[str, Tensor]]) -> Iterator[float]:
        caught[:] = model, labels
        yield 0.0

    def made() -> list[Any]:
        original, published._hugging_face = published._hugging_face, catch  # type: ignore[assignment]
        try:
            next(published.LOOPS[name].run(None))  # type: ignore[arg-type]
        finally:
            published._hugging_face = original
        return caught

    def data() -> tuple[dict[str, Tensor], Tensor]:
        tokens = _tokens(4)
        return made()[1](tokens), tokens

    return Simulated(lambda: made()[0], data, lambda p: AdamW(p, 3e-3), lambda found, _: found.loss, 4)


def momentum(params: Any) -> torch.optim.Optimizer:
    return SGD(params, 0.1, momentum=0.9)


SIMULATED = {
    "classifier": Simulated(lambda: mlp(8, 16, 3), _points, momentum),
    "float64": Simulated(lambda: mlp(8, 16, 3).double(), lambda: _points(dtype=torch.float64), momentum),
    "channels_last": Simulated(_convolutions, _images, momentum),
    "accumulation": Simulated(lambda: mlp(8, 16, 3), lambda: _points(steps=32), lambda p: SGD(p, 0.2), batch_size=64),
    "lbfgs": Simulated(lambda: mlp(8, 16, 3), _points, lambda p: torch.optim.LBFGS(p, 0.1), refused="first-order optimiser"),
    "sparse_embedding": Simulated(
        lambda: nn.Embedding(20, 4, sparse=True),
        _next_words,
        lambda p: torch.optim.SparseAdam(p, 1e-2),
        lambda found, _: found.square().mean(),
        4,
        refused="sparse",
    ),
    "mixture_of_experts": Simulated(published.Experts, lambda: _points(size=6), lambda p: Adam(p, 1e-2), batch_size=6),
    "checkpointing": Simulated(lambda: published.Checkpointed(False), _points, momentum),
    "reentrant_checkpointing": Simulated(lambda: published.Checkpointed(True), _points, momentum),
    "lstm": Simulated(published.Recurrent, _next_words, lambda p: Adam(p, 1e-2), _of_words, 4, {"clip": 1.0}),
    "vae": Simulated(published.Variational, lambda: (_points()[0],) * 2, lambda p: Adam(p, 1e-2), _variational, equal=False),
    "nanogpt": Simulated(
        published.Block,
        _next_words,
        lambda p: AdamW(p, 1e-2, betas=(0.9, 0.95)),
        _of_words,
        8,
        {"clip": 1.0, "lr_schedule": "cosine", "autocast": torch.bfloat16},
    ),
    "gpt2": _hugging_face("gpt2"),
    "bert": _hugging_face("bert"),
    "t5": _hugging_face("t5"),
}
