"""Buckets: the parameters of a model as flat rows.

A layout is a pure function of the parameters' names, shapes, dtypes, devices, groups and of a cap. It is recorded in run.json
and never rebuilt while training: top-k, QSGD and others work on buckets, so another cap gives another result.

Each bucket holds parameters of one group, dtype and device, in the reverse of their registration order (gradients become ready
in about that order), and is closed as soon as it holds ``cap`` bytes; the first one already at ``first_cap`` bytes, so that the
exchange can start early in the backward pass. Storage of a bucket is one contiguous tensor ``[rows, values]``.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.cluster.dtensor import local
from hocket.errors import HocketError

BUCKET_CAP_BYTES = 25 * 2**20
FIRST_BUCKET_CAP_BYTES = 2**20


@dataclass(frozen=True)
class Buckets:
    """Sizes of the buckets in which gradients and weights travel: closed at ``cap_bytes`` (25 MiB), the first one already at
    ``first_cap_bytes`` (1 MiB); methods that compare all values, such as top-k, have a single bucket unless sizes are given.

    >>> Buckets(cap_bytes=4 * 2**20)
    Buckets(cap_bytes=4194304, first_cap_bytes=None)
    """

    cap_bytes: int | None = None
    first_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise HocketError(f"Buckets({name}={value!r}): it must be a whole number of bytes of at least 1.")


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in its bucket."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group, dtype and device that travel together."""

    index: int
    group: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Values in one row."""
        return self.slots[-1].offset + self.slots[-1].size

    def empty(self, rows: int) -> Tensor:
        """Fresh zeroed storage ``[rows, values]``."""
        return torch.zeros(rows, self.size, dtype=self.dtype, device=self.device)

    def spaced(self, rows: int) -> Tensor:
        """The same, except that on a CPU every row starts at a multiple of 64 bytes, as a separate tensor does."""
        step = 64 // self.dtype.itemsize if self.device.type == "cpu" else 1
        width = -(-self.size // step) * step
        return torch.zeros(rows, width, dtype=self.dtype, device=self.device)[:, : self.size]

    def views(self, storage: Tensor, row: int) -> list[Tensor]:
        """One row of ``storage`` as tensors of the parameters' shapes (no copies)."""
        return [storage[row, s.offset : s.offset + s.size].view(s.shape) for s in self.slots]

    def stacked(self, storage: Tensor) -> list[Tensor]:
        """All rows of ``storage`` as tensors ``[rows, *shape]`` (no copies; strided when there are several rows)."""
        return [storage[:, s.offset : s.offset + s.size].view(storage.shape[0], *s.shape) for s in self.slots]


@dataclass(frozen=True)
class Layout:
    """All buckets of a model, in the order in which they are exchanged."""

    buckets: tuple[Bucket, ...]
    buffer_bytes: int = 0
    """Bytes of the model's floating-point buffers, which are sent beside the buckets where servers keep them."""

    @property
    def parameters(self) -> int:
        """How many values all buckets hold together."""
        return sum(b.size for b in self.buckets)

    @property
    def bytes(self) -> int:
        """Bytes of one replica's parameters."""
        return sum(b.size * b.dtype.itemsize for b in self.buckets)

    def describe(self) -> list[dict[str, object]]:
        """Plain data for run.json: per bucket its group, dtype and the parameters with their shapes."""
        return [
            {"group": b.group, "dtype": str(b.dtype).removeprefix("torch."), "parameters": {s.name: list(s.shape) for s in b.slots}}
            for b in self.buckets
        ]

    def digest(self) -> str:
        """A digest that is equal on two workers if and only if their layouts are equal (devices aside)."""
        return hashlib.sha256(repr(self.describe()).encode()).hexdigest()


_Kind = tuple[int, torch.dtype, torch.device, str]


def layout_of(
    named: Iterable[tuple[str, nn.Parameter]],
    groups: Sequence[Sequence[nn.Parameter]] | None = None,
    bucket_cap_bytes: int = BUCKET_CAP_BYTES,
    first_bucket_cap_bytes: int = FIRST_BUCKET_CAP_BYTES,
    apart: Mapping[str, str] | None = None,
) -> Layout:
    """The layout of the trainable parameters among ``named``, split by the optimiser's parameter ``groups``.

    Parameters named in ``apart`` share buckets only with those of the same kind.

    Shared parameters appear once (``named_parameters`` lists them once); frozen ones and, when groups are given, those
    that no group holds are left out, and so are those without values where they would be a bucket of their own. Of distributed
    parameters the part that this process holds counts.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> [[s.name for s in b.slots] for b in layout_of(model.named_parameters()).buckets]
    [['1.bias', '1.weight', '0.bias', '0.weight']]
    """
    group_of = None if groups is None else {id(p): g for g, group in enumerate(groups) for p in group}
    chosen = [
        (name, local(p), 0 if group_of is None else group_of[id(p)])
        for name, p in named
        if p.requires_grad and (group_of is None or id(p) in group_of)
    ]
    open_: dict[_Kind, list[tuple[str, Tensor]]] = {}
    closed: list[tuple[_Kind, list[tuple[str, Tensor]]]] = []
    for name, p, group in reversed(chosen):
        key = (group, p.dtype, p.device, (apart or {}).get(name, ""))
        held = open_.setdefault(key, [])
        held.append((name, p))
        if sum(q.numel() * q.element_size() for _, q in held) >= (bucket_cap_bytes if closed else first_bucket_cap_bytes):
            closed.append((key, open_.pop(key)))
    closed += [(key, held) for key, held in open_.items() if sum(q.numel() for _, q in held)]  # nothing to exchange, no bucket
    return Layout(tuple(_bucket(i, key, held) for i, (key, held) in enumerate(closed)))


def _bucket(index: int, key: _Kind, held: list[tuple[str, Tensor]]) -> Bucket:
    group, dtype, device, _ = key
    slots, offset = [], 0
    for name, p in held:
        slots.append(Slot(name, tuple(p.shape), offset, p.numel()))
        offset += p.numel()
    return Bucket(index, group, dtype, device, tuple(slots))
