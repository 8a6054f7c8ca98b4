"""``hocket train``: one run, on real processes or on virtual workers."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hocket.cli.batch import NAME as batch_optimizer
from hocket.cli.batch import train_on_batches
from hocket.cli.crew import Care, Crew
from hocket.cli.display import LEGEND, Display, add_result, plain_notes, predicted_for, results_table, total_of
from hocket.cli.launch import launch
from hocket.cli.leaving import leaving
from hocket.cli.pairs_crew import PairsCrew
from hocket.cluster.base import Cluster
from hocket.cluster.join import find_launcher, join
from hocket.cluster.spec import PRESETS
from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.errors import HocketError
from hocket.models import build
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S
from hocket.split import Mesh
from hocket.split.pipeline.schedules import SCHEDULES
from hocket.strategy import Strategy
from hocket.topology import Gossip
from hocket.train.checks import needs_servers
from hocket.train.run import Settings, bulk_bytes, bulk_bytes_of, explanation, run

CLUSTER = f"Predict seconds of virtual workers for a cluster: {', '.join(PRESETS)} or a TOML file."
MESH = "Split each worker's model over processes: data=2,pipeline=2,tensor=2 (data: the workers)."
MEASURE = "What layers cost: seconds (measured) or flops (counted: the same cut every time)."
PLAN = "How operations are split: a TOML file of modules' names or patterns and their kinds (default: found)."
ZERO = "1: each worker keeps a part of the optimiser's state (ZeRO-1)."
FSDP = "Each worker keeps a part of weights, gradients and optimiser state (PyTorch's FSDP2)."
SLOWDOWN = "How many times as long each worker takes to compute, such as 1,1,1,4 (repeated over all)."


def command(
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="Such as 'local(4) + gossip + topk(0.01)'.")
    ] = "bulk + allreduce",
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="How many (default: 1, or what was launched).")] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="Virtual workers in this one process.")] = False,
    processes: Annotated[int | None, typer.Option(help="Real processes, if fewer than workers (each then hosts several).")] = None,
    data: Annotated[str, typer.Option(help="digits, mnist, cifar10, cifar100, shakespeare or module:factory.")] = "digits",
    model: Annotated[str, typer.Option(help="mlp, cnn, resnet20, vgg11, gpt or module:factory.")] = "mlp",
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="Where data sets lie.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw, …: torch.optim's names in lower case; sandblaster.")] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: 0.1; of sandblaster's first step: 1).")] = None,
    momentum: Annotated[float, typer.Option(help="Momentum of sgd and rmsprop.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    lr_schedule: Annotated[str, typer.Option(help="constant, cosine, linear or step.")] = "constant",
    warmup: Annotated[float, typer.Option(help="Epochs of linear warm-up.")] = 0.0,
    scale_lr: Annotated[bool, typer.Option("--scale-lr", help="Multiply the rate by the number of workers.")] = False,
    batch_size: Annotated[int, typer.Option(help="Mini-batch per worker.")] = 100,
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 10,
    max_steps: Annotated[int | None, typer.Option(help="End after this many steps.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    autocast: Annotated[str, typer.Option(help="none, bf16 or fp16.")] = "none",
    augment: Annotated[bool, typer.Option(help="Random crops and flips, where the data set has them.")] = True,
    last: Annotated[str, typer.Option(help="An epoch's incomplete round: even (dealt out evenly) or drop.")] = "even",
    seed: Annotated[int, typer.Option(help="Decides weights, partition and codecs.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    engine: Annotated[str, typer.Option(help="Gradients of virtual workers: auto, loop or vmap.")] = "auto",
    nonfinite: Annotated[str, typer.Option(help="NaN or Inf gradients: raise or skip.")] = "raise",
    exact: Annotated[bool, typer.Option("--exact", help="Sum in worker order: equal bit for bit to virtual workers.")] = False,
    host_size: Annotated[int | None, typer.Option(help="Workers per host, for hierarchical topologies.")] = None,
    cluster: Annotated[str | None, typer.Option(help=CLUSTER)] = None,
    slowdown: Annotated[str | None, typer.Option(help=SLOWDOWN)] = None,
    balance: Annotated[str, typer.Option(help="A worker's part of a round: even, or by its speed so far (speed).")] = "even",
    bucket_cap_bytes: Annotated[int | None, typer.Option(help="Largest bucket (default: by strategy).")] = None,
    first_bucket_cap_bytes: Annotated[int | None, typer.Option(help="Largest first bucket (default: by strategy).")] = None,
    mesh: Annotated[str | None, typer.Option(help=MESH)] = None,
    pipe: Annotated[str | None, typer.Option(help=f"Schedule of the stages: {', '.join(SCHEDULES)} (default: 1f1b).")] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(help="Micro-batches per mini-batch (default: twice as many as stages).")
    ] = None,
    cut: Annotated[str | None, typer.Option(help="Modules after which to cut, with commas between them (default: found).")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="Stages of each process (default: by schedule).")] = None,
    measure: Annotated[str | None, typer.Option(help=MEASURE)] = None,
    plan: Annotated[Path | None, typer.Option("--plan", "--plan-file", help=PLAN)] = None,
    zero: Annotated[int, typer.Option(help=ZERO)] = 0,
    fsdp: Annotated[bool, typer.Option("--fsdp", help=FSDP)] = False,
    explain: Annotated[bool, typer.Option("--explain", help="With --mesh: show how the model is split and why, and end.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for run.json, metrics.jsonl and checkpoints.")] = None,
    checkpoints: Annotated[bool, typer.Option(help="A checkpoint after every epoch, for --resume.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    keys: Annotated[Path | None, typer.Option(help="Servers: keys made by `hocket keys`.")] = None,
    snapshot: Annotated[float, typer.Option(help="Servers: seconds between snapshots, 0 for none.")] = SNAPSHOT_S,
    liveness_timeout: Annotated[
        float, typer.Option(help="Servers: seconds of silence after which a worker is given up.")
    ] = LIVENESS_TIMEOUT_S,
    replace: Annotated[bool, typer.Option("--replace", help="Servers, gossip: start another worker for one that died.")] = False,
) -> None:
    """Train a model with one strategy, on real processes or on virtual workers."""
    plain_notes()
    sys.path.insert(0, os.getcwd())  # for module:factory
    place = find_launcher(os.environ)
    joined = place is not None and not virtual
    replicas = None if mesh is None else Mesh.parse(mesh).data
    size = workers if workers is not None else replicas or (place.processes if joined and place is not None else 1)
    settings = Settings(
        strategy=strategy,
        workers=size,
        virtual=virtual,
        data=data,
        model=model,
        optimizer=optimizer,
        lr=(1.0 if optimizer == batch_optimizer else 0.1) if lr is None else lr,
        momentum=momentum,
        weight_decay=weight_decay,
        lr_schedule=lr_schedule,
        warmup=warmup,
        scale_lr=scale_lr,
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
        clip=clip,
        autocast=autocast,
        augment=augment,
        last=last,
        seed=seed,
        engine=engine,
        nonfinite=nonfinite,
        exact=exact,
        host_size=host_size,
        cluster=cluster,
        slowdown=slowdown,
        balance=balance,
        bucket_cap_bytes=bucket_cap_bytes,
        first_bucket_cap_bytes=first_bucket_cap_bytes,
        mesh=mesh,
        pipe=pipe,
        num_microbatches=num_microbatches,
        cut=cut,
        stages_per_rank=stages_per_rank,
        measure=measure,
        plan_file=None if plan is None else str(plan),
        zero=zero,
        fsdp=fsdp,
    )
    if explain and mesh is None:
        raise HocketError("--explain shows how a model is split; add --mesh pipeline=2, for example.")
    if optimizer == batch_optimizer:
        if joined or processes not in (None, size) or (device not in (None, "cpu") and not virtual):
            raise HocketError(
                f"--optimizer {optimizer} starts its own processes, on this machine's CPUs; leave the launcher, --processes "
                "and --device out (a device computes for --virtual workers)."
            )
        if not checkpoints:
            raise HocketError(f"--no-checkpoints: --optimizer {optimizer} keeps only its last iterations, in --out; leave it out.")
        _refuse_care(f"--optimizer {optimizer}", keys, snapshot, liveness_timeout, replace)
        with leaving():
            train_on_batches(settings, device_of(device if virtual else "cpu"), data_dir, out, resume)
        return
    parsed = settings.check()
    if parsed.runtime != "collective" and not virtual and (size > 1 or needs_servers(parsed)):
        if joined or resume or processes not in (None, size):
            what = "under another launcher" if joined else "with --resume" if resume else f"with --processes {processes}"
            raise HocketError(f"{parsed} starts its own shards and workers and cannot run {what}; leave that out.")
        if snapshot < 0 or liveness_timeout <= 0:
            raise HocketError(
                f"--snapshot {snapshot:g} --liveness-timeout {liveness_timeout:g}: seconds are above 0 (--snapshot 0: none)."
            )
        _run_crew(settings, device_of(device), data_dir, out, Care(liveness_timeout, snapshot, replace, keys))
        return
    _refuse_care(f"{parsed} on virtual workers" if virtual else str(parsed), keys, snapshot, liveness_timeout, replace)
    if mesh is not None and processes is not None:
        raise HocketError(f"--mesh {mesh} says how many processes there are; leave --processes out.")
    _start(settings, joined, processes, device, data_dir, out, resume, checkpoints, explain)


def _refuse_care(what: str, keys: Path | None, snapshot: float, liveness_timeout: float, replace: bool) -> None:
    """What is for servers and pairs that this command starts means nothing elsewhere."""
    given = {
        "--keys": keys is not None,
        "--snapshot": snapshot != SNAPSHOT_S,
        "--liveness-timeout": liveness_timeout != LIVENESS_TIMEOUT_S,
    }
    if named := [option for option, is_given in {**given, "--replace": replace}.items() if is_given]:
        raise HocketError(f"{', '.join(named)}: {what} has no use for it; leave it out (real processes that do not wait have).")


def arguments(settings: Settings) -> list[str]:
    """What to write after ``hocket train`` for these settings.

    >>> arguments(Settings(strategy="local(4)", workers=2, virtual=True))[:5]
    ['--strategy', 'local(4)', '--workers', '2', '--virtual']
    """
    written: list[str] = []
    for name, value in asdict(settings).items():
        option = "--" + name.replace("_", "-")
        if value is True or (value is False and name == "augment"):
            written.append(option if value else f"--no-{name}")
        elif value is not None and value is not False:
            written += [option, str(value)]
    return written


def _start(
    settings: Settings,
    joined: bool,
    processes: int | None,
    device: str | None,
    data_dir: Path | None,
    out: Path | None,
    resume: bool,
    checkpoints: bool,
    explain: bool = False,
) -> None:
    """Start the workers, or be some of them."""
    parsed, size = settings.check(), settings.workers
    if resume and out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    where = device_of(device)
    count = size * settings.processes if processes is None else processes
    if settings.mesh is None and not 1 <= count <= size:
        raise HocketError(f"--processes {count}: there must be at least one and at most one per worker (--workers {size}).")
    if not joined and not settings.virtual and count > 1:
        _check_before_start(settings, data_dir, out, resume)
        launch(sys.argv[1:], count)
        return
    cluster = _cluster(settings, where, joined, count)
    try:
        _train(settings, parsed, cluster, data_dir, out, resume, checkpoints, explain)
    finally:
        cluster.close()


def _run_crew(settings: Settings, device: torch.device, data_dir: Path | None, out: Path | None, care: Care) -> None:
    """Shards and workers as processes, this one as their observer."""
    paired = isinstance(settings.check().topology, Gossip)
    with leaving():
        crew = (PairsCrew if paired else Crew)(settings, device, data_dir, out, care)
        with Display(str(crew.strategy), True, settings.epochs) as display:
            metrics = crew.run(display.step, display.epoch)
    steps, workers = crew.sequence.steps, settings.workers
    shards = "1 shard" if crew.slices.shards == 1 else f"{crew.slices.shards} shards"
    who = f"{workers} workers" if paired else f"{workers} workers and {shards}"
    title = f"{settings.model} on {settings.data}, {who}, {steps} steps"
    _show(title, str(crew.strategy), metrics, bulk_bytes_of(crew.layout, workers, steps), out)


def _train(
    settings: Settings,
    strategy: Strategy,
    cluster: Cluster,
    data_dir: Path | None,
    out: Path | None,
    resume: bool,
    checkpoints: bool,
    explain: bool = False,
) -> None:
    speaks = cluster.workers.start == 0
    if explain:
        text = explanation(settings, cluster, load(settings.data, data_dir))
        if speaks:
            print(text)
        return
    with Display(str(strategy), speaks, settings.epochs) as display:
        training = run(
            settings, cluster, data_dir, out, resume, display.step, display.epoch, checkpoints=checkpoints, on_split=display.note
        )
    if speaks:
        kind = "virtual workers" if settings.virtual else "workers"
        name = predicted_for(settings)
        predicted = f", seconds predicted for {name}" if name else ""
        who = f"{cluster.size} {kind}" if settings.mesh is None else f"{cluster.size} processes as {settings.mesh}"
        if settings.sharding and settings.workers > 1:
            who += ", the optimiser's state in parts" if settings.zero else ", all in parts (MB by formula)"
        title = f"{settings.model} on {settings.data}, {who}, {training.step} steps{predicted}"
        _show(title, str(strategy), training.metrics, bulk_bytes(training), out)


def _show(title: str, strategy: str, metrics: list[dict[str, Any]], baseline: int, out: Path | None) -> None:
    """The table at the end."""
    table = results_table(title)
    add_result(table, strategy, metrics[-1], total_of(metrics), baseline)
    console = Console()
    console.print(table)
    console.print(LEGEND + " Reduction computed against bulk + allreduce, not measured.", style="dim")
    for name, sent, seconds in axes_of(metrics):
        console.print(f"{name} axis: {sent / 1e6:,.1f} MB sent, {seconds:.2f} s waited", style="dim")
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


def _cluster(settings: Settings, device: torch.device, joined: bool, processes: int) -> Cluster:
    if settings.virtual:
        return settings.virtual_cluster(device)
    if joined or processes > 1:
        workers = settings.workers if settings.mesh is None else None
        cluster = join(device=device, workers=workers, exact=settings.exact)
        if settings.host_size is not None:
            setattr(cluster, "_host_size", settings.host_size)  # noqa: B010
        return cluster
    return VirtualCluster(settings.workers, device, settings.host_size, timed=settings.workers == 1)


def _check_before_start(settings: Settings, data_dir: Path | None, out: Path | None, resume: bool) -> None:
    """Say what is wrong once, before any process is started."""
    if out is not None and (out / "run.json").exists() and not resume:
        raise HocketError(f"{out} holds a run already; choose another --out, or --resume to go on with it.")
    build(settings.model, load(settings.data, data_dir))


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
