"""``stream``: packed shards as an ``IterableDataset`` that every worker, of any number, reads its part of.

The position in the data is one integer, the same on all workers, and the only state: a run that was interrupted at any step goes on
with any number of workers and any shares, and no sample of an epoch is repeated or lost (:mod:`hocket.data.shards.order`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hocket.data.shards import decode as decoding
from hocket.data.shards.index import Index
from hocket.data.shards.order import ShardOrder, check_division, parts, round_sizes
from hocket.data.shards.reader import BadShard, OnBad, ShardReader, check_reading
from hocket.data.shards.storage import OPEN_RETRY_S, RETRY_S
from hocket.errors import HocketError

T = TypeVar("T")
R = TypeVar("R")
Decode = Callable[[dict[str, bytes]], Any]


def stream(
    url: str | Path,
    *,
    batch_size: int | None = None,
    worker: int | None = None,
    workers: int | None = None,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    shuffle: bool = True,
    lanes: int | None = None,
    window: int | None = None,
    decode: Decode = decoding.example,
    collate: Callable[[list[Any]], Any] = default_collate,
    threads: int = 4,
    prefetch: int = 8,
    cache: Path | str | None = None,
    cache_bytes: int | None = None,
    on_bad_shard: OnBad = "stop",
    retry_s: float = RETRY_S,
) -> ShardStream:
    """This worker's part of the shards at a path, ``http(s)://`` or any URL that fsspec opens; each iteration is one epoch.

    With ``batch_size`` it yields ``collate([decode(sample), …])``, for ``DataLoader(stream, batch_size=None)``; without, single
    samples. ``decode`` gets a dict from field to bytes; the default gives tensors. ``worker`` of ``workers`` is this process in
    torch.distributed unless given, and ``shares`` are the proportions in which a round of ``workers · batch_size`` samples is
    divided. ``threads`` read and decode up to ``prefetch`` batches ahead. Shards from elsewhere are kept in ``cache``, a folder
    that all processes of a host share, of at most ``cache_bytes``; without it, in memory: up to ``3 · lanes / workers`` of them.

    ``state_dict()`` is the same on all workers. After ``load_state_dict`` the stream goes on there, whatever ``workers``,
    ``batch_size`` and ``shares`` are now; an iteration that was left goes on, too.
    """
    index = Index.load(str(url), min(retry_s, OPEN_RETRY_S))
    joined = dist.is_available() and dist.is_initialized()
    worker = (dist.get_rank() if joined else 0) if worker is None else worker
    workers = (dist.get_world_size() if joined else 1) if workers is None else workers
    if shares is not None and batch_size is None:
        raise HocketError("shares divide rounds of batches: give batch_size, too.")
    order = ShardOrder.of(index, seed, lanes, window, shuffle)
    given: dict[str, Any] = {"cache": cache, "cache_bytes": cache_bytes, "on_bad_shard": on_bad_shard, "retry_s": retry_s}
    made = ShardStream(str(url), index, order, given, decode, collate, threads, prefetch)
    made.divide(workers, worker, batch_size, shares)
    return made


class ShardStream(IterableDataset[Any]):
    """What :func:`stream` returns."""

    def __init__(
        self,
        url: str,
        index: Index,
        order: ShardOrder,
        reading: dict[str, Any],
        decode: Decode,
        collate: Callable[[list[Any]], Any],
        threads: int,
        prefetch: int,
    ) -> None:
        if threads < 1 or prefetch < 1:
            raise HocketError(f"threads and prefetch must be at least 1; got {threads} and {prefetch}: raise them.")
        self.url, self.index, self.order, self.reading = url, index, order, reading
        self.decode, self.collate, self.threads, self.prefetch = decode, collate, threads, prefetch
        self.cursor = 0
        """The position in the data, through all epochs, of the next round of all workers."""
        self.weight = 1.0
        """This worker's samples in the last batch × workers / all samples of the round, for ``job.weight``."""
        self.wait_s, self.bytes_read, self.bytes_fetched, self.skipped = 0.0, 0, 0, 0
        """Seconds that all iterations waited for data; of the last one bytes of samples, bytes from elsewhere, and samples left out
        as bad."""
        self._before = 0, 0
        self._in_turn = False
        check_reading(**reading)

    def divide(self, workers: int, worker: int, batch_size: int | None = None, shares: Sequence[float] | None = None) -> None:
        """Be this worker of so many from the next iteration on."""
        check_division(workers, worker, 1 if batch_size is None else batch_size, shares, self.order.samples)
        self.workers, self.worker, self.batch_size, self.shares = workers, worker, batch_size, shares

    @property
    def epoch(self) -> int:
        """The epoch of the next round."""
        return self.cursor // self.order.samples

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch with the next iteration."""
        self.cursor, self._in_turn = epoch * self.order.samples, False

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        order = {"seed": self.order.seed, "lanes": self.order.lanes, "window": self.order.window, "shuffle": self.order.shuffle}
        return {"cursor": self.cursor, "in_turn": self._in_turn, "digest": self.index.digest, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, in its order."""
        if state["digest"] != self.index.digest:
            raise HocketError(f"The shards at {self.url} have changed since the checkpoint: use those, or start a new epoch.")
        self.order = ShardOrder(self.index.counts, state["seed"], state["lanes"], state["window"], state["shuffle"])
        self.cursor, self._in_turn = state["cursor"], state["in_turn"]

    def figures(self) -> dict[str, float]:
        """Of all iterations in this process: seconds waited for data, bytes of samples read, samples left out."""
        read, skipped = self._before
        return {"data_wait_s": self.wait_s, "data_bytes": read + self.bytes_read, "data_skipped": skipped + self.skipped}

    def __iter__(self) -> Iterator[Any]:
        read, skipped = self._before
        self._before, self.bytes_read, self.skipped = (read + self.bytes_read, skipped + self.skipped), 0, 0
        size = self.workers * (self.batch_size or 1)
        reader = ShardReader(self.url, self.index, **self.reading)
        reader.keep = self.order.open_pieces(self.workers, reader.pieces, self.prefetch * size) + self.threads
        rounds = self._rounds()
        if reader.remote:  # a window ahead
            ahead = self.order.lanes * min(self.order.window, self.order.samples // self.order.lanes) // size
            rounds = announced(rounds, lambda found: found[0], max(1, ahead), reader, self.threads)
        work = in_order(lambda found: (found, self._batch(reader, found[0])), rounds, self.threads, self.prefetch)
        last: list[Any] = []
        try:
            while True:
                begun = time.perf_counter()
                found = next(work, None)
                self.wait_s += time.perf_counter() - begun
                self.bytes_read, self.bytes_fetched, self.skipped = reader.bytes_read, reader.bytes_fetched, reader.skipped
                if found is None:
                    return
                (_, self.weight, self.cursor, self._in_turn), batch = found
                if not batch and self.batch_size is not None:  # others wait for a batch: the last one, which counts for nothing
                    self.weight, batch = 0.0, last
                last = batch or last
                yield from batch
        finally:
            reader.storage.close()
            work.close()
            reader.close()

    def _rounds(self) -> Iterator[tuple[np.ndarray, float, int, bool]]:
        """This worker's samples in each round of the rest of the epoch, their weight, and the cursor and turn after it.

        Of the loading processes of a DataLoader each takes every ``K``-th round, which is the order in which it asks them; the
        cursor is then that of the process's next one.
        """
        info, cursor = get_worker_info(), self.cursor
        every, end = (1 if info is None else info.num_workers), (cursor // self.order.samples + 1) * self.order.samples
        if info is not None and not self._in_turn:
            cursor, _ = self._after(cursor, info.id, end)
        while cursor < end:
            following, sizes = self._after(cursor, every, end)
            part = parts(self.order, cursor, sizes)[self.worker]
            yield part, len(part) * self.workers / sum(sizes), following, info is not None and following < end
            cursor = following

    def _after(self, cursor: int, rounds: int, end: int) -> tuple[int, list[int]]:
        """The cursor ``rounds`` later, or after the epoch's last round; and the sizes of the first of them."""
        first: list[int] = []
        for _ in range(rounds):
            if cursor < end:
                sizes = round_sizes(self.order, cursor, self.workers, self.batch_size or 1, self.shares)
                first, cursor = first or sizes, cursor + sum(sizes)
        return cursor, first

    def _batch(self, reader: ShardReader, numbers: np.ndarray) -> list[Any]:
        """What to yield for these samples: one batch, or single samples; nothing where all are bad."""
        samples = [sample for sample in decoded(reader, numbers, self.decode) if sample is not None]
        return [self.collate(samples)] if samples and self.batch_size is not None else samples


def decoded(reader: ShardReader, numbers: np.ndarray, decode: Decode) -> list[Any]:
    """Samples as ``decode`` makes them, None where one is left out."""
    found: list[Any] = []
    for number, sample in zip(numbers.tolist(), reader.samples(numbers), strict=True):
        try:
            found.append(None if sample is None else decode(sample))
        except HocketError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            reader.bad(BadShard(f"The decoder fails on {reader.where(number)} ({text}): correct it, or leave the sample out."))
            found.append(None)
    return found


def _in_thread(info: Any) -> Callable[[], None] | None:
    """In a loading process of a DataLoader each thread computes alone, as its main thread does: OpenMP's threads, which were not
    forked along, would be waited for without end."""
    return None if info is None else lambda: torch.set_num_threads(1)


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Generator[R, None, None]:
    """``work(item)`` of each item in turn, up to ``ahead`` of them begun before they are asked for, by ``threads`` threads."""
    begun: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="hocket-data", initializer=_in_thread(get_worker_info())) as pool:
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > ahead:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


def announced(
    items: Iterable[T], samples_of: Callable[[T], np.ndarray], ahead: int, reader: ShardReader, threads: int
) -> Iterator[T]:
    """The same items; the pieces of those up to ``ahead`` later are being fetched meanwhile, as many as the reader keeps."""
    waiting: deque[tuple[T, set[int]]] = deque()
    live: Counter[int] = Counter()
    with ThreadPoolExecutor(threads, thread_name_prefix="hocket-fetch") as pool:
        try:
            for item in items:
                pieces = set(reader.pieces_of(samples_of(item)).tolist())  # np.unique would import numpy.ma first: 0.1 s
                for piece in pieces:
                    if piece not in live:
                        pool.submit(reader.want, piece)
                    live[piece] += 1
                waiting.append((item, pieces))
                while len(waiting) > ahead or len(live) > reader.keep - threads:
                    item, pieces = waiting.popleft()
                    yield item
                    live -= Counter(pieces)
            yield from (item for item, _ in waiting)
        finally:
            pool.shutdown(cancel_futures=True)
