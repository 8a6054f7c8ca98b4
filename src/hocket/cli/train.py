"""``hocket train``: one run, on real processes or on virtual workers."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hocket.cli.batch import train_on_batches
from hocket.cli.display import LEGEND, Display, plain_notes, predicted_for, result_of, total_of
from hocket.cli.launch import launch
from hocket.cli.options import option, with_settings
from hocket.cluster.base import Cluster
from hocket.cluster.join import find_launcher, find_rendezvous, join
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.drivers.processes import interruptible
from hocket.errors import HocketError, bytes_text
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S
from hocket.split import Mesh
from hocket.supervisor import FaultPolicy, Keeping, prepare
from hocket.supervisor.elastic import LIVENESS_TIMEOUT_S as ELASTIC_TIMEOUT_S
from hocket.supervisor.elastic import ElasticRun
from hocket.train.checkpoints import LEAST_KEPT
from hocket.train.checks import needs_servers
from hocket.train.elastic import Elastic
from hocket.train.record import Record
from hocket.train.run import bulk_bytes, bulk_bytes_of, explanation, run
from hocket.train.setting_groups import BATCH_OPTIMIZER
from hocket.train.settings import RunSettings
from hocket.train.trial import check_own
from hocket.transport.tunnel import Tunnel


@with_settings(workers=None, lr=None, epochs=10)
def command(
    *,
    processes: Annotated[int | None, typer.Option(help="Real processes, if fewer than workers (each then hosts several).")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="Where data sets lie.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="With --mesh: show how the model is split and why, and end.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for run.json, metrics.jsonl and checkpoints.")] = None,
    checkpoints: Annotated[bool, typer.Option(help="A checkpoint after every epoch, for --resume.")] = True,
    keep: Annotated[int, typer.Option(help="How many checkpoints are kept, at least 2.")] = LEAST_KEPT,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    keys: Annotated[
        Path | None, typer.Option(help="Servers, or a launcher's processes on several machines: keys made by `hocket keys`.")
    ] = None,
    snapshot: Annotated[float, typer.Option(help="Servers: seconds between snapshots, 0 for none.")] = SNAPSHOT_S,
    liveness_timeout: Annotated[
        float, typer.Option(help="Servers: seconds of silence after which a worker is given up.")
    ] = LIVENESS_TIMEOUT_S,
    replace: Annotated[bool, typer.Option("--replace", help="Servers, gossip: start another worker for one that died.")] = False,
    elastic: Annotated[
        str | None, typer.Option(help="Least and most workers, such as 2:8: the others go on when one is lost, and new ones join.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Servers, gossip, sandblaster: folder for all events, for python -m hocket.drivers.replay.")
    ] = None,
    **given: Any,
) -> None:
    """Train a model with one strategy, on real processes or on virtual workers."""
    plain_notes()
    sys.path.insert(0, os.getcwd())  # for module:factory
    member = find_rendezvous(os.environ) is not None  # our own launcher has started this process
    launcher = None if given["virtual"] or member else find_launcher(os.environ)
    if elastic is not None and given["workers"] is None:
        given["workers"] = Elastic.parse(elastic).least
    settings = _settings(given, 1 if launcher is None else launcher.processes)
    policy = {"keys": keys, "snapshot_s": snapshot, "liveness_timeout_s": liveness_timeout, "replace": replace, "record": record}
    start = Start(
        launcher is not None or member, processes, device, data_dir, out, resume, checkpoints, explain, keys, keep, elastic
    )
    if explain and settings.split is None:
        raise HocketError("--explain shows how a model is split; add --mesh pipeline=2, for example.")
    strategy, virtual = settings.strategy, settings.workers.virtual
    if elastic is not None:
        _refuse_policy(f"--elastic {elastic}", {name: policy[name] for name in ("keys", "snapshot_s", "record")})
        _train_elastic(settings, start, ELASTIC_TIMEOUT_S if liveness_timeout == LIVENESS_TIMEOUT_S else liveness_timeout)
        return
    if settings.optimizer.name == BATCH_OPTIMIZER:
        refused = policy if virtual else {name: value for name, value in policy.items() if name != "record"}
        _refuse_policy(f"--optimizer {settings.optimizer.name}", refused)
        _train_on_batches(settings, start, record)
    elif strategy.runtime != "collective" and not virtual and (settings.workers.count > 1 or needs_servers(strategy)):
        _supervise(settings, start, policy)
    else:
        refused = {**policy, "keys": None} if start.joined else policy
        _refuse_policy(f"{strategy} on virtual workers" if virtual else str(strategy), refused)
        if settings.split is not None and processes is not None:
            raise HocketError(f"--mesh {settings.split.mesh} says how many processes there are; leave --processes out.")
        _start(settings, start)


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


def _settings(given: dict[str, Any], launched: int) -> RunSettings:
    """The settings; workers that are not counted are the mesh's replicas, or as many as were launched."""
    if given["workers"] is None:
        given["workers"] = launched if given["mesh"] is None else Mesh.parse(given["mesh"]).data
    if given["lr"] is None:
        given["lr"] = 1.0 if given["optimizer"] == BATCH_OPTIMIZER else 0.1
    return RunSettings.of(**given)


def _train_on_batches(settings: RunSettings, start: Start, record: Path | None) -> None:
    name, virtual = settings.optimizer.name, settings.workers.virtual
    if start.joined or start.processes not in (None, settings.workers.count) or (start.device not in (None, "cpu") and not virtual):
        raise HocketError(
            f"--optimizer {name} starts its own processes, on this machine's CPUs; leave the launcher, --processes "
            "and --device out (a device computes for --virtual workers)."
        )
    if not start.checkpoints:
        raise HocketError(f"--no-checkpoints: --optimizer {name} keeps only its last iterations, in --out; leave it out.")
    with interruptible():
        train_on_batches(settings, device_of(start.device if virtual else "cpu"), start.data_dir, start.out, start.resume, record)


