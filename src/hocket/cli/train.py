"""``hocket train``: one run, on real processes or on virtual workers."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hocket.cli.batch import train_on_batches
from hocket.cli.display import plain_notes, predicted_for, total_of
from hocket.cli.elastic import HANG, count_workers, follow, refuse_not_elastic
from hocket.cli.launchers import RAY, check_launcher, check_machines, check_options, launched_machines, refuse_launched
from hocket.cli.live import Display, summary
from hocket.cli.options import option, with_settings
from hocket.cluster.base import Cluster
from hocket.cluster.join import find_launcher, find_rendezvous, join
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.data.shards.dataset import with_bad_shards
from hocket.drivers.machines import Machines, ThisMachine
from hocket.drivers.processes import interruptible, say
from hocket.errors import HocketError, bytes_text
from hocket.integrations.loggers import Loggers, check_loggers, open_loggers
from hocket.programs.elastic.waits import HANG_TIMEOUT_S
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S
from hocket.split import Mesh
from hocket.supervisor import FaultPolicy, Keeping, prepare
from hocket.supervisor.elastic import LIVENESS_TIMEOUT_S as ELASTIC_TIMEOUT_S
from hocket.supervisor.elastic import ElasticRun
from hocket.supervisor.launch import launch
from hocket.train.checkpoints import LEAST_KEPT
from hocket.train.checks import needs_servers
from hocket.train.elastic import Elastic
from hocket.train.record import METRICS, Record
from hocket.train.run import bulk_bytes, bulk_bytes_of, explanation, run
from hocket.train.setting_groups import BATCH_OPTIMIZER, USUAL_LRS
from hocket.train.settings import RunSettings
from hocket.train.trial import check_own
from hocket.transport.tunnel import Tunnel


@with_settings(workers=None, lr=None, epochs=10)
def command(
    *,
    processes: Annotated[int | None, typer.Option(help="Real processes, if fewer than workers (each then hosts several).")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="The folder of the data sets.")] = None,
    on_bad_shard: Annotated[str | None, typer.Option(help="A damaged shard of --data shards:…: stop, or skip and count.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="With --mesh: show how the model is split and why, and end.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for run.json, metrics.jsonl and checkpoints.")] = None,
    checkpoints: Annotated[bool, typer.Option(help="A checkpoint after every epoch, for --resume.")] = True,
    keep: Annotated[int, typer.Option(help="How many checkpoints are kept, at least 2.")] = LEAST_KEPT,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    keys: Annotated[
        Path | None,
        typer.Option(help="Servers, --elastic, or a launcher's processes on several machines: keys made by `hocket keys`."),
    ] = None,
    snapshot: Annotated[float, typer.Option(help="Servers: seconds between snapshots, 0 for none.")] = SNAPSHOT_S,
    liveness_timeout: Annotated[
        float, typer.Option(help="Servers, --elastic: seconds of silence after which a worker is given up.")
    ] = LIVENESS_TIMEOUT_S,
    replace: Annotated[bool, typer.Option("--replace", help="Servers, gossip: start another worker for one that died.")] = False,
    elastic: Annotated[
        str | None, typer.Option(help="Least and most workers, such as 2:8: the others go on when one is lost, and new ones join.")
    ] = None,
    hang_timeout: Annotated[float, HANG] = HANG_TIMEOUT_S,
    by: Annotated[
        str | None, typer.Option("--launcher", help=f"{RAY}: start the processes on a Ray cluster that runs already.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Servers, gossip, sandblaster: folder for all events, for python -m hocket.drivers.replay.")
    ] = None,
    log: Annotated[
        list[str] | None, typer.Option(help="Also write figures to tensorboard, wandb, mlflow or jsonl (with :PLACE).")
    ] = None,
    **given: Any,
) -> None:
    """Train a model with one strategy, on real processes or on virtual workers."""
    plain_notes()
    sys.path.insert(0, os.getcwd())  # for module:factory
    member = find_rendezvous(os.environ) is not None  # our own launcher has started this process
    check_launcher(by, os.environ)
    if given["virtual"]:
        refuse_launched(os.environ, "A training of --virtual workers", "leave the launcher out, or --virtual")
    launcher = None if given["virtual"] or member else find_launcher(os.environ)
    if elastic is not None:
        count_workers(given, Elastic.parse(elastic))
    given["data"] = with_bad_shards(given["data"], on_bad_shard)
    settings = _settings(given, 1 if launcher is None else launcher.processes)
    check_options(launcher, settings, processes)
    if by is not None and (elastic is not None or settings.optimizer.name == BATCH_OPTIMIZER):
        raise HocketError(f"--launcher {by}: --elastic and {BATCH_OPTIMIZER} start processes of their own here; leave it out.")
    policy = {"keys": keys, "snapshot_s": snapshot, "liveness_timeout_s": liveness_timeout, "replace": replace, "record": record}
    given_start = (processes, device, data_dir, out, resume, checkpoints, explain, keys, keep, elastic, by, replace, log or [])
    start = Start(launcher is not None or member, *given_start, hang_timeout)
    start.check(settings)
    if elastic is not None:
        _refuse_policy(f"--elastic {elastic}", {name: policy[name] for name in ("snapshot_s", "record")})
        _train_elastic(settings, start, ELASTIC_TIMEOUT_S if liveness_timeout == LIVENESS_TIMEOUT_S else liveness_timeout)
    else:
        _train_by_runtime(settings, start, policy)


@dataclass(frozen=True)
class Start:
    """How a run is started, beside its settings."""

    joined: bool = False
    """A launcher has started this process as one of several."""
    processes: int | None = None
    device: str | None = None
    data_dir: Path | None = None
    out: Path | None = None
    resume: bool = False
    checkpoints: bool = True
    explain: bool = False
    keys: Path | None = None
    """Of a launcher's job whose processes are on several machines."""
    keep: int = LEAST_KEPT
    elastic: str | None = None
    launcher: str | None = None
    """What starts the processes, if this command is to ask for it."""
    replace: bool = False
    log: list[str] = field(default_factory=list)
    hang_timeout_s: float = HANG_TIMEOUT_S
    """Of an elastic run: a worker that others have waited for so long is lost."""

    def check(self, settings: RunSettings) -> None:
        """Refuse options that contradict each other, before any process is started."""
        if self.explain and settings.split is None:
            raise HocketError("--explain shows how a model is split; add --mesh pipeline=2, for example.")
        if self.elastic is None and self.hang_timeout_s != HANG_TIMEOUT_S:
            raise HocketError(f"--hang-timeout {self.hang_timeout_s:g} is for elastic runs; add --elastic 2:8, or leave it out.")
        check_loggers(self.log, os.environ.get("WANDB_MODE"))
        if self.log and settings.optimizer.name == BATCH_OPTIMIZER:
            raise HocketError(f"--log {self.log[0]}: sandblaster writes metrics.jsonl alone; leave it out.")
        if self.log and self.elastic is not None and self.out is None:
            raise HocketError(f"--log {self.log[0]} with --elastic follows the run's metrics.jsonl; add --out FOLDER.")

    def loggers(self, settings: RunSettings, here: bool = True) -> Loggers:
        """The loggers of ``--log``; none in processes that do not record the run."""
        folder = Path(".") if self.out is None else self.out
        return open_loggers(self.log if here else [], settings.recorded(), folder, os.environ.get("WANDB_MODE"))


