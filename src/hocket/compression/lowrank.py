"""Low rank (PowerSGD): each matrix as the product of two thin ones (Vogels 2019, arXiv:1905.13727).

For a parameter as a matrix ``M`` (first dimension × the rest) and last exchange's ``Q``: ``P = mean(M Q)``, ``P`` made orthonormal,
``Q = mean(Mᵀ P)``, and all workers receive ``P Qᵀ``. One power iteration per exchange, warm-started: two small means per matrix.
Vectors, and matrices that would not get smaller, are averaged uncompressed with the first mean. Where there is no common mean
(gossip), each worker does the iteration alone and sends its own ``P`` and ``Q``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hocket.cluster.message import Message, there
from hocket.compression.base import CONSENSUS_STEP, Codec, Context, MeanChannel, Mixed, State, check_feedback
from hocket.errors import HocketError, is_whole
from hocket.noise import fold, uniform


class _Piece(NamedTuple):
    """One parameter in the row: ``height`` × ``width`` and low rank, or plain when ``width`` is 0."""

    offset: int
    size: int
    height: int
    width: int


@dataclass(frozen=True)
class LowRank(Codec):
    """``lowrank(matrix_rank)`` (PowerSGD): matrices as products of two narrow ones."""

    matrix_rank: int = 2
    feedback: bool | float | str | None = None
    name: ClassVar[str] = "lowrank"
    paper: ClassVar[str] = (
        "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019"
    )

    def __post_init__(self) -> None:
        if not is_whole(self.matrix_rank):
            raise HocketError(f"lowrank({self.matrix_rank!r}): the matrix rank must be a whole number of at least 1, such as 2.")
        check_feedback(self.feedback, "lowrank")

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False

    @property
    def single_bucket(self) -> bool:
        return True  # two small means for the whole model: with two per bucket, frames and latency would dominate

    @property
    def residual_stays(self) -> bool:
        return False  # most directions would never be averaged: replicas of the small CNN drifted apart and diverged

    def consensus_step(self, size: int, context: Context) -> float:
        # A message carries about this share of a matrix whose singular values are equal.
        return min([CONSENSUS_STEP, *(self.matrix_rank / min(p.height, p.width) for p in self.pieces(size, context) if p.width)])

    def pieces(self, size: int, context: Context) -> list[_Piece]:
        """The pieces of a row: one per parameter, or one square matrix where rows are not whole buckets."""
        shapes = context.shapes
        if shapes is None or sum(math.prod(s) for s in shapes) != size:
            side = math.isqrt(size - 1) + 1 if size > 1 else 1
            shapes = ((side, side),) if size == side * side else ((size // side, side), (size % side,)) if side else ((size,),)
        pieces, offset = [], 0
        for shape in shapes:
            count = math.prod(shape)
            height, width = (shape[0], count // max(shape[0], 1)) if len(shape) > 1 else (count, 0)
            if self.matrix_rank * (height + width) >= count:
                width = 0
            pieces.append(_Piece(offset, count, height, width))
            offset += count
        return pieces

    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        if not channel.uniform:
            return channel.coded(self, rows, state, context)
        pieces = self.pieces(rows.shape[1], context)
        thin = [p for p in pieces if p.width]
        plain = [p for p in pieces if not p.width]
        q_old = _bases(state, thin, self.matrix_rank, rows, context)
        matrices = [_matrix(rows, piece) for piece in thin]
        ps = [_matmul(matrix, q) for matrix, q in zip(matrices, q_old, strict=True)]
        first = torch.cat([*(p.flatten(1) for p in ps), *(rows[:, p.offset : p.offset + p.size] for p in plain)], 1)
        first = channel.mean(first, context)
        ps_mean, rest = _cut(first, [(p.height, self.matrix_rank) for p in thin])
        ps_mean = [_orthonormal(p) for p in ps_mean]
        q_own = [_matmul(_transposed(matrix), p) for matrix, p in zip(matrices, ps_mean, strict=True)]
        q_mean = q_own
        if thin:
            second = channel.mean(torch.cat([q.flatten(1) for q in q_own], 1), context)
            q_mean, _ = _cut(second, [(p.width, self.matrix_rank) for p in thin])
        mixed, sent = torch.empty_like(rows), torch.empty_like(rows)
        for piece, p, own, common in zip(thin, ps_mean, q_own, q_mean, strict=True):
            _fill(mixed, piece, p, common)
            _fill(sent, piece, p, own)
        start = 0
        for piece in plain:
            span = slice(piece.offset, piece.offset + piece.size)
            mixed[:, span] = rest[:, start : start + piece.size]
            sent[:, span] = rows[:, span]
            start += piece.size
        return Mixed(mixed, sent, {f"q{k}": q for k, q in enumerate(q_mean)})

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        pieces = self.pieces(rows.shape[1], context)
        thin = [p for p in pieces if p.width]
        parts, remembered = [], {}
        for k, (piece, q) in enumerate(zip(thin, _bases(state, thin, self.matrix_rank, rows, context), strict=True)):
            matrix = _matrix(rows, piece)
            p = _orthonormal(_matmul(matrix, q))
            q = _matmul(_transposed(matrix), p)
            remembered[f"q{k}"] = q
            parts += [p.flatten(1), q.flatten(1)]
        parts += [rows[:, p.offset : p.offset + p.size] for p in pieces if not p.width]
        return Message((torch.cat(parts, 1),)), remembered

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        pieces = self.pieces(size, context)
        shapes = [s for p in pieces if p.width for s in ((p.height, self.matrix_rank), (p.width, self.matrix_rank))]
        factors, rest = _cut(message.parts[0], shapes)
        rows = torch.empty(message.rows, size, dtype=rest.dtype, device=rest.device)
        start = k = 0
        for piece in pieces:
            span = slice(piece.offset, piece.offset + piece.size)
            if piece.width:
                _fill(rows, piece, factors[k], factors[k + 1])
                k += 2
            else:
                rows[:, span] = rest[:, start : start + piece.size]
                start += piece.size
        return rows


def _matrix(rows: Tensor, piece: _Piece) -> Tensor | list[Tensor]:
    """Each row's matrix; on a CPU one by one, at an address aligned as a separate tensor's, since batching and alignment change the
    rounding of a product."""
    matrices = rows[:, piece.offset : piece.offset + piece.size].view(-1, piece.height, piece.width)
    return [_straight(m) for m in matrices] if rows.device.type == "cpu" else matrices


def _transposed(matrices: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return matrices.transpose(1, 2) if isinstance(matrices, Tensor) else [m.T for m in matrices]


def _matmul(a: Tensor | list[Tensor], b: Tensor) -> Tensor:
    return a @ b if isinstance(a, Tensor) else torch.stack([x @ _straight(y) for x, y in zip(a, b, strict=True)])


def _fill(rows: Tensor, piece: _Piece, p: Tensor, q: Tensor) -> None:
    """Each row's ``P Qᵀ``, written into its place."""
    places = rows[:, piece.offset : piece.offset + piece.size].view(-1, piece.height, piece.width)
    if rows.device.type != "cpu":
        places.copy_(p @ q.transpose(1, 2))
        return
    for place, x, y in zip(places, p, q, strict=True):
        torch.mm(_straight(x), _straight(y).T, out=place)


