"""``hocket predict``: what strategies would cost on a cluster, for 1 to thousands of workers, without training."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hocket.cluster.spec import ClusterSpec
from hocket.cluster.spec_file import PRESETS, amount
from hocket.errors import HocketError
from hocket.prediction.api import STRATEGIES, Predictions, predict
from hocket.prediction.chart import chart
from hocket.prediction.model import OPTIMIZERS
from hocket.prediction.tables import LEGEND, cells, columns
from hocket.split.options import ASYNCHRONOUS
from hocket.split.pipeline.schedules import SCHEDULES

_MARKS = (1, 4, 16, 64, 256, 1024, 4096)


def command(
    model: Annotated[str | None, typer.Option(help="mlp, cnn, resnet20, vgg11, gpt, gpt:10m, … or module:factory.")] = None,
    parameters: Annotated[str | None, typer.Option(help="Instead of --model: the number of parameters, such as 124M.")] = None,
    cluster: Annotated[str, typer.Option(help=f"A TOML file (`hocket probe` writes one), or {', '.join(PRESETS)}.")] = "1gbit",
    strategy: Annotated[list[str] | None, typer.Option("--strategy", "-s", help="A strategy; may be repeated.")] = None,
    workers: Annotated[str | None, typer.Option("--workers", "-n", help="Such as 1,4,16 (default: 1 to 4096).")] = None,
    mesh: Annotated[list[str] | None, typer.Option(help="How the model is split: pipeline=4,tensor=2; may be repeated.")] = None,
    schedule: Annotated[str, typer.Option(help=f"For pipelines: {', '.join(n for n in SCHEDULES if n != ASYNCHRONOUS)}.")] = "1f1b",
    num_microbatches: Annotated[int | None, typer.Option(help="Micro-batches per mini-batch (default: twice the stages).")] = None,
    stages_per_rank: Annotated[int | None, typer.Option(help="Stages of each process (default: by schedule).")] = None,
    sharding: Annotated[str | None, typer.Option(help="zero1 (shards the optimiser's state) or fsdp (shards all).")] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a step on one worker (default: counted operations).")] = None,
    batch_size: Annotated[int, typer.Option(help="Mini-batch per worker.")] = 100,
    data: Annotated[str | None, typer.Option(help="The data set that the model is for (default: random samples).")] = None,
    sample_bytes: Annotated[str | None, typer.Option(help="Bytes of a stored sample, such as 110k.")] = None,
    samples: Annotated[str | None, typer.Option(help="Samples in the data set, such as 1.2M, to predict a cache.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "momentum",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    picture: Annotated[Path | None, typer.Option("--chart", help="Also draw samples per second as a .png file.")] = None,
) -> None:
    """Predict step time, efficiency, traffic, memory and cost, without training."""
    sys.path.insert(0, os.getcwd())  # for module:factory
    size = None if parameters is None else amount(parameters, f"--parameters {parameters}")
    counts = None if workers is None else _counts(workers)
    more: dict[str, Any] = {"meshes": mesh or (), "sharding": sharding, "data": data, "optimizer": optimizer}
    more |= {"schedule": schedule, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for name, text in (("sample_bytes", sample_bytes), ("samples", samples)):
        more[name] = None if text is None else amount(text, f"--{name.replace('_', '-')} {text}")
    found = predict(model, cluster, strategy or STRATEGIES, counts, parameters=size, step_s=step_s, batch_size=batch_size, **more)
    if picture is not None:
        chart(found, picture)
    if json_ or csv:
        print(json.dumps(found.plain(), indent=1) if json_ else found.csv(), end="" if csv else "\n")
        return
    show(found, Console(), whole=counts is not None)
    if picture is not None:
        print(f"Chart: {picture}")


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise HocketError(f"--workers {text}: expected whole numbers with commas between them, such as 1,4,16.")
    return [int(word) for word in words]


def show(found: Predictions, console: Console, whole: bool = True) -> None:
    """A table for each strategy, and what they say; a ``whole`` one has every number of workers."""
    spec, size = found.cluster, found.model
    console.print(
        f"[bold]{escape(size.name)}[/bold] ({size.parameters / 1e6:,.1f} million parameters), batch {size.batch_size}, "
        f"predicted for {escape(spec.name)}"
    )
    for strategy, mesh in dict.fromkeys((row.strategy, row.mesh) for row in found.rows):
        table = _table(f"{strategy} ({mesh})" if mesh else strategy, spec)
        rows = [row for row in found.rows if (row.strategy, row.mesh) == (strategy, mesh)]
        for row in rows:
            if row.refused is None and (whole or row.workers in _MARKS):
                table.add_row(*cells(row, spec))
        if table.row_count:
            console.print(table)
        for reason in dict.fromkeys(row.refused for row in rows if row.refused is not None):
            who = ", ".join(str(row.workers) for row in rows if row.refused == reason)
            console.print(f"{who} workers: {reason}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for sentence in found.answers():
        console.print(f"• {sentence}", markup=False, highlight=False, soft_wrap=True)
    console.print(LEGEND, style="dim")


def _table(title: str, spec: ClusterSpec) -> Table:
    style: Any = {"title_justify": "left", "title_style": "bold", "header_style": "dim", "box": SIMPLE_HEAD}
    table = Table(title=escape(title), padding=(0, 1), collapse_padding=True, pad_edge=False, **style)
    for column in columns(spec):
        table.add_column(column, justify="right", no_wrap=True)  # all of it fits into 80 characters
    return table
