"""Laws of the shard at which workers meet."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.programs.server.shard import AveragingShard

SIZE = 5


def _shard(workers: int) -> AveragingShard:
    return AveragingShard([torch.zeros(SIZE)], range(workers))


def _weights(seed: int) -> list[torch.Tensor]:
    return [torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms())
def test_the_mean_is_weighted_by_steps_whoever_comes_first(steps: list[int], random: object) -> None:
    shard, order = _shard(len(steps)), list(range(len(steps)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for came, worker in enumerate(order):
        assert shard.called() == sorted(order[came:] if came else [])
        assert shard.push(worker, steps[worker], _weights(worker), [0.1])
        assert shard.ready(worker, steps[worker]) == (came + 1 == len(order))
    expected = sum(k * _weights(w)[0] for w, k in enumerate(steps)) / sum(steps)
    torch.testing.assert_close(shard.weights[0], expected)
    assert not shard.called()
    assert shard.version == 1


def test_the_next_meeting_counts_steps_since_this_one() -> None:
    shard = _shard(2)
    shard.push(0, 4, _weights(0), [0.1])
    shard.push(1, 1, _weights(1), [0.1])
    shard.push(0, 6, _weights(2), [0.1])  # 2 more
    shard.push(1, 5, _weights(3), [0.1])  # 4 more
    torch.testing.assert_close(shard.weights[0], (2 * _weights(2)[0] + 4 * _weights(3)[0]) / 6)


def test_one_that_is_gone_is_not_waited_for_and_what_it_brought_counts() -> None:
    shard = _shard(3)
    shard.push(0, 2, _weights(0), [0.1])
    shard.push(1, 6, _weights(1), [0.1])
    assert not shard.leave(1), "nothing is lost"
    assert not shard.ready(0, 2)
    assert not shard.leave(2)
    assert shard.ready(0, 2)
    torch.testing.assert_close(shard.weights[0], 0.25 * _weights(0)[0] + 0.75 * _weights(1)[0])


def test_one_that_is_back_has_come_already_and_sends_its_weights_again_for_nothing() -> None:
    """Its answer was cut off; were it waited for once more, it would wait itself for a shard at which nobody was missed."""
    shard = _shard(2)
    shard.push(1, 2, _weights(1), [0.1], 0)
    shard.leave(1)
    shard.join(1, 2)
    assert not shard.push(1, 2, _weights(1), [0.1], 0)
    assert not shard.ready(1, 2)
    shard.push(0, 2, _weights(0), [0.1], 0)
    assert shard.ready(1, 2)
    torch.testing.assert_close(shard.weights[0], (_weights(0)[0] + _weights(1)[0]) / 2)


def test_weights_from_before_a_meeting_are_not_taken() -> None:
    shard = _shard(2)
    shard.leave(1)  # silent for long
    shard.push(0, 4, _weights(0), [0.1], 0)
    assert shard.version == 1
    shard.join(1, 0)
    assert not shard.push(1, 3, _weights(1), [0.1], 0), "it has missed a meeting"
    assert not shard.ready(1, 3), "but has come to the next one, as to that of every other shard"
    assert shard.called() == [0]
    shard.push(0, 5, _weights(3), [0.1], 1)
    assert shard.ready(1, 3)
    assert shard.version == 2
    assert torch.equal(shard.weights[0], _weights(3)[0]), "the mean of those whose weights count"
    assert shard.push(1, 4, _weights(2), [0.1], 2), "and goes on from there"


def test_one_that_waits_for_another_shard_is_not_waited_for() -> None:
    shard = _shard(3)
    shard.push(0, 2, _weights(0), [0.1], 0)
    shard.skip(2)
    assert not shard.ready(0, 2)
    shard.push(1, 2, _weights(1), [0.1], 0)
    assert shard.ready(0, 2)
    shard.push(0, 3, _weights(2), [0.1], 1)
    shard.push(1, 3, _weights(3), [0.1], 1)
    assert not shard.ready(0, 3), "once only"


def test_a_meeting_of_nobody_whose_weights_count_changes_nothing() -> None:
    shard = _shard(2)
    shard.leave(1)
    shard.push(0, 4, _weights(0), [0.1], 0)
    shard.join(1, 0)
    shard.push(1, 3, _weights(1), [0.1], 0)
    shard.leave(0)
    assert shard.ready(1, 3)
    assert shard.version == 1
    assert torch.equal(shard.weights[0], _weights(0)[0])


def test_what_is_sent_twice_counts_once() -> None:
    shard = _shard(2)
    assert shard.push(0, 3, _weights(0), [0.1])
    assert not shard.push(0, 3, _weights(5), [0.1])
    shard.push(1, 1, _weights(1), [0.1])
    torch.testing.assert_close(shard.weights[0], 0.75 * _weights(0)[0] + 0.25 * _weights(1)[0])


def test_a_meeting_goes_on_from_a_snapshot() -> None:
    shard, other = _shard(2), _shard(2)
    shard.push(0, 3, _weights(0), [0.1])
    other.load_state_dict(shard.state_dict())
    for s in (shard, other):
        s.push(1, 2, _weights(1), [0.1])
    assert torch.equal(shard.weights[0], other.weights[0])
