"""Small unsigned integers packed into bytes: ``bits`` each, or five base-3 digits to a byte."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

Count = TypeVar("Count", int, Tensor)
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes, the lowest first in memory."""


def _whole(values: Tensor, per: int) -> Tensor:
    """Rows filled up with zeros to whole groups of ``per`` values, in memory that integers of ``per`` bytes can share."""
    if values.shape[1] % per:
        return pad(values, (0, -values.shape[1] % per))
    return (
        values.clone(memory_format=torch.contiguous_format)
        if values.storage_offset() % per or not values.is_contiguous()
        else values
    )


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 values below ``2**bits`` as bytes; ``bits`` that do not divide 8 go plane by plane (eight values give ``bits`` bytes).

    >>> unpack(pack(torch.tensor([[1, 0, 3]], dtype=torch.uint8), 2), 2, 3).tolist()
    [[1, 0, 3]]
    """
    if bits == 8:
        return values
    size = values.shape[1]
    if values.is_meta or not size:
        return values.new_empty(len(values), packed_size_padded(size, bits))
    if 8 % bits == 0:
        # All values of a byte as one wide integer, whose lowest byte they are shifted into: neighbours, then pairs, then fours.
        per = 8 // bits
        wide = _whole(values, per).view(_WIDE[per])
        for k in _halves(per)[::-1]:
            wide = wide | wide >> (k * (8 - bits))
        return wide.to(torch.uint8)
    planes = [pack(values >> b & 1, 1) for b in range(bits)]
    return torch.stack(planes, 2).flatten(1)


def _halves(per: int) -> list[int]:
    """``per``'s halves, the largest first: of 8 values 4, 2, 1."""
    return [per >> k for k in range(1, per.bit_length())]


def packed_size_padded(size: Count, bits: int) -> Count:
    """Bytes that :func:`pack` gives: whole bytes when ``bits`` divides 8, whole groups of eight values otherwise.

    >>> packed_size_padded(9, 3), packed_size_padded(9, 4)
    (6, 5)
    """
    return -(-size * bits // 8) if 8 % bits == 0 else -(-size // 8) * bits


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The first ``size`` values of each row."""
    if bits == 8:
        return packed[:, :size]
    rows = packed.shape[0]
    if packed.is_meta or not size:
        return packed.new_empty(rows, size)
    if 8 % bits == 0:
        per = 8 // bits
        wide = packed.to(_WIDE[per], memory_format=torch.contiguous_format)
        for k in _halves(per):
            wide = wide | wide << (k * (8 - bits))
        wide &= sum(((1 << bits) - 1) << (8 * k) for k in range(per))
        return wide.view(torch.uint8)[:, :size]
    planes = packed.view(rows, -1, bits)
    found = unpack(planes[..., 0], 1, size)
    for b in range(1, bits):
        found |= unpack(planes[..., b], 1, size) << b
    return found


def pack_trits(values: Tensor) -> Tensor:
    """uint8 values 0, 1, 2, five to a byte (3⁵ = 243).

    >>> unpack_trits(pack_trits(torch.tensor([[2, 0, 1, 1, 2, 2]], dtype=torch.uint8)), 6).tolist()
    [[2, 0, 1, 1, 2, 2]]
    """
    cells = pad(values, (0, -values.shape[1] % 5)).view(values.shape[0], -1, 5)
    packed = cells[..., 4].clone()
    for k in (3, 2, 1, 0):
        packed = packed * 3 + cells[..., k]
    return packed


def unpack_trits(packed: Tensor, size: int) -> Tensor:
    """The first ``size`` base-3 digits of each row."""
    cells = []
    for _ in range(5):
        cells.append(packed % 3)
        packed = packed // 3
    return torch.stack(cells, 2).view(packed.shape[0], -1)[:, :size]
