"""One worker's part of a ``DataLoader`` or of any other iterable of batches.

A loader over a map-style data set, shuffled or in order, is distributed sample by sample with ``Partition``: every worker
computes the same rounds without communication. Anything else (iterable data sets, samplers of the user's own, lists of batches) is
distributed batch by batch: worker ``i`` takes batches ``i, i + N, …``, and keeps its batch until it has seen the rest of that
round, because an incomplete last round is dropped. For this every worker must see the same batches in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from hocket.data.partition import Partition
from hocket.errors import HocketError


def distribute_loader(loader: Iterable[Any], workers: int, worker: int, seed: int, epoch: int) -> Iterator[tuple[Any, float]]:
    """Batches of ``worker`` with their weights ``b_i · N / Σ b`` in the mean over all workers.

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
            return _by_samples(loader, workers, worker, seed, epoch)
    return _by_batches(loader, workers, worker)


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


def _by_samples(loader: DataLoader[Any], workers: int, worker: int, seed: int, epoch: int) -> Iterator[tuple[Any, float]]:
    shuffle = not isinstance(loader.sampler, SequentialSampler)
    rounds = _partition(loader, workers, seed, shuffle).rounds(epoch)
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    options: dict[str, Any] = {name: getattr(loader, name) for name in (*kept, "prefetch_factor")}
    batches = DataLoader(loader.dataset, batch_sampler=[r.indices[worker].tolist() for r in rounds], **options)
    return zip(batches, [r.weights[worker] for r in rounds], strict=True)


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
