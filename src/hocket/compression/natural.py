"""Natural compression: stochastic rounding to powers of two, unbiased (Horváth 2019, arXiv:1905.10988).

A value between two powers of two goes to the upper one with the probability that keeps its expectation. Nine bits: the sign
and the eight exponent bits of float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Context, Precision, State
from hocket.compression.bitpack import pack, unpack
from hocket.compression.kernels import elementwise_kernels
from hocket.compression.tiles import decode_tiles, encode_tiles
from hocket.noise import bits


@dataclass(frozen=True)
class Natural(Precision):
    """``natural``: each value rounded at random to a power of two."""

    name: ClassVar[str] = "natural"
    biased: ClassVar[bool] = False
    paper: ClassVar[str] = "Horváth et al., Natural Compression for Distributed Deep Learning, MSML 2022"

    @property
    def contracts(self) -> bool:
        return True  # unbiased, and yet no value changes by more than its magnitude

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        if kernels := elementwise_kernels(rows, rows.shape[1]):
            return Message(kernels.natural(rows, keys)), state
        return Message(encode_tiles(rows, 8, lambda columns, first: self._encode(columns, keys, first))), state

    def _encode(self, rows: Tensor, keys: Tensor, first: int) -> tuple[Tensor, ...]:
        # The mantissa is the distance to the power below, so adding 23 random bits to it carries with the right probability.
        # Zeros and denormal numbers have no power below: they are sent as zero (exponent 0).
        raw = rows.contiguous().view(torch.int32)
        carried = bits(keys, rows.shape[1], first).bitwise_and_(0x7FFFFF).add_(raw & 0x7FFFFFFF)
        exponent = torch.where((raw & 0x7F800000) == 0, 0, carried.bitwise_right_shift_(23).clamp_(max=254))
        return exponent.to(torch.uint8), pack((rows < 0).view(torch.uint8), 1)

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        exponent, signs = message.parts
        if kernels := elementwise_kernels(signs, size):
            return kernels.natural_decode(exponent, signs, size)

        def decode(first: int, end: int) -> Tensor:
            raw = exponent[:, first:end].to(torch.int32).bitwise_left_shift_(23)
            raw |= unpack(signs[:, first // 8 : -(-end // 8)], 1, end - first).to(torch.int32).bitwise_left_shift_(31)
            return raw.view(torch.float32)

        return decode_tiles(exponent, size, 8, decode)

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([counts, -(-counts // 8)], 1)
