"""Coded gradients and adaptive optimisers: what workers exchange is chosen from the optimiser, in one place.

Error feedback delivers a value rarely and large. The second moment of Adam records these spikes, and its updates shrink by the
inverse root of the density. The same code of the *updates* costs little, since nothing divides them afterwards
(docs/methods/updates.md).
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from torch.optim import ASGD, SGD, Optimizer, Rprop

from hocket.errors import HocketError
from hocket.notation import write
from hocket.optim import OneBitAdam
from hocket.strategy import Strategy
from hocket.sync import Moment

FIGURES = "a small GPT ended at a test loss of 2.990 with coded gradients and 2.605 with updates: docs/methods/updates.md"
LINEAR = ("sgd", "asgd")
"""Optimisers of servers, by name, whose update is linear in the gradient."""


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether an optimiser divides by statistics of its gradients: all but SGD and ASGD whose groups name betas or an epsilon.

    >>> import torch
    >>> [is_adaptive(kind([torch.ones(1)])) for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop)]
    [False, True, True]
    """
    if isinstance(optimizer, (SGD, ASGD)):
        return False
    return isinstance(optimizer, Rprop) or any("betas" in group or "eps" in group for group in optimizer.param_groups)


def with_exchange(strategy: Strategy, optimizer: Optimizer, sharded: bool = False, tell: bool = True) -> Strategy:
    """The strategy with what it exchanges under this optimiser: under an adaptive one a compression with error feedback and
    without ``exchange=`` sends updates, under 1-bit Adam momentum. ``sharded``: a worker has a part of the optimiser's state, so
    that it cannot step alone. ``tell``: say what was chosen, and warn where compressed gradients are known to hurt.
    """
    if strategy.exchange == "momentum" and not isinstance(optimizer, OneBitAdam):
        raise HocketError(
            f"exchange=momentum needs an optimiser with a fixed variance, and {type(optimizer).__name__} has none; use "
            "hocket.OneBitAdam(…, freeze_step=…), or exchange=updates."
        )
    compression, name = strategy.compression, strategy.topology.server_optimizer
    adaptive = is_adaptive(optimizer) if name is None else name not in LINEAR
    held_back = compression.uses_error_feedback or compression.carries_momentum
    of_gradients = strategy.exchanged == "gradients" or (strategy.weights and strategy.moment(1) is Moment.GRADIENTS)  # postlocal
    if not (adaptive and held_back and of_gradients):
        return strategy
    code, who = " | ".join(write(link) for link in compression.links), name or type(optimizer).__name__
    better = "momentum" if isinstance(optimizer, OneBitAdam) else "updates"
    possible = strategy.runtime == "collective" and strategy.keeps_replicas_equal and not compression.for_gradients_only
    possible = possible and not strategy.sync.predicts
    chosen = possible and not sharded and strategy.exchange is None
    if tell and chosen:
        warnings.warn(
            f"{code} under {who}: workers exchange their {better} (exchange={better}), since compressed gradients ruin its second "
            f"moment ({FIGURES}); write exchange=gradients to have them all the same.",
            stacklevel=3,
        )
    elif tell:
        other = "leave the sharding out" if sharded else f"use exchange={better}"
        warnings.warn(
            f"{code} of gradients is known to ruin training with {who}: its second moment records the spikes that error feedback "
            f"sends ({FIGURES}); {other if possible else 'use SGD, or a strategy that exchanges weights'}.",
            stacklevel=3,
        )
    return replace(strategy, exchange=better) if chosen else strategy