def _straight(matrix: Tensor) -> Tensor:
    return matrix if matrix.data_ptr() % 64 == 0 and matrix.is_contiguous() else matrix.clone(memory_format=torch.contiguous_format)


def _cut(flat: Tensor, shapes: list[tuple[int, int]]) -> tuple[list[Tensor], Tensor]:
    """The first matrices of each row, and the remaining values."""
    sizes = [h * w for h, w in shapes]
    parts = flat.split([*sizes, flat.shape[1] - sum(sizes)], 1)
    return [p.reshape(-1, h, w) for p, (h, w) in zip(parts[:-1], shapes, strict=True)], parts[-1]


def _bases(state: State, thin: list[_Piece], matrix_rank: int, rows: Tensor, context: Context) -> list[Tensor]:
    """Last exchange's Q of each matrix or, at first, a random one that is equal on all workers.

    A column of zeros (the matrix was zero, or of lower rank) would stay zero; it is replaced by random values.
    """
    bases = []
    for k, piece in enumerate(thin):
        fresh = _random(context, k, piece.width, matrix_rank, rows)
        old = state.get(f"q{k}", fresh)
        bases.append(torch.where(old.abs().amax(1, keepdim=True) > 0, old, fresh))
    return bases


def _random(context: Context, k: int, width: int, matrix_rank: int, rows: Tensor) -> Tensor:
    key = there(torch.tensor([fold(context.common_key(), k)]), rows)
    # A sum of four uniform values is close enough to normal for an initial value.
    draws = uniform(key, 4 * width * matrix_rank).view(4, width, matrix_rank).sum(0) - 2
    return draws.expand(rows.shape[0], -1, -1).contiguous()


def _orthonormal(matrices: Tensor) -> Tensor:
    """Gram–Schmidt on the columns of each matrix, twice over for stability; a column that vanishes becomes zero.

    The remainder of a column that the others span is rounding noise; kept as a direction, it would count them twice.
    """
    if matrices.device.type == "cpu" and matrices.shape[0] > 1:
        return torch.cat([_orthonormal(m.unsqueeze(0)) for m in matrices])  # a batch may round differently from its rows
    columns: list[Tensor] = []
    for k in range(matrices.shape[2]):
        column = matrices[:, :, k]
        noise = (column.norm(dim=1, keepdim=True) * 1e-5).clamp(min=1e-30)
        for _ in range(2):
            for other in columns:
                column = column - (column * other).sum(1, keepdim=True) * other
        norm = column.norm(dim=1, keepdim=True)
        columns.append(torch.where(norm > noise, column / norm.clamp(min=1e-30), torch.zeros_like(column)))
    return torch.stack(columns, 2)
