"""QSGD: stochastic rounding to a few levels of a block's norm (Alistarh 2017, arXiv:1610.02132).

Rows are cut into blocks of ``block`` values. With ``s = 2**(bits-1) - 1`` levels and the block's largest magnitude ``m``, a value
``x`` becomes ``sign(x) · m · ξ/s`` where ``ξ`` is ``s|x|/m`` rounded up or down at random, so that its expectation is ``x``:
unbiased. On the wire: one float32 per block and ``bits`` bits per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message
from hocket.compression.base import Context, Precision, State
from hocket.compression.bitpack import pack, packed_size_padded, unpack
from hocket.compression.kernels import block_kernels
from hocket.compression.tiles import decode_tiles, encode_tiles, times_blocks
from hocket.errors import HocketError, is_whole
from hocket.noise import uniform


@dataclass(frozen=True)
class QSGD(Precision):
    """``qsgd(bits, block=512)``: each value rounded at random to one of the levels of its block."""

    bits: int = 4
    block: int = 512
    name: ClassVar[str] = "qsgd"
    biased: ClassVar[bool] = False
    paper: ClassVar[str] = "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NeurIPS 2017"

    def __post_init__(self) -> None:
        if not is_whole(self.bits, 2, 8):
            raise HocketError(f"qsgd({self.bits!r}): bits must be a whole number from 2 to 8 (for one bit use sign).")
        if not is_whole(self.block, 8):
            raise HocketError(f"qsgd(block={self.block!r}): the block must be a whole number of at least 8 values, such as 512.")

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        if kernels := block_kernels(rows, rows.shape[1], self.block):
            return Message(kernels.qsgd(rows, keys, self.bits, self.block)), state
        return Message(encode_tiles(rows, 8 * self.block, lambda columns, first: self._encode(columns, keys, first))), state

    def _encode(self, rows: Tensor, keys: Tensor, first: int) -> tuple[Tensor, ...]:
        levels = 2 ** (self.bits - 1) - 1
        size = rows.shape[1]
        block = min(self.block, max(size, 1))
        blocks = (pad(rows, (0, -size % block)) if size % block else rows).unflatten(1, (-1, block))
        norms = blocks.abs().amax(2)
        # Divide first: levels / norm overflows for the smallest norms.
        scaled = (blocks / norms.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).mul_(levels)
        rounded = uniform(keys, size, first).add_(scaled.flatten(1)[:, :size]).floor_()
        return norms, pack(rounded.clamp_(-levels, levels).add_(levels).to(torch.uint8), self.bits)

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        levels = 2 ** (self.bits - 1) - 1
        norms, packed = message.parts
        if kernels := block_kernels(packed, size, self.block):
            return kernels.qsgd_decode(norms, packed, size, self.bits, self.block)
        block, scale = min(self.block, max(size, 1)), norms / levels

        def decode(first: int, end: int) -> Tensor:
            own = packed[:, first * self.bits // 8 : packed_size_padded(end, self.bits)]
            codes = unpack(own, self.bits, end - first).to(torch.float32).sub_(levels)
            return times_blocks(codes, scale[:, first // block : -(-end // block)], block)

        return decode_tiles(packed, size, 8 * block, decode)

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([-(-counts // self.block), packed_size_padded(counts, self.bits)], 1)
