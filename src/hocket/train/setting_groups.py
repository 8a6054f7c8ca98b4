"""The subjects of a run's settings: workers, data, optimiser, numerics, buckets, how the model is split; see
:mod:`hocket.train.settings`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.spec import ClusterSpec
from hocket.errors import SettingError, nearest
from hocket.optim import LAMB, LARS, Muon, OneBitAdam, decay_groups, hidden_matrices
from hocket.split import Mesh
from hocket.split.options import DEFAULT_SCHEDULE, Pipeline
from hocket.split.pipeline.probe import MEASURES
from hocket.split.pipeline.schedules import SCHEDULES, make
from hocket.train.lr_schedule import lr_scale, scaling
from hocket.train.plan_file import read_plan

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
} | {"lamb": LAMB, "lars": LARS, "muon": Muon, "onebit": OneBitAdam}
LAYERWISE = ("lamb", "lars")
DECAYS = ("auto", "all", "matrices")
USUAL_MOMENTUM = 0.9
"""Of lars and muon, where none is given."""
BATCH_OPTIMIZER = "sandblaster"
"""Sandblaster computes on the whole batch; it is named in place of an optimiser."""
ONEBIT = "onebit"
ONEBIT_WARMUP = 0.15
"""The share of the steps after which 1-bit Adam fixes its variance, where none is given."""
USUAL_LRS = {BATCH_OPTIMIZER: 1.0, "lars": 1.0, "lamb": 0.003, ONEBIT: 0.001}
"""Of optimisers whose rate is of another size than SGD's."""
AUTOCAST = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class WorkersSettings:
    """The workers: real processes, or virtual workers on a described cluster."""

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
        """The slowdown of a real worker."""
        return self.factors[worker % len(self.factors)]


@dataclass(frozen=True)
class DataSettings:
    """The data and the mini-batches."""

    name: str = "digits"
    batch_size: int = 100
    last: str = "even"
    """An epoch's incomplete round: dealt out evenly, or dropped."""
    balance: str = "even"
    """A worker's part of a round: even, or by its speed."""
    augment: bool = True
    partition: str = "iid"
    """Which samples a worker may have: any (iid), or those it owns by label: label(2), dirichlet(0.5)."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimiser of every worker."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    warmup: float = 0.0
    """Epochs of linear warm-up."""
    scale_lr: str = "none"
    """The rate is one worker's: multiply it by the number of workers (``linear``, Goyal 2017), or by its root (``sqrt``)."""
    clip: float | None = None
    """The largest norm of a gradient."""
    rest_lr: float | None = None
    """Of muon: the rate of embeddings, heads and vectors, which AdamW updates (None: the same)."""
    freeze_step: int | None = None
    """Of onebit: the step after which its variance is fixed (None: after 15 % of the steps)."""
    refresh: int | None = None
    """Of onebit: refresh the variance so many times at every step, every second, every fourth … (0/1 Adam); None: never."""
    decay: str = "auto"
    """What weight decay is for: ``all`` parameters, or ``matrices``, not norms and biases; lars and lamb always do the latter."""

    def __post_init__(self) -> None:
        if self.name not in (*OPTIMIZERS, BATCH_OPTIMIZER):
            hint = nearest(self.name, OPTIMIZERS)
            raise SettingError(f"<optimizer>: unknown{hint or '.'} Use one of {', '.join(OPTIMIZERS)}.", optimizer=self.name)
        if not self.lr > 0:
            raise SettingError("<lr>: the rate must be above 0.", lr=self.lr)
        object.__setattr__(self, "scale_lr", scaling(self.scale_lr))
        if self.decay not in DECAYS:
            raise SettingError("<decay>: use all, or matrices (no weight decay of norms and biases).", decay=self.decay)
        if self.decay == "all" and self.name in LAYERWISE:
            raise SettingError("<decay:all>: lars and lamb have no weight decay of norms and biases; leave it out.")
        if self.decay == "matrices" and self.name in ("muon", "rprop"):
            raise SettingError(f"<decay:matrices>: {self.name} has no groups for it; leave it out.")
        if self.rest_lr is not None and self.name != "muon":
            raise SettingError("<rest_lr>: only muon has two rates; use <optimizer:muon>, or leave it out.", rest_lr=self.rest_lr)
        self._check_variance()

    def _check_variance(self) -> None:
        for name, value in (("freeze_step", self.freeze_step), ("refresh", self.refresh)):
            if value is not None and self.name != ONEBIT:
                text = f"<{name}>: only onebit fixes its variance; use <optimizer:{ONEBIT}>, or leave it out."
                raise SettingError(text, **{name: value})
            if value is not None and value < 1:
                raise SettingError(f"<{name}>: it must be a whole number of at least 1.", **{name: value})

    def with_steps(self, steps: int) -> OptimizerSettings:
        """The same for a training of so many steps: onebit's warm-up is a share of them, unless it is given.

        >>> OptimizerSettings("onebit").with_steps(1000).freeze_step, OptimizerSettings("sgd").with_steps(1000).freeze_step
        (150, None)
        """
        if self.name != ONEBIT or self.freeze_step is not None:
            return self
        return replace(self, freeze_step=max(1, round(ONEBIT_WARMUP * steps)))

    def make(self, model: nn.Module, params: list[nn.Parameter], workers: int) -> torch.optim.Optimizer:
        """The optimiser over ``params``, which are those of ``model`` or of a worker's row of it, in its order."""
        if self.name == BATCH_OPTIMIZER:
            raise SettingError(
                f"<optimizer>: it computes on the whole batch, not on mini-batches; use hocket.Sandblaster, or "
                f"{', '.join(OPTIMIZERS)}.",
                optimizer=self.name,
            )
        scale = lr_scale(self.scale_lr, workers)
        options: dict[str, Any] = {"lr": self.lr * scale}
        if self.name == "muon":
            rest = (self.lr if self.rest_lr is None else self.rest_lr) * scale
            params = [p for p in params if p.requires_grad]
            options |= {"rest_lr": rest, "matrices": hidden_matrices(model), "momentum": self.momentum or USUAL_MOMENTUM}
        if self.name == ONEBIT:
            options |= {"freeze_step": self.freeze_step or 1, "refresh": self.refresh or 0}
        if self.name == "lars":
            options["momentum"] = self.momentum or USUAL_MOMENTUM
        if self.name in ("sgd", "rmsprop"):
            options["momentum"] = self.momentum
        if self.name != "rprop":
            options["weight_decay"] = self.weight_decay
        if self.decay == "matrices" and self.name not in LAYERWISE:
            return OPTIMIZERS[self.name](decay_groups(params, self.weight_decay), **options)
        return OPTIMIZERS[self.name](params, **options)


