"""``hocket advise``: which strategy to train a model with on a cluster, and why; "plain DDP" is one of the answers."""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hocket.cli.train import device_of
from hocket.cluster.spec_file import PRESETS
from hocket.data import load
from hocket.errors import HocketError
from hocket.prediction.advise import CANDIDATES, Advice, advise, over_link, timed_step
from hocket.prediction.tables import contender_cells, contender_columns

_GOALS = "'within 1 point' (of bulk), '70% soonest', 'loss 1.5 soonest', 'cheapest', 'fits 16GB'; commas between several."


def command(
    model: Annotated[str, typer.Option(help="mlp, cnn, resnet20, vgg11, gpt, gpt:10m, … or module:factory.")] = "cnn",
    data: Annotated[str, typer.Option(help="A data set's name, text:PATH or module:factory.")] = "digits",
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many workers there are.")] = 4,
    cluster: Annotated[str | None, typer.Option(help=f"A TOML file (`hocket probe` writes one), or {', '.join(PRESETS)}.")] = None,
    link: Annotated[str | None, typer.Option(help="Or the rate of every link, such as 1Gbit; then a step is timed here.")] = None,
    goal: Annotated[str, typer.Option(help=_GOALS)] = "within 1 point",
    strategy: Annotated[list[str] | None, typer.Option("--strategy", "-s", help="A strategy to try; may be repeated.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adamw, …")] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: three are tried for each strategy).")] = None,
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.9,
    batch_size: Annotated[int, typer.Option(help="Mini-batch per worker.")] = 100,
    step_s: Annotated[float | None, typer.Option(help="Seconds of a step on one worker (default: the cluster's).")] = None,
    minutes: Annotated[float, typer.Option(help="About how many minutes the trials take.")] = 4.0,
    seeds: Annotated[int, typer.Option(help="Trainings, each with its own seed, of every strategy in the last round.")] = 2,
    later_epochs: Annotated[int | None, typer.Option(help="Also extrapolate to a training of this many epochs.")] = None,
    later_workers: Annotated[int | None, typer.Option(help="Also extrapolate to this many workers.")] = None,
    explain: Annotated[Path | None, typer.Option(help="Draw quality against time of the last strategies as a .png file.")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="The folder of the data sets.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank strategies for a model on a cluster, with the reason; none of them, plain DDP, is one of the answers."""
    sys.path.insert(0, os.getcwd())  # for module:factory
    if (cluster is not None) and link is not None:
        raise HocketError("--cluster describes the links too; leave --link out.")
    if minutes <= 0 or seeds < 1:
        raise HocketError(f"--minutes {minutes:g} --seeds {seeds}: give more than 0 minutes and at least one seed.")
    _check_chart(explain)
    where, dataset, console = device_of(device), load(data, data_dir), Console(stderr=True)
    spec: Any = cluster or "1gbit"
    if link is not None:
        spec = over_link(link, step_s or timed_step(model, dataset, batch_size, where))
    with console.status("starting") as status:
        options: dict[str, Any] = {"optimizer": optimizer, "lr": lr, "momentum": momentum, "batch_size": batch_size}
        options |= {
            "step_s": step_s,
            "minutes": minutes,
            "seeds": seeds,
            "later_epochs": later_epochs,
            "later_workers": later_workers,
            "device": where,
            "watch": lambda text: status.update(escape(text)),
        }
        found = advise(model, dataset, spec, workers, goal, strategies=strategy or CANDIDATES, **options)
    if explain is not None:
        _chart(found, explain)
    if json_:
        print(json.dumps(_plain(found), indent=1))
        return
    show(found, Console())
    if explain is not None:
        print(f"Chart: {explain}")


def show(found: Advice, console: Console) -> None:
    """The answer, why, the table, and the command."""
    console.print(f"[bold]{escape(found.answer)}[/bold]", highlight=False)
    for reason in found.reasons:
        console.print(reason, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, header_style="dim", padding=(0, 1), collapse_padding=True)
    for place, name in enumerate(contender_columns(found)):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place))
    for one in found.contenders:
        table.add_row(*contender_cells(one, found))
    console.print(table)
    for one in found.contenders:
        console.print(f"{one.strategy}: {one.why}.", markup=False, highlight=False, soft_wrap=True)
    for look in found.outlooks:
        console.print(f"{look}.", markup=False, highlight=False, soft_wrap=True)
    console.print(found.legend, style="dim", markup=False, highlight=False, soft_wrap=True)
    if found.command:
        console.print(found.command, markup=False, highlight=False, soft_wrap=True)


def _plain(found: Advice) -> dict[str, Any]:
    rows = [{k: v for k, v in vars(one).items() if k != "curves"} for one in found.contenders]
    for row in rows:
        for name in ("quality", "seconds"):
            row[name] = None if row[name] is None else vars(row[name])
    whole = {"answer": found.answer, "reasons": found.reasons, "strategy": found.strategy, "lr": found.lr, "command": found.command}
    looks = [{**vars(look), "loss": vars(look.loss), "law": str(look.law)} for look in found.outlooks]
    return _finite({**whole, "about": found.about, "goal": str(found.goal), "contenders": rows, "outlooks": looks})


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor Infinity."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_chart(path: Path | None) -> None:
    if path is not None and path.suffix != ".png":
        raise HocketError(f"--explain {path}: a chart is a PNG file; give it a name that ends in .png.")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise HocketError(f"--explain {path} needs matplotlib; install hocket[plot], or leave it out.")


def _chart(found: Advice, path: Path) -> None:
    """Quality against predicted seconds, every seed of the strategies that were left at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    ended = [one for one in found.contenders if one.curves]
    loss = any(one.quality is not None and one.quality.mean < 0 for one in ended)
    axes = figure.add_subplot(xlabel=f"seconds on {found.cluster.name}, predicted", ylabel="test loss" if loss else "accuracy")
    for number, one in enumerate(ended):
        for place, curve in enumerate(one.curves):
            points = [(p.seconds, abs(p.quality)) for p in curve.points]
            axes.plot(*zip(*points, strict=True), color=f"C{number}", marker=".", label="" if place else one.strategy)
    axes.set_title(found.about, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise HocketError(f"--explain {path} cannot be written ({error.strerror}): choose another place.") from None
