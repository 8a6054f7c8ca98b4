"""A user's data set as tensors in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hocket.data.base import DataSet, Pair, identity, normalise_by
from hocket.errors import HocketError


def as_tensors(dataset: Any) -> Pair:
    """Inputs and targets of a pair ``(x, y)``, a ``TensorDataset`` or any map-style data set of ``(tensor, label)``.

    >>> x, y = as_tensors([(torch.zeros(3), 1), (torch.ones(3), 0)])
    >>> x.shape, y
    (torch.Size([2, 3]), tensor([1, 0]))
    """
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if isinstance(dataset, tuple):
        if len(dataset) != 2:
            raise HocketError(
                f"A data set is a pair of tensors (inputs, targets); got {len(dataset)} parts: give exactly these two."
            )
        return torch.as_tensor(dataset[0]), torch.as_tensor(dataset[1])
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise HocketError(
            f"A data set needs a length and numbered examples to be distributed; got {type(dataset).__name__}: "
            "give a map-style data set or a pair of tensors (inputs, targets)."
        )
    if not len(dataset):
        raise HocketError("A data set needs at least one example; got an empty one: check the path or the filter it was made with.")
    examples = [_example(dataset[i], i) for i in range(len(dataset))]
    try:
        return torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples])
    except RuntimeError as error:
        raise HocketError(f"Examples of a data set need equal shapes ({error}): crop or pad them to one.") from None


def from_parts(name: str, train: Any, test: Any) -> DataSet:
    """A ``DataSet`` of two parts that ``as_tensors`` can read; uint8 images are normalised by their own mean and deviation."""
    pairs = as_tensors(train), as_tensors(test)
    (inputs, targets), (_, test_targets) = pairs
    images = inputs.dtype == torch.uint8 and inputs.dim() == 4
    classes = max(_classes(name, targets), _classes(name, test_targets))
    return DataSet(name, *pairs, classes, normalise_by(inputs) if images else identity)


def _example(item: Any, index: int) -> tuple[Tensor, Tensor]:
    try:
        x, y = item
        return torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        kinds = [type(part).__name__ for part in (item if isinstance(item, tuple) else [item])]
        got = f"({', '.join(kinds)})" if isinstance(item, tuple) else kinds[0]
        raise HocketError(
            f"Example {index} of a data set must be (tensor, label); got {got}: convert it in the set's transform."
        ) from None


def _classes(name: str, targets: Tensor) -> int:
    """Integer targets are class numbers, float ones ``[n, classes]`` are shares of classes."""
    if not targets.is_floating_point():
        return int(targets.max()) + 1
    if targets.dim() == 2:
        return targets.shape[1]
    raise HocketError(
        f"Data set '{name}' has float targets of shape {list(targets.shape)}, from which no number of classes follows: "
        "return a hocket.data.DataSet that states it."
    )
