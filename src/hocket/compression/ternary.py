"""TernGrad: every value becomes −m, 0 or +m, unbiased (Wen 2017, arXiv:1705.07878).

With ``m`` the row's largest magnitude, ``x`` becomes ``sign(x)·m`` with probability ``|x|/m`` and 0 otherwise. Five values share
a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Context, Precision, State, peaks
from hocket.compression.bitpack import pack_trits, unpack_trits
from hocket.compression.kernels import elementwise_kernels
from hocket.compression.tiles import decode_tiles, encode_tiles
from hocket.noise import uniform


@dataclass(frozen=True)
class Ternary(Precision):
    """``ternary``: each value rounded at random to −1, 0 or 1 times the largest magnitude."""

    name: ClassVar[str] = "ternary"
    biased: ClassVar[bool] = False
    paper: ClassVar[str] = (
        "Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017"
    )

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        scale = peaks(rows)
        if kernels := elementwise_kernels(rows, rows.shape[1]):
            return Message((scale, kernels.ternary(rows, keys, scale))), state

        def encode(columns: Tensor, first: int) -> tuple[Tensor, ...]:
            hit = uniform(keys, columns.shape[1], first).mul_(scale) < columns.abs()
            return (pack_trits(columns.sign().mul_(hit).add_(1).to(torch.uint8)),)

        return Message((scale, *encode_tiles(rows, 5, encode))), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        scale, packed = message.parts
        if kernels := elementwise_kernels(packed, size):
            return kernels.ternary_decode(scale, packed, size)
        return decode_tiles(
            packed,
            size,
            5,
            lambda first, end: (
                unpack_trits(packed[:, first // 5 : -(-end // 5)], end - first).to(torch.float32).sub_(1).mul_(scale)
            ),
        )

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(counts), -(-counts // 5)], 1)
