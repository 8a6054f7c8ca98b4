"""LARS: the rate of each layer follows the ratio of its weights' norm to its gradient's (You, Gitman, Ginsburg 2017,
arXiv:1708.03888).

A layer ``w`` with gradient ``g``: ``r = τ‖w‖ / (‖g‖ + λ‖w‖)``, ``v ← μv + r(g + λw)``, ``w ← w − ηv``. Norms and biases, which have
fewer than two dimensions, take ``r = 1`` and no decay: plain SGD with momentum. As in PyTorch's SGD the rate multiplies the whole
velocity; the paper has it inside, which is the same while the rate does not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.optim.layers import RowOptimizer, check_options, layer_groups, layer_norms


class LARS(RowOptimizer):
    """``LARS(model, lr=1.0)``: SGD with momentum whose steps are a fixed share of each layer's norm, for large batches.

    ``params`` is a model, its parameters or groups; of groups, ``layerwise=False`` says that a group has the plain rate. ``trust``
    is the paper's coefficient: at ``lr=1`` a step changes a layer by about this share of its norm.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(g["layerwise"], g["weight_decay"], len(g["params"])) for g in LARS(net, weight_decay=1e-4).param_groups]
    [(True, 0.0001, 1), (False, 0.0, 3)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        nesterov: bool = False,
    ) -> None:
        check_options("LARS", {"lr": lr, "weight_decay": weight_decay, "trust": trust}, {"momentum": momentum})
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "nesterov": nesterov}
        super().__init__(layer_groups(params, weight_decay), {**defaults, "layerwise": True})

    def _update(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        for p, gradient in pairs:
            update = self._direction(group, p, gradient)
            velocity = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            velocity.mul_(group["momentum"]).add_(update)
            p.add_(update.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity, alpha=-group["lr"])

    def _direction(self, group: dict[str, Any], weights: Tensor, grad: Tensor) -> Tensor:
        decay = group["weight_decay"]
        update = grad.add(weights, alpha=decay) if decay else grad
        if not group["layerwise"]:
            return update
        of_weights, of_grad = layer_norms(weights, self.rows), layer_norms(grad, self.rows)
        ratio = group["trust"] * of_weights / (of_grad + decay * of_weights)
        return update * torch.where((of_weights > 0) & (of_grad > 0), ratio, 1.0)
