"""The settings of a run: a few frozen objects, each parsed and checked where it is made.

:class:`RunSettings` holds one object per subject. Where settings are a flat list (options of the command line, keys of a study's
file, run.json) a setting has one name; :data:`FIELDS` says which field that is and what records call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, get_type_hints

import torch
from torch import nn

from hocket.cluster.layout import Buckets
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import VirtualCluster
from hocket.data import DataSet
from hocket.errors import HocketError, SettingError, nearest
from hocket.models import build
from hocket.models.pretrained import load_weights, with_adapters
from hocket.split import Mesh
from hocket.split.sharded import refuse_sharding
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.asynchronous import DEFAULT_CLUSTER
from hocket.train.balance import check_balance
from hocket.train.checks import needs_servers
from hocket.train.loop import TrainingPlan
from hocket.train.lr_schedule import warmup_start
from hocket.train.setting_groups import (
    BATCH_OPTIMIZER,
    ONEBIT,
    DataSettings,
    NumericsSettings,
    OptimizerSettings,
    ShardingSettings,
    SplitSettings,
    WorkersSettings,
    split_settings,
)
from hocket.train.simulate import seeded

FIELDS: dict[str, tuple[str, str]] = {
    "strategy": ("strategy", "strategy"),
    "workers": ("workers.count", "workers"),
    "virtual": ("workers.virtual", "virtual"),
    "data": ("data.name", "data"),
    "model": ("model", "model"),
    "pretrained": ("pretrained", "from"),
    "lora": ("lora", "lora"),
    "optimizer": ("optimizer.name", "optimizer"),
    "lr": ("optimizer.lr", "lr"),
    "momentum": ("optimizer.momentum", "momentum"),
    "weight_decay": ("optimizer.weight_decay", "weight_decay"),
    "lr_schedule": ("optimizer.lr_schedule", "schedule"),
    "warmup": ("optimizer.warmup", "warmup"),
    "scale_lr": ("optimizer.scale_lr", "scale_lr"),
    "batch_size": ("data.batch_size", "batch"),
    "epochs": ("epochs", "epochs"),
    "max_steps": ("max_steps", "max_steps"),
    "clip": ("optimizer.clip", "clip"),
    "rest_lr": ("optimizer.rest_lr", "rest_lr"),
    "freeze_step": ("optimizer.freeze_step", "freeze_step"),
    "refresh": ("optimizer.refresh", "refresh"),
    "decay": ("optimizer.decay", "decay"),
    "autocast": ("numerics.autocast", "autocast"),
    "augment": ("data.augment", "augment"),
    "last": ("data.last", "last"),
    "seed": ("seed", "seed"),
    "engine": ("numerics.engine", "engine"),
    "nonfinite": ("numerics.nonfinite", "nonfinite"),
    "exact": ("numerics.exact", "exact"),
    "host_size": ("workers.host_size", "host_size"),
    "cluster": ("workers.cluster", "cluster"),
    "slowdown": ("workers.slowdown", "slowdown"),
    "balance": ("data.balance", "share"),
    "partition": ("data.partition", "partition"),
    "bucket_cap_bytes": ("buckets.cap_bytes", "bucket_bytes"),
    "first_bucket_cap_bytes": ("buckets.first_cap_bytes", "first_bucket_bytes"),
    "mesh": ("split.mesh", "mesh"),
    "pipe": ("split.pipe", "pipe"),
    "num_microbatches": ("split.num_microbatches", "micro"),
    "cut": ("split.cut", "cut"),
    "stages_per_rank": ("split.stages_per_rank", "virtual_stages"),
    "measure": ("split.measure", "measure"),
    "plan_file": ("split.plan_file", "plan_file"),
    "zero": ("sharding.zero", "shard"),
    "fsdp": ("sharding.fsdp", "shard"),
}
"""By a setting's name: its field in :class:`RunSettings`, and its key in run.json and study.json, which older records have too.

