"""A torch optimiser as plain data, so that a shard can run the worker's own: its name and the options of its groups.

Shards hold slices that end anywhere, so only optimisers that treat each value by itself can run there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hocket.errors import HocketError, is_number
from hocket.optim.delayed_nesterov import DelayedNesterov
from hocket.strategy import Strategy
from hocket.topology.server import OPTIMIZERS

_OUTER = "delayednesterov"
KNOWN: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, Optimizer)
}
KNOWN[_OUTER] = DelayedNesterov
Options = dict[str, Any]
_OWN = ("params", "fused", "foreach", "capturable", "differentiable")
"""What is the worker's own: its parameters, and options about how to compute, not what."""


@dataclass(frozen=True)
class OptimizerSpec:
    """What builds an optimiser over one parameter list per group."""

    name: str
    groups: tuple[Options, ...]
    state: tuple[Options, ...] = ()
    """Per bucket what an optimiser that has stepped remembers: numbers, and rows ``[values]``; see :func:`state_rows`."""

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
                f"{type(optimizer).__name__} computes with whole tensors, or is not torch's own, but a shard holds slices; "
                f"use one of {', '.join(OPTIMIZERS)}, or server(role=sum), where the optimiser stays with the workers."
            )
        return cls(name, tuple({k: _plain(v) for k, v in g.items() if k not in _OWN} for g in optimizer.param_groups))

    def build(self, parameters: Sequence[list[nn.Parameter]]) -> Optimizer:
        """The optimiser over these parameters, one list per group; empty groups stay, so that rates find their place."""
        kind = KNOWN[self.name]
        known = inspect.signature(kind.__init__).parameters
        groups = [{"params": p, **{k: v for k, v in g.items() if k in known}} for p, g in zip(parameters, self.groups, strict=True)]
        return kind(groups)  # type: ignore[call-arg]

    def changes(self, optimizer: Optimizer, instead: str | None = None) -> list[Options]:
        """Per group the options, beside the rate, that ``optimizer`` has by now and this spec has not.

        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
        >>> spec = OptimizerSpec.of(sgd)
        >>> sgd.param_groups[0] |= {"lr": 0.2, "momentum": 0.8}
        >>> spec.changes(sgd)
        [{'momentum': 0.8}]
        """
        found = []
        for own, now in zip(self.groups, OptimizerSpec.of(optimizer, instead).groups, strict=True):
            found.append({k: v for k, v in now.items() if k in own and k != "lr" and own[k] != v})
            fixed = next((k for k, v in found[-1].items() if not _numeric(v) or not _numeric(own[k])), None)
            if fixed is not None:
                raise HocketError(
                    f"The optimiser's option {fixed} has changed to {found[-1][fixed]}, but servers can change only numbers; call "
                    "job.detach() and parallelize again."
                )
        return found if any(found) else []

    def changed(self, changes: Any) -> list[Options]:
        """The options of all groups with what a worker told of :meth:`changes`; ValueError where it is something else."""
        if not isinstance(changes, list) or len(changes) not in (0, len(self.groups)):
            raise ValueError("changed options are not those of this optimiser")
        found = []
        for own, new in zip(self.groups, changes or [{}] * len(self.groups), strict=True):
            if not isinstance(new, dict) or not all(k in own and _numeric(own[k]) and _numeric(v) for k, v in new.items()):
                raise ValueError("changed options are not those of this optimiser")
            found.append({k: v for k, v in {**own, **{k: _restore(v) for k, v in new.items()}}.items() if k != "lr"})
        return found

    def with_delay(self, updates: int) -> OptimizerSpec:
        """The same, where a delay of 0 is one of so many updates.

        >>> [OptimizerSpec("delayednesterov", ({"delay": delay},)).with_delay(4).groups for delay in (0, 2)]
        [({'delay': 4},), ({'delay': 2},)]
        """
        return replace(self, groups=tuple({**g, "delay": updates} if g.get("delay") == 0 else g for g in self.groups))

    def describe(self) -> Options:
        return {"name": self.name, "groups": list(self.groups)}

    @classmethod
    def read(cls, data: Options) -> OptimizerSpec:
        """From :meth:`describe`; anything else is refused."""
        groups = data.get("groups")
        if (
            data.get("name") not in (*OPTIMIZERS, _OUTER)
            or not isinstance(groups, list)
            or not all(isinstance(g, dict) for g in groups)
        ):
            raise HocketError(f"A worker described an unknown optimiser: {str(data)[:200]}; use the same hocket everywhere.")
        known = inspect.signature(KNOWN[str(data["name"])].__init__).parameters
        return cls(str(data["name"]), tuple({str(k): _restore(v) for k, v in g.items() if k in known} for g in groups))


