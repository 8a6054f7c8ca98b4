"""A data set in memory: raw inputs, and the functions that turn a batch of them into what a model reads.

Images stay uint8 ``[n, C, H, W]``, texts int64 or, byte by byte, uint8 ``[n, T]``, so that a whole set fits beside the model on any
device; ``prepare`` normalises a batch after ``augment`` (if any) has changed it. Both work on any device and keep leading axes, so
that one call serves all workers hosted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hocket import noise
from hocket.errors import HocketError

Pair = tuple[Tensor, Tensor]
Index = Tensor | list[Tensor]


class Order(Protocol):
    """An order of the samples of every epoch that suits where they lie."""

    def dealt(self, start: int, stop: int) -> np.ndarray:
        """The samples at positions ``start`` to ``stop``, counted through all epochs, in the order in which workers take them."""
        ...


class Samples(Protocol):
    """Training samples by number."""

    @property
    def device(self) -> torch.device:
        """Where the numbers of samples are looked up."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor) -> Pair:
        """Inputs and targets, with the leading axes of ``index``."""
        ...

    def on(self, device: torch.device) -> Samples:
        """The same, given out on ``device``."""
        ...

    def batches(self, indices: Iterable[Index]) -> Iterator[Pair | list[Pair]]:
        """The samples of each index in turn, of a list one pair per tensor; they may be read ahead."""
        ...

    def order(self, seed: int) -> Order | None:
        """The order to take them in; None: any."""
        ...

    def labels(self) -> Tensor | None:
        """The class of every sample; None where there are none."""
        ...

    def figures(self) -> dict[str, float]:
        """What reading took since the last call; nothing of what lies in memory."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Samples that are tensors."""

    pair: Pair

    @property
    def device(self) -> torch.device:
        return self.pair[0].device

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: Tensor) -> Pair:
        index = index.to(self.device)
        return self.pair[0][index], self.pair[1][index]

    def on(self, device: torch.device) -> InMemory:
        return InMemory((self.pair[0].to(device), self.pair[1].to(device)))

    def batches(self, indices: Iterable[Index]) -> Iterator[Pair | list[Pair]]:
        return (self[index] if isinstance(index, Tensor) else [self[i] for i in index] for index in indices)

    def order(self, seed: int) -> Order | None:
        return None

    def labels(self) -> Tensor | None:
        targets = self.pair[1]
        return targets.cpu() if targets.dim() == 1 and not targets.is_floating_point() else None

    def figures(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test examples with the functions that prepare them for a model.

    ``prepare(x)`` takes ``[..., *shape]`` raw inputs to what the model reads. ``augment(x, keys)`` takes ``[rows, B, *shape]`` raw
    inputs and one int64 key per row to changed raw inputs; row ``r`` depends on ``x[r]`` and ``keys[r]`` alone.

    >>> pair = torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 3
    >>> data = DataSet("mine", pair, pair, classes=3, prepare=Normalise((0.5,), (0.25,)))
    >>> data.shape, data.example.shape, data.text
    ((1, 8, 8), torch.Size([1, 1, 8, 8]), False)
    """

    name: str
    train: Pair
    test: Pair | None
    """None: nothing is evaluated."""
    classes: int
    prepare: Callable[[Tensor], Tensor]
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    source: Samples | None = None
    """Where training samples are read from if they are too many for memory; ``train`` then holds the first of them."""

    def __post_init__(self) -> None:
        for part, pair in (("train", self.train), ("test", self.test)):
            if pair is None:
                continue
            inputs, targets = pair
            if len(inputs) != len(targets) or not len(inputs):
                raise HocketError(
                    f"The {part} part of data set '{self.name}' needs as many targets as inputs, and at least one of each; "
                    f"got {len(inputs)} inputs and {len(targets)} targets: correct the pair of tensors."
                )

    @property
    def samples(self) -> Samples:
        """All training samples."""
        return InMemory(self.train) if self.source is None else self.source

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one raw input: ``(C, H, W)`` of an image, ``(T,)`` of a text."""
        return tuple(self.train[0].shape[1:])

    @property
    def text(self) -> bool:
        """Whether inputs are tokens (int64 for the model) rather than values."""
        return self.prepare(self.train[0][:1]).dtype == torch.int64

    @property
    def language(self) -> bool:
        """Whether a model is to predict a token at every position, so that its perplexity says more than its accuracy."""
        return self.text and not self.train[1].is_floating_point() and self.train[1].shape == self.train[0].shape

    @property
    def example(self) -> Tensor:
        """A batch of one training input as the model reads it."""
        return self.prepare(self.train[0][:1])


def identity(x: Tensor) -> Tensor:
    """The ``prepare`` of inputs that need no preparation."""
    return x


@dataclass(frozen=True)
class Normalise:
    """``(x / scale − mean_c) / std_c`` per channel ``c`` as float32, for ``x`` of shape ``[..., C, H, W]``.

    >>> Normalise((0.5,), (0.25,))(torch.full((2, 3, 1, 1, 1), 255, dtype=torch.uint8)).unique()
    tensor([2.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0

    def __call__(self, x: Tensor) -> Tensor:
        shift = _channels(tuple(m * self.scale for m in self.mean), x.device)
        factor = _channels(tuple(1.0 / (s * self.scale) for s in self.std), x.device)
        return x.to(torch.float32).sub(shift).mul(factor)


# Cached because a copy to the device in every step would stall its queue.
@lru_cache(maxsize=64)
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def normalise_by(x: Tensor) -> Normalise:
    """The ``Normalise`` that gives the uint8 images ``x`` of shape ``[n, C, H, W]`` mean 0 and deviation 1 in every channel."""
    values = x.to(torch.float64).transpose(0, 1).flatten(1).div(255.0)
    std = values.std(1).clamp(min=1 / 255)
    return Normalise(tuple(values.mean(1).tolist()), tuple(std.tolist()))


@dataclass(frozen=True)
class CropFlip:
    """Random crop out of the image padded with zeros by ``pad``, then a horizontal flip for every other image.

    Sample ``b`` of row ``r`` uses numbers ``3b … 3b+2`` of ``noise.uniform`` under ``keys[r]``: the same on any device, in any
    process, and for any size of the batch.

    >>> x = torch.ones(2, 5, 3, 8, 8, dtype=torch.uint8)
    >>> CropFlip()(x, torch.tensor([1, 2])).shape
    torch.Size([2, 5, 3, 8, 8])
    """

    pad: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        rows, batch, channels, height, width = x.shape
        draws = noise.uniform(keys.to(x.device), 3 * batch).view(rows * batch, 3)
        offsets = (draws[:, :2] * (2 * self.pad + 1)).long().clamp(max=2 * self.pad)
        across = torch.arange(width, device=x.device).expand(rows * batch, width)
        if self.flip:
            across = torch.where(draws[:, 2:] < 0.5, across.flip(1), across)
        down = offsets[:, :1] + torch.arange(height, device=x.device)
        across = offsets[:, 1:] + across
        # Two gathers with expanded indices: no index tensor of the size of the images is ever made.
        out = F.pad(x.flatten(0, 1), [self.pad] * 4)
        out = out.gather(2, down[:, None, :, None].expand(-1, channels, -1, width + 2 * self.pad))
        out = out.gather(3, across[:, None, None, :].expand(-1, channels, height, -1))
        return out.view(x.shape)
