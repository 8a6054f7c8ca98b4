"""How sparse messages carry indices: in two leading parts, in one of two codes.

*Plain*: sixteen low bits per index in ``low``, preceded by ``blocks``, which says how many of the indices fall into each block of
65,536 (left out where a row is no longer than one block). Two bytes per index instead of four.

*Rice* (Rice 1971; Golomb 1966): the gaps between neighbouring indices. A gap's ``k`` low bits are in ``low`` (eight gaps give
``k`` bytes, bit by bit); the remaining bits, a small number ``q``, are ``q`` zeros and a one in the bitmap ``unary``. Where indices
fall at random this takes about ``log2(size/count) + 1.5`` bits per index. ``k`` follows from the row's length and the number of
ones, so that it need not be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message, there
from hocket.compression.bitpack import pack, unpack
from hocket.compression.kernels import native_kernels, select_kernels

if TYPE_CHECKING:
    from hocket.compression.base import Selected

BLOCK = 1 << 16


def block_count(size: int) -> int:
    """Blocks of a row of ``size`` values; 0 when one block holds it all."""
    return 0 if size <= BLOCK else -(-size // BLOCK)


def with_indices(chosen: Selected, values: Message, size: int, rice: bool = False) -> Message:
    """``values`` preceded by their indices."""
    indices, counts = chosen.indices, chosen.counts
    rows, width = indices.shape
    if rice:
        full = there(torch.tensor([width, *(p.shape[1] for p in values.parts)]), indices).expand(rows, -1)
        low, unary, sizes = _rice(indices, full[:, 0] if counts is None else counts, size)
        sizes = torch.cat([sizes, full[:, 1:] if values.lengths is None else values.lengths], 1)
        return Message((low, unary, *values.parts), sizes)
    blocks = _block_counts(indices, counts, size)
    low = indices & (BLOCK - 1)
    low = torch.where(low >= BLOCK // 2, low - BLOCK, low).to(torch.int16)
    lengths = None
    if counts is not None and values.lengths is not None:
        lengths = torch.cat([torch.full_like(counts, blocks.shape[1]).unsqueeze(1), counts.unsqueeze(1), values.lengths], 1)
    return Message((blocks, low, *values.parts), lengths)


def _block_counts(indices: Tensor, counts: Tensor | None, size: int) -> Tensor:
    """How many of each row's indices lie in each block, int32 ``[rows, blocks]``."""
    rows, width, blocks = *indices.shape, block_count(size)
    if counts is None and blocks and not indices.is_meta:
        edges = torch.arange(0, (blocks + 1) * BLOCK, BLOCK, device=indices.device).expand(rows, -1).contiguous()
        return torch.searchsorted(indices, edges, out_int32=True).diff(dim=1)
    found = indices.new_zeros((rows, blocks), dtype=torch.int32)
    if not blocks:
        return found
    real = torch.ones_like(indices, dtype=torch.int32)
    if counts is not None:
        real = (torch.arange(width, device=indices.device) < counts.unsqueeze(1)).to(torch.int32)
    return found.scatter_add_(1, indices >> 16, real)


def read_indices(message: Message, size: int, rice: bool = False) -> tuple[Tensor, Tensor | None]:
    """The indices in rows of ``size``, int64 ``[rows, width]`` (arbitrary valid indices in the padding), and how many are real."""
    if rice:
        return _read_rice(message.parts[0], message.parts[1], size)
    blocks, low = message.parts[0], message.parts[1]
    indices = low.to(torch.int64) & (BLOCK - 1)
    if blocks.shape[1]:
        ends = blocks.to(torch.int64).cumsum(1)
        index = torch.arange(low.shape[1], device=low.device).expand(low.shape[0], -1).contiguous()
        indices += torch.searchsorted(ends, index, right=True) << 16
    return indices.clamp_(max=size - 1), None if message.lengths is None else message.lengths[:, 1]


def put_sent(message: Message, size: int, rice: bool, values: Callable[[int, Tensor | None], Tensor]) -> Tensor:
    """Rows of ``size`` with ``values(width, counts)`` at the indices that a message carries; padding must hold zeros."""
    blocks, low = message.parts[:2]
    if not rice and blocks.shape[1] and (kernels := select_kernels(low, size)):
        counts = None if message.lengths is None else message.lengths[:, 1]
        return kernels.put(blocks, low, values(low.shape[1], counts), size)
    indices, counts = read_indices(message, size, rice)
    return put(indices, values(indices.shape[1], counts), size)


