"""Kernels of selections: find the largest values, and write values at their indices. Reference: ``topk.py``, ``threshold.py``.

The magnitude that is the k-th largest of a row is found a digit at a time, from the highest bits down: a pass counts how often each
digit occurs among the values that agree in the digits found before. Of large rows a sample says between which two magnitudes the
k-th lies, and the passes see only the values between these, which are gathered; should the sample have erred, they see the whole
row. Then each value above the k-th is marked by a bit, and the bits become indices: no sorting, and nothing waits for the GPU.
Rows are shared among programs in consecutive portions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hocket.compression.kernels.bits import adjacent, magnitude_bits

TILE = 4096
WORDS = 512
"""Words of 32 marks that a program reads at a time."""
PROGRAMS = 1056
"""So many share the work: eight for each multiprocessor of a large GPU."""
DIGITS = 128
"""Room for the counts of a pass."""
SHIFTS = (25, 19, 13, 7, 0)
"""The lowest bit of each pass's digit, of the 31 bits of a magnitude."""
SAMPLE, SAMPLED = 1 << 15, 1 << 19
"""Values of a sample, and of the rows of which one is taken."""
PUT = {"PARTS": 4, "TILE": 4096, "num_warps": 4}
"""How a block is shared when values are put at their indices."""
CHUNK_WARPS = 2


