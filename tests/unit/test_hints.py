"""Hints about settings that work but give little: few steps for a density, short tries for a learning rate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.cluster.virtual import VirtualCluster
from hocket.errors import NonFiniteGradient
from hocket.strategy import Strategy
from hocket.study.carry_out import Data, Search, Watch
from hocket.study.folder import Folder
from hocket.train.checks import mention_steps
from hocket.train.run import run
from hocket.train.settings import RunSettings


def said(text: str, steps: int | None, workers: int = 4) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mention_steps(Strategy.parse(text), steps, workers)
    return [str(w.message) for w in caught if "sends each value" in str(w.message)]


# --- density ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, exchanges, sends", [
    ("topk(0.01)", 100, 1.0), ("randomk(0.1)", 50, 5.0), ("threshold(keep=0.02)", 50, 1.0), ("dgc(0.001)", 100, 0.1),
    ("dgc(0.001, warmup=8)", 10, 2 * (0.25 + 0.0625 + 0.015625 + 0.00390625) + 0.002), ("topk(0.01) | qsgd(4)", 100, 1.0),
    ("none", 100, None), ("sign", 100, None), ("lowrank(2)", 100, None), ("threshold(0.1)", 100, None), ("topk(1.0)", 100, None),
    ("topk(0.01, feedback=False)", 100, None), ("randomk(0.1, unbiased=True)", 100, None),
])  # fmt: skip
def test_how_often_a_value_is_sent(text: str, exchanges: int, sends: float | None) -> None:
    found = Strategy.parse(text).compression.sends_per_value(exchanges)
    assert found == (None if sends is None else pytest.approx(sends))


@pytest.mark.parametrize("text, steps, warned", [
    ("topk(0.01)", 199, True), ("topk(0.01)", 200, False), ("local(4) + topk(0.01)", 799, True),
    ("local(4) + topk(0.01)", 800, False), ("topk(0.01) | qsgd(4)", 90, True), ("randomk(0.01)", 90, True), ("dgc(0.01)", 90, True),
    ("threshold(keep=0.01)", 90, True), ("bulk + gossip + topk(0.01)", 90, True), ("bulk", 1, False), ("sign", 1, False),
    ("topk(0.01)", None, False), ("async + topk(0.01)", 90, True), ("postlocal(10, 200) + topk(0.01)", 250, False),
])  # fmt: skip
def test_few_steps_for_a_density_are_mentioned_where_the_steps_are_known(text: str, steps: int | None, warned: bool) -> None:
    assert bool(said(text, steps)) == warned


def test_the_hint_says_which_density_or_how_many_steps_would_do() -> None:
    (sentence,) = said("local(2) + topk(0.01)", 100)
    assert "topk(0.01) sends each value 0.5 times on average in 100 steps" in sentence
    assert "a density of 0.04 or more, or 400 steps" in sentence
    assert not said("local(2) + topk(0.04)", 100)
    assert not said("local(2) + topk(0.01)", 400)
    assert not said("topk(0.01)", 10, workers=1)


def test_simulate_and_train_give_the_hint() -> None:
    x = torch.randn(64, 5)
    sets: Any = (x, (x.sum(1) > 0).long())
    with pytest.warns(UserWarning, match="sends each value 0.04 times"):
        hocket.simulate(lambda: nn.Linear(5, 2), nn.functional.cross_entropy, sets, strategy="topk(0.01)", batch_size=4)
    settings = RunSettings.of(strategy="topk(0.01)", workers=4, virtual=True, model="mlp", max_steps=2, epochs=1)
    with pytest.warns(UserWarning, match="sends each value 0.02 times"):
        run(settings, VirtualCluster(4))


# --- learning rates --------------------------------------------------------------------------------------------------------------


def searched(tmp_path: Path, max_steps: int, whole: dict[float, float | None]) -> tuple[dict[str, Any], list[float], list[str]]:
    """A search in which a higher rate is better in tries, and ``whole`` says what whole trainings give: what was found, the
    rates of whole trainings, and the notes."""
    trained, notes = [], []

    def virtual(settings: RunSettings, out: Path | None, watch: Watch) -> list[dict[str, Any]]:
        lr = settings.optimizer.lr
        if settings.max_steps != max_steps:  # a try
            return [{"loss": {0.03: 0.4, 0.1: 0.3, 0.3: 0.2}.get(lr, 0.9), "accuracy": 0.5}]
        trained.append(lr)
        loss = whole.get(lr, 0.95)  # the last tries are as long where tries are short
        if loss is None:
            raise NonFiniteGradient("NaN or Inf.")
        return [{"loss": loss, "accuracy": 0.5}]

    class Notes(Watch):
        def note(self, text: str) -> None:
            notes.append(text)

    settings = RunSettings.of(workers=2, virtual=True, model="mlp", batch_size=16, epochs=50, max_steps=max_steps)
    folder = Folder(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    search = Search(folder, settings, Data(), virtual, Notes())
    found = search.run()
    assert Search(folder, settings, Data(), virtual, Notes()).run()["chosen"] == found["chosen"], "not searched again"
    return found, trained, notes


@pytest.mark.parametrize("whole, chosen, order", [
    ({0.3: 0.5, 0.1: 0.1, 0.03: 0.3}, 0.1, [0.3, 0.1, 0.03]),
    ({0.3: None, 0.1: 0.3, 0.03: 0.1}, 0.03, [0.3, 0.1, 0.03]),
    ({0.3: 0.1, 0.1: 0.2}, 0.3, [0.3, 0.1]),
    ({0.3: 0.1, 0.1: None}, 0.3, [0.3, 0.1]),
])  # fmt: skip
def test_after_short_tries_the_best_rate_has_to_beat_the_next_lower_one_in_whole_trainings(
    tmp_path: Path, whole: dict[float, float | None], chosen: float, order: list[float]
) -> None:
    found, trained, notes = searched(tmp_path, 90, whole)
    assert found["chosen"] == chosen
    assert set(order) <= set(trained)
    diverged = {float(lr) for lr, loss in found["longer"].items() if loss is None}
    assert {float(lr) for lr in found["given_up"]} | diverged >= {lr for lr in whole if lr > chosen}
    (note,) = notes
    assert "Tries of learning rates have 45 steps, fewer than 100" in note


def test_after_long_tries_nothing_is_trained_whole_and_nothing_is_noted(tmp_path: Path) -> None:
    found, trained, notes = searched(tmp_path, 400, {})
    assert (found["chosen"], trained, notes) == (0.3, [], [])
