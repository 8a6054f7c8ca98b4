"""DeMo: each worker keeps its momentum and sends the fastest-moving components of it (Peng 2024, arXiv:2411.19870).

Each worker accumulates ``m ← β·m + g``, cuts ``m`` into chunks of 64 × 64 and takes the largest ``k`` values of each chunk's cosine
transform, ``q``. They leave the momentum, ``m ← m − IDCT(q)``, and all workers receive ``sign(IDCT(mean q))`` as gradient. Matrices
are cut along both sides, what is smaller is put in a row first. This method applies the momentum, so the optimiser's own must be
zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.compression.base import Codec, Context, MeanChannel, Mixed, MomentumCompressor, State, flag
from hocket.compression.chain import Chain
from hocket.compression.topk import TopK
from hocket.errors import HocketError, is_number, is_whole
from hocket.notation import Ratio

SIDE = 64
CHUNK = SIDE * SIDE
_LEAST = 32
"""A matrix with a shorter side than this is no matrix here: it would be padded to more than twice its size."""


@dataclass(frozen=True)
class _Fastest(TopK):
    """The largest values of each chunk; of the mean, which the second phase sends, up to ``of_all`` values."""

    of_all: int = CHUNK

    @property
    def second_phase(self) -> TopK:
        return TopK(Ratio(self.of_all, CHUNK))


@dataclass(frozen=True)
class DeMo(MomentumCompressor):
    """``demo(k=32, decay=0.999, sign=True)``: the ``k`` largest frequencies of each chunk of the momentum."""

    k: int = 32
    decay: float = 0.999
    sign: bool = True
    """Whether workers receive signs of the mean; otherwise the mean itself."""
    name: ClassVar[str] = "demo"
    sums: ClassVar[tuple[str, ...]] = ("momentum",)
    paper: ClassVar[str] = "Peng et al., DeMo: Decoupled Momentum Optimization, 2024"

    def __post_init__(self) -> None:
        flag(self.sign, "demo", "sign")
        if not is_whole(self.k, 1, CHUNK):
            raise HocketError(f"demo(k={self.k!r}): k is how many values of a chunk of 4,096 are sent, from 1 to 4,096.")
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise HocketError(f"demo(decay={self.decay!r}): the momentum's decay must lie in [0, 1), such as 0.999.")

    @property
    def gives_signs(self) -> bool:
        return self.sign

    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        m = rows if "momentum" not in state else state["momentum"] * self.decay + rows
        top = _Fastest(Ratio(self.k, CHUNK), of_all=min(CHUNK, self.k * context.world))
        codec: Codec = top if self.precision is None else Chain(top, self.precision)
        mixed, sent, inner = channel.coded(codec, transformed(m, context), state.get("inner", {}), context)
        mixed, own = (restored(values, rows.shape[1], context) for values in (mixed, sent))
        return Mixed(mixed.sign() if self.sign else mixed, own, {"momentum": m - own, "inner": inner})

    def decoded(self, rows: Tensor, size: int, context: Context) -> Tensor:
        return restored(rows, size, context)


def transformed(rows: Tensor, context: Context) -> Tensor:
    """The cosine transform of each chunk of each row, ``[rows, chunks · 4,096]``; as many chunks as fill equal slices."""
    chunks = torch.cat([_cut(part, tall) for part, tall in _parts(rows, context)], 1)
    chunks = pad(chunks, (0, 0, 0, 0, 0, -chunks.shape[1] % context.world))
    return _both_sides(chunks, _cosines(rows.device)).flatten(1)


def restored(values: Tensor, size: int, context: Context) -> Tensor:
    """The rows ``[rows, size]`` of :func:`transformed` values."""
    chunks = _both_sides(values.view(values.shape[0], -1, SIDE, SIDE), _cosines(values.device).T)
    found, at = values.new_empty(values.shape[0], size), 0
    for part, tall in _parts(found, context):
        count = _cut(part, tall).shape[1]
        part.copy_(_joined(chunks[:, at : at + count], part, tall))
        at += count
    return found


def _parts(rows: Tensor, context: Context) -> list[tuple[Tensor, bool]]:
    """Views of the rows as ``[rows, tall, wide]`` matrices (True), and of all between them as vectors ``[rows, values]``."""
    found: list[tuple[Tensor, bool]] = []
    at = start = 0
    for shape in context.shapes or ():
        size = math.prod(shape)
        if len(shape) > 1 and min(shape[0], size // shape[0]) >= _LEAST:
            if at > start:
                found.append((rows[:, start:at], False))
            found.append((rows[:, at : at + size].unflatten(1, (shape[0], -1)), True))
            start = at + size
        at += size
    if start < rows.shape[1]:
        found.append((rows[:, start:], False))
    return found


def _cut(part: Tensor, matrix: bool) -> Tensor:
    """A part as chunks ``[rows, chunks, 64, 64]``, filled up with zeros."""
    if not matrix:
        return pad(part, (0, -part.shape[1] % CHUNK)).view(part.shape[0], -1, SIDE, SIDE)
    _, tall, wide = part.shape
    whole = pad(part, (0, -wide % SIDE, 0, -tall % SIDE))
    return whole.unflatten(2, (-1, SIDE)).unflatten(1, (-1, SIDE)).transpose(2, 3).flatten(1, 2)


def _joined(chunks: Tensor, part: Tensor, matrix: bool) -> Tensor:
    """The inverse of :func:`_cut`."""
    if not matrix:
        return chunks.flatten(1)[:, : part.shape[1]]
    _, tall, wide = part.shape
    across = -(-wide // SIDE)
    whole = chunks.unflatten(1, (-1, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return whole[:, :tall, :wide]


def _both_sides(chunks: Tensor, matrix: Tensor) -> Tensor:
    """``D X Dᵀ`` of every chunk; row by row, so that a result does not depend on how many workers this process hosts."""
    return torch.stack([matrix @ row @ matrix.T for row in chunks])


@lru_cache(maxsize=8)
def _cosines(device: torch.device) -> Tensor:
    """The orthonormal matrix of the cosine transform (DCT-II) of 64 values."""
    k, i = torch.arange(SIDE, dtype=torch.float64).view(-1, 1), torch.arange(SIDE, dtype=torch.float64)
    found = torch.cos(math.pi / SIDE * (i + 0.5) * k) * math.sqrt(2 / SIDE)
    found[0] /= math.sqrt(2)
    return found.to(device, torch.float32)
