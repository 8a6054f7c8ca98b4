"""LAMB: Adam whose step in each layer is a share of that layer's norm (You et al. 2020, arXiv:1904.00962).

With Adam's bias-corrected moments ``m``, ``v`` of a layer ``w``: ``u = m / (√v + ε) + λw``, ``w ← w − η (‖w‖ / ‖u‖) u``. Norms and
biases, which have fewer than two dimensions, take the ratio 1 and no decay: they step as under AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.optim.layers import RowOptimizer, check_options, layer_groups, trust_ratio


class LAMB(RowOptimizer):
    """``LAMB(model, lr=0.003)``: Adam for large batches; a step changes each layer by the share ``lr`` of its norm.

    ``params`` is a model, its parameters or groups; of groups, ``layerwise=False`` says that a group has the plain rate.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(g["layerwise"], g["weight_decay"], len(g["params"])) for g in LAMB(net, weight_decay=0.01).param_groups]
    [(True, 0.01, 1), (False, 0.0, 3)]
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.003,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        fractions = {f"betas[{i}]": beta for i, beta in enumerate(betas)}
        check_options("LAMB", {"lr": lr, "weight_decay": weight_decay, "eps": eps}, fractions)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(layer_groups(params, weight_decay), {**defaults, "layerwise": True})

    def _update(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        beta1, beta2 = group["betas"]
        for p, gradient in pairs:
            state = self.state[p]
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["step"] += 1
            step = state["step"].item()
            first, second = state["exp_avg"].lerp_(gradient, 1 - beta1), state["exp_avg_sq"]
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            spread = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (first / (1 - beta1**step)).div_(spread)
            if group["weight_decay"]:
                update.add_(p, alpha=group["weight_decay"])
            if group["layerwise"]:
                update.mul_(trust_ratio(p, update, self.rows))
            p.add_(update, alpha=-group["lr"])
