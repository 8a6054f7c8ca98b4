"""Exchanges along an axis as autograd functions.

========== ==================== =======================
function   forward              backward
========== ==================== =======================
copied     the same tensor      the sum over the axis
summed     the sum over it      the same gradient
gathered   all slices, joined   this process's own slice
========== ==================== =======================

Every process computes the same loss from what was summed or gathered, so these gradients are already whole and need no sum. Where
a whole tensor enters split layers, each process has the gradient of its own paths alone: there ``copied`` adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hocket.split.axis import Axis


def copied(x: Tensor, axis: Axis) -> Tensor:
    """A whole tensor that enters split layers."""
    return x if axis.size == 1 else _Copied.apply(x, axis)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over all processes."""
    return x if axis.size == 1 else _Summed.apply(x, axis)


def gathered(x: Tensor, axis: Axis, dim: int = -1, widths: Sequence[int] | None = None) -> Tensor:
    """The concatenation of all processes' slices along ``dim``; ``widths`` says how wide each is where they differ."""
    return x if axis.size == 1 else _Gathered.apply(x, axis, dim % x.dim(), widths)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(_own(grad)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(_own(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, widths: Sequence[int] | None) -> Tensor:
        widths = widths or [x.shape[dim]] * axis.size
        ctx.dim, ctx.start, ctx.width = dim, sum(widths[: axis.place]), x.shape[dim]
        widest = max(widths)
        if min(widths) == widest:
            return axis.all_gather(x, dim)
        padding = [0, 0] * (x.dim() - 1 - dim) + [0, widest - x.shape[dim]]
        everyone = axis.all_gather(F.pad(x, padding), dim)
        return torch.cat([everyone.narrow(dim, k * widest, width) for k, width in enumerate(widths)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.width), None, None, None


def _own(values: Tensor) -> Tensor:
    """A copy that may be overwritten: sums are computed in place, and the caller may still use the input."""
    return values.clone(memory_format=torch.contiguous_format)
