"""Bins: each value as one of a few levels, which are the means of the values that they stand for (SparseLoCo, Sarfi 2025).

The paper has ``2**bits`` equal bins over 6σ, around the mean, and the mean of each bin as its level. Values that top-k has chosen
have two modes, one on either side of a wide gap, and most of these bins would lie in the gap. So here one bit is the sign, and the
bins divide the *magnitudes* of a block of ``block`` values: ``2**(bits-1)`` equal bins over 6σ around the mean magnitude, no
further than from the smallest to the largest. Each value then goes to the nearest of the bins' means, and the means are taken once
more (one step of Lloyd 1982). On the wire: the means of each block in float32, and ``bits`` bits per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message
from hocket.compression.base import Context, Precision, State, check_feedback
from hocket.compression.bitpack import pack, packed_size_padded, unpack
from hocket.compression.kernels import block_kernels
from hocket.errors import HocketError, is_whole


@dataclass(frozen=True)
class Bins(Precision):
    """``bins(bits, block=512)``: each value as one of ``2**bits`` values of its block."""

    bits: int = 2
    block: int = 512
    feedback: bool | float | str | None = None
    name: ClassVar[str] = "bins"
    paper: ClassVar[str] = "Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025"

    def __post_init__(self) -> None:
        if not is_whole(self.bits, 2, 4):
            raise HocketError(f"bins({self.bits!r}): bits must be 2, 3 or 4 (for one bit use sign, for more qsgd or cast).")
        if not is_whole(self.block, 8):
            raise HocketError(f"bins(block={self.block!r}): the block must be a whole number of at least 8 values, such as 512.")
        check_feedback(self.feedback, "bins")

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        return self.encode_some(rows, None, keys, context), state

    def encode_some(self, rows: Tensor, counts: Tensor | None, keys: Tensor, context: Context) -> Message:
        size = rows.shape[1]
        if self.bits == 2 and (kernels := block_kernels(rows, size, self.block)):
            return Message(kernels.bins(rows, counts, self.block))
        real = torch.arange(size, device=rows.device) < (size if counts is None else counts.unsqueeze(1))
        levels, codes = self._binned(self._blocks(rows.abs()), self._blocks(real.expand_as(rows)))
        codes = codes.flatten(1)[:, :size] * 2 + (rows < 0)
        return Message((levels.flatten(1), pack(codes.to(torch.uint8), self.bits)))

    def _binned(self, magnitudes: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The levels of each block, ``[rows, blocks, levels]``, and which of them each value is."""
        peak = magnitudes.amax(2, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        unit, number = magnitudes / peak, real.sum(2, keepdim=True).clamp(min=1)  # squares of very small values would vanish
        mean = unit.sum(2, keepdim=True) / number
        spread = 3 * ((unit - mean).square() * real).sum(2, keepdim=True).div(number).sqrt()
        low = torch.maximum(torch.where(real, unit, 1.0).amin(2, keepdim=True), mean - spread)
        high = torch.minimum(unit.amax(2, keepdim=True), mean + spread)
        count = 2 ** (self.bits - 1)
        levels = low + (high - low) * ((torch.arange(count, dtype=unit.dtype, device=unit.device) + 0.5) / count)
        codes = torch.zeros_like(unit)
        for _ in range(2):
            edges = (levels[..., 1:] + levels[..., :-1]) / 2
            codes = sum(((unit > edge).to(torch.float32) for edge in edges.split(1, 2)), torch.zeros_like(unit))
            members = [(codes == k) & real for k in range(count)]
            sums = torch.cat([(unit * m).sum(2, keepdim=True) for m in members], 2)
            sizes = torch.cat([m.sum(2, keepdim=True) for m in members], 2)
            levels = torch.where(sizes > 0, sums / sizes.clamp(min=1), levels)
        return levels * peak, codes

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        levels, packed = message.parts
        if self.bits == 2 and (kernels := block_kernels(packed, size, self.block)):
            return kernels.bins_decode(levels, packed, size, self.block)
        codes = self._blocks(unpack(packed, self.bits, size))
        found = levels.unflatten(1, (-1, 2 ** (self.bits - 1))).gather(2, (codes >> 1).to(torch.int64))
        return torch.where(codes & 1 == 1, -found, found).flatten(1)[:, :size]

    def _blocks(self, rows: Tensor) -> Tensor:
        """Rows cut into blocks, ``[rows, blocks, block]``, the last one filled up with zeros."""
        return pad(rows, (0, -rows.shape[1] % self.block)).unflatten(1, (-1, self.block))

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([-(-counts // self.block) * 2 ** (self.bits - 1), packed_size_padded(counts, self.bits)], 1)
