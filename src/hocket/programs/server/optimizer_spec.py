"""A torch optimiser as plain data, so that a shard can run the worker's own: its name and the options of its groups.

Shards hold slices that end anywhere, so only optimisers that treat each value by itself can run there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.topology.server import OPTIMIZERS

KNOWN: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, Optimizer)
}
Options = dict[str, Any]
_OWN = ("params", "fused", "foreach", "capturable", "differentiable")
"""What is the worker's own: its parameters, and options about how to compute, not what."""


@dataclass(frozen=True)
class OptimizerSpec:
    """What builds an optimiser over one parameter list per group."""

    name: str
    groups: tuple[Options, ...]

    @classmethod
    def of(cls, optimizer: Optimizer, instead: str | None = None) -> OptimizerSpec:
        """The spec of ``optimizer``; with ``instead`` that one with its own options and only the rate and weight decay of this.

        >>> OptimizerSpec.of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)).groups[0]["momentum"]
        0.9
        """
        name = type(optimizer).__name__.lower()
        if instead is not None:
            kept = ("lr",) if instead == "rprop" else ("lr", "weight_decay")
            return cls(instead, tuple({k: _plain(g[k]) for k in kept if k in g} for g in optimizer.param_groups))
        if name not in OPTIMIZERS or KNOWN.get(name) is not type(optimizer):
            raise HocketError(
                f"{type(optimizer).__name__} looks at whole tensors, or is not torch's own, and a shard holds slices of them; "
                f"use one of {', '.join(OPTIMIZERS)}, or server(role=sum), where the optimiser stays with the workers."
            )
        return cls(name, tuple({k: _plain(v) for k, v in g.items() if k not in _OWN} for g in optimizer.param_groups))

    def build(self, parameters: Sequence[list[nn.Parameter]]) -> Optimizer:
        """The optimiser over these parameters, one list per group; empty groups stay, so that rates find their place."""
        kind = KNOWN[self.name]
        known = inspect.signature(kind.__init__).parameters
        groups = [{"params": p, **{k: v for k, v in g.items() if k in known}} for p, g in zip(parameters, self.groups, strict=True)]
        return kind(groups)  # type: ignore[call-arg]

    def describe(self) -> Options:
        """Plain data for a message."""
        return {"name": self.name, "groups": list(self.groups)}

    @classmethod
    def read(cls, data: Options) -> OptimizerSpec:
        """From :meth:`describe`; anything else is refused."""
        groups = data.get("groups")
        if data.get("name") not in OPTIMIZERS or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise HocketError(f"A worker described an optimiser that there is not: {str(data)[:200]}.")
        known = inspect.signature(KNOWN[str(data["name"])].__init__).parameters
        return cls(str(data["name"]), tuple({str(k): _restore(v) for k, v in g.items() if k in known} for g in groups))


def shard_optimizer(strategy: Strategy, optimizer: Optimizer) -> OptimizerSpec:
    """The optimiser of the shards; where the workers keep theirs, whatever it is, one that never moves."""
    if strategy.sync.averages_weights or strategy.topology.peer_to_peer:
        return OptimizerSpec("sgd", tuple({"lr": 0.0} for _ in optimizer.param_groups))
    return OptimizerSpec.of(optimizer, strategy.topology.server_optimizer)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _restore(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restore(v) for v in value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and not math.isnan(value)):
        return value
    raise HocketError(f"A worker described an optimiser with the option {str(value)[:100]}, which no optimiser takes.")
