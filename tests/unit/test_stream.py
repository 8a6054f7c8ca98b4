"""Every sample of an epoch is given once, whatever becomes of the workers meanwhile."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from hocket.data.elastic_stream import SampleStream
from hocket.data.partition import Partition
from hocket.data.shards.order import ShardOrder


def _change(streams: list[SampleStream], before: list[SampleStream], numbers: dict[SampleStream, int], lost: bool) -> None:
    for stream in before:
        stream.turn()
    positions = [s.position for s in before]
    for rank, stream in enumerate(streams):
        stream.propose(positions, [numbers[s] for s in streams], rank, lost)
        stream.confirm()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_given_once_however_workers_come_and_go(seed: int, shards: bool) -> None:
    """Workers are at most one round apart; what lost ones were given since the last exchange that counts is given again, also where
    several are lost before the next one. Of packed shards nothing is dropped."""
    rng = random.Random(seed)
    count, samples = rng.randint(2, 5), rng.randint(40, 200)
    partition = Partition(samples, count, rng.randint(1, 4), seed, order=ShardOrder([samples], seed) if shards else None)
    streams = [SampleStream(count, worker) for worker in range(count)]
    pending: dict[SampleStream, list[int]] = {s: [] for s in streams}
    given: Counter[int] = Counter()
    for stream in streams:
        stream.begin(partition)
    alive, period, made = True, rng.choice([1, 1, 3]), 0
    numbers = {s: k for k, s in enumerate(streams)}
    _change(streams, streams[:1], numbers, lost=False)  # the run begins
    while alive:
        alive, made = False, made + 1
        faults = {rng.randint(0, len(streams)) for _ in range(3) if rng.random() < 0.1}  # after so many have taken the round
        ended = False  # for one of them, after which nothing of the epoch is dealt again
        for k, stream in enumerate(list(streams)):
            if k in faults and len(streams) > 1 and not ended:
                lost = rng.choice(streams)
                streams = [s for s in streams if s is not lost]
                _change(streams, streams, numbers, lost=True)
                pending.pop(lost)
                alive = True
            if stream not in streams:
                continue
            found = stream.next()
            alive, ended = alive or found is not None, found is None
            if found is not None:
                pending[stream] += found.indices[stream.worker].tolist()
        if made % period and alive:
            continue
        for stream in streams:  # an exchange that includes all rounds so far
            stream.count()
            given.update(pending[stream])
            pending[stream] = []
        if rng.random() < 0.1:
            joined = SampleStream()
            joined.load_state_dict(streams[0].state_dict())
            joined.begin(partition)
            pending[joined] = []
            numbers[joined] = len(numbers)
            before = list(streams)
            streams.insert(rng.randint(0, len(streams)), joined)
            _change(streams, before, numbers, lost=False)
    assert max(given.values()) == 1
    dropped = samples - len(given)
    assert dropped < (1 if shards else 2 * len(streams) + 5), "only a rest too small for all workers is dropped"


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_goes_on_with_other_workers_gives_the_rest_of_the_epoch_once(seed: int, shards: bool) -> None:
    """Also where some of the workers were behind others when all left."""
    rng = random.Random(seed)
    before, after, samples = rng.randint(1, 4), rng.randint(1, 4), rng.randint(60, 200)
    partition = Partition(samples, before, rng.randint(1, 4), seed, order=ShardOrder([samples], seed) if shards else None)
    streams = [SampleStream(before, worker) for worker in range(before)]
    given: Counter[int] = Counter()
    for stream in streams:
        stream.begin(partition)
        for _ in range(rng.randint(2, 4)):
            found = stream.next()
            assert found is not None
            given.update(found.indices[stream.worker].tolist())
    saved = [stream.state_dict() for stream in streams]
    for worker in range(after):
        stream = SampleStream(after, worker)
        stream.go_on(saved)
        stream.begin(partition)
        for found in stream:
            given.update(found.indices[worker].tolist())
    assert max(given.values()) == 1
    assert len(given) > partition.samples - (1 if shards else max(before, after))


def test_shards_are_mixed_in_an_elastic_run_as_in_any_other() -> None:
    """Rounds of packed shards, which are dealt lane by lane inside each round, are the same with and without the stream."""
    order = ShardOrder([100] * 16, seed=3)
    partition = Partition(samples=1600, workers=2, batch_size=50, seed=3, order=order)
    dealt = [torch.cat(list(r.indices)) for r in partition.rounds(epoch=1)]
    assert torch.equal(torch.cat(dealt), partition.permutation(1))
    assert all(len(set((part // 100).tolist())) > 8 for part in dealt)
