"""VGG-11 for 32×32 images: eight 3×3 convolutions, five poolings, one linear head 512→classes.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, configuration A, with the head
that is usual for CIFAR instead of its three large layers. 9,225,610 parameters for 10 classes, 9,231,114 with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hocket.errors import HocketError

_POOL = 0
_LAYERS = (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL)


def vgg11(shape: Sequence[int], classes: int, batch_norm: bool = False) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width), 32×32 to 63×63.

    >>> sum(p.numel() for p in vgg11((3, 32, 32), 10).parameters())
    9225610
    """
    before, height, width = shape
    if not (32 <= height < 64 and 32 <= width < 64):
        raise HocketError(f"vgg11 pools five times and needs images of 32×32 to 63×63; got {height}×{width}: use cnn or resnet20.")
    layers: list[nn.Module] = []
    for after in _LAYERS:
        if after == _POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if batch_norm else []), nn.ReLU()]
        before = after
    model = VGG(*layers, nn.Flatten(), nn.Linear(512, classes))
    for name, weight in model.named_parameters():
        model.init_parameter(name, weight)
    return model


class VGG(nn.Sequential):
    """Layers one after another, and how their convolutions start."""

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
