"""Laws of A-EDiT: exchanges after seconds, an outer step, and a guard of the workers' displacements."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError
from hocket.programs.server.shard import AveragingShard
from hocket.strategy import Strategy
from hocket.sync import AEDiT
from virtual.test_asynchronous import _servers, _simulate, _training, _weights

STEP_S, SLOW = 1.0, 3
SPEEDS = ClusterSpec(step_s=STEP_S, slowdown=(1, 1, 1, SLOW))


def _meetings(strategy: str, spec: ClusterSpec = SPEEDS, **options: Any) -> tuple[list[list[int]], list[float]]:
    """The steps of each worker between meetings, and the times at which meetings were held."""
    training = _training(strategy, spec=spec, **options)
    shard = _servers(training).servers[0].shard
    assert isinstance(shard, AveragingShard)
    meet, steps, times = shard._meet, [], []

    def met() -> None:
        arrived, version = dict(shard._arrived), shard.version
        meet()
        if shard.version > version:
            steps.append([arrived[worker][0] for worker in sorted(arrived)])
            times.append(training.simulation.now)

    shard._meet = met  # type: ignore[method-assign]
    list(training.run())
    return steps, times


def test_workers_make_as_many_steps_as_they_can_and_wait_for_at_most_one_step_of_the_slowest() -> None:
    steps, times = _meetings("aedit(6)", epochs=8)
    assert len(steps) > 6
    assert all(counts[:3] == [6, 6, 6] and counts[3] in (2, 3) for counts in steps[:5])  # later mini-batches run out
    assert all(6 <= after - before <= 6 + SLOW * STEP_S for before, after in pairwise(times[:5]))


def test_at_most_so_many_steps() -> None:
    steps, _ = _meetings("aedit(100, s=4)")
    assert max(max(counts) for counts in steps) == 4


def test_without_outer_step_and_guard_it_is_stale_where_all_are_equally_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """If mini-batches are dealt out alike; within rounding, since the outer step adds a difference."""
    monkeypatch.setattr(AEDiT, "batches_ahead", lambda *_: 3)
    even = ClusterSpec(step_s=1.0)
    found, stale = (_weights(_simulate(text, spec=even)) for text in ("aedit(2.5, 1, 0, guard=None)", "stale(3)"))
    torch.testing.assert_close(found, stale, rtol=1e-4, atol=1e-6)


def test_accuracy_depends_on_the_cluster_and_not_on_chance() -> None:
    one, again, other = (_weights(_simulate("aedit(5)", spec=s)) for s in (SPEEDS, SPEEDS, ClusterSpec(step_s=2.0)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# --- the meeting -------------------------------------------------------------------------------------------------------------


def _shard(text: str, workers: int = 3, size: int = 4) -> AveragingShard:
    return AveragingShard([torch.zeros(size)], range(workers), Strategy.parse(text).sync.outer_step)


def _bring(shard: AveragingShard, step: int, *brought: Tensor) -> Tensor:
    for worker, weights in enumerate(brought):
        shard.push(worker, step, [weights], [0.1])
    return shard.weights[0].clone()


def test_the_mean_displacement_is_the_gradient_of_a_nesterov_step() -> None:
    shard = _shard("aedit(9, 0.5, 0.8, guard=None)")
    outer = velocity = torch.zeros(4)
    for step in (1, 2, 3):
        brought = [outer + torch.randn(4, generator=torch.Generator().manual_seed(10 * step + k)) for k in range(3)]
        delta = outer - torch.stack(brought).mean(0)
        velocity = 0.8 * velocity + delta
        outer = outer - 0.5 * (delta + 0.8 * velocity)
        torch.testing.assert_close(_bring(shard, step, *brought), outer)


def test_the_guard_weighs_by_norms_and_leaves_out_what_is_not_finite() -> None:
    shard = _shard("aedit(9, 1, 0, guard=3)")
    near, far, lost = torch.full((4,), 0.5), torch.full((4,), 1.0), torch.full((4,), torch.inf)
    shares = torch.tensor([-1.0, -2.0]).softmax(0)
    torch.testing.assert_close(_bring(shard, 1, near, far, lost), shares[0] * near + shares[1] * far)
    before = shard.weights[0].clone()
    assert torch.equal(_bring(shard, 2, lost, lost, lost), before)


def test_a_worker_that_moves_unusually_far_is_left_out() -> None:
    shard = _shard("aedit(9, 1, 0, guard=3)")
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 15):
        own = shard.weights[0].clone()
        _bring(shard, step, *(own + 0.1 + 0.01 * torch.randn(4, generator=generator) for _ in range(3)))
    own = shard.weights[0].clone()
    found = _bring(shard, 15, own + 0.1, own + 0.1, own + 5.0)
    torch.testing.assert_close(found, own + 0.1)


def test_a_shard_that_was_saved_goes_on_as_it_was() -> None:
    whole, other = _shard("aedit(9)"), _shard("aedit(9)")
    brought = [[torch.randn(4, generator=torch.Generator().manual_seed(10 * t + k)) for k in range(3)] for t in range(6)]
    for step, weights in enumerate(brought[:4], 1):
        _bring(whole, step, *weights)
    other.load_state_dict(whole.state_dict())
    for step, weights in enumerate(brought[4:], 5):
        assert torch.equal(_bring(whole, step, *weights), _bring(other, step, *weights))


# --- the notation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["aedit(60.0)", "aedit(0.5, 1.0, 0.5, None, 7) + server(2)", "aedit(30, guard=2.5)"])
def test_the_notation_gives_it_back(text: str) -> None:
    strategy = Strategy.parse(text)
    assert Strategy.parse(str(strategy)) == strategy
    assert math.isfinite(strategy.sync.seconds)


@pytest.mark.parametrize("text, words", [
    ("aedit(0)", "use bulk"), ("aedit(-1)", "seconds"), ("aedit(1, momentum=1)", "momentum"), ("aedit(1, s=0)", "at least 1"),
    ("aedit(1, guard=-1)", "guard"), ("aedit(1) + gossip", "use allreduce or server"), ("aedit(1) + topk(0.1)", "compression out"),
    ("aedit(1) + server(optimizer=adagrad)", r"server\(shards=n\)"), ("aedit(1) + exchange=gradients", "by definition"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError, match=words):
        Strategy.parse(text)
