"""The loss of a data set."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from hocket.data import DataSet
from hocket.errors import HocketError


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``[..., V]`` logits: one target for each image, or for each position of each text.

    Integer targets have the shape of the logits without its last axis; float targets, shares of classes, have its whole shape.

    >>> import torch
    >>> cross_entropy(torch.zeros(2, 7, 4), torch.zeros(2, 7, dtype=torch.int64))  # log 4
    tensor(1.3863)
    """
    shares = targets.is_floating_point()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(0, -2) if shares else targets.flatten())


def loss_for(dataset: DataSet) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss to train on ``dataset`` with: cross-entropy, since all its targets are classes."""
    targets = dataset.train[1]
    if targets.is_floating_point() and targets.dim() < 2:
        raise HocketError(
            f"Data set '{dataset.name}' has float targets, for which cross-entropy makes no sense: pass a loss of your own."
        )
    return cross_entropy
