"""``hocket train --optimizer sandblaster``: distributed L-BFGS on the whole batch, on real processes or on virtual workers."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from hocket.cli.options import option
from hocket.data import load
from hocket.drivers.replay import DESCRIPTION, ReplayNode, describe_recording
from hocket.errors import HocketError, SettingError
from hocket.models import build, loss_for
from hocket.report.figures import plain
from hocket.sandblaster import Sandblaster
from hocket.sandblaster.replay import replay_nodes as sandblaster_nodes
from hocket.strategy import Strategy
from hocket.topology import Topology
from hocket.train.asynchronous import DEFAULT_CLUSTER
from hocket.train.record import Record, versions
from hocket.train.setting_groups import BATCH_OPTIMIZER
from hocket.train.settings import RunSettings, defaults

_SHARDS = 2
STATE = "state"
"""The folder in ``--out`` that real workers go on from."""
_USED = {"strategy", "workers", "virtual", "data", "model", "optimizer", "lr", "weight_decay", "epochs", "seed", "exact"}
_USED |= {"cluster", "slowdown"}
_EVALUATIONS = 10
"""The most evaluations of the batch per iteration, on average; a line search needs one or two."""


def train_on_batches(
    settings: RunSettings,
    device: torch.device,
    data_dir: Path | None,
    out: Path | None,
    resume: bool = False,
    recording: Path | None = None,
) -> None:
    """Train; ``epochs`` are iterations, the strategy ``server(shards=n)`` gives the shards; ``device`` is virtual workers'.

    Real workers' last iteration lies in ``out``: with ``resume`` the run there goes on from it. ``recording`` is a folder for the
    events of their processes, to replay the run.
    """
    strategy = settings.strategy
    server = strategy.topology
    if strategy not in (Strategy(), Strategy(topology=server)) or not (strategy == Strategy() or server.has_servers):
        raise HocketError(
            f"--strategy '{strategy}': sandblaster exchanges in its own way; leave --strategy out, or use 'server(shards=n)'."
        )
    _refuse_ignored(settings, server)
    if resume and settings.workers.virtual:
        raise HocketError("--resume: virtual workers of sandblaster write no checkpoints; start without --resume.")
    if resume and out is None:
        raise HocketError("--resume needs --out, the folder of the run to go on with.")
    if not resume and out is not None and (out / STATE).exists():
        raise HocketError(f"{out / STATE} holds a run already; choose another --out, or --resume to go on with it.")
    record = None if out is None else Record(out, 0, resume)
    job = _job(settings, server, device, data_dir)
    if record is not None:
        described = _described(settings, job, device)
        run_before = record.read_run() if resume else None
        if run_before is not None:
            record.check_resumed(run_before, described)  # not longer either: its line search counts the evaluations left
        elif resume and not (record.folder / STATE).exists():
            raise SettingError(f"There is no run in {record.folder} to go on with; start without <resume>.")
        else:  # the launch checks that the saved state belongs to this run
            record.write_run({**described, "versions": versions()})
    kept = None if out is None or not resume else out / "metrics.jsonl"
    before = len(kept.read_text().splitlines()) if kept is not None and kept.exists() else 0
    if recording is not None:
        where = None if data_dir is None else str(data_dir)
        describe_recording(recording, "sandblaster", settings=settings.by_name(), data_dir=where)
    run = _run(settings, job, record, before, out, recording)
    metrics = [_metrics(row) for row in run.metrics]  # the last iteration of real workers has an accuracy only now
    if record is not None:
        record.write_metrics(metrics)
    _show(settings, job, metrics, run.ended, out)


def _job(settings: RunSettings, server: Topology, device: torch.device, data_dir: Path | None) -> Sandblaster:
    data, optimizer = load(settings.data.name, data_dir), settings.optimizer
    return Sandblaster(
        lambda: build(settings.model, data).to(device),
        loss_for(data),
        data,
        workers=settings.workers.count,
        shards=server.num_shards(settings.workers.count) if server.has_servers else _SHARDS,
        max_iter=settings.epochs,
        max_eval=_EVALUATIONS * settings.epochs,
        l2=optimizer.weight_decay,
        lr=optimizer.lr,
        exact=settings.numerics.exact,
        seed=settings.seed,
        cluster=DEFAULT_CLUSTER if settings.spec is None else settings.spec,
    )


def _described(settings: RunSettings, job: Sandblaster, device: torch.device) -> dict[str, Any]:
    """The content of run.json without the versions."""
    given = {name: value for name, value in settings.recorded().items() if name != "cluster"}
    virtual, workers = settings.workers.virtual, settings.workers.count
    kind = "virtual" if virtual else "processes"
    cluster = {"kind": kind, "workers": workers, "device": str(device), "shards": job.shards}
    return {**given, "strategy": BATCH_OPTIMIZER, "cluster": cluster, "spec": job.cluster.describe() if virtual else None}


def _run(
    settings: RunSettings, job: Sandblaster, record: Record | None, before: int, out: Path | None, recording: Path | None
) -> Any:
    """Train, and write the figures of every iteration that the record lacks (it has the first ``before``)."""
    metrics: list[dict[str, Any]] = []
    restarts = 0
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("The first evaluation of the whole batch")

        def watch(row: dict[str, Any]) -> None:
            metrics.append(_metrics(row))
            progress.update(task, description=f"iteration {row['iteration']}  loss {row['loss']:.5f}")
            if record is not None and len(metrics) > before:
                record.write_metrics(metrics)

        def tend(company: Any) -> None:
            nonlocal restarts
            if company.times_restarted > restarts:
                progress.console.print("hocket: a shard or the coordinator was killed, and restarted from the last iteration.")
            restarts = company.times_restarted

        if settings.workers.virtual:
            return job.run(watch)
        slowdown = [settings.workers.slowdown_of(worker) for worker in range(settings.workers.count)]
        kept = None if out is None else out / STATE
        return job.launch(kept, watch=tend, on_iteration=watch, slowdown=slowdown, record=recording)


def replay_nodes(folder: Path) -> dict[Any, ReplayNode]:
    """All processes of a run that was recorded in ``folder``."""
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    settings, data_dir = RunSettings.of(**described["settings"]), described["data_dir"]
    job = _job(settings, settings.strategy.topology, torch.device("cpu"), None if data_dir is None else Path(data_dir))
    torch.set_num_threads(1)  # as its workers do
    return sandblaster_nodes(folder, job)


def _refuse_ignored(settings: RunSettings, server: Topology) -> None:
    usual = defaults()
    ignored = {name: value for name, value in settings.by_name().items() if name not in _USED and value != usual[name]}
    given = [option(name, False if value is False else None) for name, value in ignored.items()]
    if server.has_server_settings:
        given += [f"server({f.name}=…)" for f in fields(server) if f.name != "shards" and getattr(server, f.name) != f.default]
    if given:
        raise HocketError(
            f"{', '.join(given)}: sandblaster computes on the whole batch with a line search and does not use this option; leave "
            "it out."
        )


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    """An iteration as a line of metrics.jsonl."""
    line = {"epoch": row["iteration"], "accuracy": row["accuracy"], "loss": row["loss"], "test_loss": row.get("test_loss")}
    line |= {name: row[name] for name in ("perplexity", "seconds") if name in row}
    line |= dict.fromkeys(("compute_s", "wait_s", "transfer_s", "transfer_hidden_s"))
    line |= {"bytes_sent": row["bytes_shards"] + row["bytes_coordinator"], "exchanges": row["evaluations"]}
    return line | {name: row[name] for name in ("bytes_coordinator", "issued", "duplicated", "wasted", "lost")}


def _show(settings: RunSettings, job: Sandblaster, metrics: list[dict[str, Any]], ended: str, out: Path | None) -> None:
    kind = f"virtual workers, seconds predicted for {job.cluster.name}" if settings.workers.virtual else "workers"
    who = f"{settings.workers.count} {kind}"
    table = Table(title=f"Sandblaster L-BFGS: {settings.model} on {settings.data.name}, {job.shards} shards, {who}")
    for column in ("iteration", "loss", "test loss", "accuracy", "evals", "seconds", "MB", "central"):
        table.add_column(column, justify="right")
    for row in metrics:
        accuracy = "–" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        share = f"{row['bytes_coordinator'] / max(row['bytes_sent'], 1):.2%}"
        costs = (str(row["exchanges"]), f"{row['seconds']:.2f}", f"{row['bytes_sent'] / 1e6:,.1f}", share)
        table.add_row(str(row["epoch"]), f"{row['loss']:.5f}", plain(row.get("test_loss")), accuracy, *costs)
    console = Console()
    console.print(table)
    console.print(f"Ended: {ended}. evals: of the whole batch; central: the coordinator's share of all bytes sent.", style="dim")
    if out is not None:
        console.print(f"Records in {out}/run.json and {out}/metrics.jsonl")
