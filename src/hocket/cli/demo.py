"""``hocket demo``: the embedded digits under several strategies, on real processes and on virtual workers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hocket.cli.display import LEGEND, Display, add_result, plain_notes, results_table, total_of
from hocket.cluster.virtual import VirtualCluster
from hocket.train.run import Settings, run

REAL = (
    "bulk + allreduce",
    "local(8)",
    "bulk + gossip",
    "bulk + lowrank(2)",
    "local(4) + topk(0.02)",
    "diloco(4, momentum=0.5)",
)
VIRTUAL = ("bulk + allreduce", "local(4)", "local(4) + gossip", "bulk + topk(0.02)", "local(4) + topk(0.02) | qsgd(4)")


def command(
    workers: Annotated[int, typer.Option(help="Real worker processes.")] = 4,
    virtual: Annotated[int, typer.Option(help="Virtual workers.")] = 32,
    epochs: Annotated[int, typer.Option(help="Epochs with real workers; virtual ones get three times as many.")] = 5,
) -> None:
    """Train the embedded digits with real processes and with virtual workers, and compare."""
    plain_notes()
    console = Console()
    console.print(
        f"[bold]Handwritten digits[/bold], one model, {workers} real workers, then {virtual} virtual ones in one process.\n"
    )
    common: dict[str, Any] = {"data": "digits", "model": "cnn", "momentum": 0.9, "schedule": "cosine"}
    settings = Settings(workers=workers, batch=16, lr=0.05, epochs=epochs, **common)
    table = results_table(f"{workers} real processes, {epochs} epochs, batch 16 each (measured)")
    _compare(console, REAL, table, settings, _real)
    console.print(table)
    settings = Settings(workers=virtual, virtual=True, batch=4, lr=0.1, epochs=3 * epochs, **common)
    table = results_table(f"{virtual} virtual workers, {3 * epochs} epochs, batch 4 each (bytes counted, no clocks yet)")
    _compare(console, VIRTUAL, table, settings, _virtual)
    console.print(table)
    console.print(LEGEND, style="dim")
    console.print("Yours next: [bold]hocket train --workers 4 --strategy 'local(4) + topk(0.02)'[/bold]")


def _compare(console: Console, strategies: tuple[str, ...], table: Any, settings: Settings, train: Any) -> None:
    baseline = 0.0
    for strategy in strategies:
        fields = {**asdict(settings), "strategy": strategy}
        metrics = train(Settings(**fields))
        total = total_of(metrics)
        baseline = baseline or total.bytes_sent
        add_result(table, strategy, metrics[-1], total, baseline)


def _real(settings: Settings) -> list[dict[str, Any]]:
    """Through the command itself, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        arguments = ["--strategy", settings.strategy, "--workers", str(settings.workers)]
        arguments += ["--data", settings.data, "--model", settings.model]
        arguments += ["--batch", str(settings.batch), "--epochs", str(settings.epochs), "--lr", str(settings.lr), "--device", "cpu"]
        arguments += ["--momentum", str(settings.momentum), "--schedule", settings.schedule, "--out", str(out)]
        ended = subprocess.run(
            [sys.executable, "-m", "hocket.cli.main", "train", *arguments], stdout=subprocess.DEVNULL, check=False
        )
        if ended.returncode:
            raise typer.Exit(ended.returncode)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _virtual(settings: Settings) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    cluster = VirtualCluster(settings.workers)
    with Display(f"{settings.strategy} ({settings.workers} virtual)", speaks=True, epochs=settings.epochs) as display:
        return run(settings, cluster, watch=display.step, on_epoch=display.epoch).metrics
