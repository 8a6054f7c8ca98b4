"""What Hocket's optimisers share: the step, which parameters decay, and the norm of each layer, per worker where they are rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.errors import HocketError


class RowOptimizer(Optimizer, ABC):
    """Base of optimisers that step parameters of one model, or rows of several workers' parameters."""

    rows = False
    """Whether parameters are those of several workers, one row each."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            self._update(group, [(p, p.grad) for p in group["params"] if p.grad is not None])
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Update a group's parameters, each given with its gradient."""


def decay_groups(params: nn.Module | Iterable[Any], weight_decay: float, **others: Any) -> list[dict[str, Any]]:
    """Two parameter groups: matrices and filters with ``weight_decay``, norms and biases (fewer than two dimensions) without.

    ``params`` is a model or its parameters; ``others`` are options of the second group. Decay of norms and biases costs accuracy
    with large batches (Goyal 2017, section 5.3; He 2019, arXiv:1812.01187).

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> [(group["weight_decay"], len(group["params"])) for group in decay_groups(model, 1e-4)]
    [(0.0001, 1), (0.0, 3)]
    """
    given = params.parameters() if isinstance(params, nn.Module) else params
    plain = [p[1] if isinstance(p, tuple) else p for p in given]
    trained = [p for p in plain if p.requires_grad] if isinstance(params, nn.Module) else plain
    high, flat = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": high, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0, **others}]
    return [group for group in groups if group["params"]]


def layer_groups(params: nn.Module | Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """The groups of a layerwise optimiser; groups that are given stay as they are."""
    if not isinstance(params, nn.Module):
        params = list(params)
        if params and isinstance(params[0], dict):
            return params
    groups = decay_groups(params, weight_decay, layerwise=False)
    return [{"layerwise": True, **group} for group in groups]


def check_options(name: str, options: dict[str, float], fractions: dict[str, float]) -> None:
    """Refuse negative ``options``, and ``fractions`` that are not at least 0 and below 1."""
    for key, value in options.items():
        if not value >= 0:
            raise HocketError(f"{name}: {key} must not be negative; got {value}.")
    for key, value in fractions.items():
        if not 0 <= value < 1:
            raise HocketError(f"{name}: {key} must be at least 0 and below 1; got {value}.")


def layer_norms(values: Tensor, rows: bool) -> Tensor:
    """The norm of ``values`` as a tensor that multiplies them: one number, or one per row where each row is a worker's.

    >>> layer_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), rows=True).tolist()
    [[5.0], [2.0]]
    """
    if not rows:
        return torch.linalg.vector_norm(values)
    if values.is_cuda:
        norms = torch.linalg.vector_norm(values.flatten(1), dim=1) if values.dim() > 1 else values.abs()
    else:  # one reduction at a time: a result does not depend on how many workers this process hosts
        norms = torch.stack([torch.linalg.vector_norm(row) for row in values])
    return norms.view(-1, *[1] * (values.dim() - 1))


def trust_ratio(weights: Tensor, update: Tensor, rows: bool) -> Tensor:
    """``‖w‖ / ‖u‖`` of a layer, 1 where either is 0."""
    of_weights, of_update = layer_norms(weights, rows), layer_norms(update, rows)
    return torch.where((of_weights > 0) & (of_update > 0), of_weights / of_update, 1.0)