def _train_by_runtime(settings: RunSettings, start: Start, policy: dict[str, Any]) -> None:
    """Train by Sandblaster, by messages or by collectives, as optimiser and strategy require."""
    strategy, virtual, by = settings.strategy, settings.workers.virtual, start.launcher
    if settings.optimizer.name == BATCH_OPTIMIZER:
        refused = policy if virtual else {name: value for name, value in policy.items() if name != "record"}
        _refuse_policy(f"--optimizer {settings.optimizer.name}", refused)
        _train_on_batches(settings, start, policy["record"])
    elif strategy.runtime != "collective" and not virtual and (settings.workers.count > 1 or needs_servers(strategy)):
        _supervise(settings, start, policy)
    else:
        refused = {**policy, "keys": None} if start.joined or by == RAY else policy
        refused |= {"replace": False} if by == RAY else {}
        if by == RAY and (virtual or settings.processes * settings.workers.count == 1):
            raise HocketError(f"--launcher {RAY} starts several workers; add --workers, or leave --launcher out.")
        _refuse_policy(f"{strategy} on virtual workers" if virtual else str(strategy), refused)
        if settings.split is not None and start.processes is not None:
            raise HocketError(f"--mesh {settings.split.mesh} says how many processes there are; leave --processes out.")
        _start(settings, start)


def _settings(given: dict[str, Any], launched: int) -> RunSettings:
    """The settings; the default number of workers is that of the mesh's replicas, or of launched processes."""
    if given["workers"] is None:
        given["workers"] = launched if given["mesh"] is None else Mesh.parse(given["mesh"]).data
    if given["lr"] is None:
        given["lr"] = USUAL_LRS.get(given["optimizer"], 0.1)
    return RunSettings.of(**given)


