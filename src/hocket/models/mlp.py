"""The wide multilayer perceptron: flatten, then fully connected layers with ReLU between them (Rumelhart, Hinton and Williams,
"Learning representations by back-propagating errors", 1986).

Many parameters for little computation: for 3×32×32 images 3072-1024-1024-10 has 4,206,602 parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (1024, 1024)) -> nn.Sequential:
    """A perceptron for inputs of any shape with ``inputs`` values each.

    >>> sum(p.numel() for p in mlp(3072, 10).parameters())
    4206602
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise((inputs, *hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))
