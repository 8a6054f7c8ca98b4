"""Models for images: a wide perceptron, a small convolutional network, ResNet-20 and VGG-11.

- ``mlp``: flatten, then fully connected layers with ReLU between them (Rumelhart, Hinton and Williams, "Learning representations by
  back-propagating errors", 1986). Many parameters for little computation: for 3×32×32 images 3072-1024-1024-10 has 4,206,602.
- ``cnn``: conv 3→32, pool, conv 32→64, pool, 4096→128→10, ReLU; convolutions 3×3. After LeNet (LeCun, Bottou, Bengio and Haffner,
  "Gradient-based learning applied to document recognition", 1998). 545,098 parameters for 3×32×32 images and 10 classes; the first
  layers follow the image's channels and size.
- ``resnet20``: three stages of three residual blocks with 16, 32, 64 channels, BatchNorm, global average (He, Zhang, Ren and Sun,
  "Deep Residual Learning for Image Recognition", 2016, section 4.2): where the shape changes, the shortcut takes every second pixel
  and fills the new channels with zeros (option A), so it has no parameters. 269,722 parameters for 10 classes. Under ``vmap`` each
  worker needs running statistics of its own (stack the buffers too): BatchNorm writes them.
- ``vgg11``: eight 3×3 convolutions, five poolings, one linear head 512→classes (Simonyan and Zisserman, "Very Deep Convolutional
  Networks for Large-Scale Image Recognition", 2015, configuration A, with the head that is usual for CIFAR instead of its three
  large layers). 9,225,610 parameters for 10 classes, 9,231,114 with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (1024, 1024)) -> nn.Sequential:
    """A perceptron for inputs of any shape with ``inputs`` values each.

    >>> sum(p.numel() for p in mlp(3072, 10).parameters())
    4206602
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))


def cnn(shape: Sequence[int], classes: int) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width), at least 4×4.

    >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
    545098
    """
    channels, height, width = shape
    if min(height, width) < 4:
        raise HocketError(f"cnn pools twice and needs images of at least 4×4; got {height}×{width}: use mlp.")
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    features = 64 * (height // 4) * (width // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, classes))


def resnet20(shape: Sequence[int], classes: int) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width) of any size.

    >>> sum(p.numel() for p in resnet20((3, 32, 32), 10).parameters())
    269722
    """
    stages = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(stages)]
    return _initialised(ResNet(_conv(shape[0], 16), nn.BatchNorm2d(16), nn.ReLU(), *blocks, Average(), nn.Linear(64, classes)))


_POOL = 0
_VGG = (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL)


def vgg11(shape: Sequence[int], classes: int, batch_norm: bool = False) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width), 32×32 to 63×63.

    >>> sum(p.numel() for p in vgg11((3, 32, 32), 10).parameters())
    9225610
    """
    before, height, width = shape
    if not (32 <= height < 64 and 32 <= width < 64):
        raise HocketError(f"vgg11 pools five times and needs images of 32×32 to 63×63; got {height}×{width}: use cnn or resnet20.")
    layers: list[nn.Module] = []
    for after in _VGG:
        if after == _POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if batch_norm else []), nn.ReLU()]
        before = after
    return _initialised(VGG(*layers, nn.Flatten(), nn.Linear(512, classes)))


def _initialised(model: ResNet | VGG) -> nn.Sequential:
    for name, weight in model.named_parameters():
        model.init_parameter(name, weight)
    return model


class ResNet(nn.Sequential):
    """The layers of :func:`resnet20`."""

    def init_parameter(self, name: str, weight: Tensor) -> bool:
        """Fill the weight of a convolution; whether it was one."""
        if weight.dim() == 4:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
        return weight.dim() == 4


class VGG(nn.Sequential):
    """The layers of :func:`vgg11`."""

    def init_parameter(self, name: str, weight: Tensor) -> bool:
        """Fill what belongs to a convolution; whether it did."""
        if not isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Conv2d):
            return False
        # Keeps the forward signal through eight layers: torch's own start lets it, and the gradient, shrink about a thousandfold.
        if weight.dim() == 4:
            nn.init.kaiming_normal_(weight, mode="fan_in", nonlinearity="relu")
        else:
            nn.init.zeros_(weight)
        return True


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