``zero`` and ``fsdp`` share the key ``shard``: ``"state"``, ``"full"`` or None.
"""


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    >>> settings = RunSettings.of(strategy="local(4)", workers=2, batch_size=20)
    >>> str(settings.strategy), settings.workers.count, settings.data.batch_size, settings.changed(lr=1.0).optimizer.lr
    ('local(4) + allreduce', 2, 20, 1.0)
    """

    strategy: Strategy = field(default_factory=Strategy)
    model: str = "mlp"
    pretrained: str | None = None
    """A file or folder of weights to start from."""
    lora: int | None = None
    """The rank of adapters, which alone are trained."""
    workers: WorkersSettings = field(default_factory=WorkersSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    numerics: NumericsSettings = field(default_factory=NumericsSettings)
    buckets: Buckets = field(default_factory=Buckets)
    split: SplitSettings | None = None
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    seed: int = 0
    epochs: int = 1
    max_steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", Strategy.parse(self.strategy))
        self.plan()  # refuses what no training can have
        self._check_sharding()
        self._check_split()
        self._check_variance()
        check_balance(self.data.balance, self.strategy, self.data.partition)
        if self.data.partition != "iid" and self.optimizer.name == BATCH_OPTIMIZER:
            raise SettingError(
                "<partition>: sandblaster divides each batch between all workers; use iid.", partition=self.data.partition
            )
        if self.optimizer.name == BATCH_OPTIMIZER and (self.pretrained or self.lora):
            name, value = ("pretrained", self.pretrained) if self.pretrained else ("lora", self.lora)
            raise SettingError(f"<{name}>: sandblaster starts from the model's own weights; leave it out.", **{name: value})
        if self.workers.virtual and self.spec is None:
            if self.workers.slowdown is not None:
                text = "<slowdown>: virtual workers have a clock only with <cluster>, such as 1gbit."
                raise SettingError(text, slowdown=self.workers.slowdown)
            if self.data.balance == "speed":
                raise SettingError("<balance:speed>: virtual workers have speeds only with <cluster>, such as 1gbit.")

    def _check_sharding(self) -> None:
        """Refuse sharding in runs that do not support it."""
        sharding, split = self.sharding, self.split
        refuse_sharding(self.strategy, sharding.zero, sharding.fsdp)
        if not sharding.named:
            return
        if self.workers.virtual:
            raise SettingError(f"{sharding.named}: virtual workers share one memory, so none is saved; leave it or <virtual> out.")
        if not sharding.fsdp:
            return
        if split is not None:
            raise SettingError(
                f"<fsdp> cuts every parameter between <workers> by itself; leave <mesh> out, or use <zero:1> with {split.mesh}."
            )
        uneven = self.data.balance != "even" or self.workers.slowdown is not None
        if uneven or self.numerics.exact or self.buckets != Buckets():
            raise SettingError(
                "<fsdp> leaves all exchanges to PyTorch's FSDP2; leave <balance>, <slowdown>, <exact>, <bucket_cap_bytes> and "
                "<first_bucket_cap_bytes> out, or use <zero:1>."
            )

    def _check_split(self) -> None:
        """Refuse workers and strategies that a split model cannot have."""
        if self.split is None:
            return
        mesh, workers, count = self.split.mesh, self.workers, self.workers.count
        if mesh.data != count:
            replicas = f"{mesh.data} replica{'s' * (mesh.data > 1)}"
            raise SettingError(
                f"<mesh> has {replicas}, but <workers> says {count}; leave <workers> out, or make data= the same.", mesh=mesh
            )
        uneven = self.data.balance != "even" or workers.slowdown is not None
        if workers.virtual or uneven or self.numerics.autocast == "fp16":
            raise SettingError(
                "<mesh> splits a model over real processes that wait for each other; leave <virtual>, <balance>, <slowdown> and "
                "<autocast:fp16> out.",
                mesh=mesh,
            )
        if self.strategy.runtime != "collective" and (mesh.data > 1 or needs_servers(self.strategy)):
            raise SettingError(
                f"{self.strategy} between split replicas runs in a script of yours (hocket.parallelize(…, mesh=…) under torchrun), "
                "not under `hocket train`."
            )

    def _check_variance(self) -> None:
        """Refuse what 1-bit Adam, whose fixed variance must be the same on all workers, does not go with."""
        if self.optimizer.name != ONEBIT or self.workers.count == 1:
            return
        if self.sharding.named:
            raise SettingError(f"<optimizer:{ONEBIT}> steps with a whole state; leave {self.sharding.named} out, or use adamw.")
        strategy = self.resolved
        fixed = strategy.exchanged == "momentum" or (strategy.exchanged == "gradients" and strategy.keeps_replicas_equal)
        if strategy.runtime != "collective" or not fixed:
            raise SettingError(
                f"<optimizer:{ONEBIT}> fixes a variance that must be the same on all workers, and under {strategy} it is not; use "
                "bulk, such as bulk + sign, or local(4) + sign + exchange=momentum, or <optimizer:adamw>."
            )

    # --- by name -----------------------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, **given: Any) -> RunSettings:
        """From settings by name, those of :data:`FIELDS`; the others have their defaults."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in given.items():
            if name not in FIELDS:
                raise HocketError(f"There is no setting '{name}'{nearest(name, FIELDS) or '.'} Use one of {', '.join(FIELDS)}.")
            group, _, inner = FIELDS[name][0].rpartition(".")
            groups.setdefault(group, {})[inner] = value
        parts: dict[str, Any] = {name: kind(**groups.pop(name)) for name, kind in _GROUPS.items() if name in groups}
        return cls(**groups.pop("", {}), **parts, split=split_settings(groups.pop("split", {})))

    def by_name(self) -> dict[str, Any]:
        """The inverse of :meth:`of`: plain values by name, the strategy and the mesh as text."""
        found = {name: _at(self, path) for name, (path, _) in FIELDS.items()}
        return {name: str(value) if isinstance(value, (Strategy, Mesh)) else value for name, value in found.items()}

    def changed(self, **given: Any) -> RunSettings:
        """These settings with the given values replaced."""
        return type(self).of(**{**self.by_name(), **given})

    def recorded(self) -> dict[str, Any]:
        """The settings by the keys that run.json and study.json have for them.

        >>> RunSettings.of(batch_size=20, zero=1).recorded()["batch"], RunSettings.of(fsdp=True).recorded()["shard"]
        (20, 'full')
        """
        values = {**self.by_name(), "strategy": str(self.resolved)}
        zero, fsdp = values.pop("zero"), values.pop("fsdp")
        named = {FIELDS[name][1]: value for name, value in values.items()}
        return {**named, "shard": "full" if fsdp else "state" if zero else None}

    @classmethod
    def from_recorded(cls, record: Mapping[str, Any]) -> RunSettings:
        """The inverse of :meth:`recorded`; what a record has beside settings, or lacks of them, is left out.

        >>> settings = RunSettings.of(workers=2, batch_size=20, zero=1)
        >>> RunSettings.from_recorded(settings.recorded()) == settings
        True
        """
        given = {name: record[key] for name, (_, key) in FIELDS.items() if key in record and key != "shard"}
        return cls.of(**given, zero=int(record.get("shard") == "state"), fsdp=record.get("shard") == "full")

    # --- what they make ----------------------------------------------------------------------------------------------------------

    @cached_property
    def resolved(self) -> Strategy:
        """The strategy with what it exchanges under this optimiser, as records and tables show it.

        >>> str(RunSettings.of(strategy="bulk + sign", optimizer="adam").resolved)
        'bulk + allreduce + sign + exchange=updates'
        """
        if self.optimizer.name == BATCH_OPTIMIZER:
            return self.strategy
        any_model = nn.Linear(1, 1)
        optimizer = self.optimizer.make(any_model, list(any_model.parameters()), 1)
        return with_exchange(self.strategy, optimizer, bool(self.sharding.zero), tell=False)

    @cached_property
    def spec(self) -> ClusterSpec | None:
        """The cluster whose seconds virtual workers predict; those that do not step together always have one."""
        workers = self.workers
        together = self.strategy.runtime == "collective" and self.optimizer.name != BATCH_OPTIMIZER
        if workers.spec is None and workers.virtual and not together:
            return workers.slowed(ClusterSpec.parse(DEFAULT_CLUSTER))
        return workers.spec

    @property
    def processes(self) -> int:
        """How many processes one worker takes."""
        return 1 if self.split is None else self.split.mesh.size // self.workers.count

    def virtual_cluster(self, device: torch.device | str) -> VirtualCluster:
        """The virtual workers that these settings ask for."""
        return VirtualCluster(self.workers.count, device, self.workers.host_size, spec=self.spec, seed=self.seed)

    def build(self, data: DataSet) -> nn.Module:
        """The model at its start, the same on all workers: drawn from the seed, or read from a file."""
        return seeded(lambda: self._built(data), self.seed)

    def _built(self, data: DataSet) -> nn.Module:
        model = build(self.model, data)
        if self.pretrained is not None:
            model = load_weights(model, self.pretrained)
        return model if self.lora is None else with_adapters(model, self.lora)

    def plan(self) -> TrainingPlan:
        """The training plan of the loop."""
        data, optimizer = self.data, self.optimizer
        return TrainingPlan(
            self.epochs,
            data.batch_size,
            self.seed,
            optimizer.lr_schedule,
            optimizer.warmup,
            self.max_steps,
            data.augment,
            data.last,
            balance=data.balance,
            partition=data.partition,
            warmup_start=warmup_start(optimizer.scale_lr, self.workers.count),
        )

    def optimizer_for(self, model: nn.Module) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        """The factory of the optimiser of the model's parameters, with the rate scaled by the number of workers if ``scale_lr``
        says so."""
        return lambda params: self.optimizer.make(model, params, self.workers.count)


_GROUPS: dict[str, Any] = {
    "workers": WorkersSettings,
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "numerics": NumericsSettings,
    "buckets": Buckets,
    "sharding": ShardingSettings,
}


def _at(settings: RunSettings, path: str) -> Any:
    return reduce(lambda found, name: None if found is None else getattr(found, name), path.split("."), settings)


def types() -> dict[str, Any]:
    """The type of each setting by its name, as text and plain values give it."""
    inner = {"": RunSettings, **_GROUPS, "split": SplitSettings}
    hints = {group: get_type_hints(kind) for group, kind in inner.items()}
    found = {name: hints[path.rpartition(".")[0]][path.rpartition(".")[2]] for name, (path, _) in FIELDS.items()}
    return {**found, "strategy": str, "mesh": str | None}


def defaults() -> dict[str, Any]:
    """The value of each setting that is not given, by its name."""
    return RunSettings().by_name()
