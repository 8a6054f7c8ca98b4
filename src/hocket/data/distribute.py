"""One worker's part of a ``DataLoader`` or of any other iterable of batches.

A loader over a map-style data set, shuffled or in order, is distributed sample by sample with ``Partition``: every worker
computes the same rounds without communication. Anything else (iterable data sets, samplers of the user's own, lists of batches) is
distributed batch by batch: worker ``i`` takes batches ``i, i + N, …``, and keeps its batch until it has seen the rest of that
round, because an incomplete last round is dropped. For this every worker must see the same batches in the same order.

Where workers do not step together, the batches of one process are dealt by demand: whoever is ready takes the next one.

The order of samples is a function of the seed and the number of the epoch. :class:`LoaderPositions` count the epochs, so that a
loader that is built anew for each of them gets another order each time, and a resumed training goes on where it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat, takewhile
from typing import Any

import torch
from torch.distributed import Store
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from hocket.data.elastic_stream import SampleStream
from hocket.data.partition import Partition
from hocket.data.shards.stream import ShardStream
from hocket.errors import HocketError


class SharedBatchCounter:
    """Gives each worker that asks the next number of a batch: all workers share a count on ``store``, which begins at ``dealt``.

    >>> store = torch.distributed.HashStore()
    >>> one, other = SharedBatchCounter(store, "pass", 0), SharedBatchCounter(store, "pass", 2)
    >>> one(), other(), one(), one.dealt
    (2, 3, 4, 5)
    """

    def __init__(self, store: Store, name: str, dealt: int) -> None:
        self._store, self._name = store, name
        while (now := self.dealt) < dealt:  # workers that resume have saved at different times: the latest counts
            store.compare_set(name, str(now), str(dealt))

    def __call__(self) -> int:
        return self._store.add(self._name, 1) - 1

    @property
    def dealt(self) -> int:
        """How many numbers all workers have been given."""
        return self._store.add(self._name, 0)


@dataclass(eq=False)
class Iteration:
    """One pass over a loader of this ``kind``: its epoch, and how many batches it has given to this worker; to all of them, where
    there is a ``dispatcher``."""

    kind: str
    epoch: int
    batches: int = 0
    again: int = 0
    """How many passes of this kind and epoch came before."""
    dispatcher: SharedBatchCounter | None = None
    workers: int = 0
    """How many workers it is distributed to."""
    before: tuple[tuple[int, int], ...] = ()
    """Workers that had it before these, and how many batches each of them was given."""

    def go_on(self, workers: int) -> None:
        """Distribute what is left to ``workers`` workers from here on."""
        if self.workers not in (0, workers) and self.batches:
            self.before, self.batches = (*self.before, (self.workers, self.batches)), 0
        self.workers = workers

    def by_demand(self, store: Store) -> SharedBatchCounter:
        """Deal the batches by demand from here on."""
        self.dispatcher = SharedBatchCounter(store, f"{self.kind}/{self.epoch}/{self.again}", self.batches)
        return self.dispatcher

    def state(self) -> list[Any]:
        dealt = self.dispatcher is not None  # numbers of batches mean the same whoever takes them
        given = self.batches if self.dispatcher is None else self.dispatcher.dealt
        return [self.kind, self.epoch, given, 0 if dealt else self.workers, [list(part) for part in self.before]]

    @classmethod
    def from_state(cls, saved: Sequence[Any]) -> Iteration:
        kind, epoch, batches, *more = saved
        workers, before = more or (0, ())
        return cls(kind, epoch, batches, workers=workers, before=tuple((int(w), int(b)) for w, b in before))


class LoaderPositions:
    """How many epochs each kind of loader has begun, and where passes that have not ended stand.

    Loaders that distribute equally many samples in the same way are of one kind: workers agree on it without communication, and no
    loader has to be kept.

    >>> positions = LoaderPositions()
    >>> [positions.begin(["a", "b"], None).epoch for _ in range(3)]
    [0, 1, 2]
    """

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._open: list[Iteration] = []
        self._interrupted: list[Iteration] = []
        self._begun: Counter[tuple[str, int]] = Counter()

    def begin(self, loader: Iterable[Any], epoch: int | None, workers: int = 0) -> Iteration:
        """The next pass over a loader (or that of ``epoch``), for so many workers; one that a checkpoint interrupted goes on where
        it was."""
        kind = _kind(loader)
        found = next((i for i in self._interrupted if i.kind == kind and epoch in (None, i.epoch)), None)
        if found is not None:
            self._interrupted.remove(found)
        else:
            found = Iteration(kind, self._epochs.get(kind, 0) if epoch is None else epoch)
            if epoch is None:
                self._epochs[kind] = found.epoch + 1
        found.go_on(workers)
        found.again = self._begun[kind, found.epoch]
        self._begun[kind, found.epoch] += 1
        self._open.append(found)
        return found

    def end(self, iteration: Iteration) -> None:
        """The pass has ended, or was left."""
        self._open.remove(iteration)

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"epochs": dict(self._epochs), "open": [i.state() for i in (*self._interrupted, *self._open)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`: the next passes are the rest of those that were under way."""
        self._epochs = dict(state["epochs"])
        self._interrupted = [Iteration.from_state(saved) for saved in state["open"]]


def _kind(loader: Iterable[Any]) -> str:
    if not isinstance(loader, DataLoader) or not _re_partitionable(loader):
        return type(loader).__name__
    order = "in order" if isinstance(loader.sampler, SequentialSampler) else "shuffled"
    return f"{len(loader.dataset)} {order}, {loader.batch_size} at a time, drop_last={loader.drop_last}"  # type: ignore[arg-type]