@dataclass(frozen=True)
class NumericsSettings:
    """The precision and order in which gradients are computed, and the policy for NaN and Inf."""

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


STAGED = ("pipe", "num_microbatches", "cut", "stages_per_rank", "measure")
"""What only a model that is cut into stages has."""


@dataclass(frozen=True)
class SplitSettings:
    """How each worker's model is split; the workers are the replicas, ``mesh.data`` of them."""

    mesh: Mesh
    pipe: str | None = None
    """The schedule of the stages."""
    num_microbatches: int | None = None
    cut: str | None = None
    """Modules after which to cut, with commas between them."""
    stages_per_rank: int | None = None
    measure: str | None = None
    plan_file: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh.parse(self.mesh))
        mesh = self.mesh
        staged = [name for name in STAGED if getattr(self, name) is not None]
        if staged and mesh.pipeline == 1:
            raise SettingError(f"{_about_stages(staged)}, but the mesh {mesh} has one stage; add pipeline=2, for example.")
        if self.plan_file is not None and mesh.tensor == 1:
            raise SettingError(
                f"<plan_file> is for operations that are split, but the mesh {mesh} has no tensor axis; add tensor=2, for example."
            )
        _ = self.kinds  # refuses a file that is not a plan
        if self.pipe is not None and self.pipe not in SCHEDULES:
            hint = nearest(self.pipe, SCHEDULES)
            raise SettingError(f"<pipe>: there is no such schedule{hint or '.'} Use one of {', '.join(SCHEDULES)}.", pipe=self.pipe)
        if self.measure not in (None, *MEASURES):
            raise SettingError(
                "<measure>: use seconds (layers are timed) or flops (their operations are counted).", measure=self.measure
            )
        if not all(self.points or ["none"]):
            cut = f"'{self.cut}'"
            raise SettingError("<cut>: give names of modules with commas between them, such as blocks.0,blocks.1.", cut=cut)
        if mesh.pipeline > 1:  # refuses what cannot be scheduled
            num_microbatches = 2 * mesh.pipeline if self.num_microbatches is None else self.num_microbatches
            make(self.schedule, mesh.pipeline, num_microbatches, self.stages_per_rank)

    @property
    def schedule(self) -> str:
        """The schedule of the stages, given or not."""
        return self.pipe or DEFAULT_SCHEDULE

    @property
    def points(self) -> list[str] | None:
        """The modules after which to cut, if they are given.

        >>> SplitSettings(Mesh(pipeline=2), cut="blocks.0, blocks.1").points
        ['blocks.0', 'blocks.1']
        """
        return None if self.cut is None else [name.strip() for name in self.cut.split(",")]

    @cached_property
    def kinds(self) -> dict[str, str] | None:
        """How operations are split, by modules' names or patterns, if that is given."""
        return None if self.plan_file is None else read_plan(self.plan_file)

    def pipeline(self, sample: Tensor) -> Pipeline:
        """How the model is cut and run, for inputs such as ``sample``."""
        return Pipeline(
            self.schedule,
            self.num_microbatches,
            self.stages_per_rank,
            self.points,
            sample=sample,
            measure=self.measure,
        )


def split_settings(given: Mapping[str, Any]) -> SplitSettings | None:
    """From settings by name; None where no mesh is given.

    >>> split_settings({"mesh": None, "cut": "3"})
    Traceback (most recent call last):
    hocket.errors.SettingError: cut= is for a model cut into stages; add mesh=pipeline=2, for example.
    """
    if given.get("mesh") is not None:
        return SplitSettings(**given)
    if staged := [name for name in STAGED if given.get(name) is not None]:
        raise SettingError(f"{_about_stages(staged)}; add <mesh:pipeline=2>, for example.")
    if given.get("plan_file") is not None:
        raise SettingError("<plan_file> is for operations that are split; add <mesh:tensor=2>, for example.")
    return None


def _about_stages(names: list[str]) -> str:
    given = ", ".join(f"<{name}>" for name in names)
    return f"{given} {'are' if len(names) > 1 else 'is'} for a model cut into stages"


@dataclass(frozen=True)
class ShardingSettings:
    """What workers shard instead of each keeping the whole: ZeRO-1 (``zero=1``) or PyTorch's FSDP2."""

    zero: int = 0
    """1: the optimiser's state is sharded over the workers."""
    fsdp: bool = False
    """Weights, gradients and optimiser state are sharded."""

    @property
    def named(self) -> str:
        """The setting that shards, as errors name it; empty where nothing is sharded."""
        return "<fsdp:True>" if self.fsdp else f"<zero:{self.zero}>" if self.zero else ""
