"""What the kernels share: noise, codes packed into bytes, magnitudes as whole numbers."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
EXACT = {"enable_fp_fusion": False}
"""``a·b + c`` rounds twice, as in the text."""


@triton.jit
def noise(keys, row, index):
    """:func:`hocket.noise.bits` at ``index``, uint32."""
    key = tl.load(keys + row).to(tl.uint32)
    x, added = index.to(tl.uint32) ^ key, key * 0x9E3779B1
    for _ in tl.static_range(2):
        x ^= x >> 16
        x *= 0x7FEB352D
        x ^= x >> 15
        x *= 0x846CA68B
        x ^= x >> 16
        x += added
    return x


@triton.jit
def uniform(keys, row, index):
    """:func:`hocket.noise.uniform` at ``index``."""
    return (noise(keys, row, index) >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def packed_bits(codes, BITS: tl.constexpr, COUNT: tl.constexpr):
    """``COUNT`` codes below ``2**BITS``, a divisor of 8, as ``COUNT · BITS / 8`` bytes: the first is lowest."""
    if BITS == 1:
        low, high = tl.split(tl.reshape(codes, [COUNT // 2, 2]))
        codes = low | (high << 1)
        low, high = tl.split(tl.reshape(codes, [COUNT // 4, 2]))
        codes = low | (high << 2)
        low, high = tl.split(tl.reshape(codes, [COUNT // 8, 2]))
        codes = low | (high << 4)
    elif BITS == 2:
        low, high = tl.split(tl.reshape(codes, [COUNT // 2, 2]))
        codes = low | (high << 2)
        low, high = tl.split(tl.reshape(codes, [COUNT // 4, 2]))
        codes = low | (high << 4)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(codes, [COUNT // 2, 2]))
        codes = low | (high << 4)
    return codes


@triton.jit
def store_codes(out, codes, first, bytes_, BITS: tl.constexpr, COUNT: tl.constexpr):
    """:func:`hocket.compression.bitpack.pack` of a tile that begins with the value ``first``, into a row of ``bytes_`` bytes."""
    if 8 % BITS == 0:
        places = (first >> 3) * BITS + tl.arange(0, COUNT * BITS // 8)
        tl.store(out + places, packed_bits(codes, BITS, COUNT).to(tl.uint8), places < bytes_)
    else:
        groups = (first >> 3) + tl.arange(0, COUNT // 8)
        for bit in tl.static_range(BITS):
            places = groups * BITS + bit
            tl.store(out + places, packed_bits((codes >> bit) & 1, 1, COUNT).to(tl.uint8), places < bytes_)


@triton.jit
def spread_bits(codes, BITS: tl.constexpr, COUNT: tl.constexpr):
    """The codes that :func:`packed_bits` has packed, ``[COUNT]``."""
    if BITS == 1:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [COUNT // 4])
        codes = tl.reshape(tl.join(codes & 3, codes >> 2), [COUNT // 2])
        codes = tl.reshape(tl.join(codes & 1, codes >> 1), [COUNT])
    elif BITS == 2:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [COUNT // 2])
        codes = tl.reshape(tl.join(codes & 3, codes >> 2), [COUNT])
    elif BITS == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [COUNT])
    return codes


@triton.jit
def load_codes(packed, first, bytes_, BITS: tl.constexpr, COUNT: tl.constexpr):
    """The codes of a tile that begins with the value ``first``, int32 ``[COUNT]``, as :func:`store_codes` has stored them."""
    if 8 % BITS == 0:
        places = (first >> 3) * BITS + tl.arange(0, COUNT * BITS // 8)
        return spread_bits(tl.load(packed + places, places < bytes_, 0).to(tl.int32), BITS, COUNT)
    places = ((first >> 3) + tl.arange(0, COUNT // 8)) * BITS
    codes = spread_bits(tl.load(packed + places, places < bytes_, 0).to(tl.int32), 1, COUNT)
    for bit in tl.static_range(1, BITS):
        plane = tl.load(packed + places + bit, places + bit < bytes_, 0).to(tl.int32)
        codes |= spread_bits(plane, 1, COUNT) << bit
    return codes


@triton.jit
def magnitude_bits(x):
    """The bits of ``|x|``: they are ordered as magnitudes are, and NaN is above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def adjacent(rows: Tensor) -> Tensor:
    """Rows whose values lie side by side in memory."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
