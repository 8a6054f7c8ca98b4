"""Attention of all rows at once: under ``vmap`` PyTorch's fused kernels run once, with the rows as part of the batch.

``scaled_dot_product_attention`` has no batching rule for these kernels: on a CPU it runs row by row, on CUDA it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_plain = F.scaled_dot_product_attention


@torch.library.custom_op("hocket::row_attention", mutates_args=())
def _row_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    return _plain(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped).clone()


@_row_attention.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@_row_attention.register_vmap
def _over_rows(
    info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, int]:
    dropout, causal, scale, grouped = options
    rows = info.batch_size
    first = [_rows_first(t, dim, rows) for t, dim in zip((query, key, value), in_dims, strict=False)]
    most = max(t.dim() for t in first)
    first = [t.view(rows, *(1,) * (most - t.dim()), *t.shape[1:]) for t in first]
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in first))  # the kernels take [batch, heads, length, values]
    query, key, value = (t.expand(*lead, *t.shape[-3:]).reshape(-1, *t.shape[-3:]) for t in first)
    if mask is not None and (in_dims[3] is not None or mask.dim() > 2):
        whole = _rows_first(mask, in_dims[3], rows)
        whole = whole.view(rows, *(1,) * (len(lead) + 3 - whole.dim()), *whole.shape[1:])
        mask = whole.expand(*lead, *whole.shape[-3:]).reshape(-1, *whole.shape[-3:])
    with _outside_vmap():
        out = _plain(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return out.view(*lead, *out.shape[-3:]), 0


def _outside_vmap() -> Any:
    """A rule runs inside ``vmap``, which would refuse dropout's random numbers for tensors that hold all rows already."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode))


def _rows_first(tensor: Tensor, dim: int | None, rows: int) -> Tensor:
    return tensor.expand(rows, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.dim() < 3:
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled(query.device.type):  # which does not know an operation of our own
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    out: Tensor = _row_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out


@contextmanager
def row_attention() -> Iterator[None]:
    """While it is entered, attention under ``vmap`` treats the rows as part of the batch."""
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
