"""ACCO's own laws: its equations by the letter, halves weighed by samples, and parameters that a half did not use."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import HocketError, NonFiniteGradient
from hocket.strategy import Strategy
from hocket.train.checks import refuse_prediction
from virtual.world import Tiny, World, data, gradients, seeded

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.2),
    "momentum": lambda params: torch.optim.SGD(params, 0.2, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.02),
    "muon": lambda params: hocket.Muon(params, 0.02, rest_lr=0.01),
}


class Reference:
    """The equations on one whole vector: ``θ`` and the optimiser's state are deep copies."""

    def __init__(self, start: Tensor, optimizer: str) -> None:
        self.theta = nn.Parameter(start.clone())
        self.optimizer = OPTIMIZERS[optimizer]([self.theta])

    def predicted(self, gradient: Tensor) -> Tensor:
        other = copy.deepcopy(self)
        return other.update(gradient)

    def update(self, gradient: Tensor) -> Tensor:
        self.theta.grad = gradient.clone()
        self.optimizer.step()
        return self.theta.detach()


def _expected(world: World, optimizer: str, steps: int, counts: list[float]) -> Tensor:
    """The weights after ``steps`` steps, each computed at the weights that it found."""
    reference = Reference(world.rows[0], optimizer)
    weights, travelling, first = reference.theta.detach().clone(), None, None
    for t in range(steps):
        gradient = gradients(weights.expand(world.cluster.size, -1), world, t).mean(0)
        if travelling is not None and first is None:
            first, weights = travelling, reference.predicted(travelling[0]).clone()
        elif travelling is not None:
            (a, n), (b, m) = first, travelling
            first, weights = None, reference.update((n * a + m * b) / (n + m)).clone()
        travelling = gradient, counts[t]
    return weights


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9])
def test_it_follows_its_equations(optimizer: str, steps: int) -> None:
    counts = [16.0, 8.0, 16.0, 4.0, 1.0, 16.0, 2.0, 7.0, 3.0]
    world = World("acco", optimizer=OPTIMIZERS[optimizer], caps=(40, 40))
    start = copy.deepcopy(world)
    for t in range(steps):
        world.replicas.samples = counts[t]
        world.step()
    expected = _expected(start, optimizer, steps, counts)
    torch.testing.assert_close(world.rows, expected.expand(4, -1), rtol=0, atol=2e-6)


def test_two_steps_make_one_update() -> None:
    """After 2k + 1 steps an optimiser has counted k updates, whatever it predicted meanwhile."""
    world = World("acco", optimizer=OPTIMIZERS["adamw"])
    counted = []
    for _ in range(7):
        world.step()
        states = world.replicas.optimizer.state.values()
        counted.append({int(state["step"]) for state in states})
    assert counted == [set(), {1}, {1}, {2}, {2}, {3}, {3}]


def test_a_muon_is_taken_back_as_well() -> None:
    one, two = (World("acco", optimizer=OPTIMIZERS["muon"]) for _ in range(2))
    one.step(9)
    for stop in (2, 3, 4):  # after a prediction, too
        two.step(stop)
        state, at = two.replicas.state_dict(), two.at
        two = World("acco", optimizer=OPTIMIZERS["muon"])
        two.replicas.load_state_dict(state)
        two.at = at
    assert torch.equal(one.rows, two.rows)


class Sometimes(nn.Module):
    """The second half of it is used where the first input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rare = Tiny(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.always(x)
        return found + self.rare(x) if float(x[0, 0]) > 1e3 else found


def test_what_nobody_used_in_both_halves_is_not_updated() -> None:
    """Weight decay would move it; where a half used it, the update of that mini-batch does."""
    world = World("acco", make=Sometimes, optimizer=lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.5))
    x, _ = data(64, 4)
    x[4, 1, 0, 0] = 1e4  # step 5, worker 1: a first half
    world.x, rare, changed = x, dict(seeded(Sometimes).named_parameters())["rare.weight"].detach().flatten(), []
    places = [(b, s) for b, bucket in enumerate(world.replicas.layout.buckets) for s in bucket.slots if s.name == "rare.weight"]
    ((bucket, slot),) = places
    for _ in range(9):
        world.step()
        own = world.replicas.weights[bucket][:, slot.offset : slot.offset + slot.size]
        assert torch.equal(own, own[:1].expand_as(own))
        changed.append(not torch.equal(own[0], rare))
        rare = own[0].clone()
    # Predicted in step 6, updated in 7 (from where the prediction began); what a later half did not use stays.
    assert changed == [False] * 5 + [True, True, False, False]


def test_bad_gradients_end_it_a_step_later() -> None:
    world = World("acco")
    world.x[2, 1] = math.nan
    world.step(3)
    with pytest.raises(NonFiniteGradient, match="at step 3 on worker 1"):
        world.step()


@pytest.mark.parametrize("what, words", [("split", "model is split"), ("scaled", "bfloat16"), ("elastic", "elastic run")])
def test_it_is_refused_where_updates_cannot_be_taken_back(what: str, words: str) -> None:
    options = {"split": False, "scaled": False, "elastic": False}
    refuse_prediction(Strategy.parse("bulk"), **(options | {what: True}))
    refuse_prediction(Strategy.parse("acco"), **options)
    with pytest.raises(HocketError, match=words):
        refuse_prediction(Strategy.parse("acco"), **(options | {what: True}))
