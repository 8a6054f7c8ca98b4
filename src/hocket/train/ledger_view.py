"""The figures of a job: seconds split into compute, wait and transfer, and bytes; of this worker alone, or of all.

``summary()`` is never a collective, so any worker may ask at any time. ``close_epoch`` and ``summary(all_workers=True)`` of a
:class:`ClusterLedger`, and of any ledger on a mesh, are collectives: all processes must call them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.cluster.step_times import described
from hocket.programs.account import data_of, entry_of

if TYPE_CHECKING:  # sockets, and what splits a model, are loaded only where they are needed
    from hocket.drivers.worker_runtime import WorkerRuntime
    from hocket.split import MeshCoordinate
    from hocket.split.axis import CommStats

_SECONDS = ("seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s")
_UNTOLD = ("compute_s", "wait_s", "transfer_s", "transfer_hidden_s")
AxisFigures = dict[str, dict[str, float]]
"""Bytes, exchanges and seconds of waiting, by axis."""


@dataclass
class MeshAxes:
    """The mesh of a split model: what its pipeline and tensor axes cost stands beside the figures of the data axis."""

    coordinate: MeshCoordinate
    world: Cluster
    own: AxisFigures = field(default_factory=dict)
    """What this process has spent on pipeline and tensor up to the last :meth:`combine`."""

    def combine(self, entry: Entry) -> AxisFigures:
        """Turn ``entry``, of the data axis, into that of all processes and all axes; the axes' figures since the last call."""
        figures = [float(getattr(entry, name) or 0.0) for name in _SECONDS] + [float(entry.bytes_sent)]
        for name in ("pipeline", "tensor"):
            taken = _figures(self.coordinate.axes[name].comm_stats.take())
            self.own[name] = _added(self.own.get(name, {}), taken)
            figures += [float(value) for value in taken.values()]
        everyone = self.world.all_gather_metrics(torch.tensor([figures], dtype=torch.float64))
        if self.world.elastic:  # whose workers are replicas
            everyone = torch.cat(self.coordinate.gather_plain(everyone))
        sums, means = everyone.sum(0).tolist(), everyone.mean(0).tolist()
        for name, value in zip(_SECONDS, means, strict=False):
            setattr(entry, name, value)
        # Every process along a data axis knows the sum over it.
        sent = sums[5] * self.coordinate.pipeline.size * self.coordinate.tensor.size / len(everyone)
        synchronised = (entry.wait_s or 0.0) + (entry.transfer_s or 0.0)
        found: AxisFigures = {"data": {"bytes_sent": int(sent), "exchanges": entry.exchanges, "seconds": synchronised}}
        for k, name in ((6, "pipeline"), (9, "tensor")):
            found[name] = {"bytes_sent": int(sums[k]), "exchanges": int(sums[k + 1]), "seconds": means[k + 2]}
            entry.compute_s = max((entry.compute_s or 0.0) - means[k + 2], 0.0)
        entry.bytes_sent = int(sum(axis["bytes_sent"] for axis in found.values()))
        return found

    def beside(self, summary: dict[str, Any]) -> dict[str, Any]:
        """This process's summary of the data axis with what it has spent on the other axes by now."""
        data = {name: summary[name] for name in ("bytes_sent", "exchanges")}
        axes: AxisFigures = {"data": {**data, "seconds": summary["synchronisation_s"] or 0.0}}
        for name in ("pipeline", "tensor"):
            axes[name] = _added(self.own.get(name, {}), _figures(self.coordinate.axes[name].comm_stats))
        waited = axes["pipeline"]["seconds"] + axes["tensor"]["seconds"]
        compute = None if summary["compute_s"] is None else max(summary["compute_s"] - waited, 0.0)
        sent = int(sum(axis["bytes_sent"] for axis in axes.values()))
        return {**summary, "compute_s": compute, "bytes_sent": sent, "axes": axes}