def shard_optimizer(strategy: Strategy, optimizer: Optimizer) -> OptimizerSpec:
    """The optimiser of the shards; where the workers keep theirs, whatever it is, an outer one or one that never moves."""
    if (outer := strategy.sync.outer_optimizer) is not None:
        return OptimizerSpec(_OUTER, tuple(dict(outer) for _ in optimizer.param_groups))
    if workers_optimize(strategy):
        return OptimizerSpec("sgd", tuple({"lr": 0.0} for _ in optimizer.param_groups))
    return OptimizerSpec.of(optimizer, strategy.topology.server_optimizer)


def workers_optimize(strategy: Strategy) -> bool:
    """Whether the workers' own optimisers make all updates but those of an outer optimiser."""
    return strategy.sync.averages_weights or strategy.sync.outer_optimizer is not None or strategy.topology.peer_to_peer


def state_rows(optimizer: Optimizer, buckets: Sequence[Sequence[nn.Parameter]]) -> tuple[Options, ...]:
    """What ``optimizer`` remembers of earlier steps, per bucket of parameters: numbers, and rows with a value per weight.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> sgd = torch.optim.SGD([weight], 0.1, momentum=0.9)
    >>> state_rows(sgd, [[weight]])
    ()
    >>> weight.grad = torch.ones(2)
    >>> sgd.step()
    >>> state_rows(sgd, [[weight]])
    ({'momentum_buffer': tensor([1., 1.])},)
    """
    if not any(optimizer.state.values()):
        return ()
    found: list[Options] = []
    for params in buckets:
        states = [{k: v for k, v in optimizer.state.get(p, {}).items() if v is not None} for p in params]
        pairs = [(k, v, p.shape) for p, state in zip(params, states, strict=True) for k, v in state.items()]
        rows = {k for k, v, shape in pairs if isinstance(v, torch.Tensor) and v.shape == shape and v.dim() > 0}
        numbers = [{k: _plain(v) for k, v in state.items() if k not in rows} for state in states]
        if any(set(state) != set(states[0]) or own != numbers[0] for state, own in zip(states, numbers, strict=True)):
            raise HocketError(
                "The optimiser has stepped some parameters more often than others, but servers keep one number of steps per "
                "bucket; give hocket.parallelize(…) a new optimiser."
            )
        found.append({**numbers[0], **{k: torch.cat([state[k].detach().flatten() for state in states]) for k in sorted(rows)}})
    return tuple(found)


def load_rows(optimizer: Optimizer, parameters: Sequence[nn.Parameter], state: Sequence[Options]) -> None:
    """Give ``optimizer``, which has made no step, the state that :func:`state_rows` found, cut as the parameters are.

    ValueError where it is not what this optimiser remembers.
    """
    if len(state) != len(parameters):
        raise ValueError(f"the optimiser's state of {len(state)} buckets instead of {len(parameters)}")
    for parameter, entry in zip(parameters, state, strict=True):
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        probe = nn.Parameter(parameter.detach().new_zeros(1))
        probe.grad = torch.zeros_like(probe)
        one = type(optimizer)([{**group, "params": [probe]}])  # type: ignore[call-arg]
        one.step()
        kinds = {k: v for k, v in one.state[probe].items() if v is not None}
        for k, value in entry.items():
            row = isinstance(value, torch.Tensor)
            if k not in kinds or row != (isinstance(kinds[k], torch.Tensor) and kinds[k].dim() > 0):
                raise ValueError(f"the optimiser has no state {str(k)[:50]} of this kind")
            if row and value.numel() != parameter.numel():
                raise ValueError(f"the optimiser's {k} has {value.numel()} values instead of {parameter.numel()}")
            if not row and not isinstance(value, (int, float)):
                raise ValueError(f"the optimiser's {k} is no number")
        optimizer.state[parameter] = {
            k: v.clone() if isinstance(v, torch.Tensor) else torch.tensor(v) if isinstance(kinds[k], torch.Tensor) else v
            for k, v in entry.items()
        }


def _numeric(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(is_number(v) and math.isfinite(v) for v in values)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _restore(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restore(v) for v in value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and not math.isnan(value)):
        return value
    raise HocketError(
        f"A worker described an optimiser with the option {str(value)[:100]}, which no optimiser has; use the same "
        "hocket everywhere."
    )
