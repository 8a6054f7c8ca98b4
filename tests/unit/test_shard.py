"""Laws of one shard of the parameters: delay compensation is its formula, staleness is counted, a restart forgets nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.optim.delayed_nesterov import DelayedNesterov
from hocket.programs.server.optimizer_spec import KNOWN, OptimizerSpec, state_rows
from hocket.programs.server.shard import AveragingShard, ParameterShard
from hocket.sync import SSP, Async, AsyncDiLoCo, Bulk, Sync

LR = 0.1
SGD = OptimizerSpec("sgd", ({"lr": LR},))
START = torch.linspace(-1, 1, 7)
ORDER = [0, 1, 1, 0, 0, 0, 1, 0]
"""Who pushes, one after another; all have fetched at the start, and each fetches after its push."""


def gradient(number: int) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(number))


def run(sync: Sync, order: Sequence[int] = ORDER, spec: OptimizerSpec = SGD) -> ParameterShard:
    shard = ParameterShard([START.clone()], [0], spec, sync, range(2))
    steps = {0: 0, 1: 0}
    for worker in (0, 1):
        shard.give(worker)
    for number, worker in enumerate(order):
        steps[worker] += 1
        assert shard.push(worker, steps[worker], [gradient(number)], [LR])
        shard.give(worker)
    return shard


def reference(kind: str, strength: float, order: Sequence[int] = ORDER) -> tuple[Tensor, dict[int, int]]:
    """The published formulas in double precision, and how often each staleness was met."""
    now, squares = START.double(), None
    then, seen = {0: now, 1: now}, {0: 0, 1: 0}
    staleness: dict[int, int] = {}
    for number, worker in enumerate(order):
        g = gradient(number).double()
        tau = number - seen[worker]
        staleness[tau] = staleness.get(tau, 0) + 1
        lr = LR / max(tau, 1) if kind == "rate" else LR
        if kind in ("taylor", "adaptive"):
            squares = g * g if squares is None else 0.95 * squares + 0.05 * g * g
            scale = strength if kind == "taylor" else strength / (squares + 1e-7).sqrt()
            g = g + scale * g * g * (now - then[worker])
        now = now - lr * g
        then[worker], seen[worker] = now, number + 1
    return now, staleness


@pytest.mark.parametrize(
    "kind, strength, sync",
    [
        ("none", 0.0, Async()),
        ("rate", 0.0, Async("rate")),
        ("taylor", 0.04, Async("taylor")),
        ("taylor", 3.0, Async("taylor", 3.0)),
        ("adaptive", 2.0, Async("adaptive")),
        ("adaptive", 0.5, Async("adaptive", 0.5)),
    ],
)
def test_delay_compensation_is_its_formula(kind: str, strength: float, sync: Sync) -> None:
    wanted, staleness = reference(kind, strength)
    shard = run(sync)
    torch.testing.assert_close(shard.weights[0].double(), wanted, rtol=1e-5, atol=1e-6)
    assert dict(shard.staleness) == staleness
    assert shard.version == len(ORDER)
    plain = reference("none", 0.0)[0]
    assert kind == "none" or float((wanted - plain).abs().max()) > 1e-3, "the formulas differ here"


@pytest.mark.parametrize("sync", [Async("taylor", 0.0), Async("adaptive", 0.0)])
def test_compensation_of_no_strength_is_none(sync: Sync) -> None:
    assert torch.equal(run(sync).weights[0], run(Async()).weights[0])


@pytest.mark.parametrize("sync", [Async("rate"), Async("taylor", 9.0), Async("adaptive", 9.0)])
def test_a_gradient_that_is_not_stale_is_not_compensated(sync: Sync) -> None:
    """One worker alone: nothing happens between its fetch and its push."""
    assert torch.equal(run(sync, [0] * 5).weights[0], run(Async(), [0] * 5).weights[0])


@pytest.mark.parametrize("sync", [Async("rate"), Async("taylor", 3.0), Async("adaptive", 3.0)])
def test_a_worker_that_left_is_compensated_from_its_next_fetch_on(sync: Sync) -> None:
    """Nothing is kept of a worker that is gone: with its first push after that there is nothing to compare with."""
    shard, plain = run(sync), run(Async())
    plain.weights[0].copy_(shard.weights[0])
    for of in (shard, plain):
        of.leave(1)
        of.join(1, 9)
        of.push(1, 10, [gradient(50)], [LR], seen=of.version)
    assert torch.equal(shard.weights[0], plain.weights[0])


@pytest.mark.parametrize("seen, tau", [(None, 3), (5, 3), (8, 0), (2, 6), (99, 0)])
def test_staleness_counts_from_the_version_that_the_gradient_was_computed_at(seen: int | None, tau: int) -> None:
    """A worker says which it was: with overlap not the one given last, and after a restart one that the shard has not reached."""
    shard = run(Async("rate"), [0, 1, 0, 1, 1, 0, 0, 0])
    before, counted = shard.weights[0].clone(), shard.staleness[tau]
    shard.push(1, 4, [gradient(99)], [LR], seen)
    assert shard.staleness[tau] == counted + 1
    torch.testing.assert_close(shard.weights[0], before - LR / max(tau, 1) * gradient(99))


# --- what a restart keeps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sync", [Bulk(), SSP(2), Async(), Async("rate"), Async("taylor", 2.0), Async("adaptive", 2.0)], ids=lambda s: str(s)
)
def test_a_restored_shard_has_all_that_it_counted(sync: Sync) -> None:
    """And goes on with it: everything it has of its own is in its state, as a copy."""
    spec = OptimizerSpec("sgd", ({"lr": LR, "momentum": 0.9},))
    shard = run(sync, [0, 1, 1, 0, 0] if not isinstance(sync, Bulk) else [0, 1, 0, 1], spec)
    shard.set_options([])
    if isinstance(sync, Bulk):
        shard.push(1, 3, [gradient(60)], [LR])
    saved = shard.state_dict()
    again = ParameterShard([torch.zeros(7)], [0], spec, sync, range(2))
    again.load_state_dict(copy.deepcopy(saved))
    assert same(again.state_dict(), saved)
    assert (again.version, again.staleness, again.done) == (shard.version, shard.staleness, shard.done)
    for of in (shard, again):
        of.push(0, 9, [gradient(61)], [LR])
        of.push(1, 9, [gradient(62)], [LR])
    assert torch.equal(shard.weights[0], again.weights[0])
    assert shard.staleness == again.staleness
    assert not same(shard.state_dict(), saved), "what was saved is a copy"


def test_a_restored_meeting_has_all_who_had_come() -> None:
    shard = AveragingShard([torch.zeros(3)], range(3))
    for worker, steps in ((0, 2), (1, 6), (2, 4)):
        shard.push(worker, steps, [torch.full((3,), float(worker))], [])
    shard.push(2, 5, [torch.full((3,), 7.0)], [])
    again = AveragingShard([torch.zeros(3)], range(3))
    again.load_state_dict(shard.state_dict())
    assert same(again.state_dict(), shard.state_dict())
    for of in (shard, again):
        of.push(1, 9, [torch.full((3,), 3.0)], [])
        of.push(0, 2, [torch.full((3,), 99.0)], [])  # it has no step since: nothing new
        assert of.called() == [0]
        of.push(0, 3, [torch.full((3,), -5.0)], [])
        assert of.version == 2
        assert not of.called()
    mean = (1 * 7.0 + 3 * 3.0 - 1 * 5.0) / 5
    torch.testing.assert_close(again.weights[0], torch.full((3,), mean))
    assert torch.equal(shard.weights[0], again.weights[0])


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in every number and every bit of their tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


# --- an optimiser that has made steps ----------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": LR, "momentum": 0.9},
    "adam": {"lr": LR},
    "adamw": {"lr": LR, "amsgrad": True},
    "adagrad": {"lr": LR},
    "rmsprop": {"lr": LR, "momentum": 0.5, "centered": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_go_on_from_the_state_of_the_workers_optimiser(name: str) -> None:
    """Two shards that get the state of an optimiser after three steps make the next ones as it does."""
    weights = [nn.Parameter(START[:4].clone()), nn.Parameter(START[4:].clone())]
    plain = KNOWN[name](weights, **OPTIMIZERS[name])

    def step(number: int) -> Tensor:
        found = gradient(number)
        weights[0].grad, weights[1].grad = found[:4].clone(), found[4:].clone()
        plain.step()
        return found

    for number in range(3):
        step(number)
    (state,) = state_rows(plain, [weights])
    now = torch.cat([w.detach().clone() for w in weights])
    cuts, shards = (slice(0, 3), slice(3, 7)), []
    for cut in cuts:
        own = {k: v[cut] if isinstance(v, Tensor) else v for k, v in state.items()}
        spec = replace(OptimizerSpec.of(plain), state=(own,))
        shards.append(ParameterShard([now[cut].clone()], [0], spec, Async(), range(1)))
    for number in range(3, 6):
        found = step(number)
        for cut, shard in zip(cuts, shards, strict=True):
            shard.push(0, number, [found[cut]], [LR])
    assert torch.equal(torch.cat([s.weights[0] for s in shards]), torch.cat([w.detach() for w in weights]))


@pytest.mark.parametrize(
    "state, words",
    [
        (({"momentum_buffer": torch.ones(6)},), "6 values instead of 7"),
        (({"momentum_buffer": 3},), "no state momentum_buffer of this kind"),
        (({"exp_avg": torch.ones(7)},), "no state exp_avg of this kind"),
        (({}, {}), "2 buckets instead of 1"),
    ],
)
def test_a_state_that_is_not_the_optimisers_is_refused(state: Any, words: str) -> None:
    spec = OptimizerSpec("sgd", ({"lr": LR, "momentum": 0.9},), state=state)
    with pytest.raises(ValueError, match=words):
        ParameterShard([START.clone()], [0], spec, Async(), range(1))
    with pytest.raises(ValueError, match="step is no number"):
        ParameterShard([START.clone()], [0], OptimizerSpec("adam", ({"lr": LR},), state=({"step": "x"},)), Async(), range(1))


def test_an_optimiser_that_has_stepped_some_parameters_only_has_no_state_for_a_shard() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    plain = torch.optim.Adam(weights, LR)
    weights[0].grad = torch.ones(2)
    plain.step()
    with pytest.raises(HocketError, match="stepped some parameters"):
        state_rows(plain, [weights])
    assert len(state_rows(plain, [[weights[0]], [weights[1]]])) == 2


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_delayed_nesterov_is_its_algorithm(delay: int) -> None:
    """Algorithm 3 of arXiv:2401.09135 with c = 0; for a delay of 1, torch's Nesterov."""
    one, two = nn.Parameter(START.clone()), nn.Parameter(START.clone())
    outer, torchs = DelayedNesterov([one], 0.7, 0.6, delay), torch.optim.SGD([two], 0.7, momentum=0.6, nesterov=True)
    now, momentum, total = START.double(), torch.zeros(7).double(), torch.zeros(7).double()
    for t in range(8):
        one.grad, two.grad, g = gradient(t), gradient(t), gradient(t).double()
        outer.step()
        torchs.step()
        total = total + g
        if (t + 1) % delay == 0:
            momentum, total = 0.6 * momentum + total / delay, torch.zeros(7).double()
            now = now - 0.7 * (0.6 * momentum + g / delay)
        else:
            now = now - 0.7 * g / delay
    torch.testing.assert_close(one.detach().double(), now, rtol=1e-5, atol=1e-5)
    if delay == 1:
        torch.testing.assert_close(one, two)


