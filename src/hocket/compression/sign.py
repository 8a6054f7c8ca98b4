"""Sign: one bit per value and one scale per row (EF-signSGD, Karimireddy 2019, arXiv:1901.09847).

``C(x) = (‖x‖₁/n) · sign(x)``: the scale makes it a contraction, and error feedback makes it converge. With ``vote=True`` the second
phase of an all-reduce sends the majority's sign of each value (signSGD with majority vote, Bernstein 2018) with the mean scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message, ordered_mean
from hocket.compression.base import Context, Memory, Precision
from hocket.compression.bitpack import pack, unpack


@dataclass(frozen=True)
class Sign(Precision):
    """``sign``, ``sign(vote=True)``."""

    vote: bool = False
    feedback: bool | None = None
    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019"

    @property
    def remembers(self) -> bool:
        return self.feedback is not False

    def encode(self, rows: Tensor, keys: Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        scale = rows.abs().mean(1, keepdim=True)
        return Message((scale, pack((rows >= 0).to(torch.uint8), 1))), memory

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        scale, packed = message.parts
        return unpack(packed, 1, size).to(torch.float32).mul_(2).sub_(1).mul_(scale)

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(counts), -(-counts // 8)], 1)

    def combine(self, message: Message, senders: int, size: int, context: Context) -> Tensor:
        """What the owner of a slice makes of ``senders`` messages per row: their mean or, with ``vote``, the majority."""
        if not self.vote:
            return ordered_mean(self.decode(message, size, context).view(-1, senders, size).transpose(0, 1))
        scale, packed = message.parts
        signs = unpack(packed, 1, size).to(torch.float32).mul_(2).sub_(1).view(-1, senders, size).sum(1)
        return torch.where(signs >= 0, 1.0, -1.0) * scale.view(-1, senders, 1).mean(1)
