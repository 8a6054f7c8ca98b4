"""One run from its settings: what ``hocket train`` does in every process, real or virtual."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Buckets, Layout
from hocket.cluster.message import ring_bytes
from hocket.cluster.processes import ProcessCluster
from hocket.cluster.spec import ClusterSpec
from hocket.cluster.virtual import VirtualCluster
from hocket.data import DataSet, Partition, load
from hocket.errors import HocketError, nearest
from hocket.models import build, loss_for
from hocket.split import Mesh
from hocket.split.options import DEFAULT_SCHEDULE, Pipeline
from hocket.split.pipeline.probe import MEASURES
from hocket.split.pipeline.schedules import SCHEDULES, make
from hocket.split.sharded import refuse_sharding
from hocket.strategy import Strategy
from hocket.train.asynchronous import DEFAULT_CLUSTER, AsyncReplicas, AsyncSimulation
from hocket.train.balance import check_balance
from hocket.train.checks import mention_period, needs_servers
from hocket.train.engines import Engine, VmapEngine, choose
from hocket.train.loop import Progress, Training, TrainingPlan
from hocket.train.plan_file import read_plan
from hocket.train.record import Record, versions
from hocket.train.replicas import LiveReplica, Loss, Replicas, StackedReplicas
from hocket.train.simulate import seeded

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
}
Engines = dict[tuple[Any, ...], Engine]
_RECORDED_AS = {
    "lr_schedule": "schedule",
    "batch_size": "batch",
    "balance": "share",
    "bucket_cap_bytes": "bucket_bytes",
    "first_bucket_cap_bytes": "first_bucket_bytes",
    "num_microbatches": "micro",
    "stages_per_rank": "virtual_stages",
}
"""Settings that run.json and study.json name otherwise: records of older runs stay readable."""
AUTOCAST = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run does."""

    strategy: str = "bulk + allreduce"
    workers: int = 1
    virtual: bool = False
    data: str = "digits"
    model: str = "mlp"
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    warmup: float = 0.0
    scale_lr: bool = False
    batch_size: int = 100
    epochs: int = 1
    max_steps: int | None = None
    clip: float | None = None
    autocast: str = "none"
    augment: bool = True
    last: str = "even"
    seed: int = 0
    engine: str = "auto"
    nonfinite: str = "raise"
    exact: bool = False
    host_size: int | None = None
    cluster: str | None = None
    slowdown: str | None = None
    balance: str = "even"
    bucket_cap_bytes: int | None = None
    first_bucket_cap_bytes: int | None = None
    mesh: str | None = None
    """How each worker's model is split: ``pipeline=2,tensor=2``; workers are replicas."""
    pipe: str | None = None
    num_microbatches: int | None = None
    cut: str | None = None
    """Modules after which to cut, with commas between them."""
    stages_per_rank: int | None = None
    measure: str | None = None
    plan_file: str | None = None
    zero: int = 0
    """1: the optimiser's state is sharded over the workers (ZeRO-1)."""
    fsdp: bool = False
    """Weights, gradients and optimiser state are sharded (PyTorch's FSDP2)."""

    def check(self) -> Strategy:
        """Refuse what cannot work before anything is started; returns the parsed strategy."""
        strategy = Strategy.parse(self.strategy)
        if self.workers < 1:
            raise HocketError(f"--workers {self.workers}: there must be at least one worker.")
        if self.optimizer not in OPTIMIZERS:
            hint = nearest(self.optimizer, OPTIMIZERS)
            raise HocketError(f"--optimizer {self.optimizer}: unknown{hint or '.'} Use one of {', '.join(OPTIMIZERS)}.")
        if self.autocast not in AUTOCAST:
            raise HocketError(f"--autocast {self.autocast}: use none, bf16 or fp16.")
        if not self.lr > 0:
            raise HocketError(f"--lr {self.lr}: the rate must be above 0.")
        self.plan()
        self._check_sharding(strategy)
        self._check_mesh(strategy)
        check_balance(self.balance, strategy)
        if self.spec() is None and self.virtual and self.balance == "speed":
            raise HocketError("--balance speed: virtual workers have speeds only with --cluster, such as 1gbit.")
        return strategy

    @property
    def processes(self) -> int:
        """How many processes one worker takes."""
        return 1 if self.mesh is None else Mesh.parse(self.mesh).size // self.workers

    def _check_mesh(self, strategy: Strategy) -> None:
        given = {
            "pipe": self.pipe,
            "num-microbatches": self.num_microbatches,
            "cut": self.cut,
            "stages-per-rank": self.stages_per_rank,
        }
        said = [f"--{name}" for name, value in {**given, "measure": self.measure}.items() if value is not None]
        staged = f"{', '.join(said)} {'are' if len(said) > 1 else 'is'} about a model cut into stages"
        if self.mesh is None:
            if said:
                raise HocketError(f"{staged}; add --mesh pipeline=2, for example.")
            if self.plan_file is not None:
                raise HocketError("--plan is about operations that are split; add --mesh tensor=2, for example.")
            return
        mesh = Mesh.parse(self.mesh)
        if mesh.data != self.workers:
            raise HocketError(
                f"--mesh {self.mesh} has {mesh.data} replica{'s' * (mesh.data > 1)}, but --workers says {self.workers}; "
                "leave --workers out, or make data= the same."
            )
        if self.virtual or self.balance != "even" or self.slowdown is not None or self.autocast == "fp16":
            raise HocketError(
                f"--mesh {self.mesh} splits a model over real processes that wait for each other; leave --virtual, --balance, "
                "--slowdown and --autocast fp16 out."
            )
        if strategy.runtime != "collective" and (mesh.data > 1 or needs_servers(strategy)):
            raise HocketError(
                f"{strategy} between split replicas runs in a script of yours (hocket.parallelize(…, mesh=…) under torchrun), "
                "not under `hocket train`."
            )
        if said and mesh.pipeline == 1:
            raise HocketError(f"{staged}, but the mesh {mesh} has one; add pipeline=2, for example.")
        if self.plan_file is not None and mesh.tensor == 1:
            raise HocketError(f"--plan is about operations, which the mesh {mesh} does not split; add tensor=2, for example.")
        self.kinds()
        if self.pipe is not None and self.pipe not in SCHEDULES:
            hint = nearest(self.pipe, SCHEDULES)
            raise HocketError(f"--pipe {self.pipe}: there is no such schedule{hint or '.'} Use one of {', '.join(SCHEDULES)}.")
        if self.measure not in (None, *MEASURES):
            raise HocketError(f"--measure {self.measure}: what layers cost is measured in seconds or counted in flops.")
        if not all(self.points() or ["none"]):
            raise HocketError(f"--cut '{self.cut}': give names of modules with commas between them, such as blocks.0,blocks.1.")
        if mesh.pipeline > 1:
            num_microbatches = 2 * mesh.pipeline if self.num_microbatches is None else self.num_microbatches
            make(
                self.pipe or DEFAULT_SCHEDULE, mesh.pipeline, num_microbatches, self.stages_per_rank
            )  # refuses what cannot be scheduled

    def _check_sharding(self, strategy: Strategy) -> None:
        refuse_sharding(strategy, self.zero, self.fsdp)
        if not self.sharding:
            return
        if self.virtual:
            raise HocketError(f"{self.sharding}: virtual workers share one memory, so none is saved; leave it or --virtual out.")
        if self.fsdp and self.mesh is not None:
            raise HocketError(
                f"--fsdp cuts every parameter between --workers by itself; leave --mesh out, or use --zero 1 with {self.mesh}."
            )
        own = (
            self.balance != "even",
            self.slowdown is not None,
            self.exact,
            self.bucket_cap_bytes,
            self.first_bucket_cap_bytes,
        )
        if self.fsdp and any(own):
            raise HocketError(
                "--fsdp leaves all exchanges to PyTorch's FSDP2; leave --balance, --slowdown, --exact, --bucket-cap-bytes and "
                "--first-bucket-cap-bytes out, or use --zero 1."
            )

    @property
    def sharding(self) -> str:
        """The option that shards the replicas, or nothing."""
        return "--fsdp" if self.fsdp else f"--zero {self.zero}" if self.zero else ""

    def recorded(self) -> dict[str, Any]:
        """The settings by the names that run.json and study.json have for them.

        >>> Settings(batch_size=20, zero=1).recorded()["batch"], Settings(fsdp=True).recorded()["shard"]
        (20, 'full')
        """
        values = asdict(self)
        zero, fsdp = values.pop("zero"), values.pop("fsdp")
        named = {_RECORDED_AS.get(name, name): value for name, value in values.items()}
        return {**named, "shard": "full" if fsdp else "state" if zero else None}

    def points(self) -> list[str] | None:
        """The modules after which to cut, if they are given.

        >>> Settings(cut="blocks.0, blocks.1").points()
        ['blocks.0', 'blocks.1']
        """
        return None if self.cut is None else [name.strip() for name in self.cut.split(",")]

    def kinds(self) -> dict[str, str] | None:
        """How operations are split, by modules' names or patterns, if that is given."""
        return None if self.plan_file is None else read_plan(self.plan_file)

    def spec(self) -> ClusterSpec | None:
        """The cluster whose seconds virtual workers predict, if one is described."""
        slowdown = None if self.slowdown is None else _factors(self.slowdown)
        if not self.virtual:
            if self.cluster is not None:
                raise HocketError(
                    f"--cluster {self.cluster}: it describes virtual workers; add --virtual, or leave it out: real ones are timed."
                )
            if slowdown is not None and min(slowdown) < 1:
                raise HocketError(f"--slowdown {self.slowdown}: real workers can only be made slower; give numbers of at least 1.")
            return None
        name = self.cluster or (DEFAULT_CLUSTER if Strategy.parse(self.strategy).runtime != "collective" else None)
        if name is None:
            if slowdown is not None:
                raise HocketError(f"--slowdown {self.slowdown}: virtual workers have a clock only with --cluster, such as 1gbit.")
            return None
        spec = ClusterSpec.parse(name)
        return spec if slowdown is None else spec.slowed(slowdown)

    def slowdown_of(self, worker: int) -> float:
        """How many times as long a real worker is made to take."""
        factors = (1.0,) if self.slowdown is None else _factors(self.slowdown)
        return factors[worker % len(factors)]

    def virtual_cluster(self, device: torch.device | str) -> VirtualCluster:
        """The virtual workers that these settings ask for."""
        return VirtualCluster(self.workers, device, self.host_size, spec=self.spec(), seed=self.seed)

    def plan(self) -> TrainingPlan:
        """The part that the loop needs."""
        return TrainingPlan(
            self.epochs,
            self.batch_size,
            self.seed,
            self.lr_schedule,
            self.warmup,
            self.max_steps,
            self.augment,
            self.last,
            balance=self.balance,
        )

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser over ``params``, with the rate scaled by the workers where asked (Goyal 2017)."""
        options: dict[str, Any] = {"lr": self.lr * (self.workers if self.scale_lr else 1)}
        if self.optimizer in ("sgd", "rmsprop"):
            options["momentum"] = self.momentum
        if self.optimizer != "rprop":
            options["weight_decay"] = self.weight_decay
        return OPTIMIZERS[self.optimizer](params, **options)


def _factors(text: str) -> tuple[float, ...]:
    """``"1,1,1,4"``: how many times as long each worker takes."""
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = (0.0,)
    if not all(0 < factor < math.inf for factor in factors):
        raise HocketError(f"--slowdown {text}: give numbers above 0 with commas between them, such as 1,1,1,4.")
    return factors


def make_training(
    settings: Settings, cluster: Cluster, data: DataSet, engines: Engines | None = None
) -> Training | AsyncSimulation:
    """A training ready to run on the workers hosted here; ``engines`` keeps gradient engines from one training to the next."""
    strategy = settings.check()
    Partition(
        len(data.train[0]), settings.workers, settings.batch_size, settings.seed, settings.plan().rounds
    )  # refuses too few samples
    loss = loss_for(data)
    model = seeded(lambda: build(settings.model, data), settings.seed).to(cluster.device)
    options: dict[str, Any] = {
        "seed": settings.seed,
        "clip": settings.clip,
        "autocast": AUTOCAST[settings.autocast],
        "nonfinite": settings.nonfinite,
        "bucket_cap_bytes": settings.bucket_cap_bytes,
        "first_bucket_cap_bytes": settings.first_bucket_cap_bytes,
    }

    def engine(layout: Layout) -> Engine:
        return _engine(settings, model, loss, layout, cluster, {} if engines is None else engines)

    if strategy.runtime != "collective" and (settings.virtual or cluster.size > 1):  # one real worker has nobody to talk to
        if cluster.rows != cluster.size:
            raise HocketError(f"{strategy}: its workers are processes of their own; leave --processes out, or use --virtual.")
        free = {name: value for name, value in options.items() if name not in ("seed", "autocast")}
        rows = AsyncReplicas(model, settings.make_optimizer, strategy, cluster, engine=engine, **free)
        return AsyncSimulation(rows, cluster, data, loss, settings.plan())
    if settings.mesh is not None:
        return _on_mesh(settings, strategy, cluster, data, model, loss, options)
    live = cluster.rows == 1 and not settings.virtual
    replicas: Replicas
    if settings.sharding and cluster.size > 1:
        replicas = _sharded(settings, strategy, cluster, model, loss, options)
    elif live:
        slowdown = settings.slowdown_of(cluster.workers.start)
        replicas = LiveReplica(model, loss, settings.make_optimizer, strategy, cluster, slowdown=slowdown, **options)
    else:
        replicas = StackedReplicas(model, loss, settings.make_optimizer, strategy, cluster, engine=engine, **options)
    training = Training(replicas, cluster, data, loss, settings.plan())
    if cluster.workers.start == 0:
        mention_period(strategy, training.steps, cluster.size)
    return training


def _on_mesh(
    settings: Settings, strategy: Strategy, world: Cluster, data: DataSet, model: nn.Module, loss: Loss, options: dict[str, Any]
) -> Training:
    """Replicas that are split; the workers of the loop are the replicas."""
    from hocket.train.mesh_replica import MeshReplica  # loaded only where a model is split

    assert settings.mesh is not None
    mesh = replace(Mesh.parse(settings.mesh), plan=settings.kinds())
    pipeline = Pipeline(
        schedule=settings.pipe or DEFAULT_SCHEDULE,
        num_microbatches=settings.num_microbatches,
        stages_per_rank=settings.stages_per_rank,
        cut=settings.points(),
        sample=data.prepare(data.train[0][: settings.batch_size].to(world.device)),
        measure=settings.measure,
    )
    buckets = Buckets(options.pop("bucket_cap_bytes"), options.pop("first_bucket_cap_bytes"))
    split: dict[str, Any] = {"zero": settings.zero, "buckets": buckets}
    replica = MeshReplica(model, loss, settings.make_optimizer, strategy, world, mesh, pipeline, **split, **options)
    return Training(replica, replica.cluster, data, loss, settings.plan())


def _sharded(
    settings: Settings, strategy: Strategy, cluster: Cluster, model: nn.Module, loss: Loss, options: dict[str, Any]
) -> Replicas:
    """Workers that keep a part each of what would be the same on all."""
    from hocket.train.sharded_replica import FullReplica  # loaded only where something is sharded

    if cluster.rows != 1 or not isinstance(cluster, ProcessCluster):
        raise HocketError(f"{settings.sharding}: a worker that keeps a part has a process of its own; leave --processes out.")
    if settings.fsdp:
        full = {name: value for name, value in options.items() if not name.endswith("bucket_cap_bytes")}
        return FullReplica(model, loss, settings.make_optimizer, strategy, cluster, **full)
    slowdown = settings.slowdown_of(cluster.workers.start)
    return LiveReplica(model, loss, settings.make_optimizer, strategy, cluster, slowdown=slowdown, zero=settings.zero, **options)


def explanation(settings: Settings, world: Cluster, data: DataSet) -> str:
    """How the model would be split, and why; all processes must ask together."""
    training = make_training(settings, world, data)
    assert isinstance(training, Training)
    job = getattr(training.replicas, "job", None)
    if job is None or settings.mesh is None:
        raise HocketError("Nothing is split; add --mesh pipeline=2, for example.")
    return "\n\n".join([*job.explain(), job.picture()])


def _engine(settings: Settings, model: nn.Module, loss: Loss, layout: Layout, cluster: Cluster, engines: Engines) -> Engine:
    """The engine of an earlier training that differs in nothing an engine depends on, or a new one; compiling takes seconds.

    An engine reads what is not trained from the model it was made with, so models with such parts get one of their own.
    """
    key = (settings.model, settings.data, cluster.rows, str(cluster.device), settings.autocast, settings.engine, layout.digest())
    trained = {s.name for b in layout.buckets for s in b.slots}
    if key in engines and trained == {name for name, _ in model.named_parameters()}:
        return engines[key]
    autocast = AUTOCAST[settings.autocast]
    engine = choose(model, loss, layout, cluster.rows, cluster.device, settings.engine, autocast=autocast)
    if isinstance(engine, VmapEngine):  # the loop has nothing to keep but memory
        engines[key] = engine
    return engine


def run(
    settings: Settings,
    cluster: Cluster,
    data_dir: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    watch: Callable[[Progress], None] = lambda _: None,
    on_epoch: Callable[[dict[str, Any]], None] = lambda _: None,
    data: DataSet | None = None,
    checkpoints: bool = True,
    engines: Engines | None = None,
    briefly: bool = False,
    on_split: Callable[[str], None] = lambda _: None,
) -> Training | AsyncSimulation:
    """Train as ``settings`` say, leaving records in ``out``; ``data`` is loaded by its name unless given.

    ``briefly``: nothing is evaluated but the mean model at the end. ``on_split`` is shown who holds what of a split model.
    """
    process = getattr(cluster, "rank", 0)
    record = None if out is None else Record(out, process, resume)
    data = load(settings.data, data_dir) if data is None else data
    with warnings.catch_warnings():
        if process:
            warnings.simplefilter("ignore")
        training = make_training(settings, cluster, data, engines)
    if settings.mesh is not None:
        picture = training.replicas.job.picture()  # type: ignore[union-attr]
        if process == 0:
            on_split(picture)
    if briefly:
        training.plan = replace(training.plan, evaluate=False, worst=False)
    late = False
    if record is not None and resume:
        record.check_resumed(_repeated(settings))
        late = _go_on(settings, cluster, training, record)
        reached = cluster.all_gather_metrics(torch.full((cluster.rows, 1), training.step)).flatten().tolist()
        if len(set(reached)) > 1:
            raise HocketError(f"The checkpoints in {out} are of different steps ({min(reached)} to {max(reached)}); start anew.")
    # A run that goes on split otherwise is described so only when there is a checkpoint of that kind.
    if record is not None and not late:
        record.write_run(describe(settings, cluster, training))
    for metrics in training.run(watch):
        if record is not None:
            record.write_metrics(training.metrics)
            if checkpoints:
                with training.cluster.uncounted():
                    record.save(training.state_dict())
                    if settings.mesh is not None and isinstance(training, Training):
                        record.save_whole(training.full_state())
            if late:
                record.write_run(describe(settings, cluster, training))
                late = False
        on_epoch(metrics)
    if record is not None and settings.mesh is not None and isinstance(training, Training):
        timeline = training.replicas.job.timeline()  # type: ignore[attr-defined]
        record.write_timeline(None if timeline is None else timeline.to_dict())
    return training


def _go_on(settings: Settings, cluster: Cluster, training: Training | AsyncSimulation, record: Record) -> bool:
    """Load the checkpoint; whether the model is split otherwise than it was, so that its whole was loaded."""
    if isinstance(training, AsyncSimulation):
        training.load_state_dict(record.load())
        return False
    other = record.mesh() != settings.mesh
    state = {} if other else record.load()
    if settings.fsdp and not other:
        state["replicas"]["whole"] = record.load(first=True)["replicas"]["whole"]
    if settings.mesh is not None and not other:  # a cut that is measured may be elsewhere this time
        fits = training.replicas.fits(state["replicas"])  # type: ignore[attr-defined]
        other = bool(cluster.all_reduce_any(torch.tensor([[not fits]], device=cluster.device)))
    if other:
        training.load_full_state(record.load_whole())
    else:
        training.load_state_dict(state)
    return other


def describe(settings: Settings, cluster: Cluster, training: Training | AsyncSimulation) -> dict[str, Any]:
    """run.json: everything needed to repeat the run."""
    clock = cluster.clock
    where = {
        "kind": "virtual" if settings.virtual else "processes",
        "workers": settings.workers,
        "processes": getattr(cluster, "processes", 1),
        "device": str(cluster.device),
        "backend": getattr(cluster, "backend", None),
        "step_s": None if clock is None else clock.step_s,
    }
    return describe_run(settings, where, training.steps, training.replicas.layout)


def describe_run(settings: Settings, where: dict[str, Any], steps: int, layout: Layout) -> dict[str, Any]:
    """The same for a run of ``steps`` steps on a cluster described as ``where``."""
    strategy = settings.check()
    return {
        **_repeated(settings),
        "exchange": "weights" if strategy.weights else "gradients",
        "cluster": where,
        "steps": steps,
        "buckets": layout.describe(),
        "parameters": layout.parameters,
        "versions": versions(),
        "citations": strategy.citation(),
    }


def _repeated(settings: Settings) -> dict[str, Any]:
    """What a run must have in common with the one it goes on with. Of files there is what they said: ``spec`` (the
    cluster) and ``plan``."""
    spec = settings.spec()
    given = {name: value for name, value in settings.recorded().items() if name not in ("cluster", "plan_file")}
    described = {"plan": settings.kinds(), "spec": None if spec is None else spec.describe()}
    return {**given, "strategy": str(settings.check()), **described}


def bulk_bytes(training: Training | AsyncSimulation) -> int:
    """What ``bulk + allreduce`` would send in the same number of steps, all workers together (computed, not measured)."""
    split = getattr(training.replicas, "split", None)
    if split is not None:  # as if each process had a whole model
        return ring_bytes(split.whole_bytes, split.mesh.size) * training.step * split.mesh.size
    return bulk_bytes_of(training.replicas.layout, training.cluster.size, training.step)


def bulk_bytes_of(layout: Layout, workers: int, steps: int) -> int:
    """The same for ``workers`` with this layout."""
    return sum(ring_bytes(b.size * b.dtype.itemsize, workers) for b in layout.buckets) * steps * workers