def put(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """Values at their indices, zeros elsewhere (padding holds zeros, so adding it changes nothing)."""
    return values.new_zeros(values.shape[0], size).scatter_add_(1, indices, values)


def rice_bits(counts: Tensor, size: int) -> Tensor:
    """The best ``k`` for this many indices below ``size``: ``⌊log2(0.963 · size/count)⌋`` (Kiely 2004), in whole numbers alone.

    >>> rice_bits(torch.tensor([0, 1, 64, 3000]), 4096).tolist()
    [0, 11, 5, 0]
    """
    ratio = torch.where(counts > 0, size * 26 // (27 * counts.clamp(min=1)), 0).unsqueeze(1)
    return (ratio >> torch.arange(1, 48, device=counts.device) > 0).sum(1)


def ones(mask: Tensor, narrowest: int = 0) -> tuple[Tensor, Tensor]:
    """The indices of a mask's ones, int64 ``[rows, width]``, padded with zeros to the longest row, and how many each row has."""
    counts = mask.sum(1)
    width = max(narrowest, int(counts.max())) if counts.numel() else narrowest
    row, index = mask.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    indices = torch.zeros(mask.shape[0], width, dtype=torch.int64, device=mask.device)
    indices[row, torch.arange(row.numel(), device=mask.device) - starts[row]] = index
    return indices, counts


def expected_rice(count: int, size: int) -> tuple[int, int]:
    """Bytes of ``low`` and ``unary`` to expect for ``count`` of ``size`` indices at random: a gap is geometric with
    ``p = count/size``, so that its ``unary`` has ``1/(1 − (1−p)^(2^k))`` bits.

    >>> low, unary = expected_rice(64, 4096)
    >>> 8 * (low + unary) / 64
    7.625
    """
    if not count:
        return 0, 0
    bits = int(rice_bits(torch.tensor([count]), size))
    return -(-count // 8) * bits, math.ceil(count / (1 - (1 - count / size) ** 2**bits) / 8) if count < size else -(-count // 8)


def _rice(indices: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """``low`` and ``unary``, and the bytes of each row in both, ``[rows, 2]``; without values (on ``meta``) those to expect."""
    if indices.is_meta:
        low_bytes, unary_bytes = expected_rice(indices.shape[1], size)
        low, unary = (indices.new_empty(len(indices), n, dtype=torch.uint8) for n in (low_bytes, unary_bytes))
        return low, unary, counts.new_empty(len(counts), 2)
    bits = rice_bits(counts, size)
    if kernels := native_kernels(indices, size):
        found: tuple[Tensor, Tensor, Tensor] = kernels.rice(indices, counts, bits)
        return found
    real, k = torch.arange(indices.shape[1], device=indices.device) < counts.unsqueeze(1), bits.unsqueeze(1)
    gaps = torch.where(real, _gaps(indices), 0)
    spans = torch.where(real, (gaps >> k) + 1, 0)
    lengths = torch.stack([-(-counts // 8) * bits, -(-spans.sum(1) // 8)], 1)
    low_bytes, unary_bytes, most = torch.cat([lengths.amax(0), bits.amax(0, keepdim=True)]).tolist()
    # The one of padding falls on that of the last real index or, in a row without any, on the first column, which is cut off.
    unary = torch.zeros(len(indices), 1 + 8 * unary_bytes, dtype=torch.uint8, device=indices.device).scatter_(1, spans.cumsum(1), 1)
    places = _low_places(counts, bits, indices.shape[1], most, low_bytes)
    planes = pack(((gaps.unsqueeze(1) >> torch.arange(most, device=gaps.device).unsqueeze(1)) & 1).to(torch.uint8).flatten(0, 1), 1)
    low = unary.new_zeros(len(indices), low_bytes + 1).scatter_(1, places.flatten(1), planes.view(places.flatten(1).shape))
    return low[:, :low_bytes], pack(unary[:, 1:], 1), lengths


def _read_rice(low: Tensor, unary: Tensor, size: int) -> tuple[Tensor, Tensor]:
    if kernels := native_kernels(unary, size):
        counts = kernels.rice_counts(unary)
        return kernels.read_rice(low, unary, counts, rice_bits(counts, size), size), counts
    seen = unpack(unary, 1, 8 * unary.shape[1]).cumsum(1, dtype=torch.int32)
    counts = seen[:, -1].to(torch.int64) if unary.shape[1] else seen.new_zeros(len(seen), dtype=torch.int64)
    bits = rice_bits(counts, size)
    width, most = torch.stack([counts, bits]).amax(1).tolist() if len(seen) else (0, 0)
    rank = torch.arange(1, width + 1, dtype=torch.int32, device=seen.device)
    rows, ends = len(seen), torch.searchsorted(seen, rank.expand(len(seen), -1).contiguous())
    places = _low_places(counts, bits, width, most, low.shape[1])
    planes = pad(low, (0, 1)).gather(1, places.flatten(1)).view(rows * most, places.shape[2])
    parts = unpack(planes, 1, width).view(rows, most, width).to(torch.int64)
    gaps = _gaps(ends) << bits.unsqueeze(1)
    gaps += (parts << torch.arange(most, device=low.device).unsqueeze(1)).sum(1)
    return ((gaps + 1).cumsum(1) - 1).clamp_(0, size - 1), counts


def _gaps(indices: Tensor) -> Tensor:
    """How many places lie between each index and the one before."""
    return indices - pad(indices, (1, 0), value=-1)[:, :-1] - 1


def _low_places(counts: Tensor, bits: Tensor, width: int, most: int, beyond: int) -> Tensor:
    """For each of the ``most`` low bits: the bytes of ``low`` that hold it, one for eight gaps; ``beyond`` where a row has none."""
    groups, bit = torch.arange(-(-width // 8), device=counts.device), torch.arange(most, device=counts.device).unsqueeze(1)
    real, k = groups * 8 < counts.view(-1, 1, 1), bits.view(-1, 1, 1)
    return torch.where(real & (bit < k), groups * k + bit, beyond)