class JobLedger(ABC):
    """A ledger as a job and the training loop use it; ``axes`` where the model is split."""

    def __init__(self, axes: MeshAxes | None) -> None:
        self._mesh = axes
        self.last: AxisFigures = {}
        """On a mesh: the axes' figures between the last two calls of :meth:`close_epoch`, of all processes."""
        self._axes: AxisFigures = {}
        self.reading: Callable[[], dict[str, float]] | None = None
        """What reading data took so far in this process."""

    def tell_reading(self) -> None:  # noqa: B027 - where figures are gathered nobody has to be told
        """A step ends: update the figures of reading data, for which others may ask."""

    @abstractmethod
    def close_epoch(self) -> Entry:
        """The figures since the last call, of all workers (a collective)."""

    @abstractmethod
    def total(self) -> Entry:
        """The figures since the job began."""

    @abstractmethod
    def step_times(self) -> dict[str, Any]:
        """p50 and p99 of what a step computes, per worker, and the slowest, by the last :meth:`close_epoch`; empty if unknown."""

    @abstractmethod
    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """Everything so far: of this worker, or (a collective) of all."""

    def _combine(self, entry: Entry, told_so_far: Sequence[str] = ()) -> Entry:
        """``entry`` of all axes; the figures of axes that are ``told_so_far`` replace those before, others are added to them."""
        if self._mesh is not None:
            self.last = self._mesh.combine(entry)
            before = {name: {} if name in told_so_far else self._axes.get(name, {}) for name in self.last}
            self._axes = {name: _added(before[name], figures) for name, figures in self.last.items()}
        return entry


class ClusterLedger(JobLedger):
    """Reads a cluster's ledger. ``computed``: bytes come from a formula, and seconds are known as a whole alone (FSDP2)."""

    def __init__(self, cluster: Cluster, axes: MeshAxes | None = None, computed: bool = False) -> None:
        super().__init__(axes)
        self._cluster, self._computed = cluster, computed
        self.computed_bytes = 0
        """By this worker, since the last call of :meth:`close_epoch`."""
        self._computed_before = 0
        if cluster.ledger.exchanges or cluster.ledger.running:
            self._close()
        self._first = len(cluster.ledger.entries)

    def close_epoch(self) -> Entry:
        entry = self._close()
        if self._computed:
            everyone = self._cluster.all_gather_metrics(torch.tensor([[self.computed_bytes]]))
            self._computed_before, self.computed_bytes = self._computed_before + self.computed_bytes, 0
            entry.bytes_sent += int(everyone.sum())
            for name in _UNTOLD:
                setattr(entry, name, None)
        return self._combine(entry)

    def total(self) -> Entry:
        """All epochs closed since this view was made, together."""
        return sum(self._cluster.ledger.entries[self._first :], Entry())

    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """Everything so far: ``seconds``, ``compute_s``, ``wait_s``, ``transfer_s``, ``transfer_hidden_s``, ``bytes_sent``,
        ``exchanges``, ``nonfinite``; ``step_times`` (p50 and p99 of what a step computes, per worker, and the slowest); ``late``:
        the latest exchanges that took far longer than those before, and whom they waited for.

        Of this worker alone; then ``wait_s`` and ``transfer_s`` are None where only their sum ``synchronisation_s`` is known. Or
        ``all_workers`` (a collective): seconds are means, bytes the sum. On a mesh ``axes`` has the figures by axis.
        """
        if not all_workers:
            return self._own()
        self.close_epoch()
        found = {**vars(self.total()), "step_times": self.step_times(), "late": self._cluster.late_exchanges()}
        found |= {} if self.reading is None else read_by_all(self._cluster, self.reading())
        if self._computed:
            found["computed"] = ["bytes_sent"]
        return found if self._mesh is None else {**found, "axes": self._axes}

    def step_times(self) -> dict[str, Any]:
        return described(*self._cluster.ledger.step_s.T.tolist())

    def _close(self) -> Entry:
        self._cluster.start(lambda: None)()  # what was launched before this has been counted
        return self._cluster.ledger.close(self._cluster.all_gather_metrics)

    def _own(self) -> dict[str, Any]:
        ledger = self._cluster.ledger
        before, (now, exposed) = sum(ledger.own_entries[self._first :], Entry()), ledger.open()
        found: dict[str, Any] = {**vars(before + now), "late": self._cluster.late_exchanges()}
        found |= {} if self.reading is None else self.reading()
        p50_s, p99_s = ([], []) if ledger.steps is None else ledger.steps.percentiles().T.tolist()
        found["step_times"] = described(p50_s, p99_s, self._cluster.workers.start)
        found["synchronisation_s"] = None if exposed is None else (before.wait_s or 0.0) + (before.transfer_s or 0.0) + exposed
        if exposed is not None and now.wait_s is None:
            found |= dict.fromkeys(("wait_s", "transfer_s", "transfer_hidden_s"))
        if self._computed:
            found |= {**dict.fromkeys((*_UNTOLD, "synchronisation_s")), "computed": ["bytes_sent"]}
            found["bytes_sent"] += self._computed_before + self.computed_bytes
        return found if self._mesh is None else self._mesh.beside(found)


