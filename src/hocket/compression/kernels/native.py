"""Compiled CPU kernels of the codecs (``native.cpp``), with the signatures of the CUDA kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from hocket.compression.bitpack import packed_size_padded
from hocket.compression.kernels.build import library

FP8 = torch.float8_e4m3fn


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library with tensors' addresses and with numbers; other threads run meanwhile."""
    found = getattr(library(), f"hocket_{name}")
    if found.argtypes is None:
        found.restype = None
        found.argtypes = [ctypes.c_void_p if a is None or isinstance(a, Tensor) else ctypes.c_int64 for a in arguments]
    found(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def _adjacent(rows: Tensor) -> Tensor:
    """Rows whose values lie side by side in memory."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _real(rows: Tensor) -> Tensor:
    """Adjacent rows, which are float32 or integers: of another type the library would read beyond their end."""
    assert rows.dtype == torch.float32 or not rows.is_floating_point(), f"codes take float32, not {rows.dtype}"
    return _adjacent(rows)


def _of(rows: Tensor) -> tuple[Tensor, int, int, int]:
    """Rows, their number, size and stride: arguments of the library's functions."""
    rows = _real(rows)
    return rows, rows.shape[0], rows.shape[1], rows.stride(0)


def _floats(rows: int, size: int) -> Tensor:
    """Empty float32 rows, whatever PyTorch's default type is."""
    return torch.empty(rows, size, dtype=torch.float32)


def _encoded(name: str, rows: Tensor, given: tuple[Any, ...], block: int, bits: int, scales: int = 1) -> tuple[Tensor, Tensor]:
    """``scales`` numbers of each block, and packed codes."""
    count, size = rows.shape
    scale = _floats(count, -(-size // block) * scales)
    packed = torch.empty(count, packed_size_padded(size, bits), dtype=torch.uint8)
    _call(name, *_of(rows), *given, scale, packed, torch.get_num_threads())
    return scale, packed


def _part(part: Tensor, dtype: torch.dtype, rows: int, width: int) -> Tensor:
    """A part of a message as adjacent rows; ValueError where it is smaller than the library reads: a peer may send anything."""
    if part.dtype != dtype or part.dim() != 2 or len(part) < rows or part.shape[1] < width:
        raise ValueError(f"a part has {list(part.shape)} values of {part.dtype}; [{rows}, {width}] of {dtype} were expected")
    return _adjacent(part)


def _decoded(
    name: str, scale: Tensor, packed: Tensor, size: int, widths: tuple[int, int], *given: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``widths``: so many values a row of both parts has at least; ``dtype`` is that of the first."""
    rows, (scales, codes) = len(packed), widths
    scale, packed, out = _part(scale, dtype, rows, scales), _part(packed, torch.uint8, rows, codes), _floats(rows, size)
    strides = scale.stride(0), packed.stride(0)
    _call(name, scale, strides[0], packed, strides[1], rows, size, *given, out, torch.get_num_threads())
    return out


def _widths(size: int, block: int, bits: int, scales: int = 1) -> tuple[int, int]:
    return -(-size // block) * scales, packed_size_padded(size, bits)


def _keys(keys: Tensor) -> Tensor:
    return keys.to(torch.int64).contiguous()


def qsgd(rows: Tensor, keys: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Norms of blocks, and packed codes."""
    return _encoded("qsgd", rows, (_keys(keys), block, bits), block, bits)


def qsgd_decode(norms: Tensor, packed: Tensor, size: int, bits: int, block: int) -> Tensor:
    return _decoded("qsgd_decode", norms, packed, size, _widths(size, block, bits), block, bits)


def sign(rows: Tensor, counts: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Mean magnitudes of blocks, and packed signs."""
    return _encoded("sign", rows, (counts, block), block, 1)


def sign_decode(means: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decoded("sign_decode", means, packed, size, _widths(size, block, 1), block)


def bins(rows: Tensor, counts: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Two levels of each block, and packed codes of two bits."""
    return _encoded("bins", rows, (counts, block), block, 2, scales=2)


def bins_decode(levels: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decoded("bins_decode", levels, packed, size, _widths(size, block, 2, scales=2), block)


def e3m0(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Peaks of blocks, and packed codes of four bits."""
    return _encoded("e3m0", rows, (block,), block, 4)


def e3m0_decode(scale: Tensor, packed: Tensor, size: int, block: int) -> Tensor:
    return _decoded("e3m0_decode", scale, packed, size, _widths(size, block, 4), block)


def ternary(rows: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """Packed codes, five to a byte."""
    packed = torch.empty(len(rows), -(-rows.shape[1] // 5), dtype=torch.uint8)
    _call("ternary", *_of(rows), _keys(keys), scale.contiguous(), packed, torch.get_num_threads())
    return packed


def ternary_decode(scale: Tensor, packed: Tensor, size: int) -> Tensor:
    return _decoded("ternary_decode", scale, packed, size, (1, -(-size // 5)))


def natural(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents, and packed signs."""
    exponents, signs = (torch.empty(len(rows), n, dtype=torch.uint8) for n in (rows.shape[1], -(-rows.shape[1] // 8)))
    _call("natural", *_of(rows), _keys(keys), exponents, signs, torch.get_num_threads())
    return exponents, signs


def natural_decode(exponents: Tensor, signs: Tensor, size: int) -> Tensor:
    return _decoded("natural_decode", exponents, signs, size, (size, -(-size // 8)), dtype=torch.uint8)


def cast(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Values over their row's scale, in a shorter format."""
    if scale is None:
        limit = torch.finfo(dtype).max
        return rows.clamp(-limit, limit).to(dtype)
    assert dtype == FP8
    out = torch.empty(rows.shape, dtype=FP8)
    _call("fp8", *_of(rows), scale.contiguous(), out, torch.get_num_threads())
    return out


def cast_decode(coded: Tensor, scale: Tensor | None, size: int) -> Tensor:
    if scale is None:
        return coded.to(torch.float32)
    coded, out = _part(coded, FP8, len(coded), size), _floats(len(coded), size)
    scale = _part(scale, torch.float32, len(coded), 1)[:, 0].contiguous()
    _call("fp8_decode", coded, coded.stride(0), scale, len(coded), size, out, torch.get_num_threads())
    return out


def kth_largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k-th largest magnitude of each row ``[rows]``, and how many of those equal to it are among the k largest."""
    level, equal = torch.empty(len(rows), dtype=torch.float32), torch.empty(len(rows), dtype=torch.int64)
    _call("largest", *_of(rows), k, None, None, level, equal, torch.get_num_threads())
    return level, equal


def largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The indices, int64 in order, and the values of the k largest magnitudes of each row; of equal ones the first."""
    indices, values = torch.empty(len(rows), k, dtype=torch.int64), _floats(len(rows), k)
    _call("largest", *_of(rows), k, indices, values, None, None, torch.get_num_threads())
    return indices, values


def above(rows: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The indices and values of magnitudes above each row's level, padded with zeros to one at least, and how many each row has."""
    counts, given = torch.empty(len(rows), dtype=torch.int64), _of(rows)
    _call("count_above", *given, level.contiguous(), counts, torch.get_num_threads())
    width = max(1, int(counts.max()))
    indices, values = torch.empty(len(rows), width, dtype=torch.int64), _floats(len(rows), width)
    _call("above", *given, level.contiguous(), width, indices, values, torch.get_num_threads())
    return indices, values, counts


def largest_of_chunks(rows: Tensor, chunk: int, k: int) -> Tensor:
    """The indices of the k largest magnitudes of each whole chunk of consecutive values, in order."""
    indices = torch.empty(len(rows), rows.shape[1] // chunk * k, dtype=torch.int64)
    _call("largest_of_chunks", *_of(rows), chunk, k, indices, torch.get_num_threads())
    return indices


def put(counts: Tensor, low: Tensor, values: Tensor, size: int) -> Tensor:
    """Values at indices whose sixteen low bits are ``low``; ``counts`` says how many lie in each block of 65,536."""
    low, out = _part(low, torch.int16, len(values), 0), _floats(len(values), size)
    counts, values = _part(counts, torch.int32, len(low), 0), _part(values, torch.float32, len(low), low.shape[1])
    blocks = counts, counts.stride(0), counts.shape[1]
    _call("put", *blocks, low, low.stride(0), values, values.stride(0), len(values), low.shape[1], size, out)
    return out


def rice(indices: Tensor, counts: Tensor, bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``low``, ``unary`` and the bytes of each row in both ``[rows, 2]``, of sorted indices in Rice's code."""
    sizes = torch.empty(len(indices), 2, dtype=torch.int64)
    given = indices.contiguous(), len(indices), indices.shape[1], counts.contiguous(), bits.contiguous()
    _call("rice_sizes", *given, sizes)
    low, unary = (torch.zeros(len(indices), n, dtype=torch.uint8) for n in sizes.amax(0).tolist())
    _call("rice", *given, low, low.shape[1], unary, unary.shape[1])
    return low, unary, sizes


def rice_counts(unary: Tensor) -> Tensor:
    """How many indices each row has."""
    unary, counts = _part(unary, torch.uint8, len(unary), 0), torch.empty(len(unary), dtype=torch.int64)
    _call("rice_count", unary, unary.stride(0), unary.shape[1], len(unary), counts)
    return counts


def read_rice(low: Tensor, unary: Tensor, counts: Tensor, bits: Tensor, size: int) -> Tensor:
    """The indices in rows of ``size``, with zeros behind them."""
    if int(counts.max()) > size:
        raise ValueError(f"{int(counts.max())} indices in a row of {size} values")
    indices = torch.empty(len(unary), int(counts.max()), dtype=torch.int64)
    low, unary = _part(low, torch.uint8, len(unary), 0), _part(unary, torch.uint8, len(unary), 0)
    coded = (low, low.stride(0), low.shape[1], unary, unary.stride(0), unary.shape[1], len(unary))
    _call("rice_read", *coded, bits.contiguous(), size, indices.shape[1], indices)
    return indices


def ordered_mean(rows: Tensor, senders: int) -> Tensor:
    """The mean of each ``senders`` consecutive rows, added in their order."""
    out = _floats(len(rows) // senders, rows.shape[1])
    given, _, size, stride = _of(rows)
    _call("mean", given, len(out), senders, size, stride, out, torch.get_num_threads())
    return out
