"""Cast: every value in a shorter floating-point format.

fp16 and bf16 round to nearest (values beyond fp16's range are clamped to it). fp8 is e4m3 with one float32 scale per row, so that
the largest value becomes 448. e3m0 has four bits, a sign and three bits of exponent, and one float32 scale per block of 512 values
(Streaming DiLoCo, Douillard 2025, arXiv:2501.18512): zero and the block's largest magnitude times 1, 1/2, …, 1/64. The rounding
errors of fp8 and e3m0 are large enough for error feedback to be on by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message, there
from hocket.compression.base import Context, Precision, State, check_feedback, peaks
from hocket.compression.bitpack import pack, unpack
from hocket.compression.kernels import block_kernels, elementwise_kernels
from hocket.compression.tiles import decode_tiles, encode_tiles, times_blocks
from hocket.errors import HocketError, nearest

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "e3m0": torch.uint8}
_BLOCK = 512
_E3M0 = torch.tensor([sign * power for sign in (1, -1) for power in (0.0, *(2.0**e for e in range(-6, 1)))], dtype=torch.float32)


@dataclass(frozen=True)
class Cast(Precision):
    """``cast(fp16|bf16|fp8|e3m0)``: each value in a smaller floating-point format."""

    format: str = "fp16"
    feedback: bool | float | str | None = None
    name: ClassVar[str] = "cast"
    spelled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_feedback(self.feedback, "cast")
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise HocketError(
                f"cast({self.format}): unknown format{nearest(str(self.format), FORMATS) or '.'} Use fp16, bf16, fp8 or e3m0."
            )

    @property
    def uses_error_feedback(self) -> bool:
        return self.format in ("fp8", "e3m0") if self.feedback is None else self.feedback is not False

    def encode(self, rows: Tensor, keys: Tensor, state: State, context: Context) -> tuple[Message, State]:
        if self.format == "e3m0":
            return Message(_encode_e3m0(rows)), state
        dtype = FORMATS[self.format]
        limit = torch.finfo(dtype).max
        kernels = elementwise_kernels(rows, rows.shape[1])
        if self.format != "fp8":
            return Message((kernels.cast(rows, None, dtype) if kernels else rows.clamp(-limit, limit).to(dtype),)), state
        scale = peaks(rows).div_(limit).clamp_(min=torch.finfo(torch.float32).tiny)
        if kernels:
            return Message((scale, kernels.cast(rows, scale, dtype).view(torch.uint8))), state
        fp8 = encode_tiles(rows, 8, lambda columns, _: ((columns / scale).clamp_(-limit, limit).to(dtype).view(torch.uint8),))
        return Message((scale, *fp8)), state

    def decode(self, message: Message, size: int, context: Context) -> Tensor:
        if self.format == "e3m0":
            return _decode_e3m0(message, size)
        scale, values = None, message.parts[-1][:, :size]
        if self.format == "fp8":
            scale, values = message.parts[0], values.contiguous().view(torch.float8_e4m3fn)
        if kernels := elementwise_kernels(values, size):
            return kernels.cast_decode(values, scale, size)
        return values.to(torch.float32) if scale is None else values.to(torch.float32) * scale

    def lengths(self, counts: Tensor) -> Tensor:
        if self.format == "e3m0":
            return torch.stack([-(-counts // _BLOCK), -(-counts // 2)], 1)
        return torch.stack([counts] if self.format != "fp8" else [torch.ones_like(counts), counts], 1)


def _encode_e3m0(rows: Tensor) -> tuple[Tensor, ...]:
    if kernels := block_kernels(rows, rows.shape[1], _BLOCK):
        return kernels.e3m0(rows, _BLOCK)
    return encode_tiles(rows, _BLOCK, lambda columns, _: _encode_e3m0_tile(columns))


def _encode_e3m0_tile(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = pad(rows.abs(), (0, -rows.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    scale = blocks.amax(2).clamp_(min=torch.finfo(torch.float32).tiny)
    unit = (blocks / scale.unsqueeze(2)).flatten(1)[:, : rows.shape[1]]
    mantissa, exponent = unit.frexp()  # the mantissa lies in [1/2, 1), and 3/4 is halfway to the next power
    codes = torch.where(unit > 2**-7, (exponent + (mantissa >= 0.75)).clamp(-5, 1) + 6, 0)
    return scale, pack((codes + 8 * (rows < 0)).to(torch.uint8), 4)


def _decode_e3m0(message: Message, size: int) -> Tensor:
    scale, packed = message.parts
    if kernels := block_kernels(packed, size, _BLOCK):
        return kernels.e3m0_decode(scale, packed, size, _BLOCK)
    levels = there(_E3M0, packed)

    def decode(first: int, end: int) -> Tensor:
        codes = unpack(packed[:, first // 2 : -(-end // 2)], 4, end - first).to(torch.int32)
        values = levels.index_select(0, codes.flatten()).view(codes.shape)
        return times_blocks(values, scale[:, first // _BLOCK : -(-end // _BLOCK)], _BLOCK)

    return decode_tiles(packed, size, _BLOCK, decode)
