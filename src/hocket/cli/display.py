"""What people see while a study runs, and the tables at its end; of one training: :mod:`hocket.cli.live`."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from hocket.cluster.ledger import Entry
from hocket.report.figures import NONE, plain, times, tokens_per_s
from hocket.report.rows import Row, cluster_name
from hocket.study.carry_out import Watch
from hocket.study.folder import Outcome
from hocket.study.plan import Planned, Study
from hocket.train.loop import Progress as Where
from hocket.train.settings import RunSettings


class StudyDisplay(Watch):
    """A live table on a terminal, a line per run elsewhere."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._console = Console(stderr=True)
        self._over: list[tuple[int, Outcome]] = []
        self._now: int | None = None
        self._share, self._note, self._quality = 0.0, "", ""
        self._begun, self._done, self._before = time.monotonic(), 0.0, 0.0
        self._whole = sum(_cost(r) for r in study.runs)
        settings = [r.settings.by_name() for r in study.runs]
        self._several = {name for name in ("workers", "seed", "optimizer") if len({given[name] for given in settings}) > 1}
        self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def begin(self, number: int, planned: Planned, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._done += _cost(planned)
            self._before += _cost(planned)
            self._over.append((number, outcome))
            self._say(number, f"{_result(outcome)} (from before)")
        else:
            self._now, self._share, self._note, self._quality = number, 0.0, "", ""

    def trying(self, lr: float) -> None:
        self._share, self._note = 0.0, f"trying rate {lr:g}"

    def trying_outer(self, lr: float, momentum: float) -> None:
        self._share, self._note = 0.0, f"trying outer rate {lr:g}, momentum {momentum:g}"

    def training(self) -> None:
        self._share, self._note = 0.0, "training"

    def step(self, where: Where) -> None:
        self._share = where.step / max(1, where.steps)

    def epoch(self, metrics: dict[str, Any]) -> None:
        if self._note == "training":
            self._quality = quality_of(metrics)

    def end(self, number: int, outcome: Outcome) -> None:
        self._now = None
        self._done += _cost(outcome.planned)
        self._over.append((number, outcome))
        self._say(number, _result(outcome))

    def note(self, text: str) -> None:
        if self._live.is_started:
            self._console.print(f"note: {escape(text)}")
        else:
            print(f"note: {text}", file=sys.stderr, flush=True)

    def _say(self, number: int, text: str) -> None:
        if not self._live.is_started:
            where = f"[{number + 1}/{len(self._study.runs)}] {self._name(self._study.runs[number])}"
            print(f"{where}: {text}", file=sys.stderr, flush=True)

    def _name(self, planned: Planned) -> str:
        settings = planned.settings
        more = [f"optimizer {settings.optimizer.name}"] * ("optimizer" in self._several)
        more += [f"{settings.workers.count} workers"] * ("workers" in self._several)
        more += [f"seed {settings.seed}"] * ("seed" in self._several)
        return ", ".join([str(settings.resolved), *more])

    def _picture(self) -> RenderableType:
        table = Table(title=escape(self._study.title), title_justify="left", header_style="bold", padding=(0, 1), box=SIMPLE_HEAD)
        names = list(dict.fromkeys(name for r in self._study.runs if (name := predicted_for(r.settings))))
        predicted = [f"s, predicted for {names[0]}" if len(names) == 1 else "s, predicted"] if names else []
        widest = max(20, self._console.width - 42 - sum(len(title) + 3 for title in predicted))  # the width that the figures leave
        table.add_column("run", overflow="ellipsis", no_wrap=True, max_width=widest)
        for column in ("result", "MB", "took, s", *predicted):
            table.add_column(column, justify="right", no_wrap=True, min_width=8)
        room = max(3, self._console.height - 9)
        for _, outcome in self._over[-room:]:
            quality, sent, took, virtual = _figures(outcome)
            cells = ["failed" if outcome.failure else quality, sent, took, *[virtual for _ in predicted]]
            table.add_row(escape(self._name(outcome.planned)), *cells)
        parts: list[RenderableType] = [table] if self._over else []
        number = self._now  # another thread draws while this one goes on
        if number is not None:
            now = Table.grid(padding=(0, 1))
            now.add_column(overflow="ellipsis", no_wrap=True, style="bold", max_width=widest)
            bar = ProgressBar(total=1.0, completed=self._share, width=20)
            now.add_row(escape(self._name(self._study.runs[number])), bar, f"{self._note} {self._quality}")
            parts.append(now)
        return Group(*parts, f"{len(self._over)} of {len(self._study.runs)} runs done{self._left()}")

    def _left(self) -> str:
        """The remaining seconds, if the rest runs at the same pace."""
        number = self._now
        running = _cost(self._study.runs[number]) * self._share if self._note == "training" and number is not None else 0.0
        done = self._done - self._before + running
        if not done:
            return ""
        left_s = (time.monotonic() - self._begun) / done * (self._whole - self._done - running)
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"


def _cost(planned: Planned) -> float:
    """The rough cost of a run in epochs; a search for the rate takes about as long as the run itself."""
    return planned.settings.epochs * (1 + planned.tuned + planned.outer)


def _figures(outcome: Outcome) -> tuple[str, str, str, str]:
    """Accuracy or test loss, MB, seconds that it took here, and seconds predicted for a described cluster."""
    if outcome.failure or not outcome.metrics:
        return NONE, NONE, NONE, NONE
    sent, took_s = (sum(m.get(name) or 0 for m in outcome.metrics) for name in ("bytes_sent", "wall_s"))
    predicted = total_of(list(outcome.metrics)).seconds if cluster_name(outcome.run) else None
    return quality_of(outcome.metrics[-1]) or NONE, plain(sent / 1e6), plain(took_s), plain(predicted)


def _result(outcome: Outcome) -> str:
    if outcome.failure:
        return f"failed: {outcome.failure}"
    quality, sent, took, virtual = _figures(outcome)
    lr = f", rate {outcome.lr:g}" if outcome.planned.tuned else ""
    cluster = cluster_name(outcome.run)
    predicted = f", {virtual} s predicted for {cluster}" if cluster else ""
    speed = tokens_per_s(sum(m.get("tokens", 0) for m in outcome.metrics), total_of(list(outcome.metrics)).seconds)
    tokens = f", {plain(speed)} tokens/s{' predicted' if cluster else ''}" if speed else ""
    return f"{quality}, {sent} MB, {took} s{predicted}{tokens}{lr}"


def study_tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each facet (data set × model × workers) of a study."""
    tables = []
    for facet in dict.fromkeys(row.facet for row in rows):
        here = [row for row in rows if row.facet == facet]
        seeds = max(len(row.seeds) for row in here)
        epochs = max(row.epochs for row in here)
        timed = any(row.compute for row in here)
        quality = PERPLEXITY[: None if timed else -1] if facet.by_loss else ACCURACY
        how_long = f"{epochs} epoch{'s' * (epochs != 1)}"
        table = results_table(f"{facet}, {how_long}{f', means of {seeds} seeds' if seeds > 1 else ''}", quality, timed)
        for row in here:
            if not row.ranked:
                table.add_row(escape(row.label), row.state, style="dim")
                continue
            found = {"accuracy": row.accuracy, "worst": row.worst, "test loss": row.test_loss, "perplexity": row.perplexity}
            found["tokens/s"] = row.tokens_per_s
            figures = {name: f.mean if f else None for name, f in found.items()}
            sent, *parts = (f.mean if f else None for f in (row.bytes_sent, row.compute, row.wait, row.transfer))
            add_result(table, row.label, {name: figures[name] for name in quality}, parts * timed, sent or 0.0, row.times_fewer)
        tables.append(table)
    return tables


ACCURACY, PERPLEXITY = ("accuracy", "worst", "test loss"), ("test loss", "perplexity", "tokens/s")
"""The columns of how good models are; the second ones of text (how fast they learn, too), or where there is no accuracy."""


def legend(rows: Sequence[Row]) -> str:
    """What the columns of these rows' tables are."""
    timed = any(row.compute for row in rows)
    parts = [
        "accuracy, test loss: of the mean of all workers' models; worst: accuracy of the worst worker's own model. "
        * (not all(row.facet.by_loss for row in rows)),
        "test loss, perplexity: of the mean of all workers' models. " * any(row.facet.by_loss for row in rows),
        "compute, wait, transfer: seconds, means over workers. " * timed,
        "MB: sent by all workers together; fewer bytes: how many times fewer than bulk + allreduce with the same optimiser.",
        " tokens/s: of all workers together (of virtual workers: predicted)." * (timed and any(row.facet.by_loss for row in rows)),
    ]
    return "".join(parts)


def predicted_for(settings: RunSettings) -> str:
    """The described cluster that a run's seconds will be predicted for; empty where there is none.

    >>> predicted_for(RunSettings.of(virtual=True, cluster="1gbit"))
    '1gbit'
    """
    spec = settings.spec
    return "" if spec is None else cluster_name({**settings.recorded(), "spec": spec.describe()})


def plain_notes() -> None:
    """Warnings as one line each, without the source line they came from."""

    def show(message: Warning | str, *_: object) -> None:
        print(f"note: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show  # type: ignore[assignment]


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def total_of(metrics: list[dict[str, Any]]) -> Entry:
    """What all epochs cost together."""
    total = Entry()
    for line in metrics:
        total += Entry(**{name: line[name] for name in vars(total)})
    return total


def quality_of(metrics: Mapping[str, Any], digits: int = 1) -> str:
    """How good the mean model is: its accuracy; of text, or without an accuracy, the test loss.

    >>> quality_of({"accuracy": 0.5, "test_loss": 1.2}), quality_of({"accuracy": 0.5, "test_loss": 1.5, "perplexity": 4.48})
    ('accuracy 50.0%', 'test loss 1.50, perplexity 4.48')
    """
    accuracy, test_loss, perplexity = (metrics.get(name) for name in ("accuracy", "test_loss", "perplexity"))
    if perplexity is None and accuracy is not None:
        return f"accuracy {accuracy:.{digits}%}"
    if test_loss is None:
        return ""
    return f"test loss {plain(test_loss)}" + (f", perplexity {plain(perplexity)}" if perplexity is not None else "")


def outer_table(label: str, found: Mapping[str, Any]) -> Table:
    """What a search for rate and momentum of an outer optimiser has tried: the training loss of each pair."""
    pairs = {tuple(map(float, name.split(", "))): loss for name, loss in found["losses"].items()}
    title = f"{escape(label)}: outer rate and momentum, training loss after {found['epochs']} epochs"
    table = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1), box=SIMPLE_HEAD)
    momenta = sorted({momentum for _, momentum in pairs})
    for column in ("outer rate", *(f"momentum {momentum:g}" for momentum in momenta)):
        table.add_column(column, justify="right", no_wrap=True)
    for lr in sorted({lr for lr, _ in pairs}):
        cells = ["" if (lr, m) not in pairs else "diverged" if (loss := pairs[lr, m]) is None else plain(loss) for m in momenta]
        chosen = [
            f"[bold]{cell} ←[/bold]" if [lr, m] == list(found["chosen"]) else cell for cell, m in zip(cells, momenta, strict=True)
        ]
        table.add_row(f"{lr:g}", *chosen)
    return table


def results_table(title: str, quality: Sequence[str], timed: bool = True) -> Table:
    """An empty table of results; ``quality`` are its columns of how good models are; ``timed``: it has seconds."""
    table = Table(title=title, title_justify="left", header_style="bold", padding=(0, 1), collapse_padding=True, box=SIMPLE_HEAD)
    table.add_column("strategy", overflow="fold", min_width=12)
    for column in (*quality, *("compute", "wait", "transfer") * timed, "MB", "fewer bytes"):
        table.add_column(column.replace(" ", "\n").replace("/", "\n/"), justify="right", no_wrap=True)
    return table


def add_result(
    table: Table,
    label: str,
    quality: Mapping[str, float | None],
    seconds: Sequence[float | None],
    bytes_sent: float,
    times_fewer: float | None,
) -> None:
    """One run as a row: how good it is, by :data:`ACCURACY` or :data:`PERPLEXITY`, and seconds of compute, wait and transfer."""
    forms = {"accuracy": _percent, "worst": _percent}
    good = [forms.get(name, plain)(value) for name, value in quality.items()]
    figures = [*good, *map(plain, seconds), plain(bytes_sent / 1e6), times(times_fewer)]
    table.add_row(escape(label), *figures)