def _train_on_batches(settings: RunSettings, start: Start, record: Path | None) -> None:
    name, virtual = settings.optimizer.name, settings.workers.virtual
    if start.joined or start.processes not in (None, settings.workers.count) or (start.device not in (None, "cpu") and not virtual):
        raise HocketError(
            f"--optimizer {name} starts its own processes, on this machine's CPUs; leave the launcher, --processes and --device "
            "out (--device is for --virtual workers)."
        )
    if not start.checkpoints:
        raise HocketError(f"--no-checkpoints: --optimizer {name} keeps only its last iterations, in --out; leave it out.")
    with interruptible():
        train_on_batches(settings, device_of(start.device if virtual else "cpu"), start.data_dir, start.out, start.resume, record)


def _refuse_policy(what: str, policy: dict[str, Any]) -> None:
    """Refuse options of servers and gossip under strategies that start no such processes."""
    usual = vars(FaultPolicy())
    if named := [option(name) for name, value in policy.items() if value != usual[name]]:
        raise HocketError(f"{', '.join(named)}: {what} does not use it; leave it out (it is for processes that do not wait).")


def _start(settings: RunSettings, start: Start) -> None:
    size = settings.workers.count
    if start.resume and start.out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    where = device_of(start.device)
    count = size * settings.processes if start.processes is None else start.processes
    if settings.split is None and not 1 <= count <= size:
        raise HocketError(f"--processes {count}: there must be at least one and at most one per worker (--workers {size}).")
    if not start.joined and not settings.workers.virtual and count > 1:
        # What is wrong is said once, before any process is started.
        if start.out is not None and (start.out / "run.json").exists() and not start.resume:
            raise HocketError(f"{start.out} holds a run already; choose another --out, or --resume to go on with it.")
        data = load(settings.data.name, start.data_dir)
        check_own(settings.model, data, settings.data.batch_size, settings.build(data))
        if start.launcher == RAY:
            from hocket.cli.ray_train import train_on_ray

            train_on_ray(count, str(settings.strategy), where.type == "cuda", start.keys, start.out, start.replace)
        else:
            launch(["-m", "hocket.cli.main", *sys.argv[1:]], count)
        return
    cluster = _cluster(settings, where, start, count)
    try:
        _train(settings, cluster, start)
    finally:
        cluster.close()


def _train_elastic(settings: RunSettings, start: Start, liveness_timeout_s: float) -> None:
    """Start the workers of an elastic run, or be one of them."""
    assert start.elastic is not None
    given, size = Elastic.parse(start.elastic), settings.workers.count
    refuse_not_elastic(settings, start.elastic, start.explain, start.processes)
    if (found := find_rendezvous(os.environ)) is not None:
        if start.log and found.member is None:
            raise HocketError(
                f"--log {start.log[0]}: in an elastic run only the launcher writes logs, and this process is a worker of another "
                "launcher; leave --log out."
            )
        cluster = join(device=device_of(start.device), exact=settings.numerics.exact, keys=start.keys)
        try:
            _train(settings, cluster, start)
        finally:
            cluster.close()
        return
    if not given.least <= size <= given.most:
        raise HocketError(f"--workers {size} is not within --elastic {start.elastic}; leave --workers out.")
    if start.resume and start.out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    if start.out is not None:
        Record(start.out, 0, start.resume)
    data = load(settings.data.name, start.data_dir)
    check_own(settings.model, data, settings.data.batch_size, settings.build(data))
    command = [sys.executable, "-m", "hocket.cli.main", *sys.argv[1:]]
    with start.loggers(settings) as loggers:
        watch = follow(start.out / METRICS, loggers.epoch) if start.log and start.out is not None else lambda: None
        more: dict[str, Any] = {"parts": settings.processes, "hang_timeout_s": start.hang_timeout_s}
        ElasticRun(command, size, given, liveness_timeout_s, keys=start.keys, **more).run(watch)


def _supervise(settings: RunSettings, start: Start, policy: dict[str, Any]) -> None:
    """Shards and workers as processes, this one as their observer."""
    strategy, workers, out = settings.strategy, settings.workers.count, start.out
    if start.resume and out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    if start.resume and policy["record"] is not None:
        raise HocketError("--record records a run from its beginning; leave --resume out, or --record.")
    if not start.joined and start.processes not in (None, workers):
        raise HocketError(f"{strategy} starts a process for each worker; leave --processes {start.processes} out.")
    parsed = FaultPolicy(**policy)
    if strategy.runtime == "peers" and policy["snapshot_s"] != SNAPSHOT_S:
        raise HocketError(f"{strategy} has no shards to take snapshots of; leave --snapshot out.")
    with interruptible(), _machines(settings, start) as machines:
        if machines is None:
            return
        check_machines(machines, settings, parsed)
        keeping = Keeping(start.resume, start.checkpoints, start.keep)
        supervised = prepare(settings, device_of(start.device), start.data_dir, out, parsed, keeping=keeping, machines=machines)
        shown = Display(str(strategy), True, settings.epochs, settings.data.batch_size * workers)
        with shown as display, start.loggers(settings) as loggers:
            metrics = supervised.train(display.step, each(display.epoch, loggers.epoch))
    steps = supervised.sequence.steps
    title = f"{settings.model} on {settings.data.name}, {supervised.description}, {steps} steps"
    _show(title, str(strategy), metrics, workers, bulk_bytes_of(supervised.layout, workers, steps), out)


