"""How sparse messages carry indices: sixteen low bits per value, and a count per block of 65,536.

A message with indices has two leading parts: ``blocks`` (how many of the indices fall into each block; left out where a row is no
longer than one block) and ``low`` (the indices' low bits). Two bytes per index instead of four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hocket.cluster.message import Message

if TYPE_CHECKING:
    from hocket.compression.base import Selected

BLOCK = 1 << 16


def block_count(size: int) -> int:
    """Blocks of a row of ``size`` values; 0 when one block holds it all."""
    return 0 if size <= BLOCK else -(-size // BLOCK)


def with_indices(chosen: Selected, values: Message, size: int) -> Message:
    """``values`` preceded by their indices."""
    indices, counts = chosen.indices, chosen.counts
    rows, width = indices.shape
    blocks = indices.new_zeros((rows, block_count(size)), dtype=torch.int32)
    if blocks.shape[1]:
        real = torch.ones_like(indices, dtype=torch.int32)
        if counts is not None:
            real = (torch.arange(width, device=indices.device) < counts.unsqueeze(1)).to(torch.int32)
        blocks.scatter_add_(1, indices >> 16, real)
    low = indices & (BLOCK - 1)
    low = torch.where(low >= BLOCK // 2, low - BLOCK, low).to(torch.int16)
    lengths = None
    if counts is not None and values.lengths is not None:
        lengths = torch.cat([torch.full_like(counts, blocks.shape[1]).unsqueeze(1), counts.unsqueeze(1), values.lengths], 1)
    return Message((blocks, low, *values.parts), lengths)


def read_indices(message: Message, size: int) -> Tensor:
    """The indices in rows of ``size``, int64 ``[rows, width]`` (arbitrary valid indices in the padding)."""
    blocks, low = message.parts[0], message.parts[1]
    indices = low.to(torch.int64) & (BLOCK - 1)
    if blocks.shape[1]:
        ends = blocks.to(torch.int64).cumsum(1)
        index = torch.arange(low.shape[1], device=low.device).expand(low.shape[0], -1).contiguous()
        indices += torch.searchsorted(ends, index, right=True) << 16
    return indices.clamp_(max=size - 1)


def put(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Values at their indices, zeros elsewhere (padding holds zeros, so adding it changes nothing)."""
    return values.new_zeros(values.shape[0], size).scatter_add_(1, indices, values)
