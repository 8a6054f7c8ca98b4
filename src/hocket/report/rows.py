"""One row per configuration: the seeds of one configuration become a mean and a spread, compared within its facet.

A *facet* is data set × model × worker count × kind; for real workers also the study, where there are several: what they measured
depends on where they ran; for virtual ones also the cluster that their seconds are predicted for. Figures of different facets are
never compared. The *spread* is the standard deviation over seeds.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from hocket.report.figure import Figure
from hocket.report.figures import lr_text, tokens_per_s
from hocket.report.read import FINISHED, Measured, RunRecord, number
from hocket.report.staleness import Staleness
from hocket.report.stragglers import Stragglers
from hocket.split.mesh import AXES

BASELINE = "bulk + allreduce"
NOT_CONFIGURATION = {"seed", "versions", "citations", "failure", "finished", "rate", "outer", "buckets", "steps", "exchange"}
NOT_CONFIGURATION |= {"parameters"}  # settings in which two seeds of one configuration may differ


@dataclass(frozen=True, order=True)
class Facet:
    """What runs must have in common to be compared."""

    data: str
    model: str
    workers: int
    virtual: bool
    study: str = ""
    cluster: str = ""
    """The described cluster that seconds are predicted for."""
    by_loss: bool = False
    """Compared by test loss: the data are text, or no run has an accuracy."""

    @property
    def predicted(self) -> str:
        """``predicted for 1gbit``, or nothing where seconds are measured or there are none."""
        return f"predicted for {self.cluster}" if self.cluster else ""

    @property
    def clock(self) -> str:
        """Where seconds come from."""
        return self.predicted if self.virtual else "measured"

    @property
    def kind(self) -> str:
        """``virtual`` or ``real``."""
        return "virtual" if self.virtual else "real"

    def __str__(self) -> str:
        where = f" ({self.study})" if self.study else ""
        clock = f", {self.predicted}" if self.cluster else ""
        return f"{self.data}, {self.model}, {self.workers} {self.kind} worker{'s' if self.workers != 1 else ''}{where}{clock}"


@dataclass(frozen=True)
class Point:
    """The end of an epoch: means over seeds, costs since the start."""

    epoch: int
    accuracy: Figure | None
    test_loss: Figure | None
    seconds: float | None
    bytes_sent: float | None
    loss: Figure | None = None
    """Of training."""


@dataclass(frozen=True)
class CommFigures:
    """The exchanges along one axis of a mesh: bytes of all processes, and the mean seconds that a process waited."""

    bytes_sent: Figure | None
    seconds: Figure | None


@dataclass(frozen=True)
class Row:
    """One configuration. Bytes are the sum over workers, seconds means over workers, both over the whole run."""

    facet: Facet
    strategy: str
    label: str
    """The strategy and the mesh it ran on, and, where a facet has it more than once, the settings that differ."""
    study: str
    state: str
    reason: str
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    folders: tuple[str, ...]
    epochs: int
    accuracy: Figure | None
    worst: Figure | None
    seconds: Figure | None
    compute: Figure | None
    wait: Figure | None
    transfer: Figure | None
    bytes_sent: Figure | None
    curve: tuple[Point, ...]
    test_loss: Figure | None = None
    perplexity: Figure | None = None
    """Of language models: exp(test loss)."""
    tokens_per_s: Figure | None = None
    """Of language models: the tokens of all workers together in a second."""
    staleness: Staleness | None = None
    """The staleness of gradients of asynchronous workers."""
    lost: Figure | None = None
    """Mini-batches whose gradients were lost through faults."""
    comm_stats: dict[str, CommFigures] = field(default_factory=dict)
    """By axis, where models are split."""
    bubble: Figure | None = None
    """The share of time in which the processes of a pipeline were idle."""
    measured: Measured | None = None
    """The timeline of one of its runs."""
    stragglers: Stragglers | None = None
    """Step times by worker, of the first seed that has them."""
    data_wait: Figure | None = None
    """Seconds that steps waited for data that are read while training; mean over processes."""
    data_bytes: Figure | None = None
    """Bytes of samples that all processes read."""
    data_skipped: Figure | None = None
    """Samples that could not be read and were left out."""
    times_fewer: float | None = None
    """How many times fewer bytes than ``bulk + allreduce`` of the same facet."""
    on_frontier: bool = False

    def score_of(self, found: Row | Point) -> Figure | None:
        """Larger is better: the accuracy, or minus the test loss."""
        if not self.facet.by_loss:
            return found.accuracy
        return None if found.test_loss is None else Figure(-found.test_loss.mean, found.test_loss.spread)

    @property
    def score(self) -> Figure | None:
        """The score at the end."""
        return self.score_of(self)

    @property
    def final(self) -> float:
        """The mean score at the end; 0 where none was recorded."""
        return self.score.mean if self.score else 0.0

    @property
    def ranked(self) -> bool:
        """Whether this row takes part in comparisons."""
        return self.state == FINISHED and self.score is not None

    @property
    def mb_per_worker(self) -> float | None:
        """MB that one worker sent, on average."""
        return None if self.bytes_sent is None else self.bytes_sent.mean / max(1, self.facet.workers) / 1e6

    @property
    def clock(self) -> dict[str, Figure | None]:
        """All seconds, and their parts, by name."""
        return {"seconds": self.seconds, "compute": self.compute, "wait": self.wait, "transfer": self.transfer}

    @property
    def lr(self) -> float | None:
        """The learning rate."""
        return number(self.settings.get("lr"))

    @property
    def mesh(self) -> str:
        """How models were split: ``data=2,pipeline=2``; empty where they were not."""
        return str(self.settings.get("mesh") or "")

    @property
    def plain(self) -> bool:
        """Whether it is ``bulk + allreduce`` with a whole model in every worker."""
        return self.strategy == BASELINE and not any(self.parts)

    @property
    def parts(self) -> tuple[str, str]:
        """How the model is split, and what is sharded (ZeRO, FSDP)."""
        return self.mesh, str(self.settings.get("shard") or "")

    @property
    def sync(self) -> str:
        """The name of the sync axis: ``local`` of ``local(4) + gossip``."""
        return self.strategy.split(" + ")[0].split("(")[0].strip()


def make_rows(runs: Iterable[RunRecord]) -> list[Row]:
    """Rows of all runs, facet by facet, the best first."""
    groups: dict[tuple[str, int], list[RunRecord]] = defaultdict(list)
    times: Counter[tuple[str, str]] = Counter()
    for run in runs:
        # Seeds of one configuration make a row; the same seed again is another measurement of it, and makes another.
        # A setting that is None counts as one that an older version did not have.
        settings = {k: v for k, v in run.settings.items() if k not in NOT_CONFIGURATION and v is not None}
        configuration = json.dumps([run.study, run.state, settings], sort_keys=True, default=str)
        again = configuration, str(run.settings.get("seed"))
        groups[configuration, times[again]].append(run)
        times[again] += 1
    rows = _compared(_labelled(_apart(_by_measure([_row(group) for group in groups.values()]))))
    return sorted(rows, key=lambda r: (r.facet, not r.ranked, -r.final, r.label))


def _by_measure(rows: list[Row]) -> list[Row]:
    """Facets of text, and those without any accuracy, are compared by test loss."""
    text = {row.facet for row in rows if row.perplexity}
    counted, by_test_loss = ({row.facet for row in rows if getattr(row, name)} for name in ("accuracy", "test_loss"))
    by_loss = text | (by_test_loss - counted)
    return [replace(row, facet=replace(row.facet, by_loss=row.facet in by_loss)) for row in rows]


def cluster_name(settings: Mapping[str, Any]) -> str:
    """The described cluster that virtual workers were timed on; empty where there is none.

    >>> cluster_name({"virtual": True, "cluster": "racks/mine.toml", "slowdown": "1,4"}), cluster_name({"virtual": False})
    ('mine with slowdown 1,4', '')
    """
    spec, asked, slowdown = (settings.get(name) for name in ("spec", "cluster", "slowdown"))
    name = spec.get("name") if isinstance(spec, dict) else PurePath(asked).stem if isinstance(asked, str) else None
    if not settings.get("virtual") or not isinstance(name, str) or not name:
        return ""
    return f"{name} with slowdown {slowdown}" if isinstance(slowdown, str) else name


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The ``bulk + allreduce`` that a row is compared with: of its facet, if possible of its study, length and batch.

    Split or sharded models are compared with whole ones; where there are none, with models split in the same way.
    """
    candidates = [r for r in rows if r.facet == row.facet and r.ranked and r.strategy == BASELINE]
    candidates = [r for r in candidates if r.plain] or [r for r in candidates if r.parts == row.parts]

    def likeness(other: Row) -> tuple[float, ...]:
        same = [other is row, other.study == row.study, other.epochs == row.epochs]
        same += [other.settings.get(name) == row.settings.get(name) for name in ("batch", "optimizer", "lr")]
        return *(float(s) for s in same), other.final

    return max(candidates, key=likeness, default=None)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows of one facet that no other beats in both score and bytes, by bytes."""
    known = [(r.bytes_sent.mean, -r.final, r) for r in rows if r.ranked and r.bytes_sent]

    best = [a for a in known if not any(b[0] <= a[0] and b[1] <= a[1] and b[:2] != a[:2] for b in known)]
    return [r for _, _, r in sorted(best, key=lambda k: k[:2])]


def _compared(rows: list[Row]) -> list[Row]:
    best = {id(row) for facet in {r.facet for r in rows} for row in frontier([r for r in rows if r.facet == facet])}

    def fewer(row: Row) -> float | None:
        base = baseline_of(row, rows) if row.ranked else None
        known = base is not None and base.bytes_sent and row.bytes_sent and row.bytes_sent.mean > 0
        return base.bytes_sent.mean / row.bytes_sent.mean if known else None  # type: ignore[union-attr]

    return [replace(row, times_fewer=fewer(row), on_frontier=id(row) in best) for row in rows]


def _row(runs: list[RunRecord]) -> Row:
    first, settings = runs[0], runs[0].settings
    strategy, mesh, workers = str(settings.get("strategy", "?")), settings.get("mesh"), settings.get("workers")

    def total(name: str) -> Figure | None:
        return Figure.of([run.total(name) for run in runs])

    def last(*names: str) -> Figure | None:
        lines = [run.lines[-1] if run.lines else {} for run in runs]
        return Figure.of([number(next((line[name] for name in names if name in line), None)) for line in lines])

    parts = ("bytes_sent", "seconds")
    axes = {axis: CommFigures(*(Figure.of([run.total(part, axis) for run in runs]) for part in parts)) for axis in AXES if mesh}
    return Row(
        facet=Facet(
            str(settings.get("data", "?")),
            str(settings.get("model", "?")),
            workers if isinstance(workers, int) and 1 <= workers <= 10**9 else 1,
            bool(settings.get("virtual", False)),
            cluster=cluster_name(settings),
        ),
        strategy=strategy,
        label=f"{strategy} on {mesh}" if mesh else strategy,
        study=first.study,
        state=first.state,
        reason="; ".join(dict.fromkeys(run.reason for run in runs if run.reason)),
        seeds=tuple(sorted(seed for run in runs if isinstance(seed := run.settings.get("seed", 0), int))),
        settings=settings,
        folders=tuple(run.folder for run in runs),
        epochs=min(run.last_epoch for run in runs),
        accuracy=last("accuracy"),
        # Where replicas are equal, the worst one is the mean.
        worst=last("accuracy_worst", "accuracy") if first.state == FINISHED else None,
        seconds=total("seconds"),
        compute=total("compute_s"),
        wait=total("wait_s"),
        transfer=total("transfer_s"),
        bytes_sent=total("bytes_sent"),
        curve=_curve(runs),
        test_loss=last("test_loss"),
        perplexity=last("perplexity"),
        tokens_per_s=Figure.of([tokens_per_s(run.total("tokens"), run.total("seconds")) for run in runs]),
        staleness=Staleness.of(line for run in runs for line in run.lines),
        lost=total("lost"),
        comm_stats={axis: found for axis, found in axes.items() if found.bytes_sent or found.seconds},
        bubble=Figure.of([run.measured.bubble_share if run.measured else None for run in runs]),
        measured=next((run.measured for run in runs if run.measured), None),
        data_wait=total("data_wait_s"),
        data_bytes=total("data_bytes"),
        data_skipped=total("data_skipped"),
        stragglers=next((found for run in runs if run.lines and (found := Stragglers.of(run.lines[-1]))), None),
    )


def _curve(runs: list[RunRecord]) -> tuple[Point, ...]:
    """The epochs that all seeds have, with costs summed since the start."""
    tracks = [{line["epoch"]: line for line in run.lines} for run in runs]
    common = sorted(set.intersection(*(set(t) for t in tracks))) if tracks else []
    sums: dict[str, float | None] = {"seconds": 0.0, "bytes_sent": 0.0}
    curve = []
    for epoch in common:
        for name, before in sums.items():
            step = Figure.of([number(track[epoch].get(name)) for track in tracks])
            sums[name] = before + step.mean if before is not None and step is not None else None
        names = ("accuracy", "test_loss", "loss")
        accuracy, test_loss, loss = (Figure.of([number(track[epoch].get(name)) for track in tracks]) for name in names)
        curve.append(Point(epoch, accuracy, test_loss, sums["seconds"], sums["bytes_sent"], loss))
    return tuple(curve)


def _apart(rows: list[Row]) -> list[Row]:
    """Separate facets for real workers of different studies, and for different clusters with the same name."""
    studies: dict[Facet, set[str]] = defaultdict(set)
    specs: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        studies[row.facet].add(row.study)
        spec = row.settings.get("spec")
        if row.facet.cluster and isinstance(spec, dict) and spec not in specs[row.facet.cluster]:
            specs[row.facet.cluster].append(spec)

    def facet(row: Row) -> Facet:
        found = row.facet
        if not found.virtual and len(studies[found]) > 1:
            return replace(found, study=row.study or "no study")
        alike, spec = specs[found.cluster], row.settings.get("spec")
        if len(alike) > 1 and spec in alike:
            return replace(found, cluster=f"{found.cluster}, no. {alike.index(spec) + 1}")
        return found

    return [replace(row, facet=facet(row)) for row in rows]


def _labelled(rows: list[Row]) -> list[Row]:
    alike: dict[tuple[Facet, str], list[Row]] = defaultdict(list)
    optimizers: dict[Facet, set[Any]] = defaultdict(set)
    for row in rows:
        alike[row.facet, row.label].append(row)
        optimizers[row.facet].add(row.settings.get("optimizer"))
    labelled = []
    for (facet, _), group in alike.items():
        always = ("optimizer",) * (len(optimizers[facet]) > 1)  # otherwise nobody knows which bulk a row is to be compared with
        if len(group) == 1:
            names = [f"{name} {group[0].settings[name]}" for name in always if group[0].settings.get(name)] or [""]
        else:
            names = [_differences(row, [other for other in group if other.state == row.state], always) for row in group]
        for place, (row, extra) in enumerate(zip(group, names, strict=True)):
            if names.count(extra) > 1:
                extra = f"{extra}, no. {names[: place + 1].count(extra)}".removeprefix(", ")
            labelled.append(replace(row, label=f"{row.label} · {extra}") if extra else row)
    return labelled


def _differences(row: Row, group: list[Row], always: Sequence[str] = ()) -> str:
    """How a row differs from the others of its strategy and state, in a few words; ``always``: settings that are named anyway."""
    parts = [row.state] if row.state != FINISHED else []
    if len({r.lr for r in group}) > 1:
        parts.append(f"rate {lr_text(row.lr)}")
    names = sorted(set.intersection(*(set(r.settings) for r in group)) - NOT_CONFIGURATION - {"lr", "strategy"})
    for name in names:
        value, values = row.settings[name], {json.dumps(r.settings[name], sort_keys=True, default=str) for r in group}
        if (len(values) > 1 or name in always) and value is not None and not isinstance(value, dict | list):
            parts.append(f"{name} {value}")
    if len({r.study for r in group}) > 1:
        parts.append(row.study or "no study")
    return ", ".join(parts)
