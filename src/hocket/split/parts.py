"""Parts of a model: the part of a parameter that a process holds, for cutting and gathering; and the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import local


@dataclass(frozen=True)
class Part:
    """Ranges along one axis of the whole; no axis: all of it.

    >>> fused = Part((6, 1), 0, ((0, 1), (2, 3), (4, 5)))  # query, key and value of the first of two heads
    >>> fused.take(torch.arange(6.0).view(6, 1)).flatten().tolist()
    [0.0, 2.0, 4.0]
    """

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def even(cls, whole: Tensor, dim: int, place: int, size: int, blocks: int = 1) -> Part:
        """The ``place``-th of ``size`` equal parts along ``dim``, of each of ``blocks`` equal blocks.

        >>> Part.even(torch.zeros(6, 1), 0, place=1, size=2, blocks=3).ranges
        ((1, 2), (3, 4), (5, 6))
        """
        dim %= whole.dim()
        block, own = whole.shape[dim] // blocks, whole.shape[dim] // blocks // size
        starts = [b * block + place * own for b in range(blocks)]
        return cls(tuple(whole.shape), dim, tuple((s, s + own) for s in starts))

    @property
    def whole(self) -> bool:
        return self.dim is None

    def take(self, whole: Tensor) -> Tensor:
        """This part of ``whole``, as a tensor of its own."""
        if self.dim is None:
            return whole.clone()
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write this part into ``whole``."""
        if self.dim is None:
            whole.copy_(part)
            return
        for (a, b), own in zip(self.ranges, part.split([b - a for a, b in self.ranges], self.dim), strict=True):
            whole.narrow(self.dim, a, b - a).copy_(own)


Parts = Mapping[str, Part]
"""Parameters by their names in the whole model."""


def part_of(parts: Parts, name: str, tensor: Tensor) -> Part:
    """The part of that name; a name without a part is held whole."""
    return parts.get(name) or Part(tuple(tensor.shape))


def all_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter, its first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def broadcast_tensors(tensors: Iterable[Tensor], cluster: Cluster) -> None:
    """Every worker starts from worker 0's values (a tensor without values has none)."""
    for tensor in tensors:
        if cluster.size > 1 and not tensor.is_meta:
            own = local(tensor.data)
            rows = own.reshape(1, -1).clone()
            cluster.synchronize(rows)
            own.copy_(rows.view(own.shape))


@contextmanager
def only(optimizer: torch.optim.Optimizer, steps: Callable[[nn.Parameter], bool]) -> Iterator[None]:
    """Inside, the groups of ``optimizer`` hold only those of their parameters that ``steps`` wants."""
    full_groups = [group["params"] for group in optimizer.param_groups]
    for group, full in zip(optimizer.param_groups, full_groups, strict=True):
        group["params"] = [p for p in full if steps(p)]
    try:
        yield
    finally:
        for group, full in zip(optimizer.param_groups, full_groups, strict=True):
            group["params"] = full


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation: running statistics and random draws do not change."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, before in training:
            part.training = before


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in the order of registration: the modules whose weights are gathered, or fetched from slow
    memory, one after another.

    They are the children of the outermost ``nn.Sequential`` and ``nn.ModuleList`` modules, such as the layers of a perceptron or
    the blocks of a transformer. Their weights are used in their own forward pass alone; everything else (embeddings, a last norm,
    weights that several modules share) stays in memory.

    >>> list(blocks_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))))
    ['0', '2']
    >>> blocks_of(nn.Linear(4, 3))
    {}
    """
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and not any(f"{name}.".startswith(f"{block}.") for block in found):
            for child, block in module.named_children():
                params = list(block.parameters())
                if params and all(holders[id(p)] == 1 for p in params) and block not in found.values():
                    found[f"{name}.{child}".lstrip(".")] = block
    return found
