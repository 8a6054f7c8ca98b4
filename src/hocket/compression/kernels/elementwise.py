"""Kernels of codes without blocks: ``ternary``, ``natural`` and ``cast``. Reference: the files of these names."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.compression.bitpack import packed_size_padded
from hocket.compression.kernels.bits import EXACT, adjacent, load_codes, noise, store_codes, uniform

TILE = 4096
"""Values of a program."""
BYTES = 512
"""Bytes of five values each of a program of ``ternary``."""


@triton.jit
def _ternary(rows, keys, scale, packed, size, stride, tiles, bytes_, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    peak = tl.load(scale + row)
    codes = tl.zeros_like(places)
    for k in tl.static_range(5):
        index = places * 5 + (4 - k)
        x = tl.load(rows + row * stride + index, index < size, 0.0)
        hit = uniform(keys, row, index) * peak < tl.abs(x)
        trit = tl.where(hit, tl.where(x > 0, 2, tl.where(x < 0, 0, 1)), 1)
        codes = codes * 3 + tl.where(index < size, trit, 0)
    tl.store(packed + row * bytes_ + places, codes.to(tl.uint8), places < bytes_)


@triton.jit
def _ternary_decode(scale, packed, out, size, tiles, packed_stride, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    real = places < size
    group = places.to(tl.uint32) // 5
    byte, digit = tl.load(packed + row * packed_stride + group, real, 0).to(tl.int32), places - 5 * group.to(tl.int32)
    # Products with 2**16 / 3**digit, rounded up, instead of divisions: exact for bytes.
    inverse = tl.where(digit < 2, tl.where(digit == 0, 65536, 21846), tl.where(digit == 2, 7282, tl.where(digit == 3, 2428, 810)))
    rest = (byte * inverse) >> 16
    trit = rest - 3 * ((rest * 21846) >> 16)
    tl.store(out + row * size + places, (trit - 1).to(tl.float32) * tl.load(scale + row), real)


@triton.jit
def _natural(rows, keys, exponents, signs, size, stride, tiles, bytes_, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    real = places < size
    x = tl.load(rows + row * stride + places, real, 0.0)
    raw = x.to(tl.int32, bitcast=True)
    carried = (noise(keys, row, places) & 0x7FFFFF).to(tl.int32) + (raw & 0x7FFFFFFF)
    exponent = tl.where((raw & 0x7F800000) == 0, 0, tl.minimum(carried >> 23, 254))
    tl.store(exponents + row * size + places, exponent.to(tl.uint8), real)
    store_codes(signs + row * bytes_, tl.where(x < 0, 1, 0), tile * COUNT, bytes_, 1, COUNT)


@triton.jit
def _natural_decode(exponents, signs, out, size, tiles, bytes_, exponent_stride, sign_stride, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    real = places < size
    raw = tl.load(exponents + row * exponent_stride + places, real, 0).to(tl.int32) << 23
    raw |= load_codes(signs + row * sign_stride, tile * COUNT, bytes_, 1, COUNT) << 31
    tl.store(out + row * size + places, raw.to(tl.float32, bitcast=True), real)


@triton.jit
def _cast(rows, scale, out, size, stride, tiles, limit, SCALED: tl.constexpr, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    real = places < size
    x = tl.load(rows + row * stride + places, real, 0.0)
    if SCALED:
        x = tl.div_rn(x, tl.load(scale + row))
    x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    tl.store(out + row * size + places, x.to(out.dtype.element_ty), real)


@triton.jit
def _cast_decode(coded, scale, out, size, tiles, stride, SCALED: tl.constexpr, COUNT: tl.constexpr):
    row, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    places = tile * COUNT + tl.arange(0, COUNT)
    real = places < size
    x = tl.load(coded + row * stride + places, real, 0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(scale + row)
    tl.store(out + row * size + places, x, real)


def ternary(rows: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """Packed codes, five to a byte."""
    rows, size = adjacent(rows), rows.shape[1]
    bytes_ = -(-size // 5)
    packed, tiles = rows.new_empty(len(rows), bytes_, dtype=torch.uint8), -(-bytes_ // BYTES)
    _ternary[(len(rows) * tiles,)](rows, keys, scale, packed, size, rows.stride(0), tiles, bytes_, COUNT=BYTES, **EXACT)
    return packed


def ternary_decode(scale: Tensor, packed: Tensor, size: int) -> Tensor:
    packed, tiles = adjacent(packed), -(-size // TILE)
    out = torch.empty(len(packed), size, dtype=torch.float32, device=packed.device)
    _ternary_decode[(len(packed) * tiles,)](scale, packed, out, size, tiles, packed.stride(0), COUNT=TILE, **EXACT)
    return out


def natural(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents, and packed signs."""
    rows, size = adjacent(rows), rows.shape[1]
    bytes_, tiles = packed_size_padded(size, 1), -(-size // TILE)
    exponents, signs = (rows.new_empty(len(rows), n, dtype=torch.uint8) for n in (size, bytes_))
    _natural[(len(rows) * tiles,)](rows, keys, exponents, signs, size, rows.stride(0), tiles, bytes_, COUNT=TILE, **EXACT)
    return exponents, signs


def natural_decode(exponents: Tensor, signs: Tensor, size: int) -> Tensor:
    exponents, signs, tiles = adjacent(exponents), adjacent(signs), -(-size // TILE)
    out = torch.empty(len(signs), size, dtype=torch.float32, device=signs.device)
    strides = signs.shape[1], exponents.stride(0), signs.stride(0)
    _natural_decode[(len(signs) * tiles,)](exponents, signs, out, size, tiles, *strides, COUNT=TILE, **EXACT)
    return out


def cast(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values over their row's scale, in a shorter format."""
    rows, size = adjacent(rows), rows.shape[1]
    out, tiles = rows.new_empty(len(rows), size, dtype=dtype), -(-size // TILE)
    limit, given = torch.finfo(dtype).max, rows if scale is None else scale
    _cast[(len(rows) * tiles,)](rows, given, out, size, rows.stride(0), tiles, limit, SCALED=scale is not None, COUNT=TILE, **EXACT)
    return out


def cast_decode(coded: Tensor, scale: Tensor | None, size: int) -> Tensor:
    coded, tiles = adjacent(coded), -(-size // TILE)
    out = torch.empty(len(coded), size, dtype=torch.float32, device=coded.device)
    given = coded if scale is None else scale
    strides = {"SCALED": scale is not None, "COUNT": TILE, **EXACT}
    _cast_decode[(len(coded) * tiles,)](coded, given, out, size, tiles, coded.stride(0), **strides)
    return out
