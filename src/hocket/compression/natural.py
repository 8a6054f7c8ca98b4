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
from hocket.noise import bits


@dataclass(frozen=True)
class Natural(Precision):
    """``natural``."""

    name: ClassVar[str] = "natural"
    biased: ClassVar[bool] = False
    paper: ClassVar[str] = "Horváth et al., Natural Compression for Distributed Deep Learning, MSML 2022"

    @property
    def contracts(self) -> bool:
        return True  # unbiased, and yet no value changes by more than its magnitude

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        # The mantissa is the distance to the power below, so adding 23 random bits to it carries with the right probability.
        # Zeros and denormal numbers have no power below: they are sent as zero (exponent 0).
        raw = rows.contiguous().view(torch.int32)
        carried = (raw & 0x7FFFFFFF) + (bits(keys, rows.shape[1]) & 0x7FFFFF)
        exponent = torch.where((raw & 0x7F800000) == 0, 0, (carried >> 23).clamp_(max=254))
        return Message((exponent.to(torch.uint8), pack((rows < 0).to(torch.uint8), 1))), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        exponent, signs = message.parts
        magnitude = (exponent[:, :size].to(torch.int32) << 23).view(torch.float32)
        return torch.where(unpack(signs, 1, size).to(torch.bool), -magnitude, magnitude)

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([counts, -(-counts // 8)], 1)
