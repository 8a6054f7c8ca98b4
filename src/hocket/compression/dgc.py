"""Deep gradient compression: top-k with momentum correction (Lin 2018, arXiv:1712.01887).

*Momentum correction*: each worker accumulates ``u ← m·u + g`` and ``v ← v + u`` and sends the largest of ``v``. *Factor masking*:
where a value was sent, ``u`` and ``v`` start again from zero. *Local clipping*: with ``clip=c`` a worker's gradient is clipped to
norm ``c/√N`` before it is accumulated. *Warm-up*: over the first ``warmup`` exchanges the density falls from 25 over 6.25, 1.56
and 0.39 % to its final value. This method applies the momentum, so the optimiser's own must be zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hocket.compression.base import Codec, Context, MeanChannel, Mixed, MomentumCompressor, State, check_density, check_indices
from hocket.compression.chain import Chain
from hocket.compression.topk import TopK
from hocket.errors import HocketError, is_number, is_whole

_STAGES = 4


@dataclass(frozen=True)
class DGC(MomentumCompressor):
    """``dgc(density, warmup=0, momentum=0.9, clip=None)``; ``indices=rice`` sends the indices in Rice's code."""

    density: float = 0.001
    warmup: int = 0
    momentum: float = 0.9
    clip: float | None = None
    indices: str | None = None
    name: ClassVar[str] = "dgc"
    sums: ClassVar[tuple[str, ...]] = ("v", "u")
    paper: ClassVar[str] = (
        "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, ICLR 2018"
    )

    def __post_init__(self) -> None:
        check_density(self.density, "dgc")
        check_indices(self.indices, "dgc")
        if not is_whole(self.warmup, 0):
            raise HocketError(f"dgc(warmup={self.warmup!r}): the warm-up is a whole number of exchanges, 0 for none.")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise HocketError(f"dgc(momentum={self.momentum!r}): the momentum must lie in [0, 1), such as 0.9.")
        if self.clip is not None and (not is_number(self.clip) or not 0 < self.clip < math.inf):
            raise HocketError(f"dgc(clip={self.clip!r}): the clipping norm must be above 0 and finite, or None for no clipping.")

    @property
    def global_selection(self) -> bool:
        return True

    def density_at(self, exchange: int) -> float:
        """The density at an exchange (they count from 0).

        >>> [DGC(0.001, warmup=8).density_at(e) for e in (0, 2, 4, 6, 8)]
        [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
        """
        if exchange >= self.warmup:
            return self.density
        return max(self.density, 0.25 ** (1 + exchange * _STAGES // self.warmup))

    def sends_per_value(self, exchanges: int) -> float | None:
        warm = min(self.warmup, exchanges)
        return sum(map(self.density_at, range(warm))) + self.density * (exchanges - warm)

    def mean(self, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
        gradient = rows if self.clip is None else _clipped(rows, self.clip / math.sqrt(max(context.world, 1)))
        u = gradient if "u" not in state else state["u"] * self.momentum + gradient
        v = u.clone() if "v" not in state else state["v"] + u
        top = TopK(self.density_at(context.exchange), indices=self.indices)
        codec: Codec = top if self.precision is None else Chain(top, self.precision)
        mixed, sent, inner = channel.coded(codec, v, state.get("inner", {}), context)
        return Mixed(mixed, sent, {"u": u * (sent == 0), "v": v - sent, "inner": inner})


def _clipped(rows: Tensor, norm: float) -> Tensor:
    return rows * (norm / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
