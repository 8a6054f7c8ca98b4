"""The small convolutional network of the study: conv 3→32, pool, conv 32→64, pool, 4096→128→10, ReLU; convolutions 3×3.

After LeNet (LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998). For 3×32×32 images
and 10 classes it has 545,098 parameters; the first layers follow the image's channels and size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hocket.errors import HocketError


def cnn(shape: Sequence[int], classes: int) -> nn.Sequential:
    """The network for images of ``shape`` (channels, height, width), at least 4×4.

    >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
    545098
    """
    channels, height, width = shape
    if min(height, width) < 4:
        raise HocketError(f"cnn pools twice and needs images of at least 4×4; got {height}×{width}: use mlp.")
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
