"""Inputs of several tensors, a dict or a sequence, as one: a sample is a row of bytes, which :class:`Unpacking` reads again.

So everything that deals out, stacks and sends samples sees one tensor ``[samples, bytes]``. A dict becomes keyword arguments of the
model, a sequence its positional ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hocket.data.base import Pair
from hocket.data.tensors import as_tensors
from hocket.errors import HocketError

LABELS = "labels"
Inputs = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Field:
    """One tensor of a sample; ``name`` is None in a sequence."""

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.shape) * self.dtype.itemsize


def is_several(inputs: Any) -> bool:
    """Whether inputs are a dict, or a sequence of tensors that are not all single numbers.

    >>> is_several({"x": torch.zeros(2)}), is_several((torch.zeros(2), torch.zeros(2, 3))), is_several([1, 2])
    (True, True, False)
    """
    if isinstance(inputs, Mapping):
        return True
    sequence = isinstance(inputs, (tuple, list)) and all(isinstance(t, Tensor) for t in inputs)
    return sequence and any(t.dim() for t in inputs)


def as_packed(dataset: Any) -> tuple[Pair, tuple[Field, ...] | None]:
    """What :func:`as_tensors` gives, and the fields where inputs are several tensors.

    Such inputs are those of a pair ``(inputs, targets)``, or those of the examples of a map-style data set: ``(inputs, label)``, or
    one dict with ``labels``, as Hugging Face data sets have them.

    >>> (packed, y), fields = as_packed([{"ids": torch.tensor([1, 2]), "labels": 0}, {"ids": torch.tensor([3, 4]), "labels": 1}])
    >>> unpack(packed, fields), y
    ([tensor([[1, 2],
            [3, 4]])], tensor([0, 1]))
    """
    if isinstance(dataset, tuple) and len(dataset) == 2 and is_several(dataset[0]):
        packed, fields = pack(dataset[0])
        return (packed, torch.as_tensor(dataset[1])), fields
    if isinstance(dataset, (tuple, TensorDataset)) or not hasattr(dataset, "__getitem__") or not getattr(dataset, "__len__", int)():
        return as_tensors(dataset), None
    first = dataset[0]
    one_dict = isinstance(first, Mapping)
    if not one_dict and not (isinstance(first, (tuple, list)) and len(first) == 2 and is_several(first[0])):
        return as_tensors(dataset), None
    if one_dict and LABELS not in first:
        raise HocketError(f"An example that is a dict needs its target as {LABELS!r}; got {', '.join(map(str, first))}: add it.")
    examples = [dataset[i] for i in range(len(dataset))]
    inputs = [{k: v for k, v in e.items() if k != LABELS} if one_dict else e[0] for e in examples]
    targets = as_tensors([(0, e[LABELS] if one_dict else e[1]) for e in examples])[1]
    try:
        if isinstance(inputs[0], Mapping):
            packed, fields = pack({name: torch.stack([torch.as_tensor(e[name]) for e in inputs]) for name in inputs[0]})
        else:
            packed, fields = pack([torch.stack(column) for column in zip(*inputs, strict=True)])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise HocketError(f"Examples of a data set need equal fields and shapes ({error}): crop or pad them to one.") from None
    return (packed, targets), fields


def pack(inputs: Inputs) -> tuple[Tensor, tuple[Field, ...]]:
    """All tensors ``[samples, …]`` as bytes ``[samples, bytes]``, and how to read them.

    >>> packed, fields = pack({"ids": torch.tensor([[1, 2], [3, 4]]), "mask": torch.ones(2, 1, dtype=torch.bool)})
    >>> packed.shape, [field.name for field in fields]
    (torch.Size([2, 17]), ['ids', 'mask'])
    """
    named = inputs.items() if isinstance(inputs, Mapping) else ((None, t) for t in inputs)
    parts = [(name, torch.as_tensor(value)) for name, value in named]
    counts = {len(t) if t.dim() else 0 for _, t in parts}
    if len(counts) != 1 or counts == {0}:
        raise HocketError(f"The tensors of the inputs need as many samples each; got {sorted(counts)}: give tensors [samples, …].")
    fields = tuple(Field(name, t.dtype, tuple(t.shape[1:])) for name, t in parts)
    return torch.cat([t.reshape(len(t), -1).contiguous().view(torch.uint8) for _, t in parts], 1), fields


def unpack(packed: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """The tensors of ``[batch, bytes]``."""
    pieces = packed.split([f.nbytes for f in fields], 1)
    return [_Reinterpret.apply(p, f.dtype).view(len(packed), *f.shape) for p, f in zip(pieces, fields, strict=True)]


class _Reinterpret(torch.autograd.Function):
    """Bytes read as values of another type; under ``vmap`` too, for which ``Tensor.view(dtype)`` has no rule in PyTorch 2.11."""

    @staticmethod
    def forward(raw: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(raw, memory_format=torch.contiguous_format).copy_(raw).view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Bytes have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], raw: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return _Reinterpret.apply(raw.movedim(in_dims[0], 0), dtype), 0


class Unpacking(nn.Module):
    """A model that is called with the tensors of a packed batch."""

    def __init__(self, model: nn.Module, fields: Sequence[Field]) -> None:
        super().__init__()
        self.model, self.fields = model, tuple(fields)

    def named(self, packed: Tensor) -> dict[str, Tensor] | list[Tensor]:
        """The tensors of a batch as they were given."""
        tensors = unpack(packed, self.fields)
        names = [f.name for f in self.fields if f.name is not None]
        return dict(zip(names, tensors, strict=True)) if names else tensors

    def forward(self, packed: Tensor) -> Any:
        inputs = self.named(packed)
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
