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
from hocket.compression.base import Context, Memory, Precision, flag
from hocket.compression.bitpack import pack, unpack


@dataclass(frozen=True)
class Sign(Precision):
    """``sign``, ``sign(vote=True)``."""

    vote: bool = False
    feedback: bool | None = None
    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019"

    def __post_init__(self) -> None:
        flag(self.vote, "sign", "vote", unset=False)
        flag(self.feedback, "sign", "feedback")

    @property
    def remembers(self) -> bool:
        return self.feedback is not False

    def consensus_step(self, size: int, context: Context) -> float:
        # One scale for all values: large differences are caught up with slowly, and 0.4 was seen to diverge on directed graphs.
        return 0.1

    def encode(self, rows: Tensor, keys: Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        return self.encode_some(rows, None, keys, context), memory

    def encode_some(self, rows: Tensor, counts: Tensor | None, keys: Tensor, context: Context) -> Message:
        # The mean over the real values alone: padding depends on who is hosted here.
        total = rows.abs().sum(1, keepdim=True)
        scale = total / (rows.shape[1] if counts is None else counts.clamp(min=1).unsqueeze(1))
        return Message((scale, pack((rows >= 0).to(torch.uint8), 1)))

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