def test_a_quorum_makes_one_step_with_the_mean_of_its_pushes() -> None:
    """Pushes of one worker add up while they wait; who is gone is not waited for, and what it pushed counts."""
    spec = OptimizerSpec("delayednesterov", ({"lr": 1.0, "momentum": 0.0, "delay": 1},))
    shard = ParameterShard([START.clone()], [0], spec, AsyncDiLoCo(2, 1.0, 0.0, quorum=2), range(3))
    expected = START.clone()

    def push(worker: int, step: int, number: int) -> None:
        assert shard.push(worker, step, [gradient(number)], [1.0])
        assert shard.ready(worker, step)  # nobody waits

    push(0, 2, 0)
    push(0, 4, 1)
    assert torch.equal(shard.weights[0], START)
    push(2, 2, 2)
    expected = expected - (gradient(0) + gradient(1) + gradient(2)) / 2
    torch.testing.assert_close(shard.weights[0], expected)
    push(1, 2, 3)
    saved = shard.state_dict()
    assert shard.leave(1) is False
    torch.testing.assert_close(shard.weights[0], expected)
    assert shard.leave(2) is False  # worker 0 alone is left: a quorum of one
    expected = expected - gradient(3)
    torch.testing.assert_close(shard.weights[0], expected)
    again = ParameterShard([START.clone()], [0], spec, AsyncDiLoCo(2, 1.0, 0.0, quorum=2), range(3))
    again.load_state_dict(saved)
    again.push(0, 6, [gradient(4)], [1.0])
    torch.testing.assert_close(again.weights[0], expected + gradient(3) - (gradient(3) + gradient(4)) / 2)