def distribute_loader(
    loader: Iterable[Any],
    workers: int,
    worker: int,
    seed: int,
    epoch: int,
    skip: int = 0,
    take: Callable[[], int] | None = None,
    before: Sequence[tuple[int, int]] = (),
) -> Iterator[tuple[Any, float]]:
    """Batches of ``worker``, without the first ``skip``, with their weights ``b_i · N / Σ b`` in the mean over all workers.

    ``take`` gives the number of the next batch, where they are dealt by demand. ``before``: so many workers had so many batches
    each of this epoch already; what is left is distributed.

    >>> [batch for batch, _ in distribute_loader(["a", "b", "c", "d", "e"], workers=2, worker=1, seed=0, epoch=0)]
    ['b', 'd']
    """
    if not 0 <= worker < workers:
        raise HocketError(f"A worker's rank is between 0 and {workers - 1}; got {worker}: pass this process's own.")
    if isinstance(getattr(loader, "dataset", loader), ShardStream):
        raise HocketError(
            "A stream of shards gives each worker its part already: iterate over it without distribute, after hocket.init."
        )
    if isinstance(loader, DataLoader):
        if isinstance(loader.sampler, DistributedSampler):
            raise HocketError(
                "The loader has a DistributedSampler, which distributes it already: remove the sampler and use shuffle=True."
            )
        if _re_partitionable(loader):
            return _by_samples(loader, workers, worker, seed, epoch, skip, take, before)
    if take is not None:
        return _by_number(loader, take)
    left = islice(loader, sum(n * batches for n, batches in before), None)
    return islice(_by_batches(left, workers, worker), skip, None)


def distributed_length(loader: Any, workers: int) -> int:
    """How many batches each worker gets of a loader that has a length; by demand, about the mean over workers.

    >>> distributed_length(["a", "b", "c", "d", "e"], workers=2)
    2
    """
    if isinstance(loader, DataLoader) and _re_partitionable(loader):
        return len(_partition(loader, workers))
    return len(loader) // workers


def _re_partitionable(loader: DataLoader[Any]) -> bool:
    """Whether the loader passes once over a map-style data set, so that its samples can be partitioned anew."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return False
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


def _by_samples(
    loader: DataLoader[Any],
    workers: int,
    worker: int,
    seed: int,
    epoch: int,
    skip: int,
    take: Callable[[], int] | None,
    before: Sequence[tuple[int, int]],
) -> Iterator[tuple[Any, float]]:
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    samples: Iterable[list[int]]
    weights: Iterable[float]
    if take is None:
        used = 0
        for others, given in before:
            rounds = _partition(loader, others, seed, shuffle).rounds(epoch, used=used)[:given]
            used += sum(sum(r.sizes) for r in rounds)
        rounds = _partition(loader, workers, seed, shuffle).rounds(epoch, used=used)[skip:]
        samples, weights = [r.indices[worker].tolist() for r in rounds], [r.weights[worker] for r in rounds]
    else:
        rounds = _partition(loader, 1, seed, shuffle).rounds(epoch)
        numbers = takewhile(lambda number: number < len(rounds), iter(take, None))
        samples, weights = (rounds[number].indices[0].tolist() for number in numbers), repeat(1.0)
    batches = _rebuilt(loader, samples)
    # A DataLoader draws from the global generator when it begins, which this pass did before it was interrupted.
    drawn = torch.get_rng_state()
    found = zip(batches, weights, strict=take is None)
    if skip or before:
        torch.set_rng_state(drawn)
    return found


def distribute_stream(loader: Iterable[Any], stream: SampleStream, seed: int) -> Iterator[tuple[Any, float]]:
    """The batches of one epoch for a worker of ``stream``, with their weights: dealt anew when the number of workers changes."""
    if not isinstance(loader, DataLoader) or not _re_partitionable(loader):
        raise HocketError("An elastic run distributes a DataLoader over a map-style data set; got another iterable of batches.")
    stream.begin(_partition(loader, 1, seed, not isinstance(loader.sampler, SequentialSampler)))
    epoch = None
    try:
        while epoch != (epoch := stream.position[:2]):
            rounds, worker = stream.rounds()[stream.position.taken :], stream.worker
            batches = _rebuilt(loader, [r.indices[worker].tolist() for r in rounds])
            for batch, found in zip(batches, rounds, strict=True):
                stream.taken()
                yield batch, found.weights[worker]
                if stream.due or stream.position[:2] != epoch:
                    break
            stream.turn()
    finally:  # also where the loop leaves an epoch early
        stream.end()


def _rebuilt(loader: DataLoader[Any], samples: Iterable[list[int]]) -> DataLoader[Any]:
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    options: dict[str, Any] = {name: getattr(loader, name) for name in (*kept, "prefetch_factor")}
    return DataLoader(loader.dataset, batch_sampler=samples, **options)


def _partition(loader: DataLoader[Any], workers: int, seed: int = 0, shuffle: bool = True) -> Partition:
    assert loader.batch_size is not None
    samples = len(loader.dataset)  # type: ignore[arg-type]
    return Partition(samples, workers, loader.batch_size, seed, "drop" if loader.drop_last else "even", shuffle=shuffle)


def _by_batches(batches: Iterable[Any], workers: int, worker: int) -> Iterator[tuple[Any, float]]:
    mine = None
    for number, batch in enumerate(batches):
        if number % workers == worker:
            mine = batch
        if number % workers == workers - 1:
            yield mine, 1.0
            mine = None


def _by_number(batches: Iterable[Any], take: Callable[[], int]) -> Iterator[tuple[Any, float]]:
    wanted = take()
    for number, batch in enumerate(batches):
        if number == wanted:
            yield batch, 1.0
            wanted = take()
