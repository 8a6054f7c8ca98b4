"""A copy of the state of optimisers, for updates that are taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Saved = list[list[dict[str, Any]]]
"""Per optimiser, per parameter in the order of its groups: the parameter's state."""


class OptimizerCopy:
    """Saves and restores ``Optimizer.state`` of all ``optimizers()``, in place and without new memory where that is possible.

    >>> p = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([p], 0.1, momentum=0.9)
    >>> own = OptimizerCopy(lambda: [optimizer])
    >>> saved, p.grad = own.save(None), torch.ones(1)
    >>> optimizer.step()
    >>> own.restore(saved)
    >>> len(optimizer.state)
    0
    """

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        self._optimizers = optimizers

    def save(self, kept: Saved | None) -> Saved:
        """The present state; ``kept`` is an earlier copy that nobody needs."""
        now = [[dict(optimizer.state.get(p, {})) for p in _parameters(optimizer)] for optimizer in self._optimizers()]
        if kept is None or [len(own) for own in kept] != [len(own) for own in now]:
            kept = [[{} for _ in own] for own in now]
        for old, new in _pairs(kept, now):
            _copy(new, old)
        return kept

    def restore(self, saved: Saved) -> None:
        for optimizer, own in zip(self._optimizers(), saved, strict=True):
            for p, state in zip(_parameters(optimizer), own, strict=True):
                if not state:
                    optimizer.state.pop(p, None)
                elif p in optimizer.state:
                    _copy(state, optimizer.state[p])
                else:
                    optimizer.state[p] = copy.deepcopy(state)


def _copy(source: dict[str, Any], target: dict[str, Any]) -> None:
    """Make ``target`` equal to ``source``; tensors are copied into those that are there."""
    for name in [name for name in target if name not in source]:
        del target[name]
    for name, value in source.items():
        there = target.get(name)
        if isinstance(value, Tensor) and isinstance(there, Tensor) and (there.shape, there.dtype) == (value.shape, value.dtype):
            there.copy_(value)
        else:
            target[name] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _pairs(one: Saved, other: Saved) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for own, others in zip(one, other, strict=True):
        yield from zip(own, others, strict=True)
