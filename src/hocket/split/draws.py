"""Dropout whose mask is a hash of a value's position, independent of the process that computes it.

``keep = hash(seed, step, replica, layer, call, sample, place in the sample's whole activation) ≥ p``. A micro-batch, a slice of
columns or of heads draws what the whole model on one process would draw there, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from zlib import crc32

import torch
from torch import Tensor, nn

from hocket.noise import bits_at, fold


@dataclass
class Draws:
    """The position of the next draws: set ``step`` and ``first_sample`` before each forward pass of a mini-batch or micro-batch.

    A layer that is called twice draws other values the second time; ``begin`` repeats a pass from its beginning.
    """

    seed: int = 0
    step: int = 0
    replica: int = 0
    first_sample: int = 0
    """The first sample of this micro-batch in the replica's mini-batch."""
    _calls: dict[str, int] = field(default_factory=dict, repr=False)
    _now: tuple[int, ...] = ()

    def begin(self, step: int, first_sample: int = 0, replica: int | None = None) -> None:
        """Draw for these samples of this step from now on, from the first call of each layer."""
        self.step, self.first_sample = step, first_sample
        self.replica = self.replica if replica is None else replica
        self._now = ()

    def keys(self, layer: str, samples: int, device: torch.device) -> Tensor:
        """One key for each sample, for the next call of a layer."""
        now = (self.seed, self.step, self.replica, self.first_sample)
        if now != self._now:
            self._calls.clear()
            self._now = now
        call = self._calls[layer] = self._calls.get(layer, -1) + 1
        common = fold(self.seed, self.step, self.replica, crc32(layer.encode()), call, 0xD409)
        index = torch.arange(self.first_sample, self.first_sample + samples, dtype=torch.int32, device=device)
        return bits_at(torch.tensor([common], device=device), index)[0]


class Dropout(nn.Module):
    """``nn.Dropout`` (with ``channels``: ``nn.Dropout1d`` to ``3d``) that draws from ``Draws``."""

    whole = True

    def __init__(
        self,
        p: float,
        layer: str,
        draws: Draws,
        dim: int = -1,
        samples: int = 0,
        channels: bool = False,
        lies: tuple[int, int] = (0, 1),
    ) -> None:
        """``samples`` is the dimension that counts samples, ``dim`` the one along which an activation may be split; ``lies`` is
        this process's slice along it: its number, and how many there are."""
        super().__init__()
        self.p, self.layer, self.draws, self.dim, self.samples, self.channels = p, layer, draws, dim, samples, channels
        self.lies = lies

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if self.channels else [*x.shape]
        keys = self.draws.keys(self.layer, shape[self.samples], x.device)
        drawn = (bits_at(keys, self._places(shape, x.device)) >> 8) & 0xFFFFFF
        kept = (drawn >= round(self.p * 2**24)).to(x.dtype).div_(max(1 - self.p, 1e-9))
        rest = [n for k, n in enumerate(shape) if k != self.samples]
        return x * kept.view(shape[self.samples], *rest).movedim(0, self.samples)

    def _places(self, shape: list[int], device: torch.device) -> Tensor:
        """The positions of this process's values in one sample's whole activation."""
        place, size = self.lies
        dim, own = self.dim % len(shape), shape[self.dim]
        whole = [n * size if k == dim else n for k, n in enumerate(shape)]
        whole[self.samples] = 1
        index = torch.arange(prod(whole), dtype=torch.int32, device=device).view(whole)
        return (index if size == 1 else index.narrow(dim, place * own, own)).flatten()

    def extra_repr(self) -> str:
        return f"p={self.p}"
