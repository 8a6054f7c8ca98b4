"""The ledger of a split model: what each axis of the mesh sent, and how long its processes waited for it."""

from __future__ import annotations

from typing import Any

import torch

from hocket.cluster.base import Cluster
from hocket.cluster.ledger import Entry
from hocket.split import MeshCoordinate
from hocket.train.free_job import FreeLedger
from hocket.train.ledger_view import LedgerView

_SECONDS = ("seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s")
Axes = dict[str, dict[str, float]]


class MeshLedger:
    """The data axis has the ledger of its strategy; those of the others stand beside it. All processes must ask together."""

    def __init__(self, inner: LedgerView | FreeLedger, place: MeshCoordinate, world: Cluster) -> None:
        self._inner, self._place, self._world = inner, place, world
        self._free = isinstance(inner, FreeLedger)
        self._total = Entry()
        self.last: Axes = {}
        """Bytes and exchanges of all processes, and the seconds that each waited, by axis, since the call of close_epoch before."""
        self._axes: Axes = {}

    def close_epoch(self) -> Entry:
        """The figures since the last call, of all processes: seconds are means, bytes the sum, over all axes."""
        entry = self._inner.close_epoch() if isinstance(self._inner, LedgerView) else self._inner.total()
        figures = [float(getattr(entry, name) or 0.0) for name in _SECONDS] + [float(entry.bytes_sent)]
        for name in ("pipeline", "tensor"):
            stats = self._place.axes[name].comm_stats.take()
            figures += [float(stats.bytes_sent), float(stats.exchanges), stats.seconds]
        everyone = self._world.all_gather_metrics(torch.tensor([figures], dtype=torch.float64))
        sums, means = everyone.sum(0).tolist(), everyone.mean(0).tolist()
        for name, value in zip(_SECONDS, means, strict=False):
            setattr(entry, name, value)
        # Every process along a data axis knows the sum over it.
        sent = sums[5] / self._place.data.size
        synchronised = (entry.wait_s or 0.0) + (entry.transfer_s or 0.0)
        self.last = {"data": {"bytes_sent": int(sent), "exchanges": entry.exchanges, "seconds": synchronised}}
        for k, name in ((6, "pipeline"), (9, "tensor")):
            self.last[name] = {"bytes_sent": int(sums[k]), "exchanges": int(sums[k + 1]), "seconds": means[k + 2]}
            entry.compute_s = max((entry.compute_s or 0.0) - means[k + 2], 0.0)
        entry.bytes_sent = int(sum(axis["bytes_sent"] for axis in self.last.values()))
        self._add(entry)
        return entry

    def total(self) -> Entry:
        """All of it since the job began."""
        return self._total

    def summary(self) -> dict[str, Any]:
        """As without a mesh, for all processes, and ``axes``: bytes, exchanges and seconds of data, pipeline and tensor."""
        self.close_epoch()
        return {**vars(self._total), "axes": self._axes}

    def _add(self, entry: Entry) -> None:
        for name, figures in self.last.items():
            before = {} if self._free and name == "data" else self._axes.get(name, {})  # shards tell everything so far
            self._axes[name] = {key: before.get(key, 0) + value for key, value in figures.items()}
        self._total = entry if self._free else self._total + entry
