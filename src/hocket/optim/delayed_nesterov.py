"""Delayed Nesterov: the outer optimiser of asynchronous local steps (Liu 2024, arXiv:2401.09135)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hocket.optim.layers import RowOptimizer


class DelayedNesterov(RowOptimizer):
    """Every ``delay``-th step ``m ← β·m + s/N`` with the sum ``s`` of the last N = ``delay`` gradients, and
    ``w ← w − lr·(β·m + g/N)``; otherwise ``w ← w − lr·g/N``. With ``delay=1`` it is Nesterov's method.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> outer = DelayedNesterov([w], lr=1.0, momentum=0.5, delay=2)
    >>> for _ in range(2):
    ...     w.grad = torch.ones(1)
    ...     outer.step()
    >>> w.item()  # −1/2, then −1/2 and half of a momentum of 1
    -1.5
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, delay: int = 1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    def _update(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        lr, momentum, delay = group["lr"], group["momentum"], int(group["delay"])
        for p, gradient in pairs:
            state = self.state[p]
            if not state:
                state |= {"step": 0, "momentum_buffer": torch.zeros_like(p), "sum": torch.zeros_like(p)}
            state["step"] += 1
            state["sum"].add_(gradient)
            p.add_(gradient, alpha=-lr / delay)
            if state["step"] % delay == 0:
                state["momentum_buffer"].mul_(momentum).add_(state["sum"], alpha=1 / delay)
                p.add_(state["momentum_buffer"], alpha=-lr * momentum)
                state["sum"].zero_()