def _machines(settings: RunSettings, start: Start) -> AbstractContextManager[Machines | None]:
    """Where shards and workers are started; None in a process that only starts what another one orders."""
    if start.launcher == RAY:
        from hocket.drivers.ray_cluster import ray_machines

        return ray_machines(settings.workers.count, str(settings.strategy), device_of(start.device).type == "cuda")
    return launched_machines(start.keys) if start.joined else nullcontext(ThisMachine())


def _train(settings: RunSettings, cluster: Cluster, start: Start) -> None:
    speaks, strategy = cluster.workers.start == 0, str(settings.resolved)
    if start.explain:
        text = explanation(settings, cluster, load(settings.data.name, start.data_dir))
        if speaks:
            print(text)
        return
    shows = speaks and not cluster.elastic
    shown = Display(strategy, shows, settings.epochs, settings.data.batch_size * settings.workers.count, settings.workers.virtual)
    with shown as display, start.loggers(settings, cluster.rank == 0 and not cluster.elastic) as loggers:
        given = (start.data_dir, start.out, start.resume, display.step, each(display.epoch, loggers.epoch))
        note = (lambda text: say(text.rstrip("."))) if cluster.elastic else display.note
        training = run(settings, cluster, *given, checkpoints=start.checkpoints, note=note, keep=start.keep, leaves=True)
    if cluster.process == 0:
        title = f"{settings.model} on {settings.data.name}, {_who(settings, cluster)}, {training.step} steps"
        _show(title, strategy, training.metrics, cluster.size, bulk_bytes(training), start.out, predicted_for(settings))


def each(*functions: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """A function that calls all of these."""

    def called(metrics: dict[str, Any]) -> None:
        for function in functions:
            function(metrics)

    return called


def _who(settings: RunSettings, cluster: Cluster) -> str:
    kind = "virtual workers" if settings.workers.virtual else "workers"
    split, sharding = settings.split, settings.sharding
    who = f"{cluster.size} {kind}" if split is None else f"{cluster.size} processes as {split.mesh}"
    if split is not None and cluster.elastic:
        who = f"{cluster.size} replicas of {settings.processes} processes"
    if sharding.named and settings.workers.count > 1:
        who += ", the optimiser's state in parts" if sharding.zero else ", all in parts (MB by formula)"
    return who


def _show(
    title: str, strategy: str, metrics: list[dict[str, Any]], workers: int, baseline: int, out: Path | None, predicted: str = ""
) -> None:
    sent = total_of(metrics).bytes_sent
    console = Console(highlight=False)
    console.print(f"{strategy}: {title}", style="bold", markup=False)
    console.print(summary(metrics, workers, baseline / sent if sent else None, predicted))
    for name, sent, seconds in axes_of(metrics):
        console.print(f"{name} axis: {bytes_text(sent)} sent, {seconds:.2f} s waited", style="dim")
    if out is not None:
        console.print(f"Records in {out}: hocket report {out} makes a page of them", soft_wrap=True)


def axes_of(metrics: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Bytes and waiting of each axis of a mesh over all epochs; empty where nothing is split.

    >>> axes_of([{"axes": {"pipeline": {"bytes_sent": 3, "seconds": 0.5}}}] * 2)
    [('pipeline', 6, 1.0)]
    """
    lines = [line["axes"] for line in metrics if "axes" in line]
    names = [name for name in (lines[0] if lines else ()) if any(line[name]["bytes_sent"] for line in lines)]
    return [(n, sum(line[n]["bytes_sent"] for line in lines), sum(line[n]["seconds"] for line in lines)) for n in names]


def _cluster(settings: RunSettings, device: torch.device, start: Start, processes: int) -> Cluster:
    workers = settings.workers
    if workers.virtual:
        return settings.virtual_cluster(device)
    if start.joined or processes > 1:
        count = workers.count if settings.split is None else None
        tunnel = None if start.keys is None else Tunnel.with_keys(start.keys)
        cluster = join(device=device, workers=count, exact=settings.numerics.exact, keys=start.keys, tunnel=tunnel)
        if workers.host_size is not None:
            cluster.host_size = workers.host_size
        return cluster
    return VirtualCluster(workers.count, device, workers.host_size, timed=workers.count == 1)


def device_of(name: str | None) -> torch.device:
    """The device of that name; CUDA if there is one, unless named."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HocketError(f"--device {name}: unknown; use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HocketError(f"--device {name}: torch sees no CUDA device here; use --device cpu.")
    return device
