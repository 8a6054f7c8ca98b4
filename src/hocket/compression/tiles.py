"""Large rows on a CPU, a tile of columns at a time: what one operation writes is still in the cache when the next one reads it.

A code whose columns do not depend on each other beyond a block gives the same bits tile by tile. Elsewhere (CUDA, small rows) all
columns are one tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 1 << 15
"""Values of a tile, for each thread: 128 kB of float32; PyTorch divides an operation among threads in portions of so many."""


def tile_width(rows: int, size: int, device: torch.device, multiple: int) -> int:
    """Columns of a tile, a multiple of ``multiple``; ``size`` where there is but one."""
    values = TILE * torch.get_num_threads()
    if device.type != "cpu" or rows * size < 2 * values:
        return size
    return max(1, values // max(1, rows) // multiple) * multiple


def encode_tiles(rows: Tensor, multiple: int, encode: Callable[[Tensor, int], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``encode(columns, first)`` of all columns of ``rows``: parts whose columns follow each other.

    >>> encode_tiles(torch.ones(1, 100_000), 8, lambda columns, first: (columns + first,))[0].shape
    torch.Size([1, 100000])
    """
    size = rows.shape[1]
    width = tile_width(rows.shape[0], size, rows.device, multiple)
    if width >= size:
        return encode(rows, 0)
    tiles = [encode(rows[:, first : first + width], first) for first in range(0, size, width)]
    return tuple(torch.cat(parts, 1) for parts in zip(*tiles, strict=True))


def decode_tiles(like: Tensor, size: int, multiple: int, decode: Callable[[int, int], Tensor]) -> Tensor:
    """``decode(first, end)`` of all of ``size`` columns, float32, one row for each of ``like``'s."""
    width = tile_width(like.shape[0], size, like.device, multiple)
    if width >= size:
        return decode(0, size)
    decoded = torch.empty(like.shape[0], size, dtype=torch.float32, device=like.device)
    for first in range(0, size, width):
        end = min(first + width, size)
        decoded[:, first:end] = decode(first, end)
    return decoded


def times_blocks(rows: Tensor, scale: Tensor, block: int) -> Tensor:
    """``rows`` (new, changed in place) with each block of values times its scale ``[rows, blocks]``; the last may be shorter.

    >>> times_blocks(torch.ones(1, 5), torch.tensor([[2.0, 3.0, 4.0]]), 2).tolist()
    [[2.0, 2.0, 3.0, 3.0, 4.0]]
    """
    whole = rows.shape[1] // block * block
    if whole:
        rows[:, :whole].unflatten(1, (-1, block)).mul_(scale[:, : whole // block].unsqueeze(2))
    if whole < rows.shape[1]:
        rows[:, whole:].mul_(scale[:, -1:])
    return rows
