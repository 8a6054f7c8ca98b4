"""The law of the loss: it finds the exponents of made-up trainings, its intervals hold trainings that it has not seen."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from hocket import HocketError, simulate
from hocket.data import load
from hocket.prediction.law import Training, fit


def made_up(noise: float = 0.0, seed: int = 0) -> list[Training]:
    draw = random.Random(seed)
    found = []
    for steps in (100, 200, 400, 800):
        for workers in (2, 4):
            for period in (1, 8):
                loss = 1.5 + 6 * steps**-0.4 * workers**0.05 * period**0.1
                found.append(Training(steps, loss * math.exp(draw.gauss(0, noise)), workers, period))
    return found


def test_the_law_of_exact_trainings_is_found_and_goes_on() -> None:
    law = fit(made_up())
    assert law.floor == pytest.approx(1.5, abs=0.01)
    assert law.exponents == pytest.approx({"steps": -0.4, "workers": 0.05, "period": 0.1}, abs=0.01)
    assert law.loss(6400, 16, 64).loss == pytest.approx(1.5 + 6 * 6400**-0.4 * 16**0.05 * 64**0.1, rel=0.01)


def test_an_interval_holds_what_was_not_seen_and_grows_with_the_distance() -> None:
    inside = 0
    for seed in range(12):
        law = fit(made_up(0.01, seed))
        near, far = law.loss(800, 4, 8), law.loss(6400, 16, 8)
        assert far.high / far.low > near.high / near.low
        truth = 1.5 + 6 * 6400**-0.4 * 16**0.05 * 8**0.1
        inside += far.low <= truth <= far.high
    assert inside >= 10, "about nineteen of twenty intervals of two sigmas hold the truth"


def test_periods_and_densities_need_few_trainings_more() -> None:
    """A grid of lengths and workers, and two trainings at each other period and density: what `benchmarks/law.py` makes."""

    def training(steps: int, workers: int, period: int = 30, density: float = 1.0, noise: float = 0.0) -> Training:
        loss = 0.8 + 5 * steps**-0.3 * workers**0.06 * period**0.04 * (1 + (1 / density - 1) * period / steps) ** 0.3
        return Training(steps, loss * math.exp(noise), workers, period, density)

    def fitted(noise: float, seed: int = 0) -> list[Training]:
        draw = random.Random(seed)
        cases: list[tuple[int, int, int, float]] = [(t, n, 30, 1.0) for n in (1, 2, 4) for t in (240, 480, 960)]
        cases += [(t, n, p, d) for p, d in ((10, 1.0), (120, 1.0), (30, 0.1), (30, 0.01)) for t, n in ((480, 4), (960, 2))]
        return [training(*case, noise=draw.gauss(0, noise)) for case in cases]

    law = fit(fitted(0.0))
    assert law.exponents == pytest.approx({"steps": -0.3, "workers": 0.06, "period": 0.04, "density": 0.3}, abs=1e-3)
    assert law.floor == pytest.approx(0.8, abs=0.01)
    asked = training(7680, 16, 60, 0.03)
    assert law.loss(7680, 16, 60, 0.03).loss == pytest.approx(asked.loss, rel=1e-3)
    found = [fit(fitted(0.01, seed)).loss(1920, 8, 60, 0.03) for seed in range(6)]
    truth = training(1920, 8, 60, 0.03).loss
    assert sum(f.low <= truth <= f.high for f in found) >= 5, "about nineteen of twenty intervals of two sigmas hold the truth"


def test_it_says_what_it_does_not_know() -> None:
    trainings = [Training(steps, 1 + steps**-0.5, 4) for steps in (10, 20, 40, 80)]
    with pytest.raises(HocketError, match=r"cannot predict workers = 8: all trainings had 4"):
        fit(trainings).loss(100, 8)
    with pytest.raises(HocketError, match="needs 4 trainings, not 2"):
        fit(trainings[:2])
    with pytest.raises(HocketError, match="leave out trainings that diverged"):
        fit([*trainings, Training(100, math.inf)])


@pytest.mark.filterwarnings("ignore:local with a period")
def test_short_virtual_trainings_tell_of_a_longer_one_with_more_workers() -> None:
    digits = load("digits")
    assert digits.test is not None
    train, test = ((digits.prepare(x), y) for x, y in (digits.train, digits.test))

    def loss_after(steps: int, workers: int) -> float:
        run = simulate(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), nn.functional.cross_entropy,
            train, test, strategy="local(4)", workers=workers, batch_size=8, max_steps=steps, epochs=80, lr_schedule="cosine",
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
        )  # fmt: skip
        return float(run.metrics[-1]["test_loss"])

    law = fit([Training(t, loss_after(t, n), n) for t in (64, 128, 256) for n in (2, 4)])
    found, seen = law.loss(512, 8), loss_after(512, 8)
    assert found.low <= seen <= found.high
    assert abs(found.loss / seen - 1) < 0.15
