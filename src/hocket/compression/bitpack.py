"""Small unsigned integers packed into bytes: ``bits`` each, or five base-3 digits to a byte."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

Count = TypeVar("Count", int, Tensor)


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 values below ``2**bits`` as bytes; ``bits`` that do not divide 8 go plane by plane (eight values give ``bits`` bytes).

    >>> unpack(pack(torch.tensor([[1, 0, 3]], dtype=torch.uint8), 2), 2, 3).tolist()
    [[1, 0, 3]]
    """
    if bits == 8:
        return values
    size = values.shape[1]
    if values.is_meta:
        return values.new_empty(len(values), packed_size_padded(size, bits))
    if 8 % bits == 0:
        per = 8 // bits
        cells = pad(values, (0, -size % per)).view(values.shape[0], -1, per)
        packed = cells[..., 0].clone()
        for k in range(1, per):
            packed |= cells[..., k] << (k * bits)
        return packed
    cells = pad(values, (0, -size % 8)).view(values.shape[0], -1, 8)
    planes = []
    for b in range(bits):
        plane = (cells[..., 0] >> b) & 1
        for k in range(1, 8):
            plane = plane | (((cells[..., k] >> b) & 1) << k)
        planes.append(plane)
    return torch.stack(planes, 2).flatten(1)[:, : packed_size_padded(size, bits)]


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
    if packed.is_meta:
        return packed.new_empty(rows, size)
    if 8 % bits == 0:
        mask = (1 << bits) - 1
        cells = [(packed >> (k * bits)) & mask for k in range(8 // bits)]
        return torch.stack(cells, 2).view(rows, -1)[:, :size]
    planes = packed.view(rows, -1, bits)
    cells = []
    for k in range(8):
        cell = (planes[..., 0] >> k) & 1
        for b in range(1, bits):
            cell = cell | (((planes[..., b] >> k) & 1) << b)
        cells.append(cell)
    return torch.stack(cells, 2).view(rows, -1)[:, :size]


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
