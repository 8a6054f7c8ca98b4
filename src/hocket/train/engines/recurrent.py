"""Recurrent layers with one set of weights per row: one product of matrices per time step for all rows, then the cell at once.

PyTorch's own LSTM, GRU and RNN have no rule for ``vmap``. For a layer with recurrent weights U, input gates x_t = W i_t + b and
recurrent gates u_t = U h_t + d, the next state is cell(x_t, u_t, state): only that runs step by step here, in a custom operation,
so that a compiler sees one node per layer however long the sequence is. On CUDA the cells are compiled into one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.train.engines.convolution import triton


def _lstm(x: Tensor, u: Tensor, state: Tensor, new: Tensor, kept: Tensor) -> None:
    """c' = f c + i g, h' = o tanh(c')."""
    i, f, g, o = (x + u).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * state.chunk(2, -1)[1] + i * g
    new.copy_(torch.cat([o * c.tanh(), c], -1))
    kept.copy_(torch.cat([i, f, g, o], -1))


def _lstm_back(d: Tensor, state: Tensor, new: Tensor, kept: Tensor, dx: Tensor, du: Tensor) -> Tensor:
    (dh, dc), (i, f, g, o) = d.chunk(2, -1), kept.chunk(4, -1)
    t = new.chunk(2, -1)[1].tanh()
    dc = dc + dh * o * (1 - t * t)
    gates = [dc * g * i * (1 - i), dc * state.chunk(2, -1)[1] * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)]
    dx.copy_(torch.cat(gates, -1))
    du.copy_(dx)
    return torch.cat([torch.zeros_like(dh), dc * f], -1)


def _gru(x: Tensor, u: Tensor, state: Tensor, new: Tensor, kept: Tensor) -> None:
    """h' = (1 − z) n + z h, where the reset gate r is in n = tanh(x_n + r u_n)."""
    (xr, xz, xn), (ur, uz, un) = x.chunk(3, -1), u.chunk(3, -1)
    r, z = (xr + ur).sigmoid(), (xz + uz).sigmoid()
    n = (xn + r * un).tanh()
    new.copy_(n + z * (state - n))
    kept.copy_(torch.cat([r, z, n, un], -1))


def _gru_back(d: Tensor, state: Tensor, new: Tensor, kept: Tensor, dx: Tensor, du: Tensor) -> Tensor:
    r, z, n, un = kept.chunk(4, -1)
    dn = d * (1 - z) * (1 - n * n)
    dr, dz = dn * un * r * (1 - r), d * (state - n) * z * (1 - z)
    dx.copy_(torch.cat([dr, dz, dn], -1))
    du.copy_(torch.cat([dr, dz, dn * r], -1))
    return d * z


def _tanh(x: Tensor, u: Tensor, state: Tensor, new: Tensor, kept: Tensor) -> None:
    new.copy_((x + u).tanh())


def _tanh_back(d: Tensor, state: Tensor, new: Tensor, kept: Tensor, dx: Tensor, du: Tensor) -> Tensor:
    dx.copy_(d * (1 - new * new))
    du.copy_(dx)
    return torch.zeros_like(d)


def _relu(x: Tensor, u: Tensor, state: Tensor, new: Tensor, kept: Tensor) -> None:
    new.copy_((x + u).relu())


def _relu_back(d: Tensor, state: Tensor, new: Tensor, kept: Tensor, dx: Tensor, du: Tensor) -> Tensor:
    dx.copy_(d * (new > 0))
    du.copy_(dx)
    return torch.zeros_like(d)


@dataclass(frozen=True)
class _Cell:
    """``forward(x, u, state, new, kept)`` writes the next state and what the backward pass needs.

    ``backward(d, state, new, kept, dx, du)`` writes the gradients of x and u and returns that of the state but for what goes
    through u. ``states`` and ``keeps``: their widths in units of the hidden size; h comes first.
    """

    forward: Callable[..., None]
    backward: Callable[..., Tensor]
    states: int = 1
    keeps: int = 0


CELLS = {
    "LSTM": _Cell(_lstm, _lstm_back, 2, 4),
    "GRU": _Cell(_gru, _gru_back, 1, 4),
    "RNN_TANH": _Cell(_tanh, _tanh_back),
    "RNN_RELU": _Cell(_relu, _relu_back),
}


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """One kernel instead of a dozen where that can be had."""
    return _compiled(function) if like.is_cuda and triton is not None else function