def test_a_quorum_may_be_weighed_by_steps_and_by_direction_and_wait_for_more() -> None:
    """Three pushes, one of which holds two periods: the formula; with grace the shard waits until it is told, or all are there."""
    spec = OptimizerSpec("delayednesterov", ({"lr": 1.0, "momentum": 0.0, "delay": 1},))
    two, other, third = gradient(0) + gradient(1), gradient(2), gradient(3)

    def unit(push: Tensor) -> Tensor:
        return push / push.norm()

    directions = (2 * unit(two) + unit(other)) / 3 * (2 * two.norm() + other.norm()) / 3
    for settings, mean in (
        ({"weights": "steps"}, (2 * two + other) / 3),
        ({"direction": True}, (unit(two) + unit(other)) / 2 * (two.norm() + other.norm()) / 2),
        ({"weights": "steps", "direction": True}, directions),
        ({"weights": "steps", "direction": True, "grace": 1.0}, directions),
    ):
        sync = AsyncDiLoCo(2, 1.0, 0.0, quorum=2, **settings)
        shard = ParameterShard([START.clone()], [0], spec, sync, range(3))
        for worker, step, push in ((0, 2, gradient(0)), (0, 4, gradient(1)), (2, 2, other)):
            assert not shard.has_quorum
            shard.push(worker, step, [push], [1.0])
        assert shard.has_quorum == ("grace" in settings)
        again = ParameterShard([START.clone()], [0], spec, sync, range(3))
        again.load_state_dict(shard.state_dict())
        for one in (shard, again):
            assert torch.equal(one.weights[0], START) == one.has_quorum
            one.end_grace()
            torch.testing.assert_close(one.weights[0], START - mean)
    for worker, push in enumerate((two, other, third)):
        shard.push(worker, 6, [push], [1.0])
    assert not shard.has_quorum, "all who are here have pushed"
    assert shard.version == 2
