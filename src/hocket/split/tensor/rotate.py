"""The block-rotating matrix product: activations are sent around a ring while they are multiplied.

Input and output of a layer are split by columns. Process ``p`` holds the block ``X_p`` of the input and the columns ``A_p`` of the
weight, cut into row blocks ``A_qp`` that fit ``X_q``:

    ``Y_p = Σ_q X_q A_qp``            ``P − 1`` times: send the block, multiply it meanwhile, receive the next
    ``∂X_q = Σ_p ∂Y_p A_qpᵀ``         partial sums are sent around; each ends at its owner
    ``∂A_qp = X_qᵀ ∂Y_p``             from the blocks received in the forward pass, which are kept

After the systolic products of Cannon (1969) and Fox, Otto and Hey (1987), with stationary weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.split.axis import Axis, gathered
from hocket.split.tensor.layers import ColumnLinear, check_split_input


class RotatingLinear(ColumnLinear):
    """A Linear between split activations, without an all-reduce; ``closing``: its output is gathered at the end."""

    closing = False

    def forward(self, x: Tensor) -> Tensor:
        check_split_input(x, self.in_features // self.axis.size, self.axis)
        out: Tensor = _Rotating.apply(x, self.weight, self.axis)
        out = out if self.bias is None else out + self.bias
        return gathered(out, self.axis) if self.closing else out


class _Rotating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.axis, blocks = axis, [x.flatten(0, -2).contiguous()]
        out = x.new_zeros(blocks[0].shape[0], weight.shape[0])
        for turn in range(axis.size):
            block = blocks[-1]
            passing = _pass_on(block, axis) if turn + 1 < axis.size else None
            out.addmm_(block, _columns(weight, axis.place - turn, axis.size).T)
            if passing is not None:
                blocks.append(_taken(passing, axis))
        ctx.save_for_backward(weight, *blocks)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, *blocks = ctx.saved_tensors
        axis, size, flat = ctx.axis, ctx.axis.size, grad.flatten(0, -2)
        weight_grad = torch.empty_like(weight)
        passing = None
        for turn in range(size):
            # The sum for block q starts at process q + 1 and ends at process q.
            q = axis.place - 1 - turn
            partial = flat @ _columns(weight, q, size)
            _columns(weight_grad, q, size).addmm_(flat.T, blocks[(turn + 1) % size], beta=0)
            if passing is not None:
                partial += _taken(passing, axis)
            passing = _pass_on(partial, axis) if turn + 1 < size else None
        return partial.unflatten(0, grad.shape[:-1]), weight_grad, None


def _columns(weight: Tensor, block: int, size: int) -> Tensor:
    width = weight.shape[1] // size
    return weight.narrow(1, block % size * width, width)


def _pass_on(block: Tensor, axis: Axis) -> tuple[Tensor, Any, Any]:
    incoming = torch.empty_like(block)
    sent = axis.send(block, (axis.place + 1) % axis.size)
    return incoming, sent, axis.receive(incoming, (axis.place - 1) % axis.size)


def _taken(passing: tuple[Tensor, Any, Any], axis: Axis) -> Tensor:
    incoming, sent, received = passing
    axis.wait(received)
    axis.wait(sent)
    return incoming
