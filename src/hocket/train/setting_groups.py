"""The subjects of a run's settings: workers, data, optimiser, numerics, buckets; see :mod:`hocket.train.settings`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hocket.cluster.spec import ClusterSpec
from hocket.errors import SettingError, nearest
from hocket.train.balance import check_balance
from hocket.train.lr_schedule import factor
from hocket.train.setting_checks import check_count, check_last, check_warmup

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
}
BATCH_OPTIMIZER = "sandblaster"
"""Goes over the whole batch: no optimiser of a step, but named in its place."""
AUTOCAST = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class WorkersSettings:
    """Who trains: real processes, or virtual workers on a described cluster."""

    count: int = 1
    virtual: bool = False
    host_size: int | None = None
    cluster: str | None = None
    """A preset or a TOML file: the cluster whose seconds virtual workers predict."""
    slowdown: str | None = None
    """How many times as long each worker takes, repeated over all: ``1,1,1,4``."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SettingError("<workers>: there must be at least one worker.", workers=self.count)
        _ = self.spec
        if self.virtual:
            return
        if self.cluster is not None:
            raise SettingError(
                "<cluster>: it describes virtual workers; add <virtual:True>, or leave it out: real ones are timed.",
                cluster=self.cluster,
            )
        if min(self.factors) < 1:
            raise SettingError(
                "<slowdown>: real workers can only be made slower; give numbers of at least 1.", slowdown=self.slowdown
            )

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """The slowdown as numbers."""
        if self.slowdown is None:
            return (1.0,)
        try:
            factors = tuple(float(part) for part in self.slowdown.split(","))
        except ValueError:
            factors = (0.0,)
        if not all(0 < factor < math.inf for factor in factors):
            raise SettingError(
                "<slowdown>: give numbers above 0 with commas between them, such as 1,1,1,4.", slowdown=self.slowdown
            )
        return factors

    @cached_property
    def spec(self) -> ClusterSpec | None:
        """The described cluster, if there is one, with the slowdown."""
        return self.slowed(None if self.cluster is None or not self.virtual else ClusterSpec.parse(self.cluster))

    def slowed(self, spec: ClusterSpec | None) -> ClusterSpec | None:
        """The same cluster with this slowdown."""
        factors = self.factors
        return spec if spec is None or self.slowdown is None else spec.slowed(factors)

    def slowdown_of(self, worker: int) -> float:
        """How many times as long a real worker is made to take."""
        return self.factors[worker % len(self.factors)]


@dataclass(frozen=True)
class DataSettings:
    """What is trained on, and in which mini-batches."""

    name: str = "digits"
    batch_size: int = 100
    last: str = "even"
    """An epoch's incomplete round: dealt out evenly, or dropped."""
    balance: str = "even"
    """A worker's part of a round: even, or by its speed."""
    augment: bool = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_last(self.last)
        check_balance(self.balance)


@dataclass(frozen=True)
class OptimizerSettings:
    """How a worker steps."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    warmup: float = 0.0
    """Epochs of linear warm-up."""
    scale_lr: bool = False
    """Multiply the rate by the number of workers (Goyal 2017)."""
    clip: float | None = None
    """The largest norm of a gradient."""

    def __post_init__(self) -> None:
        if self.name not in (*OPTIMIZERS, BATCH_OPTIMIZER):
            hint = nearest(self.name, OPTIMIZERS)
            raise SettingError(f"<optimizer>: unknown{hint or '.'} Use one of {', '.join(OPTIMIZERS)}.", optimizer=self.name)
        if not self.lr > 0:
            raise SettingError("<lr>: the rate must be above 0.", lr=self.lr)
        factor(self.lr_schedule, 1)  # refuses a name that there is not
        check_warmup(self.warmup)

    def make(self, params: list[nn.Parameter], workers: int) -> torch.optim.Optimizer:
        """The optimiser over ``params``."""
        if self.name == BATCH_OPTIMIZER:
            raise SettingError(
                f"<optimizer>: it goes over the whole batch, not step by step; use hocket.Sandblaster, or {', '.join(OPTIMIZERS)}.",
                optimizer=self.name,
            )
        options: dict[str, Any] = {"lr": self.lr * (workers if self.scale_lr else 1)}
        if self.name in ("sgd", "rmsprop"):
            options["momentum"] = self.momentum
        if self.name != "rprop":
            options["weight_decay"] = self.weight_decay
        return OPTIMIZERS[self.name](params, **options)


@dataclass(frozen=True)
class NumericsSettings:
    """In which precision and order gradients are computed, and what becomes of those that are not finite."""

    autocast: str = "none"
    nonfinite: str = "raise"
    engine: str = "auto"
    exact: bool = False
    """Sum in worker order: equal bit for bit to virtual workers."""

    def __post_init__(self) -> None:
        if self.autocast not in AUTOCAST:
            raise SettingError("<autocast>: use none, bf16 or fp16.", autocast=self.autocast)

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in."""
        return AUTOCAST[self.autocast]


@dataclass(frozen=True)
class BucketSettings:
    """How large buckets are, in bytes; by strategy where not given."""

    cap_bytes: int | None = None
    first_cap_bytes: int | None = None

    def options(self) -> dict[str, int | None]:
        """As jobs and replicas are told."""
        return {"bucket_cap_bytes": self.cap_bytes, "first_bucket_cap_bytes": self.first_cap_bytes}
