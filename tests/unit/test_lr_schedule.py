"""Learning-rate schedules at every place where they bend, and the linear scaling of the rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hocket.errors import HocketError
from hocket.train.lr_schedule import SCHEDULES, factor
from hocket.train.setting_groups import OptimizerSettings

AT = {
    "constant": {0: 1.0, 50: 1.0, 75: 1.0, 100: 1.0, 130: 1.0},
    "linear": {0: 1.0, 25: 0.75, 50: 0.5, 75: 0.25, 99: 0.01, 100: 0.0, 130: 0.0},
    "cosine": {0: 1.0, 25: (1 + math.sqrt(0.5)) / 2, 50: 0.5, 75: (1 - math.sqrt(0.5)) / 2, 100: 0.0, 130: 0.0},
    "step": {0: 1.0, 49: 1.0, 50: 0.1, 74: 0.1, 75: 0.01, 100: 0.01, 130: 0.01},
}
"""The rate after so many per cent of the steps (and after more steps than were planned)."""


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_its_formula_at_each_bend(name: str, warmup: int) -> None:
    """After the warm-up the schedule goes over the steps that are left."""
    at = factor(name, 200 + warmup, warmup)
    assert {percent: at(warmup + 2 * percent) for percent in AT[name]} == pytest.approx(AT[name], abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_rises_evenly_to_the_whole_rate(name: str) -> None:
    at = factor(name, 100, warmup=4)
    assert [at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("warmup", [3, 5, 6])
def test_a_run_that_ends_within_its_warm_up_has_no_schedule_after_it(warmup: int) -> None:
    at = factor("linear", 5, warmup)
    assert [at(step) for step in range(min(warmup, 5))] == [(step + 1) / warmup for step in range(min(warmup, 5))]
    assert at(warmup) == 1.0
    assert at(warmup + max(1, 5 - warmup)) == 0.0


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(HocketError, match="did you mean 'cosine'"):
        factor("cosin", 10)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop", "rprop"])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_scaled_rate_is_that_of_one_worker_times_the_workers(name: str, workers: int) -> None:
    model = nn.Linear(2, 2)

    def made(scale_lr: str | bool) -> dict:
        settings = OptimizerSettings(name=name, lr=0.25, momentum=0.5, weight_decay=0.125, scale_lr=scale_lr)
        return settings.make(model, list(model.parameters()), workers).param_groups[0]

    assert (made(False)["lr"], made(True)["lr"]) == (0.25, 0.25 * workers)
    own = made(True)
    if name in ("sgd", "rmsprop"):
        assert own["momentum"] == 0.5
    if name != "rprop":
        assert own["weight_decay"] == 0.125


def test_what_is_no_optimiser_of_steps_is_refused() -> None:
    with pytest.raises(HocketError, match="above 0"):
        OptimizerSettings(lr=0.0)
    with pytest.raises(HocketError, match="did you mean 'adam"):
        OptimizerSettings(name="adamm")
    with pytest.raises(HocketError, match="Sandblaster"):
        OptimizerSettings(name="sandblaster").make(model := nn.Linear(2, 2), list(model.parameters()), 2)
    assert isinstance(OptimizerSettings().make(model, list(model.parameters()), 2), torch.optim.Optimizer)