def _sizes(x: Tensor, weight: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """Room for all states ``[T + 1, R, B, ·]`` and for what the backward pass needs ``[T, R, B, ·]``."""
    (rows, length, batch), hidden = x.shape[:3], weight.shape[-1]
    states = x.new_empty(length + 1, rows, batch, CELLS[cell].states * hidden)
    return states, x.new_empty(length, rows, batch, CELLS[cell].keeps * hidden)


@torch.library.custom_op("hocket::rows_recurrence", mutates_args=())
def _rows_recurrence(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """Input gates ``[R, T, B, G]``, weights ``[R, G, H]``, biases ``[R, G]`` and the first state ``[R, B, ·]``."""
    (states, kept), hidden = _sizes(x, weight, cell), weight.shape[-1]
    forward, across, bias = _fused(CELLS[cell].forward, x), weight.transpose(1, 2), bias.unsqueeze(1)
    states[0].copy_(start)
    for t in range(x.shape[1]):
        u = torch.baddbmm(bias, states[t, ..., :hidden], across)
        forward(x[:, t], u, states[t], states[t + 1], kept[t])
    return states, kept


@_rows_recurrence.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    return _sizes(x, weight, cell)


@torch.library.custom_op("hocket::rows_recurrence_back", mutates_args=())
def _rows_back(d: Tensor, states: Tensor, kept: Tensor, weight: Tensor, cell: str) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the input gates ``[T, R, B, G]``, of the recurrent gates and of the first state."""
    backward, hidden = _fused(CELLS[cell].backward, d), weight.shape[-1]
    dx, du, last = _rows_back_sizes(d, weight)
    last = d[-1].clone()
    for t in range(len(kept) - 1, -1, -1):
        last = backward(last, states[t], states[t + 1], kept[t], dx[t], du[t])
        last[..., :hidden] += du[t] @ weight
        last += d[t]
    return dx, du, last


def _rows_back_sizes(d: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = (len(d) - 1, *d.shape[1:3], weight.shape[1])
    return d.new_empty(gates), d.new_empty(gates), d.new_empty(d.shape[1:])


@_rows_back.register_fake
def _(d: Tensor, states: Tensor, kept: Tensor, weight: Tensor, cell: str) -> tuple[Tensor, Tensor, Tensor]:
    return _rows_back_sizes(d, weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, _, _, ctx.cell = inputs
    ctx.save_for_backward(weight, *output)


def _backward(ctx: Any, d: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
    weight, states, kept = ctx.saved_tensors
    dx, du, start = _rows_back(d.contiguous(), states, kept, weight, ctx.cell)
    gates = du.transpose(0, 1).flatten(1, 2)  # [R, T B, G]
    before = states[:-1, ..., : weight.shape[-1]].transpose(0, 1).flatten(1, 2)
    return dx.transpose(0, 1), gates.transpose(1, 2) @ before, gates.sum(1), start, None


_rows_recurrence.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("hocket::recurrence", mutates_args=())
def _recurrence(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, cell: str) -> Tensor:
    """The same for one row; all states ``[T + 1, B, ·]``."""
    return _rows_recurrence(x[None], weight[None], bias[None], start[None], cell)[0].squeeze(1)


@_recurrence.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, cell: str) -> Tensor:
    return x.new_empty(len(x) + 1, *start.shape)


@_recurrence.register_vmap
def _(info: Any, dims: Any, *args: Any) -> tuple[Tensor, int]:
    *tensors, cell = args
    whole = [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=False)
    ]
    return _rows_recurrence(*whole, cell)[0], 1


class RowRecurrence(nn.Module):
    """What a ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` becomes under ``vmap``; its tensors and options are that layer's own.

    It is no subclass of them: ``torch.compile`` does not look into those.
    """

    mode: str
    batch_first: bool
    bidirectional: bool
    bias: bool
    num_layers: int
    hidden_size: int
    dropout: float

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        if not isinstance(input, Tensor):
            raise TypeError("packed sequences have lengths that depend on the data")
        single, states = input.dim() == 2, CELLS[self.mode].states
        x = input.unsqueeze(1) if single else input.transpose(0, 1) if self.batch_first else input
        starts = [hx] if isinstance(hx, Tensor) else list(hx or ())
        starts = [s.unsqueeze(1) if single else s for s in starts]
        ends: list[Tensor] = []
        for layer in range(self.num_layers):
            found = [self._run(x, layer, back, starts) for back in range(1 + self.bidirectional)]
            ends += [end for _, end in found]
            x = torch.cat([out for out, _ in found], -1)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        last = torch.stack(ends).squeeze(1) if single else torch.stack(ends)
        out = x.squeeze(1) if single else x.transpose(0, 1) if self.batch_first else x
        return out, last if states == 1 else last.chunk(2, -1)

    def _run(self, x: Tensor, layer: int, back: int, starts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """One layer in one direction: the outputs ``[T, B, H]`` and the last state."""
        suffix = f"_l{layer}{'_reverse' * back}"
        into, across = getattr(self, f"weight_ih{suffix}"), getattr(self, f"weight_hh{suffix}")
        x = F.linear(x.flip(0) if back else x, into, getattr(self, f"bias_ih{suffix}") if self.bias else None)
        bias = getattr(self, f"bias_hh{suffix}") if self.bias else across.new_zeros(len(across))
        place = layer * (1 + self.bidirectional) + back
        start = (
            torch.cat([s[place] for s in starts], -1)
            if starts
            else x.new_zeros(x.shape[1], CELLS[self.mode].states * self.hidden_size)
        )
        states = _recurrence(x, across.to(x.dtype), bias.to(x.dtype), start.to(x.dtype), self.mode)
        out = states[1:, :, : self.hidden_size]
        return out.flip(0) if back else out, states[-1]


def has_row_recurrence(m: nn.Module) -> bool:
    """Whether :class:`RowRecurrence` can stand for it."""
    return type(m) in (nn.LSTM, nn.GRU, nn.RNN) and not m.proj_size
