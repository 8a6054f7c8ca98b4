"""What people see while a training runs, and the table at its end."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hocket.cluster.ledger import Entry
from hocket.train.loop import Progress as Where


class Display:
    """A progress bar on a terminal, a few lines elsewhere; silent on processes that do not host worker 0."""

    def __init__(self, label: str, speaks: bool, epochs: int) -> None:
        self._epochs, self._every = epochs, max(1, epochs // 5)
        self._console = Console(stderr=True)
        self._speaks, self._label = speaks, label
        self._last = ""
        self._bar: Progress | None = None
        if speaks and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(label, total=None, note="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, where: Where) -> None:
        """One step has been made."""
        if self._bar is not None:
            self._bar.update(self._task, completed=where.step, total=where.steps)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """One epoch has ended."""
        note = f"epoch {metrics['epoch']}  loss {metrics['loss']:.4f}"
        if metrics["accuracy"] is not None:
            note += f"  accuracy {metrics['accuracy']:.2%}"
        if self._bar is not None:
            self._bar.update(self._task, note=note)
        elif self._speaks and (metrics["epoch"] % self._every == 0 or metrics["epoch"] == self._epochs):
            print(f"{self._label}: {note}", file=sys.stderr, flush=True)


LEGEND = (
    "accuracy: of the mean model; worst: of the worst replica. compute, wait, transfer: seconds, means over workers. "
    "MB: sent by all workers together; less: how many times less than bulk + allreduce."
)


def plain_notes() -> None:
    """Warnings as one line each, without the source line they came from."""

    def show(message: Warning | str, *_: object) -> None:
        print(f"note: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show  # type: ignore[assignment]


def seconds(value: float | None) -> str:
    """Seconds with a sensible number of digits; a dash for workers without a clock.

    >>> seconds(12.345), seconds(None)
    ('12.3', '–')
    """
    return "–" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def megabytes(count: float) -> str:
    """Bytes as MB.

    >>> megabytes(1_234_567), megabytes(123_456_789)
    ('1.23', '123')
    """
    value = count / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times_less(baseline: float, count: float) -> str:
    """How many times less than the baseline.

    >>> times_less(100, 10), times_less(100, 0)
    ('10×', '–')
    """
    if not count:
        return "–"
    ratio = baseline / count
    return f"{ratio:,.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 2 else f"{ratio:.2f}×"


def total_of(metrics: list[dict[str, Any]]) -> Entry:
    """What all epochs cost together."""
    total = Entry()
    for line in metrics:
        total += Entry(**{name: line[name] for name in vars(total)})
    return total


def results_table(title: str) -> Table:
    """An empty table of results."""
    table = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1), collapse_padding=True, box=SIMPLE_HEAD)
    table.add_column("strategy", overflow="fold", min_width=20)
    for column in ("accuracy", "worst", "compute", "wait", "transfer", "MB", "less"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def add_result(table: Table, strategy: str, metrics: dict[str, Any], total: Entry, baseline: float) -> None:
    """One run as a row."""
    accuracy = metrics.get("accuracy")
    worst = metrics.get("accuracy_worst", accuracy)
    table.add_row(
        strategy,
        "–" if accuracy is None else f"{accuracy:.1%}",
        "–" if worst is None else f"{worst:.1%}",
        seconds(total.compute_s),
        seconds(total.wait_s),
        seconds(total.transfer_s),
        megabytes(total.bytes_sent),
        times_less(baseline, total.bytes_sent),
    )
