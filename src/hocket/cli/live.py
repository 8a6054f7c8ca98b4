"""What people see of one training: a live table in a terminal while it runs, and a summary at its end."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hocket.cli.display import quality_of, total_of
from hocket.errors import bytes_text
from hocket.report.figures import NONE, plain, tokens_per_s
from hocket.train.loop import Progress as Where

_SHOWN = 8
"""So many epochs are in the table."""


class Display:
    """A progress bar and a table of the last epochs on a terminal, a few lines elsewhere; silent on processes without worker 0."""

    def __init__(self, label: str, speaks: bool, epochs: int, samples: int = 0, predicted: bool = False) -> None:
        """``samples`` are those of one step of all workers; ``predicted``: seconds are those of a virtual clock."""
        self._epochs, self._every, self._clock = epochs, max(1, epochs // 5), " predicted" if predicted else ""
        self._console = Console(stderr=True)
        self._speaks, self._label, self._samples = speaks, label, samples
        self._drawn = speaks and self._console.is_terminal
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "steps", TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, "{task.fields[note]}", console=self._console)
        self._task = self._bar.add_task(label, total=None, note="")
        self._lines: list[dict[str, Any]] = []
        self._first: tuple[int, float] | None = None
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self._drawn:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._live.stop()

    def step(self, where: Where) -> None:
        first = self._first = self._first or (where.step, time.monotonic())
        took_s = time.monotonic() - first[1]
        speed = (where.step - first[0]) * self._samples / took_s if took_s > 1.0 else 0.0
        self._bar.update(self._task, completed=where.step, total=where.steps, note=f"{plain(speed)} samples/s" if speed else "")

    def note(self, text: str) -> None:
        if self._speaks:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def epoch(self, metrics: dict[str, Any]) -> None:
        self._lines.append(metrics)
        if not self._speaks or self._drawn or (metrics["epoch"] % self._every and metrics["epoch"] != self._epochs):
            return
        note = f"epoch {metrics['epoch']}  loss {metrics['loss']:.4f}"
        if quality := quality_of(metrics, 2):
            note += f"  {quality}"
        if speed := tokens_per_s(metrics.get("tokens"), metrics["seconds"]):
            note += f"  {plain(speed)} tokens/s{self._clock}"
        if read := metrics.get("data_bytes"):
            note += f"  data {bytes_text(read)}, waited {metrics['data_wait_s']:.2g} s"
        print(f"{self._label}: {note}", file=sys.stderr, flush=True)

    def _picture(self) -> RenderableType:
        lines = list(self._lines)  # another thread draws while this one goes on
        return Group(epochs_table(lines[-_SHOWN:], self._clock), self._bar) if lines else self._bar


def epochs_table(lines: list[dict[str, Any]], clock: str = "") -> Table:
    """The epochs of a running training; ``clock`` is ``" predicted"`` where seconds are a virtual clock's."""
    table = Table(header_style="bold", padding=(0, 1), box=SIMPLE_HEAD)
    predicted = clock if any(line.get("seconds") is not None for line in lines) else ""
    titles = ("epoch", "training loss", "on the test set", f"seconds{predicted}", f"of it waiting{clock}", f"MB/s sent{clock}")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        seconds, wait, sent = line.get("seconds"), line.get("wait_s"), line.get("bytes_sent") or 0
        share = f"{wait / seconds:.0%}" if seconds and wait is not None else NONE
        rate = plain(sent / 1e6 / seconds) if seconds else NONE
        took = plain(line.get("wall_s") if seconds is None else seconds)
        table.add_row(str(line["epoch"]), f"{line['loss']:.4f}", quality_of(line) or NONE, took, share, rate)
    return table


def summary(metrics: list[dict[str, Any]], workers: int, times_fewer: float | None, predicted: str = "") -> Table:
    """A run in words; ``predicted`` names the described cluster whose seconds they are.

    >>> from hocket.cluster.ledger import Entry
    >>> entry = Entry(seconds=4.0, compute_s=3.0, wait_s=0.5, transfer_s=0.5, bytes_sent=2_000_000)
    >>> made = summary([{"loss": 0.2, "accuracy": 0.9, "test_loss": 0.3, **vars(entry)}], 4, 20.0)
    >>> for cell in made.columns[1].cells:
    ...     print(cell)
    90.0 %, test loss 0.3
    4.00 s: 3.00 s computing, 0.5 s waiting for other workers, 0.5 s sending and receiving
    2.0 MB by all workers together: 20.0 times fewer bytes than bulk + allreduce would send
    """
    total, last = total_of(metrics), metrics[-1]
    rows = {}
    if last.get("perplexity") is not None:
        rows["test loss"] = f"{plain(last['test_loss'])}, perplexity {plain(last['perplexity'])}"
    elif last.get("accuracy") is not None:
        worst = last.get("accuracy_worst")
        apart = f" (the worst worker alone: {100 * worst:.1f} %)" if worst is not None else ""
        rows["test accuracy"] = f"{100 * last['accuracy']:.1f} %, test loss {plain(last.get('test_loss'))}{apart}"
    elif last.get("test_loss") is not None:
        rows["test loss"] = plain(last["test_loss"])
    else:
        rows["training loss"] = plain(last["loss"])
    rows |= _time(total, metrics, workers, predicted)
    less = times_fewer is not None and times_fewer > 1.005
    fewer = f": {plain(times_fewer)} times fewer bytes than bulk + allreduce would send" if less else ""
    if workers > 1:
        rows["data sent"] = f"{bytes_text(total.bytes_sent)} by all workers together{fewer}"
    if read := sum(line.get("data_bytes") or 0 for line in metrics):
        waited, skipped = (sum(line.get(name) or 0 for line in metrics) for name in ("data_wait_s", "data_skipped"))
        rows["data read"] = f"{bytes_text(read)}, {plain(waited)} s waited for them" + (
            f", {skipped} samples left out" if skipped else ""
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _time(total: Any, metrics: list[dict[str, Any]], workers: int, predicted: str) -> dict[str, str]:
    if metrics[-1].get("seconds") is None:
        wall = sum(line.get("wall_s") or 0.0 for line in metrics)
        return {"time": f"{plain(wall)} s on this machine; say --cluster 1gbit, for example, to predict a cluster's"}
    where = f" (predicted for {predicted})" if predicted else ""
    text = f"{plain(total.seconds)} s{where}"
    if workers > 1 and total.compute_s is not None:
        parts = {"computing": total.compute_s, "waiting for other workers": total.wait_s, "sending and receiving": total.transfer_s}
        text += ": " + ", ".join(f"{plain(seconds)} s {what}" for what, seconds in parts.items())
    speed = tokens_per_s(sum(line.get("tokens", 0) for line in metrics), total.seconds)
    found = {"time": text}
    return found | {"speed": f"{plain(speed)} tokens/s, all workers together"} if speed else found
