"""Kernels of codes in blocks: ``qsgd``, ``sign``, ``bins(2)`` and ``cast(e3m0)``. Reference: the files of these names.

A program has a tile of whole blocks of one row. Codes of neighbouring values are joined pairwise until a byte is full.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.compression.bitpack import packed_size_padded
from hocket.compression.kernels.bits import EXACT, TINY, adjacent, load_codes, magnitude_bits, store_codes, uniform

WARP = 1024
"""Values of a warp: it has whole blocks, or blocks have whole warps."""


@triton.jit
def _tile(size, tiles, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's row, its first value, and the places ``[BLOCKS, BLOCK]`` of its values."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first = tile * (BLOCKS * BLOCK)
    places = first + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row.to(tl.int64), first, places, places < size


@triton.jit
def _qsgd(
    rows,
    keys,
    norms,
    packed,
    size,
    stride,
    tiles,
    scales,
    bytes_,
    TINY,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    x = tl.load(rows + row * stride + places, real, 0.0)
    norm = tl.max(magnitude_bits(x), 1).to(tl.float32, bitcast=True)
    levels: tl.constexpr = 2 ** (BITS - 1) - 1
    divisor = tl.maximum(norm, TINY)
    inverse = tl.div_rn(1.0, divisor)[:, None]
    quotient = x * inverse
    scaled = tl.fma(tl.fma(-divisor[:, None], quotient, x), inverse, quotient) * levels  # the quotient, rounded as a division
    codes = tl.floor(uniform(keys, row, places) + scaled)
    codes = tl.minimum(tl.maximum(codes, -levels), levels).to(tl.int32) + levels
    codes = tl.where(real, codes, 0)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    tl.store(norms + row * scales + blocks, norm, blocks < scales)
    store_codes(packed + row * bytes_, tl.reshape(codes, [BLOCKS * BLOCK]), first, bytes_, BITS, BLOCKS * BLOCK)


@triton.jit
def _qsgd_decode(
    norms,
    packed,
    out,
    size,
    tiles,
    scales,
    bytes_,
    scale_stride,
    packed_stride,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    levels: tl.constexpr = 2 ** (BITS - 1) - 1
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    scale = tl.div_rn(tl.load(norms + row * scale_stride + blocks, blocks < scales, 0.0), levels * 1.0)
    codes = tl.reshape(load_codes(packed + row * packed_stride, first, bytes_, BITS, BLOCKS * BLOCK), [BLOCKS, BLOCK]) - levels
    tl.store(out + row * size + places, codes.to(tl.float32) * scale[:, None], real)


@triton.jit
def _sign(
    rows,
    counts,
    means,
    packed,
    size,
    stride,
    tiles,
    scales,
    bytes_,
    COUNTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    x = tl.load(rows + row * stride + places, real, 0.0)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    count = size - blocks * BLOCK
    if COUNTED:
        count = tl.load(counts + row).to(tl.int32) - blocks * BLOCK
    mean = tl.div_rn(tl.sum(tl.abs(x), 1), tl.minimum(tl.maximum(count, 1), BLOCK).to(tl.float32))
    tl.store(means + row * scales + blocks, mean, blocks < scales)
    codes = tl.where(real & (x >= 0), 1, 0)
    store_codes(packed + row * bytes_, tl.reshape(codes, [BLOCKS * BLOCK]), first, bytes_, 1, BLOCKS * BLOCK)


@triton.jit
def _sign_decode(
    means,
    packed,
    out,
    size,
    tiles,
    scales,
    bytes_,
    scale_stride,
    packed_stride,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    mean = tl.load(means + row * scale_stride + blocks, blocks < scales, 0.0)[:, None]
    codes = tl.reshape(load_codes(packed + row * packed_stride, first, bytes_, 1, BLOCKS * BLOCK), [BLOCKS, BLOCK])
    tl.store(out + row * size + places, tl.where(codes == 1, mean, -mean), real)


@triton.jit
def _bins(
    rows,
    counts,
    levels,
    packed,
    size,
    stride,
    tiles,
    scales,
    bytes_,
    TINY,
    COUNTED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, inside = _tile(size, tiles, BLOCKS, BLOCK)
    x = tl.load(rows + row * stride + places, inside, 0.0)
    blocks = (first // BLOCK + tl.arange(0, BLOCKS))[:, None]
    count = size
    if COUNTED:
        count = tl.load(counts + row).to(tl.int32)
    real = places < count
    number = tl.minimum(tl.maximum(count - blocks * BLOCK, 0), BLOCK).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.maximum(number, 1.0))
    peak = tl.max(tl.abs(x), 1)[:, None]
    unit = tl.abs(x) * tl.div_rn(1.0, tl.maximum(peak, TINY))
    mean = tl.sum(unit, 1)[:, None] * inverse
    off = tl.where(real, unit - mean, 0.0)
    spread = 3 * tl.sqrt_rn(tl.sum(off * off, 1)[:, None] * inverse)
    lowest = tl.maximum(tl.min(tl.where(real, unit, 1.0), 1)[:, None], mean - spread)
    highest = tl.minimum(tl.where(peak > 0, 1.0, 0.0), mean + spread)
    low, high = lowest + (highest - lowest) * 0.25, lowest + (highest - lowest) * 0.75
    upper = unit > unit
    for _ in tl.static_range(2):
        upper = unit > (high + low) / 2  # never a value beyond the count, which is 0
        ups, above = tl.sum(upper.to(tl.float32), 1)[:, None], tl.sum(tl.where(upper, unit, 0.0), 1)[:, None]
        below = tl.sum(tl.where(upper, 0.0, unit), 1)[:, None]
        high = tl.where(ups > 0, tl.div_rn(above, tl.maximum(ups, 1.0)), high)
        low = tl.where(number > ups, tl.div_rn(below, tl.maximum(number - ups, 1.0)), low)
    tl.store(levels + row * 2 * scales + 2 * blocks, low * tl.maximum(peak, TINY), blocks < scales)
    tl.store(levels + row * 2 * scales + 2 * blocks + 1, high * tl.maximum(peak, TINY), blocks < scales)
    codes = tl.where(inside, tl.where(upper, 2, 0) | tl.where(x < 0, 1, 0), 0)
    store_codes(packed + row * bytes_, tl.reshape(codes, [BLOCKS * BLOCK]), first, bytes_, 2, BLOCKS * BLOCK)


@triton.jit
def _bins_decode(
    levels,
    packed,
    out,
    size,
    tiles,
    scales,
    bytes_,
    scale_stride,
    packed_stride,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    blocks = (first // BLOCK + tl.arange(0, BLOCKS))[:, None]
    low = tl.load(levels + row * scale_stride + 2 * blocks, 2 * blocks < scales, 0.0)
    high = tl.load(levels + row * scale_stride + 2 * blocks + 1, 2 * blocks < scales, 0.0)
    codes = tl.reshape(load_codes(packed + row * packed_stride, first, bytes_, 2, BLOCKS * BLOCK), [BLOCKS, BLOCK])
    value = tl.where(codes >= 2, high, low)
    tl.store(out + row * size + places, tl.where(codes & 1 == 1, -value, value), real)


@triton.jit
def _e3m0(rows, scale, packed, size, stride, tiles, scales, bytes_, TINY, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    x = tl.load(rows + row * stride + places, real, 0.0)
    peak = tl.maximum(tl.max(magnitude_bits(x), 1).to(tl.float32, bitcast=True), TINY)
    bits = tl.div_rn(tl.abs(x), peak[:, None]).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 + ((bits >> 22) & 1)  # of a mantissa in [1/2, 1), rounded up from 3/4
    codes = tl.where(bits > 0x3C000000, tl.minimum(tl.maximum(exponent, -5), 1) + 6, 0) + tl.where(x < 0, 8, 0)
    codes = tl.where(real, codes, 0)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    tl.store(scale + row * scales + blocks, peak, blocks < scales)
    store_codes(packed + row * bytes_, tl.reshape(codes, [BLOCKS * BLOCK]), first, bytes_, 4, BLOCKS * BLOCK)


@triton.jit
def _e3m0_decode(
    scale,
    packed,
    out,
    size,
    tiles,
    scales,
    bytes_,
    scale_stride,
    packed_stride,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, first, places, real = _tile(size, tiles, BLOCKS, BLOCK)
    blocks = first // BLOCK + tl.arange(0, BLOCKS)
    peak = tl.load(scale + row * scale_stride + blocks, blocks < scales, 0.0)
    codes = tl.reshape(load_codes(packed + row * packed_stride, first, bytes_, 4, BLOCKS * BLOCK), [BLOCKS, BLOCK])
    power = tl.where(codes & 7 == 0, 0, ((codes & 7) + 120) << 23) | ((codes >> 3) << 31)
    tl.store(out + row * size + places, power.to(tl.float32, bitcast=True) * peak[:, None], real)


def _blocked(
    rows: Tensor, block: int, bits: int, per_block: int = 1
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...], dict[str, Any]]:
    """Rows, room for what is sent of each block and for the packed codes; then the sizes and constants that kernels share."""
    rows, size = adjacent(rows), rows.shape[1]
    scales, bytes_ = -(-size // block), packed_size_padded(size, bits)
    tiles = -(-size // max(WARP, block))
    room = rows.new_empty(len(rows), scales * per_block), rows.new_empty(len(rows), bytes_, dtype=torch.uint8)
    return rows, *room, (size, rows.stride(0), tiles, scales, bytes_), _shape(block)


def _shape(block: int) -> dict[str, Any]:
    """A program's blocks, and its warps."""
    return {"BLOCKS": max(1, WARP // block), "BLOCK": block, "num_warps": max(1, block // WARP), **EXACT}


def _decode_blocks(kernel: triton.JITFunction, scale: Tensor, packed: Tensor, size: int, bits: int, block: int) -> Tensor:
    scale, packed = adjacent(scale), adjacent(packed)
    tiles, out = -(-size // max(WARP, block)), torch.empty(len(packed), size, dtype=torch.float32, device=packed.device)
    strides = scale.shape[1], packed.shape[1], scale.stride(0), packed.stride(0)
    kernel[(len(packed) * tiles,)](scale, packed, out, size, tiles, *strides, BITS=bits, **_shape(block))
    return out


def qsgd(rows: Tensor, keys: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Norms of blocks, and packed codes."""
    rows, norms, packed, sizes, constants = _blocked(rows, block, bits)
    _qsgd[(len(rows) * sizes[2],)](rows, keys, norms, packed, *sizes, TINY, BITS=bits, **constants)
    return norms, packed


def qsgd_decode(norms: Tensor, packed: Tensor, size: int, bits: int, block: int) -> Tensor:
    return _decode_blocks(_qsgd_decode, norms, packed, size, bits, block)


def sign(rows: Tensor, counts: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Mean magnitudes of blocks, and packed signs."""
    rows, means, packed, sizes, constants = _blocked(rows, block, 1)
    given = rows if counts is None else counts
    _sign[(len(rows) * sizes[2],)](rows, given, means, packed, *sizes, COUNTED=counts is not None, **constants)
    return means, packed


def sign_decode(means: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decode_blocks(_sign_decode, means, packed, size, 1, block)


def bins(rows: Tensor, counts: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Two levels of each block, and packed codes of two bits."""
    rows, levels, packed, sizes, constants = _blocked(rows, block, 2, 2)
    given = rows if counts is None else counts
    _bins[(len(rows) * sizes[2],)](rows, given, levels, packed, *sizes, TINY, COUNTED=counts is not None, **constants)
    return levels, packed


def bins_decode(levels: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decode_blocks(_bins_decode, levels, packed, size, 2, block)


def e3m0(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Peaks of blocks, and packed codes of four bits."""
    rows, scale, packed, sizes, constants = _blocked(rows, block, 4)
    _e3m0[(len(rows) * sizes[2],)](rows, scale, packed, *sizes, TINY, **constants)
    return scale, packed


def e3m0_decode(scale: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decode_blocks(_e3m0_decode, scale, packed, size, 4, block)
