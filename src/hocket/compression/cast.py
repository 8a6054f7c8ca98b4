"""Cast: every value in a shorter floating-point format.

fp16 and bf16 round to nearest (values beyond fp16's range are clamped to it). fp8 is e4m3 with one float32 scale per row, so that
the largest value becomes 448; its rounding error is large enough for error feedback to be on by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Context, Precision, State, flag
from hocket.errors import HocketError, nearest

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Cast(Precision):
    """``cast(fp16|bf16|fp8)``."""

    format: str = "fp16"
    feedback: bool | None = None
    name: ClassVar[str] = "cast"
    spelled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        flag(self.feedback, "cast", "feedback")
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise HocketError(
                f"cast({self.format}): unknown format{nearest(str(self.format), FORMATS) or '.'} Use fp16, bf16 or fp8."
            )

    @property
    def uses_error_feedback(self) -> bool:
        return self.format == "fp8" if self.feedback is None else self.feedback

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        dtype = FORMATS[self.format]
        limit = torch.finfo(dtype).max
        if self.format != "fp8":
            return Message((rows.clamp(-limit, limit).to(dtype),)), state
        scale = rows.abs().amax(1, keepdim=True).div_(limit).clamp_(min=torch.finfo(torch.float32).tiny)
        return Message((scale, (rows / scale).clamp_(-limit, limit).to(dtype).view(torch.uint8))), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        values = message.parts[-1][:, :size]
        if self.format != "fp8":
            return values.to(torch.float32)
        return values.contiguous().view(torch.float8_e4m3fn).to(torch.float32) * message.parts[0]

    def lengths(self, counts: Tensor) -> Tensor:
        return torch.stack([counts] if self.format != "fp8" else [torch.ones_like(counts), counts], 1)