class MessageLedger(JobLedger):
    """The figures of a worker that sends messages: its own account, and what servers or peers know of all workers."""

    def __init__(self, worker: WorkerRuntime, axes: MeshAxes | None = None) -> None:
        super().__init__(axes)
        self._worker = worker
        self._total, self._steps, self._read_before = Entry(), dict[str, Any](), dict[str, float]()

    def tell_reading(self) -> None:
        if self.reading is not None:
            before, self._read_before = self._read_before, self.reading()
            self._worker.account.add_data(**{name: value - before.get(name, 0) for name, value in self._read_before.items()})

    def close_epoch(self) -> Entry:
        """Everything so far of all workers, on a mesh of all processes (a collective there alone)."""
        summary = self._worker.summary()
        self._steps = summary["step_times"]
        self._total = self._combine(Entry(**{name: summary[name] for name in vars(Entry())}), told_so_far=["data"])
        return self._total

    def total(self) -> Entry:
        """The result of the last :meth:`close_epoch`."""
        return self._total

    def step_times(self) -> dict[str, Any]:
        return self._steps

    def summary(self, all_workers: bool = False) -> dict[str, Any]:
        """As :meth:`ClusterLedger.summary`, and ``staleness`` and ``lost`` of all workers, which servers or peers tell to any
        worker that asks; ``all_workers`` is a collective on a mesh alone."""
        if all_workers and self._mesh is not None:
            return {**vars(self.close_epoch()), "axes": self._axes}
        summary = self._worker.summary()
        if all_workers:
            return summary
        account = {"": self._worker.figures()}
        own = vars(entry_of(account)[0]) | data_of(account)
        found = {**summary, **own, "synchronisation_s": own["wait_s"] + own["transfer_s"], "late": self._worker.late_exchanges()}
        return found if self._mesh is None else self._mesh.beside(found)


def read_by_all(cluster: Cluster, own: dict[str, float]) -> dict[str, float]:
    """The costs of reading data of all processes (a collective): bytes and samples summed, seconds as their mean."""
    rows = torch.zeros(cluster.rows, len(own), dtype=torch.float64)
    rows[0] = torch.tensor(list(own.values()), dtype=torch.float64)
    sums = dict(zip(own, cluster.all_gather_metrics(rows).sum(0).tolist(), strict=True))
    return {name: value / cluster.processes if name.endswith("_s") else int(value) for name, value in sums.items()}


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0) + value for key, value in other.items()}


def _figures(stats: CommStats) -> dict[str, float]:
    return {"bytes_sent": stats.bytes_sent, "exchanges": stats.exchanges, "seconds": stats.seconds}
