"""One worker's part of a ``DataLoader`` or of any other iterable of batches.

A loader over a map-style data set, shuffled or in order, is distributed sample by sample with ``Partition``: every worker
computes the same rounds without communication. Anything else (iterable data sets, samplers of the user's own, lists of batches) is
distributed batch by batch: worker ``i`` takes batches ``i, i + N, …``, and keeps its batch until it has seen the rest of that
round, because an incomplete last round is dropped. For this every worker must see the same batches in the same order.

The order of samples is a function of the seed and the number of the epoch. :class:`LoaderPositions` count the epochs, so that a
loader that is built anew for each of them gets another order each time, and a resumed training goes on where it was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from hocket.data.partition import Partition
from hocket.errors import HocketError


@dataclass(eq=False)
class Iteration:
    """One pass over a loader of this ``kind``: its epoch, and how many batches it has given."""

    kind: str
    epoch: int
    batches: int = 0


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

    def begin(self, loader: Iterable[Any], epoch: int | None) -> Iteration:
        """The next pass over a loader (or that of ``epoch``); one that a checkpoint interrupted goes on where it was."""
        kind = _kind(loader)
        found = next((i for i in self._interrupted if i.kind == kind and epoch in (None, i.epoch)), None)
        if found is not None:
            self._interrupted.remove(found)
        else:
            found = Iteration(kind, self._epochs.get(kind, 0) if epoch is None else epoch)
            if epoch is None:
                self._epochs[kind] = found.epoch + 1
        self._open.append(found)
        return found

    def end(self, iteration: Iteration) -> None:
        """The pass has ended, or was left."""
        self._open.remove(iteration)

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"epochs": dict(self._epochs), "open": [[i.kind, i.epoch, i.batches] for i in (*self._interrupted, *self._open)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`: the next passes are the rest of those that were under way."""
        self._epochs = dict(state["epochs"])
        self._interrupted = [Iteration(*saved) for saved in state["open"]]


def _kind(loader: Iterable[Any]) -> str:
    if not isinstance(loader, DataLoader) or not _re_partitionable(loader):
        return type(loader).__name__
    order = "in order" if isinstance(loader.sampler, SequentialSampler) else "shuffled"
    return f"{len(loader.dataset)} {order}, {loader.batch_size} at a time, drop_last={loader.drop_last}"  # type: ignore[arg-type]


def distribute_loader(
    loader: Iterable[Any], workers: int, worker: int, seed: int, epoch: int, skip: int = 0
) -> Iterator[tuple[Any, float]]:
    """Batches of ``worker``, without the first ``skip``, with their weights ``b_i · N / Σ b`` in the mean over all workers.

    >>> [batch for batch, _ in distribute_loader(["a", "b", "c", "d", "e"], workers=2, worker=1, seed=0, epoch=0)]
    ['b', 'd']
    """
    if not 0 <= worker < workers:
        raise HocketError(f"A worker's rank is between 0 and {workers - 1}; got {worker}: pass this process's own.")
    if isinstance(loader, DataLoader):
        if isinstance(loader.sampler, DistributedSampler):
            raise HocketError(
                "The loader has a DistributedSampler, which distributes it already: remove the sampler and use shuffle=True."
            )
        if _re_partitionable(loader):
            return _by_samples(loader, workers, worker, seed, epoch, skip)
    return islice(_by_batches(loader, workers, worker), skip, None)


def distributed_length(loader: Any, workers: int) -> int:
    """How many batches each worker gets of a loader that has a length.

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
    loader: DataLoader[Any], workers: int, worker: int, seed: int, epoch: int, skip: int
) -> Iterator[tuple[Any, float]]:
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    rounds = _partition(loader, workers, seed, shuffle).rounds(epoch)[skip:]
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    options: dict[str, Any] = {name: getattr(loader, name) for name in (*kept, "prefetch_factor")}
    batches = DataLoader(loader.dataset, batch_sampler=[r.indices[worker].tolist() for r in rounds], **options)
    # A DataLoader draws from the global generator when it begins, which this pass did before it was interrupted.
    before = torch.get_rng_state()
    found = zip(batches, [r.weights[worker] for r in rounds], strict=True)
    if skip:
        torch.set_rng_state(before)
    return found


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