def _refuse_policy(what: str, policy: dict[str, Any]) -> None:
    """What is for servers and pairs that this command starts means nothing elsewhere."""
    usual = vars(FaultPolicy())
    if named := [option(name) for name, value in policy.items() if value != usual[name]]:
        raise HocketError(f"{', '.join(named)}: {what} has no use for it; leave it out (real processes that do not wait have).")


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
        check_own(settings.model, load(settings.data.name, start.data_dir), settings.data.batch_size)
        launch(sys.argv[1:], count)
        return
    cluster = _cluster(settings, where, start, count)
    try:
        _train(settings, cluster, start)
    finally:
        cluster.close()


def _train_elastic(settings: RunSettings, start: Start, liveness_timeout_s: float) -> None:
    """Start the workers of an elastic run, or be one of them."""
    assert start.elastic is not None
    given, strategy, size = Elastic.parse(start.elastic), settings.strategy, settings.workers.count
    refused = {
        "--virtual": settings.workers.virtual,
        "--mesh": settings.split is not None,
        settings.sharding.named: bool(settings.sharding.named),
        "--resume": start.resume,
        "--processes": start.processes is not None,
        "--balance": settings.data.balance != "even",
        f"--optimizer {settings.optimizer.name}": settings.optimizer.name == BATCH_OPTIMIZER,
        str(strategy): strategy.runtime != "collective",
        "exchange=momentum": strategy.exchanged == "momentum",
    }
    if named := [name for name, found in refused.items() if found]:
        raise HocketError(f"--elastic {start.elastic} trains whole replicas that step together; leave {named[0]} out.")
    if find_rendezvous(os.environ) is not None:
        cluster = join(device=device_of(start.device), exact=settings.numerics.exact)
        try:
            _train(settings, cluster, start)
        finally:
            cluster.close()
        return
    if not given.least <= size <= given.most:
        raise HocketError(f"--workers {size}: an elastic run of {start.elastic} starts with as many as it may have.")
    if start.out is not None:
        Record(start.out, 0)
    check_own(settings.model, load(settings.data.name, start.data_dir), settings.data.batch_size)
    ElasticRun([sys.executable, "-m", "hocket.cli.main", *sys.argv[1:]], size, given, liveness_timeout_s).run()


def _supervise(settings: RunSettings, start: Start, policy: dict[str, Any]) -> None:
    """Shards and workers as processes, this one as their observer."""
    strategy, workers, out = settings.strategy, settings.workers.count, start.out
    if start.resume and out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    if start.resume and policy["record"] is not None:
        raise HocketError("--record records a run from its beginning; leave --resume out, or --record.")
    if start.joined or start.processes not in (None, workers):
        what = "under another launcher" if start.joined else f"with --processes {start.processes}"
        raise HocketError(f"{strategy} starts its own shards and workers and cannot run {what}; leave that out.")
    parsed = FaultPolicy(**policy)
    if strategy.runtime == "peers" and policy["snapshot_s"] != SNAPSHOT_S:
        raise HocketError(f"{strategy} has no shards to take snapshots of; leave --snapshot out.")
    with interruptible():
        keeping = Keeping(start.resume, start.checkpoints, start.keep)
        supervised = prepare(settings, device_of(start.device), start.data_dir, out, parsed, keeping=keeping)
        with Display(str(strategy), True, settings.epochs) as display:
            metrics = supervised.train(display.step, display.epoch)
    steps = supervised.sequence.steps
    title = f"{settings.model} on {settings.data.name}, {supervised.description}, {steps} steps"
    _show(title, str(strategy), metrics, bulk_bytes_of(supervised.layout, workers, steps), out)


def _train(settings: RunSettings, cluster: Cluster, start: Start) -> None:
    speaks, strategy = cluster.workers.start == 0, str(settings.resolved)
    if start.explain:
        text = explanation(settings, cluster, load(settings.data.name, start.data_dir))
        if speaks:
            print(text)
        return
    shows = speaks and not cluster.elastic
    with Display(strategy, shows, settings.epochs, predicted=settings.workers.virtual) as display:
        given = (start.data_dir, start.out, start.resume, display.step, display.epoch)
        training = run(settings, cluster, *given, checkpoints=start.checkpoints, note=display.note, keep=start.keep)
    if cluster.rank == 0:
        title = f"{settings.model} on {settings.data.name}, {_who(settings, cluster)}, {training.step} steps"
        if name := predicted_for(settings):
            title += f", seconds predicted for {name}"
        _show(title, strategy, training.metrics, bulk_bytes(training), start.out)


def _who(settings: RunSettings, cluster: Cluster) -> str:
    kind = "virtual workers" if settings.workers.virtual else "workers"
    split, sharding = settings.split, settings.sharding
    who = f"{cluster.size} {kind}" if split is None else f"{cluster.size} processes as {split.mesh}"
    if sharding.named and settings.workers.count > 1:
        who += ", the optimiser's state in parts" if sharding.zero else ", all in parts (MB by formula)"
    return who


def _show(title: str, strategy: str, metrics: list[dict[str, Any]], baseline: int, out: Path | None) -> None:
    sent = total_of(metrics).bytes_sent
    console = Console()
    console.print(result_of(title, strategy, metrics, baseline / sent if sent else None))
    console.print(LEGEND + " Reduction computed against bulk + allreduce, not measured.", style="dim")
    for name, sent, seconds in axes_of(metrics):
        console.print(f"{name} axis: {bytes_text(sent)} sent, {seconds:.2f} s waited", style="dim")
    if out is not None:
        console.print(f"Records in {out}/run.json and {out}/metrics.jsonl")


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
