"""1-bit Adam: AdamW until step ``freeze_step``, then a fixed variance, so that the momentum may be coded (Tang 2021, 2102.02888).

Until then ``m ← β₁m + (1−β₁)g``, ``v ← β₂v + (1−β₂)g²``, ``w ← (1 − ηλ)w − η·m̂/(√v̂ + ε)``, where ``m̂ = m/(1 − β₁ᵗ)`` and ``v̂`` is
corrected alike. From there on ``v̂`` stays as it is, and the update is linear in ``m``. Under ``exchange=momentum`` each worker then
sends ``β₁m + (1−β₁)g_i``, coded with error feedback, and ``m`` becomes the mean of what they send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hocket.errors import HocketError


class OneBitAdam(Optimizer):
    """``OneBitAdam(params, lr=1e-3, freeze_step=1000)``: a warm-up of 15 to 20 % of the steps is usual.

    A value whose variance is still zero when it is fixed is updated no more: any momentum over it would be infinite.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = OneBitAdam([weight], lr=0.1, weight_decay=0.0, freeze_step=1)
    >>> for gradient in ([1.0, 0.0], [1.0, 5.0]):
    ...     weight.grad = torch.tensor(gradient)
    ...     optimizer.step()
    >>> weight, optimizer.frozen
    (Parameter containing:
    tensor([0.8000, 1.0000], requires_grad=True), True)
    """

    takes_momentum = False
    """Whether gradients are the mean momentum itself once the variance is fixed; a job with ``exchange=momentum`` sets it."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        freeze_step: int,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise HocketError(f"OneBitAdam: {name} must not be negative; got {value}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise HocketError(f"OneBitAdam: betas must be at least 0 and below 1; got {betas}.")
        if not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1:
            raise HocketError(f"OneBitAdam: freeze_step={freeze_step!r} must be a whole number of steps, at least 1.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step})

    @property
    def frozen(self) -> bool:
        """Whether the variance is fixed from the next step on: some parameter has had ``freeze_step`` updates."""
        pairs = ((group, self.state.get(p)) for group in self.param_groups for p in group["params"])
        return any(state and float(state["step"]) >= group["freeze_step"] for group, state in pairs)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        update = self._fixed if self.frozen else self._adamw
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            for p in used:
                if not self.state[p]:
                    self.state[p] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if used:
                update(group, used)
        return loss

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        first, second, steps = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        (beta1, beta2), own = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
        grads = [p.grad for p in params if p.grad is not None]
        adamw(params, grads, first, second, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, maximize=False, **own)

    def _fixed(self, group: dict[str, Any], params: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            state, gradient = self.state[p], p.grad
            mean, variance = state["exp_avg"], state["exp_avg_sq"]
            if not state.get("fixed"):
                variance.div_(max(1 - beta2 ** float(state["step"]), 1e-30)).masked_fill_(variance == 0, inf)
                state["fixed"] = True
            state["step"] += 1
            mean.copy_(gradient) if self.takes_momentum else mean.lerp_(gradient, 1 - beta1)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.addcdiv_(mean, variance.sqrt().add_(group["eps"]), value=-group["lr"] / (1 - beta1 ** float(state["step"])))
