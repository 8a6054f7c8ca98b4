"""``hocket demo``: the embedded digits under several strategies, on real processes and on virtual workers: two small studies."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from hocket.cli.display import plain_notes
from hocket.cli.study import Machine, perform, show
from hocket.errors import HocketError
from hocket.report.figures import plain
from hocket.report.rows import Row
from hocket.study.carry_out import Data
from hocket.study.plan import Entry, Outline, expand

REAL = ("bulk + allreduce", "bulk + lowrank(2)", "local(4) + topk(0.02)")
"""Few: starting the processes of each takes longer than its training."""
VIRTUAL = ("bulk + allreduce", "local(4)", "local(4) + gossip", "local(4) + topk(0.02) | qsgd(4)")


def command(
    workers: Annotated[int, typer.Option(help="Real worker processes.")] = 4,
    virtual: Annotated[int, typer.Option(help="Virtual workers.")] = 32,
    epochs: Annotated[int, typer.Option(help="Epochs with real workers; virtual ones get three times as many.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the page; an earlier demo's is replaced.")] = Path("hocket-demo"),
) -> None:
    """Train the embedded digits with real processes and with virtual workers, and compare."""
    plain_notes()
    console = Console()
    machine = Machine(torch.device("cpu"), Data())
    common: dict[str, Any] = {"data": "digits", "model": "cnn", "momentum": 0.9, "lr_schedule": "cosine"}
    real = _outline(
        f"{workers} real processes", REAL, workers, 0.05, {**common, "virtual": False, "batch_size": 16, "epochs": epochs}
    )
    more = {**common, "virtual": True, "batch_size": 4, "epochs": 3 * epochs, "cluster": "100mbit"}
    many = _outline(f"{virtual} virtual workers", VIRTUAL, virtual, 0.1, more)
    studies = {out / "real": expand(real, machine.data), out / "virtual": expand(many, machine.data)}
    _make_room(out)
    console.print(
        f"[bold]Handwritten digits[/bold]: one small network, trained under {len(REAL)} strategies by {workers} processes of this "
        f"machine, then under {len(VIRTUAL)} by {virtual} virtual workers, which one process computes. A strategy says when "
        "workers exchange, with whom, and what they send; bulk + allreduce is what PyTorch's DistributedDataParallel does.\n"
    )
    for place, study in studies.items():
        perform(study, place, machine, then="the demo begins anew next time")
    report = show(list(studies), out, title="Hocket demo: handwritten digits")
    console.print("\n[bold]What was seen[/bold]")
    for line in seen(report.rows):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    after = "hocket study ten-modern --workers 4 --model mlp --batch-size 20 --epochs 10"
    console.print(f"To compare ten strategies: [bold]{after}[/bold]", soft_wrap=True)


def seen(rows: Sequence[Row]) -> list[str]:
    """For each kind of worker the strategy that sends least within two points of the best accuracy; and how to read seconds."""
    lines = []
    for facet in dict.fromkeys(row.facet for row in rows):
        here = [row for row in rows if row.facet == facet and row.accuracy is not None and row.times_fewer]
        if not here:
            continue
        best = max(row.accuracy.mean for row in here if row.accuracy)
        least = max(
            (row for row in here if row.accuracy and row.accuracy.mean > best - 0.02), key=lambda row: row.times_fewer or 0.0
        )
        assert least.accuracy is not None
        who = f"{facet.workers} {facet.kind} workers"
        if (least.times_fewer or 0.0) > 1.005:
            other = f"; the best strategy here {best:.1%}" if least.accuracy.mean < best else ", more than any other here"
            lines.append(
                f"{who}: {escape(least.label)} sends {plain(least.times_fewer)} times fewer bytes than bulk + allreduce and "
                f"classifies {least.accuracy.mean:.1%} of the test digits correctly{other}."
            )
        else:
            lines.append(f"{who}: no strategy that sends fewer bytes than bulk + allreduce is within two points of {best:.1%}.")
    return [*lines, "Seconds of real workers were measured here; those of virtual workers are predicted for links of 100 Mbit/s."]


def _outline(title: str, strategies: tuple[str, ...], workers: int, lr: float, settings: dict[str, Any]) -> Outline:
    return Outline(title, lambda *_: [Entry(s) for s in strategies], "demo", (workers,), settings=settings, lr=lr)


def _make_room(out: Path) -> None:
    """Remove an earlier demo's folder; refuse a folder that is not a demo's."""
    for place in (out / "real", out / "virtual"):
        try:
            earlier = json.loads((place / "study.json").read_bytes()).get("preset") == "demo"
        except (OSError, ValueError, AttributeError):
            earlier = False
        if place.exists() and not earlier:
            raise HocketError(f"{place} exists, and `hocket demo` did not make it; choose another --out.")
        if earlier:
            shutil.rmtree(place)
