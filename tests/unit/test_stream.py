"""Every sample of an epoch is given once, whatever becomes of the workers meanwhile."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from hocket.data.elastic_stream import SampleStream
from hocket.data.partition import Partition
from hocket.data.shards.order import ShardOrder


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_given_once_however_workers_come_and_go(seed: int, shards: bool) -> None:
    """Workers are at most one round apart; what a lost one was given since the last exchange that counts is given again. Of packed
    shards nothing is dropped, if an exchange counts between two losses."""
    rng = random.Random(seed)
    count, samples = rng.randint(2, 5), rng.randint(40, 200)
    partition = Partition(samples, count, rng.randint(1, 4), seed, order=ShardOrder([samples], seed) if shards else None)
    streams = [SampleStream(count, worker) for worker in range(count)]
    pending: dict[int, list[int]] = {id(s): [] for s in streams}
    given: Counter[int] = Counter()
    for stream in streams:
        stream.begin(partition)
    alive, settled = True, True
    while alive:
        alive = False
        ahead = rng.randint(0, len(streams))  # so many take the round before the others learn of a loss
        fault = rng.random() < 0.15 and len(streams) > 2 and (settled or not shards)
        order = list(streams)
        for k, stream in enumerate(order):
            if fault and k == ahead:
                lost = rng.randrange(len(streams))
                slots = [streams[lost].worker]
                left = [s for s in streams if s is not streams[lost]]
                positions = [s.position for s in left]
                for rank, s in enumerate(left):
                    s.propose(positions, slots, len(left), rank)
                    s.confirm()
                pending.pop(id(streams[lost]))
                streams = left
            if stream not in streams:
                continue
            found = stream.next()
            alive = alive or found is not None
            if found is not None:
                pending[id(stream)] += found.indices[stream.worker].tolist()
        settled = len({s.position[:3] for s in streams}) == 1
        if not settled:
            continue
        for stream in streams:  # an exchange that includes all rounds so far
            stream.count()
            given.update(pending[id(stream)])
            pending[id(stream)] = []
        if rng.random() < 0.1:
            joined = SampleStream()
            joined.load_state_dict(streams[0].state_dict())
            joined.begin(partition)
            pending[id(joined)] = []
            positions = [s.position for s in streams]
            streams.append(joined)
            for rank, s in enumerate(streams):
                s.propose(positions, [], len(streams), rank)
                s.confirm()
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
