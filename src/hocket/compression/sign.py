"""Sign: one bit per value and one scale per block (EF-signSGD, Karimireddy 2019, arXiv:1901.09847).

``C(x) = (‖x‖₁/n) · sign(x)`` on blocks of ``block`` values: the scale makes it a contraction, and error feedback makes it
converge. (One scale for a whole model would make steps of one size in all layers; the paper takes one per layer.) With
``vote=True`` the second phase of an all-reduce sends the majority's sign of each value (signSGD with majority vote, Bernstein
2018) with the mean scale. A tie, which an even number of workers may have, is decided by chance: a bit cannot say zero, and a fixed
sign would be a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message, ordered_mean
from hocket.compression.base import Context, Precision, State, check_feedback, flag
from hocket.compression.bitpack import pack, unpack
from hocket.compression.kernels import block_kernels
from hocket.compression.tiles import decode_tiles, encode_tiles, times_blocks
from hocket.errors import HocketError, is_whole
from hocket.noise import bits


@dataclass(frozen=True)
class Sign(Precision):
    """``sign``: the sign of each value and the mean magnitude of its block; ``sign(vote=True)``: the majority of signs."""

    vote: bool = False
    feedback: bool | float | str | None = None
    block: int = 512
    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019"

    def __post_init__(self) -> None:
        flag(self.vote, "sign", "vote")
        check_feedback(self.feedback, "sign")
        if self.vote and self.feedback == "ef21":
            raise HocketError(
                "sign(vote=True, feedback=ef21): EF21 adds up means, but a vote is not a mean; leave one of the two out."
            )
        if not is_whole(self.block, 8):
            raise HocketError(f"sign(block={self.block!r}): the block must be a whole number of at least 8 values, such as 512.")

    @property
    def uses_error_feedback(self) -> bool:
        return self.feedback is not False

    def consensus_step(self, size: int, context: Context) -> float:
        # One scale for many values makes large differences shrink slowly; γ = 0.4 diverged on directed graphs.
        return 0.1

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        return self.encode_some(rows, None, keys, context), state

    def encode_some(self, rows: Tensor, counts: Tensor | None, keys: Tensor, context: Context) -> Message:
        if kernels := block_kernels(rows, rows.shape[1], self.block):
            return Message(kernels.sign(rows, counts, self.block))
        # The mean over the real values alone: padding depends on which workers this process hosts.
        sums, packed = encode_tiles(
            rows, 8 * self.block, lambda columns, _: (self._blocks(columns.abs()).sum(2), pack((columns >= 0).view(torch.uint8), 1))
        )
        real = torch.full((rows.shape[0], 1), rows.shape[1], device=rows.device) if counts is None else counts.unsqueeze(1)
        starts = torch.arange(sums.shape[1], device=rows.device) * self.block
        return Message((sums / (real - starts).clamp(1, self.block), packed))

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        scale, packed = message.parts
        if kernels := block_kernels(packed, size, self.block):
            return kernels.sign_decode(scale, packed, size, self.block)

        def decode(first: int, end: int) -> Tensor:
            signs = unpack(packed[:, first // 8 : -(-end // 8)], 1, end - first).to(torch.float32).mul_(2).sub_(1)
            return times_blocks(signs, scale[:, first // self.block : -(-end // self.block)], self.block)

        return decode_tiles(packed, size, 8 * self.block, decode)

    def _blocks(self, rows: Tensor) -> Tensor:
        """Rows cut into blocks, ``[rows, blocks, block]``, the last one filled up with zeros."""
        over = -rows.shape[1] % self.block
        return (pad(rows, (0, over)) if over else rows).unflatten(1, (-1, self.block))

    def _spread(self, scale: Tensor, size: int) -> Tensor:
        """Each block's scale at each of its values."""
        return scale.repeat_interleave(self.block, 1)[:, :size]

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([-(-counts // self.block), -(-counts // 8)], 1)

    def combine(self, message: Message, senders: int, size: int, context: Context) -> Tensor:
        """The slice owner's result from ``senders`` messages per row: their mean or, with ``vote``, the majority."""
        if not self.vote:
            return ordered_mean(self.decode(message, size, context).view(-1, senders, size).transpose(0, 1))
        scale, packed = message.parts
        signs = unpack(packed, 1, size).to(torch.float32).mul_(2).sub_(1).view(-1, senders, size).sum(1)
        if senders % 2 == 0:
            chance = bits(context.keys(3, device=signs.device), size)  # of the slice's owner, so the same whoever hosts it
            signs = torch.where(signs == 0, chance, signs)
        return torch.where(signs >= 0, 1.0, -1.0) * self._spread(scale.view(-1, senders, scale.shape[1]).mean(1), size)
