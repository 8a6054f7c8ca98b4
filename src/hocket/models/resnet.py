"""ResNet-20 for small images: three stages of three residual blocks with 16, 32, 64 channels, BatchNorm, global average.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016, section 4.2: where the shape changes, the shortcut
takes every second pixel and fills the new channels with zeros (option A), so it has no parameters. 269,722 parameters in all for
10 classes.

Under ``vmap`` each worker needs running statistics of its own (stack the buffers too): BatchNorm writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


def resnet20(shape: Sequence[int], classes: int) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width) of any size.

    >>> sum(p.numel() for p in resnet20((3, 32, 32), 10).parameters())
    269722
    """
    stages = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(stages)]
    model = ResNet(_conv(shape[0], 16), nn.BatchNorm2d(16), nn.ReLU(), *blocks, Average(), nn.Linear(64, classes))
    for name, weight in model.named_parameters():
        model.init_parameter(name, weight)
    return model


class ResNet(nn.Sequential):
    """Layers one after another, and how their convolutions start."""

    def init_parameter(self, name: str, weight: Tensor) -> bool:
        """Fill the weight of a convolution; whether it was one."""
        if weight.dim() == 4:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
        return weight.dim() == 4


class Block(nn.Module):
    """``relu(x + f(x))`` with two 3×3 convolutions in ``f``; more channels also mean half the resolution."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.new = (1, 0) if before == after else (2, after - before)
        self.conv1, self.norm1 = _conv(before, after, self.stride), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = _conv(after, after), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if not self.new:
            return x
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


class Average(nn.Module):
    """The mean over all pixels of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
