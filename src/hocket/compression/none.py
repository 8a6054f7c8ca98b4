"""No compression: rows travel as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hocket.compression.base import Compressor, Context, MeanChannel, Mixed, State


@dataclass(frozen=True)
class NoCompression(Compressor):
    """``none``: values as they are."""

    name: ClassVar[str] = "none"
    biased: ClassVar[bool] = False
    compresses: ClassVar[bool] = False

    @property
    def lossless(self) -> bool:
        return True

    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        return Mixed(channel.mean(rows, context), rows, state)
