"""Damped: a decoded value times the factor that brings it nearest to the original.

``τ = ⟨C(x), x⟩ / ‖C(x)‖²`` travels with the message, so that ``‖τC(x) − x‖ ≤ ‖x‖`` for every codec. Unbiased codecs can be
further from ``x`` than 0 is (ternary on many values is), and public copies that add such messages up grow without bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Codec, Context, State


@dataclass(frozen=True)
class Damped(Codec):
    """``base`` with one more value per message, the factor."""

    base: Codec

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        message, state = self.base.encode(rows, keys, state, context)
        decoded = self.base.decode(message, rows.shape[1], context)
        # Relative to the row's largest code: squares of very small or large values leave float32's range.
        peak = decoded.abs().amax(1, keepdim=True)
        peak = torch.where(peak > 0, peak, 1.0)
        unit = decoded / peak
        factor = (unit * rows).sum(1, keepdim=True) / peak / (unit * unit).sum(1, keepdim=True).clamp(min=1.0)
        lengths = None if message.lengths is None else torch.cat([message.lengths, torch.ones_like(message.lengths[:, :1])], 1)
        return Message((*message.parts, factor), lengths), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        lengths = None if message.lengths is None else message.lengths[:, :-1]
        return self.base.decode(Message(message.parts[:-1], lengths), size, context) * message.parts[-1]