@triton.jit
def _ones(words):
    """How many bits are set in each."""
    v = words.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _lowest(words):
    """Where the lowest set bit of each is: the exponent of that bit as a number."""
    low = (words & (0 - words)).to(tl.uint32, bitcast=True)
    return (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _words(marks, COUNT: tl.constexpr):
    """Marks ``[COUNT]`` as bits of words, the first one lowest."""
    return tl.sum(tl.reshape(marks.to(tl.int32), [COUNT // 32, 32]) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def _kth_digit(counts, left, DIGITS: tl.constexpr):
    """The digit that the ``left``-th largest has, by the counts of all digits, and how many are left among those of this digit."""
    digits = tl.arange(0, DIGITS)
    found = tl.load(counts + digits)
    above = tl.sum(found) - tl.cumsum(found, 0)  # how many have a larger digit
    here = (above < left) & (above + found >= left)
    return tl.sum(tl.where(here, digits, 0)), left - tl.sum(tl.where(here, above, 0))


@triton.jit
def _prefix(counts, left, PASSES: tl.constexpr, DIGITS: tl.constexpr):
    """The bits that earlier passes have found, and how many are left among the values that have them."""
    prefix = 0
    for earlier in tl.static_range(PASSES):
        digit, left = _kth_digit(counts + earlier * DIGITS, left, DIGITS)
        prefix = (prefix << (7 if earlier == 4 else 6)) | digit
    return prefix, left


@triton.jit
def _rank(counts, k, room, DIGITS: tl.constexpr):
    """Of the gathered values: their number and the k-th's rank among them, where it is one of them; otherwise 0 and ``k``."""
    kept, above = tl.load(counts + 5 * DIGITS), tl.load(counts + 5 * DIGITS + 1)
    whole = (kept > room) | (k <= above) | (k > above + kept)
    return tl.where(whole, 0, kept), tl.where(whole, k, k - above)


@triton.jit
def _gather(rows, kept, counts, low, high, size, stride, programs, portion, room, TILE: tl.constexpr, DIGITS: tl.constexpr):
    """The values between two magnitudes, in any order, and how many are larger."""
    row, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    rows, kept, counts = rows + row * stride, kept + row * room, counts + row * (6 * DIGITS)
    least, most = tl.load(low + row).to(tl.int32, bitcast=True), tl.load(high + row).to(tl.int32, bitcast=True)
    first, above = program * portion, tl.zeros([TILE], tl.int32)
    for start in range(first, tl.minimum(first + portion, size), TILE):
        places = start + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(rows + places, places < size, 0.0))
        above += ((bits > most) & (places < size)).to(tl.int32)
        words = _words((bits >= least) & (bits <= most) & (places < size), TILE)
        ones = _ones(words)
        place = tl.atomic_add(counts + 5 * DIGITS, tl.sum(ones)) + tl.cumsum(ones, 0) - ones
        while tl.max((words != 0).to(tl.int32)) > 0:
            index = start + tl.arange(0, TILE // 32) * 32 + _lowest(words)
            x = tl.load(rows + index, words != 0, 0.0)
            tl.store(kept + place, x, (words != 0) & (place < room))
            words, place = words & (words - 1), place + 1
    tl.atomic_add(counts + 5 * DIGITS + 1, tl.sum(above))


@triton.jit
def _count_digits(
    rows, kept, counts, size, stride, programs, portion, room, k,
    PASS: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """How often each digit occurs, among the gathered values or in the whole row."""
    row, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    counts += row * (6 * DIGITS)
    number, left = _rank(counts, k, room, DIGITS)
    prefix, _ = _prefix(counts, left, PASS, DIGITS)
    found = tl.zeros([1 << BITS], tl.int32)
    source = tl.where(number > 0, kept + row * room, rows + row * stride)
    end = tl.where(number > 0, number, size)
    for start in range(program * TILE, end, programs * TILE):
        places = start + tl.arange(0, TILE)
        bits = magnitude_bits(tl.load(source + places, places < end, 0.0))
        among = (places < end) & ((bits >> (SHIFT + BITS)) == prefix)
        found += tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, among)
    digits = tl.arange(0, 1 << BITS)
    tl.atomic_add(counts + PASS * DIGITS + digits, found, found > 0)


@triton.jit
def _settle(counts, level, equal, room, k, DIGITS: tl.constexpr):
    """The k-th largest magnitude of a row, and how many of those that equal it are among the k largest."""
    row = tl.program_id(0).to(tl.int64)
    counts += row * (6 * DIGITS)
    _, left = _rank(counts, k, room, DIGITS)
    prefix, left = _prefix(counts, left, 5, DIGITS)
    tl.store(level + row, prefix.to(tl.float32, bitcast=True))
    tl.store(equal + row, left)


@triton.jit
def _mark(rows, level, marks, above, equal, size, stride, programs, portion, EQUAL: tl.constexpr, TILE: tl.constexpr):
    """A bit for each value above its row's level or, with ``EQUAL``, on it; and how many there are of either in each portion."""
    row, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    rows, marks = rows + row * stride, marks + row * (programs * portion // 32)
    edge, first = tl.load(level + row).to(tl.int32, bitcast=True), program * portion
    more, same = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(first, first + portion, TILE):
        places = start + tl.arange(0, TILE)
        bits = tl.where(places < size, magnitude_bits(tl.load(rows + places, places < size, 0.0)), -1)
        more += (bits > edge).to(tl.int32)
        marked = bits > edge
        if EQUAL:
            same += (bits == edge).to(tl.int32)
            marked = bits >= edge
        tl.store(marks + start // 32 + tl.arange(0, TILE // 32), _words(marked, TILE))
    tl.store(above + tl.program_id(0), tl.sum(more))
    tl.store(equal + tl.program_id(0), tl.sum(same))


@triton.jit
def _first_equals(rows, words, places, edge, seen, most):
    """Words of marks without those of values on the edge beyond the ``most`` first ones, and how many of these are seen by now."""
    rest, equals = words, words * 0
    while tl.max((rest != 0).to(tl.int32)) > 0:
        x = tl.load(rows + places + _lowest(rest), rest != 0, 0.0)
        equals += ((rest != 0) & (magnitude_bits(x) == edge)).to(tl.int32)
        rest &= rest - 1
    rank, rest = seen + tl.cumsum(equals, 0) - equals, words
    while tl.max((rest != 0).to(tl.int32)) > 0:
        x = tl.load(rows + places + _lowest(rest), rest != 0, 0.0)
        same = (rest != 0) & (magnitude_bits(x) == edge)
        rank += same.to(tl.int32)
        words = tl.where(same & (rank > most), words & ~(rest & (0 - rest)), words)
        rest &= rest - 1
    return words, seen + tl.sum(equals)


@triton.jit
def _write(
    rows, marks, level, allowed, above, equal, indices, values, size, stride, programs, portion, width,
    EQUAL: tl.constexpr, MANY: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The indices and values of what is marked, in order."""
    row, program = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    rows, marks = rows + row * stride, marks + row * (programs * portion // 32)
    indices, values = indices + row * width, values + row * width
    earlier = tl.arange(0, MANY)
    before = tl.sum(tl.load(above + row * programs + earlier, earlier < program, 0))
    edge, seen, most, surplus = 0, 0, 0, False
    if EQUAL:
        edge, most = tl.load(level + row).to(tl.int32, bitcast=True), tl.load(allowed + row)
        seen = tl.sum(tl.load(equal + row * programs + earlier, earlier < program, 0))
        before += tl.minimum(seen, most)
        own = tl.load(equal + row * programs + program)
        surplus = (own > 0) & (seen + own > most)
    first = program * portion // 32
    for start in range(first, first + portion // 32, WORDS):
        places = (start + tl.arange(0, WORDS)) * 32
        words = tl.load(marks + start + tl.arange(0, WORDS), start + tl.arange(0, WORDS) < first + portion // 32, 0)
        if EQUAL:  # noqa: SIM102 - this is known when the kernel is compiled, and what follows is not
            if surplus:
                words, seen = _first_equals(rows, words, places, edge, seen, most)
        ones = _ones(words)
        place = before + tl.cumsum(ones, 0) - ones
        before += tl.sum(ones)
        while tl.max((words != 0).to(tl.int32)) > 0:
            index = places + _lowest(words)
            tl.store(indices + place, index.to(tl.int64), words != 0)
            tl.store(values + place, tl.load(rows + index, words != 0, 0.0), words != 0)
            words, place = words & (words - 1), place + 1


@triton.jit
def _chunks(rows, indices, stride, width, chunks, K: tl.constexpr, CHUNK: tl.constexpr):
    """The ``K`` largest of one chunk: the bits of the K-th magnitude from the highest down."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    bits, edge = magnitude_bits(tl.load(rows + row * stride + chunk * CHUNK + tl.arange(0, CHUNK))), 0
    for bit in range(31):
        higher = edge | (1 << (30 - bit))
        edge = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= K, higher, edge)
    chosen = bits >= edge
    surplus = tl.sum(chosen.to(tl.int32)) - K
    if surplus > 0:
        same = (bits == edge).to(tl.int32)
        chosen = (bits > edge) | ((same == 1) & (tl.cumsum(same, 0) <= tl.sum(same) - surplus))
    words = _words(chosen, CHUNK)
    ones = _ones(words)
    place = row * width + chunk * K + tl.cumsum(ones, 0) - ones
    while tl.max((words != 0).to(tl.int32)) > 0:
        index = chunk * CHUNK + tl.arange(0, CHUNK // 32) * 32 + _lowest(words)
        tl.store(indices + place, index.to(tl.int64), words != 0)
        words, place = words & (words - 1), place + 1


@triton.jit
def _put(
    starts,
    low,
    values,
    out,
    size,
    width,
    blocks,
    low_stride,
    value_stride,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of one block of 65,536 values: zeros, then those that were sent."""
    row, block = (tl.program_id(0) // (blocks * PARTS)).to(tl.int64), tl.program_id(0) // PARTS % blocks
    out += row * size + block.to(tl.int64) * BLOCK
    least = tl.program_id(0) % PARTS * (BLOCK // PARTS)
    most = tl.minimum(size - block * BLOCK, least + BLOCK // PARTS)
    for start in range(least, most, TILE):
        places = start + tl.arange(0, TILE)
        tl.store(out + places, tl.zeros([TILE], tl.float32), places < most)
    tl.debug_barrier()
    first = tl.maximum(tl.load(starts + row * (blocks + 1) + block), 0)  # a peer may have sent any counts
    end = tl.minimum(tl.load(starts + row * (blocks + 1) + block + 1), width)
    for start in range(first, end, TILE):
        places = start + tl.arange(0, TILE)
        index = tl.load(low + row * low_stride + places, places < end, 0).to(tl.int32) & (BLOCK - 1)
        tl.store(
            out + index,
            tl.load(values + row * value_stride + places, places < end, 0.0),
            (places < end) & (index >= least) & (index < most),
        )


def _portions(rows: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Rows of one stride; then their size, stride, programs per row, and values per program."""
    rows, size = adjacent(rows), rows.shape[1]
    programs = max(1, min(-(-size // TILE), PROGRAMS // len(rows)))
    portion = -(-size // (programs * TILE)) * TILE
    return rows, (size, rows.stride(0), programs, portion)


def kth_largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k-th largest magnitude of each row ``[rows]``, and how many of those equal to it are among the k largest."""
    rows, sizes = _portions(rows)
    counts = torch.zeros(len(rows), len(SHIFTS) + 1, DIGITS, dtype=torch.int32, device=rows.device)
    grid, room, kept = (len(rows) * sizes[2],), 0, rows
    if found := _bounds(rows, k):
        low, high, room = found
        kept = rows.new_empty(len(rows), room)
        _gather[grid](rows, kept, counts, low, high, *sizes, room, TILE=TILE, DIGITS=DIGITS)
    for number, shift in enumerate(SHIFTS):
        digit = {"PASS": number, "SHIFT": shift, "BITS": (31, *SHIFTS)[number] - shift}
        _count_digits[grid](rows, kept, counts, *sizes, room, k, **digit, TILE=TILE, DIGITS=DIGITS)
    level, equal = rows.new_empty(len(rows)), counts.new_empty(len(rows))
    _settle[(len(rows),)](counts, level, equal, room, k, DIGITS=DIGITS)
    return level, equal


def _bounds(rows: Tensor, k: int) -> tuple[Tensor, Tensor, int] | None:
    """Two magnitudes of each row that have the k-th between them, by four deviations of a sample's count, and room for the values
    between them; ``None`` where that would spare little."""
    size, expected = rows.shape[1], k * SAMPLE / rows.shape[1]
    margin = 4 * math.sqrt(expected) + 8
    room = int(3 * margin / SAMPLE * size)
    if size < SAMPLED or room > size // 4:
        return None
    sample = rows[:, :: size // SAMPLE][:, :SAMPLE].abs().sort(1, descending=True).values
    above, below = int(expected - margin), int(expected + margin)
    high = sample[:, above].contiguous() if above >= 0 else rows.new_full((len(rows),), math.inf)
    low = sample[:, below].contiguous() if below < SAMPLE else torch.zeros_like(high)
    return low, high, room


def largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The indices, int64 in order, and the values of the k largest magnitudes of each row; of equal ones the first."""
    level, allowed = kth_largest(rows, k)
    return _marked(rows, level, allowed, k)[:2]


def above(rows: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The indices and values of magnitudes above each row's level, padded with zeros to one at least, and how many each row has."""
    return _marked(rows, level, None, 1)


def _marked(rows: Tensor, level: Tensor, allowed: Tensor | None, width: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, sizes = _portions(rows)
    grid = (len(rows) * sizes[2],)
    marks = torch.empty(len(rows), sizes[2] * sizes[3] // 32, dtype=torch.int32, device=rows.device)
    more, equal = (torch.empty(len(rows), sizes[2], dtype=torch.int32, device=rows.device) for _ in range(2))
    _mark[grid](rows, level, marks, more, equal, *sizes, EQUAL=allowed is not None, TILE=TILE)
    counts = more.sum(1, dtype=torch.int64)
    if allowed is None:
        width = max(width, int(counts.max()))
    room = torch.zeros if allowed is None else torch.empty
    indices = room(len(rows), width, dtype=torch.int64, device=rows.device)
    values = room(len(rows), width, dtype=rows.dtype, device=rows.device)
    constants = {"EQUAL": allowed is not None, "MANY": triton.next_power_of_2(sizes[2]), "WORDS": WORDS}
    given = level if allowed is None else allowed
    _write[grid](rows, marks, level, given, more, equal, indices, values, *sizes, width, **constants)
    return indices, values, counts


def largest_of_chunks(rows: Tensor, chunk: int, k: int) -> Tensor:
    """The indices of the k largest magnitudes of each whole chunk of consecutive values (a power of two), in order."""
    rows = adjacent(rows)
    chunks = rows.shape[1] // chunk
    indices = torch.empty(len(rows), chunks * k, dtype=torch.int64, device=rows.device)
    warps = {"num_warps": CHUNK_WARPS if chunk > 1024 else 1}
    _chunks[(len(rows) * chunks,)](rows, indices, rows.stride(0), chunks * k, chunks, K=k, CHUNK=chunk, **warps)
    return indices


def put(counts: Tensor, low: Tensor, values: Tensor, size: int) -> Tensor:
    """Values at indices whose sixteen low bits are ``low``; ``counts`` says how many lie in each block of 65,536."""
    starts = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    low, values = adjacent(low), adjacent(values)
    out, blocks = values.new_empty(len(values), size), counts.shape[1]
    strides = low.stride(0), values.stride(0)
    grid = (len(values) * blocks * PUT["PARTS"],)
    _put[grid](starts, low, values, out, size, low.shape[1], blocks, *strides, **PUT, BLOCK=1 << 16)
    return out
