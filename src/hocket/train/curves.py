"""Simulated runs in notebooks: a table of one, and the curves of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

from hocket.errors import HocketError, bytes_text
from hocket.notebook import table
from hocket.picture import Chart, Panel, draw

_LAST = 5
_MEASURES = {"accuracy": ("accuracy of the mean model (%)", 100), "test_loss": ("test loss of the mean model", 1)}
_MEASURES |= {"loss": ("training loss", 1)}


class Recorded(Protocol):
    """The part of a run (:class:`hocket.Run`) that is shown."""

    metrics: list[dict[str, Any]]
    strategy: str
    workers: int
    cluster: str


def table_of(run: Recorded) -> str:
    """The last epochs and the whole, as HTML."""
    lines, epochs = run.metrics, len(run.metrics)
    names = [name for name in ("loss", "test_loss", "accuracy", "perplexity", "metric") if any(_known(lines, name))]
    timed = any(_known(lines, "seconds"))
    titles = {"loss": "training loss", "test_loss": "test loss"}
    seconds = [f"seconds, predicted for {run.cluster}", "of it waiting"] if timed else []
    rows = [_cells(str(line["epoch"]), line, [line], names, timed) for line in lines[-_LAST:]]
    if epochs > 1:
        rows.append(_cells("all", lines[-1], lines, names, timed))
    title = f"{run.strategy}, {run.workers} virtual workers, {epochs} epoch{'s' * (epochs != 1)}"
    return table(title, ["epoch", *(titles.get(name, name) for name in names), *seconds, "sent by all workers"], rows)


def _cells(name: str, last: dict[str, Any], lines: Sequence[dict[str, Any]], names: Sequence[str], timed: bool) -> list[str]:
    """A row: how good the model is after ``lines``, and their total cost."""
    good = ["–" if (value := last.get(n)) is None else f"{value:.1%}" if n == "accuracy" else f"{value:.4g}" for n in names]
    took, waited = (sum(line.get(part) or 0.0 for line in lines) for part in ("seconds", "wait_s"))
    seconds = [f"{took:.3g}", f"{waited / took:.0%}" if took else "–"] if timed else []
    return [name, *good, *seconds, bytes_text(sum(line["bytes_sent"] for line in lines))]


def plot_of(runs: Sequence[Recorded]) -> Chart:
    """How good the models are, by epoch and by seconds, or by MB where some run has no seconds."""
    measure = next((name for name in _MEASURES if all(any(_known(run.metrics, name)) for run in runs)), None)
    if measure is None:
        raise HocketError("There is no epoch to plot; train for one at least.")
    ylabel, scale = _MEASURES[measure]
    labels = _labels(runs)
    timed = all(all(_known(run.metrics, "seconds")) for run in runs)
    name, unit = ("seconds", 1.0) if timed else ("bytes_sent", 1e-6)
    by_epoch, by_cost = [], []
    for run, label in zip(runs, labels, strict=True):
        costs = accumulate(line[name] * unit for line in run.metrics)
        pairs = zip(run.metrics, costs, strict=True)
        points = [(line["epoch"], cost, line[measure] * scale) for line, cost in pairs if line.get(measure) is not None]
        epochs, spent, heights = ([point[k] for point in points] for k in range(3))
        by_epoch.append((label, epochs, heights))
        by_cost.append((label, spent, heights))
    where = " and ".join(dict.fromkeys(run.cluster for run in runs))
    cost = (f"seconds, predicted for {where}", "seconds") if timed else ("MB sent by all workers", "traffic")
    short = ylabel.split(" of")[0]
    log = not timed and all(x > 0 for _, xs, _ in by_cost for x in xs)
    panels = [Panel(f"{short} per epoch", "epoch", ylabel, by_epoch)]
    panels.append(Panel(f"{short} against {cost[1]}", cost[0], "", by_cost, log))
    return draw(panels)


def _known(lines: Sequence[dict[str, Any]], name: str) -> list[bool]:
    return [line.get(name) is not None for line in lines]


def _labels(runs: Sequence[Recorded]) -> list[str]:
    """Strategies, with their workers where these differ, and a number where several are alike."""
    several = len({run.workers for run in runs}) > 1
    names = [f"{run.strategy}, {run.workers} workers" if several else run.strategy for run in runs]
    return [f"{name}, no. {names[: k + 1].count(name)}" if names.count(name) > 1 else name for k, name in enumerate(names)]
