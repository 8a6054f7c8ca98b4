"""What can be said of packed shards: whether they are whole, how balanced their classes are, how well an order mixes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

import numpy as np

from hocket.data.shards.index import Index, Shard
from hocket.data.shards.order import ShardOrder
from hocket.data.shards.storage import Storage
from hocket.errors import HocketError

_SHOWN, _BATCHES = 20, 2000


def shard(url: str) -> Callable[[Shard], str]:
    """What is wrong with a shard of ``url``, or an empty text."""
    storage = Storage(url)

    def checked(known: Shard) -> str:
        digest, count = hashlib.sha256(), 0
        try:
            for block in storage.blocks(known.name):
                digest.update(block)
                count += len(block)
        except FileNotFoundError:
            return "missing"
        except HocketError as error:
            return str(error)
        if count != known.bytes:
            return f"{count:,} bytes instead of {known.bytes:,}"
        return "" if digest.hexdigest() == known.sha256 else "damaged"

    return checked


def balance(index: Index) -> list[str]:
    """Lines with the share of each class, the largest first."""
    counts = np.bincount(index.labels[index.labels >= 0])
    names = index.about.get("classes") or [str(number) for number in range(len(counts))]
    largest = np.argsort(-counts, kind="stable")
    lines = [f"class {names[i]}: {counts[i]:,} samples ({counts[i] / counts.sum():.1%})".replace("%)", " %)") for i in largest]
    rest = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"… and {rest:,} classes more"] if rest > 0 else [])


def quality(index: Index, order: ShardOrder, batch_size: int) -> list[str]:
    """How well batches mix classes in this order, and in that of the files."""
    size = min(batch_size, order.samples)
    starts = range(0, order.samples - size + 1, size)[:_BATCHES]
    found = shuffle_quality(index.labels, (order.at(start, start + size) for start in starts))
    plain = shuffle_quality(index.labels, (np.arange(start, start + size) for start in starts))
    if math.isnan(found):
        return []
    pool = min(order.samples, order.lanes * order.window)
    return [
        f"classes in batches of {size}: χ²/df {found:.2f} with {order.lanes} lanes of {order.window:,} (as a buffer of {pool:,} "
        f"samples), {plain:.2f} in the order of the files; 1 is a perfect shuffle"
    ]


def shuffle_quality(labels: np.ndarray, batches: Iterable[np.ndarray]) -> float:
    """How evenly batches mix classes: the mean over batches of χ² / degrees of freedom. 1 for a perfect shuffle; as many as a batch
    has samples where each has one of two equal classes."""
    known = labels[labels >= 0]
    share = np.bincount(known) / max(1, len(known))
    present = share > 0
    if present.sum() < 2:
        return math.nan
    found = []
    for batch in batches:
        drawn = np.bincount(labels[batch][labels[batch] >= 0], minlength=len(share))[present]
        expected = drawn.sum() * share[present]
        found.append(float(((drawn - expected) ** 2 / np.maximum(expected, 1e-12)).sum() / (present.sum() - 1)))
    return float(np.mean(found))
