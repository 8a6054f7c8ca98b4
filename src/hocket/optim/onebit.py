"""1-bit Adam: AdamW until step ``freeze_step``, then a fixed variance, so that the momentum may be coded (Tang 2021, 2102.02888).

Until then ``m ← β₁m + (1−β₁)g``, ``v ← β₂v + (1−β₂)g²``, ``w ← (1 − ηλ)w − η·m̂/(√v̂ + ε)``, where ``m̂ = m/(1 − β₁ᵗ)`` and ``v̂`` is
corrected alike. From there on ``v̂`` stays as it is, and the update is linear in ``m``. Under ``exchange=momentum`` each worker then
sends ``β₁m + (1−β₁)g_i``, coded with error feedback, and ``m`` becomes the mean of what they send.

0/1 Adam (Lu 2022, 2202.06009) adds two things. ``refresh=κ``: the variance is refreshed with whole gradients κ times at every step,
κ times at every second, κ times at every fourth … ``local(p)``: for ``p`` steps (at first as few as lie between refreshes) each
worker moves with a momentum ``m_i`` of its own; then all return to where they were after the last exchange and move from there by
the mean of ``Σ η m_i``, and ``m`` becomes ``mean Σ η m_i / Σ η``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from hocket.errors import HocketError


class OneBitAdam(Optimizer):
    """``OneBitAdam(params, lr=1e-3, freeze_step=1000)``: a warm-up of 15 to 20 % of the steps is usual.

    A value whose variance is still zero is not updated while it is fixed: any momentum over it would be infinite. ``refresh=16`` is
    0/1 Adam's; with it ``freeze_step`` may be small.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = OneBitAdam([weight], lr=0.1, weight_decay=0.0, freeze_step=1)
    >>> for gradient in ([1.0, 0.0], [1.0, 5.0]):
    ...     weight.grad = torch.tensor(gradient)
    ...     optimizer.step()
    >>> weight, optimizer.frozen
    (Parameter containing:
    tensor([0.8000, 1.0000], requires_grad=True), True)
    """

    momentum_period = 0
    """A job with ``exchange=momentum`` sets it: once the variance is fixed, every so many steps the gradient is the mean momentum
    itself; 0: never."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        freeze_step: int,
        refresh: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise HocketError(f"OneBitAdam: {name} must not be negative; got {value}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise HocketError(f"OneBitAdam: betas must be at least 0 and below 1; got {betas}.")
        if not isinstance(freeze_step, int) or isinstance(freeze_step, bool) or freeze_step < 1:
            raise HocketError(f"OneBitAdam: freeze_step={freeze_step!r} must be a whole number of steps, at least 1.")
        if not isinstance(refresh, int) or isinstance(refresh, bool) or refresh < 0:
            raise HocketError(f"OneBitAdam: refresh={refresh!r} must be a whole number, such as 16, or 0 for never.")
        schedule = {"freeze_step": freeze_step, "refresh": refresh}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **schedule})

    @property
    def frozen(self) -> bool:
        """Whether the variance is fixed from the next step on: some parameter has had ``freeze_step`` updates."""
        return self._steps >= self.param_groups[0]["freeze_step"]

    @property
    def sends(self) -> str:
        """What workers exchange in the next step: ``gradients`` where the variance is not fixed or is refreshed, ``momentum``, or
        ``nothing`` in a local step."""
        after, period = self._steps + 1 - self.param_groups[0]["freeze_step"], max(1, self.momentum_period)
        if after < 1:
            return "gradients"
        if each := self.param_groups[0]["refresh"]:
            interval = 1 << (((after - 1) // each + 1).bit_length() - 1)
            place = (after - 1 - each * (interval - 1)) % interval
            if place == 0:  # all replicas are equal: every interval ends with an exchange
                return "gradients"
            after, period = place + 1, min(period, interval)
            if after == interval:
                return "momentum"
        return "nothing" if after % period else "momentum"

    def rate(self, group: int) -> float:
        """The factor on the momentum of a group in the next step: its learning rate, corrected for the momentum's start at zero."""
        options = self.param_groups[group]
        return float(options["lr"] / (1 - options["betas"][0] ** (self._steps + 1)))

    def summed_rates(self, group: int) -> float:
        """The sum of these factors in the local steps since the last exchange."""
        return max((self.state.get(p, {}).get("rates", 0.0) for p in self.param_groups[group]["params"]), default=0.0)

    @property
    def _steps(self) -> int:
        return int(max((float(state.get("step", 0.0)) for state in self.state.values()), default=0))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        sends, rates = self.sends, [self.rate(g) for g in range(len(self.param_groups))]
        update = partial(self._fixed, sends) if self.frozen else self._adamw
        for group, rate in zip(self.param_groups, rates, strict=True):
            # In local steps all parameters count the rates: workers then agree on them, whichever parameters each of them uses.
            used = [p for p in group["params"] if p.grad is not None or (sends == "nothing" and self.frozen)]
            for p in used:
                if not self.state[p]:
                    self.state[p] |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if used:
                update(group, used, rate)
        return loss

    def _adamw(self, group: dict[str, Any], params: list[Tensor], _: float) -> None:
        first, second, steps = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        (beta1, beta2), own = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
        grads = [p.grad for p in params if p.grad is not None]
        adamw(params, grads, first, second, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, maximize=False, **own)

    def _fixed(self, sends: str, group: dict[str, Any], params: list[Tensor], rate: float) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            state, gradient, kept = self.state[p], p.grad, 1 - group["lr"] * group["weight_decay"]
            mean, variance, total = state["exp_avg"], state["exp_avg_sq"], rate
            state.setdefault("refreshed", float(state["step"]))
            state["step"] += 1
            if sends == "gradients":
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                state["refreshed"] += 1
            if sends == "momentum" and self.momentum_period:
                mean.copy_(gradient)
                if rates := state.pop("rates", 0.0):  # from where the last exchange left all workers
                    p.copy_(state.pop("start"))
                    del state["sum"]
                    total, kept = rate + rates, kept * state.pop("kept")
            elif gradient is not None:
                mean.lerp_(gradient, 1 - beta1)
            if sends == "nothing":
                _count(state, p, rate, kept)
            if gradient is not None:
                corrected = variance.div(max(1 - beta2 ** state["refreshed"], 1e-30)).masked_fill_(variance == 0, inf)
                p.mul_(kept)
                p.addcdiv_(mean, corrected.sqrt_().add_(group["eps"]), value=-total)


def _count(state: dict[str, Any], weight: Tensor, rate: float, kept: float) -> None:
    """A local step: what the next exchange needs of it."""
    if "rates" not in state:
        state |= {"rates": 0.0, "kept": 1.0, "start": weight.clone(), "sum": torch.zeros_like(weight)}
    state["rates"] += rate
    state["kept"] *= kept
    state["sum"].add_(state["exp_avg"], alpha=rate)
