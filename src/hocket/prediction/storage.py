"""What reading the data costs beside the gradients: from small files, from packed shards, and with a cache.

The cluster file's ``[storage]`` has the bandwidth of the storage, which all workers share, the latency of each open, and the size
of a cache per host. A worker reads ahead while it computes, with :data:`READERS` requests at a time, so data limit a step
where reading takes longer than the step. On the link they share with the gradients, both times add up. All are bounds, without
queues at the storage: predicted, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hocket.cluster.spec import ClusterSpec
from hocket.prediction.steps import Prediction

READERS = 4
"""Requests that a worker has under way, as :func:`hocket.data.stream` does."""
PIECE_BYTES = 1 << 20
"""What one request for packed shards brings."""
_KEPT = 0.01


@dataclass(frozen=True)
class Reading:
    """The samples that are read: bytes of each, how many there are (None: more than any cache holds), how many in a mini-batch."""

    sample_bytes: float
    batch_size: int
    samples: float | None = None

    def seconds(self, spec: ClusterSpec, row: Prediction, packed: bool) -> float:
        """How long a worker needs to read a mini-batch, where nothing is cached."""
        size = self.sample_bytes * self.batch_size
        opens = -(-size // PIECE_BYTES) if packed else self.batch_size
        on_link = size / spec.bandwidth + row.transfer_s + row.transfer_hidden_s if spec.bandwidth < float("inf") else 0.0
        return max(opens * spec.storage_latency_s / READERS, size * row.workers / spec.storage_bandwidth, on_link)

    def cached(self, spec: ClusterSpec) -> float:
        """The share of the data that a host's cache holds."""
        return 0.0 if self.samples is None else min(1.0, spec.cache_bytes / (self.samples * self.sample_bytes))

    def figures(self, spec: ClusterSpec, row: Prediction) -> dict[str, Any]:
        """Seconds per mini-batch from files, from shards, and from shards behind the cache after the first epoch."""
        files, shards = (self.seconds(spec, row, packed) for packed in (False, True))
        found = {"files_s": files, "shards_s": shards, "cached_s": shards * (1 - self.cached(spec))}
        return {"strategy": row.strategy, "workers": row.workers, "step_s": row.step_s, **found}

    def answer(self, rows: Sequence[Prediction], spec: ClusterSpec) -> str:
        """When data, not gradients, are the limit of one strategy, and what packing or caching would give."""
        found = [(row, self.figures(spec, row)) for row in rows]
        slow = next(((row, f) for row, f in found if f["files_s"] > (1 + _KEPT) * row.step_s), None)
        if slow is None:
            return f"data are not the limit up to {rows[-1].workers} workers, even from small files"
        row, f = slow
        said = f"data are the limit from {_workers(row.workers)} on if they are small files ({_time(f['files_s'])} to read a "
        said += f"mini-batch, {_time(row.step_s)} to train on it)"
        last, at_end = found[-1]
        limited = next(((row, f) for row, f in found if f["shards_s"] > (1 + _KEPT) * row.step_s), None)
        if limited is None:
            return f"{said}; packed into shards they are not (at most {_time(at_end['shards_s'])} with {_workers(last.workers)})"
        row, f = limited
        said += f", and from {_workers(row.workers)} on if they are packed into shards ({_time(f['shards_s'])})"
        share = self.cached(spec)
        if share == 1:
            return f"{said}; the cache holds all of them, so only the first epoch waits"
        return f"{said}; a cache that holds {share:.0%} of them leaves {_time(f['cached_s'])}"


def _workers(count: int) -> str:
    return "one worker" if count == 1 else f"{count} workers"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def answers(reading: Reading, rows: Sequence[Prediction], spec: ClusterSpec) -> list[str]:
    """A sentence for each strategy and mesh."""
    found = []
    for key in dict.fromkeys((row.strategy, row.mesh) for row in rows):
        own = [row for row in rows if (row.strategy, row.mesh) == key and row.refused is None]
        if own:
            found.append(f"{key[0]}{f' ({key[1]})' if key[1] else ''}: {reading.answer(own, spec)}.")
    return found
