"""Laws of the advice: plain DDP where links are fast, another strategy where they are slow, and no answer where there is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from hocket import ClusterSpec, HocketError, advise
from hocket.cli.main import app
from hocket.prediction.advise import Advice, Interval
from hocket.prediction.goal import Goal
from hocket.prediction.race import Curve, Point, Race
from hocket.prediction.race import _beats as beats


def asked(bandwidth: float, goal: str = "within 2 points", **more: object) -> Advice:
    spec = ClusterSpec(name="links", bandwidth=bandwidth, step_s=0.002, **more)  # type: ignore[arg-type]
    return advise(
        "mlp", "digits", spec, 2, goal, strategies=["local(8)", "bulk + sign"], lr=0.1, batch_size=40, seeds=1, minutes=1e-6
    )


def test_plain_ddp_is_advised_where_links_cost_nothing() -> None:
    found = asked(math.inf)
    assert found.answer.startswith("Plain DDP")
    assert found.strategy == "bulk + allreduce"
    assert "DistributedDataParallel" in found.command


def test_where_links_are_slow_a_strategy_that_sends_less_is_advised_with_its_gain() -> None:
    found = asked(1e5)
    bulk = next(c for c in found.contenders if c.strategy == "bulk + allreduce")
    winner = found.contenders[0]
    assert found.strategy == winner.strategy != "bulk + allreduce"
    assert bulk.seconds is not None
    assert winner.seconds is not None
    assert f"{bulk.seconds.mean / winner.seconds.mean:.1f} times sooner than bulk" in found.reasons[0]
    assert winner.seconds.mean < bulk.seconds.mean
    assert f"--strategy '{winner.strategy}'" in found.command
    assert bulk.exchange_share > 0.9


def test_a_longer_training_and_more_workers_are_extrapolated_with_an_interval() -> None:
    spec = ClusterSpec(name="links", bandwidth=1e5, step_s=0.002)
    options: dict[str, Any] = {"lr": 0.1, "batch_size": 20, "seeds": 1, "minutes": 1e-6, "strategies": ["local(8)"]}
    found = advise("mlp", "digits", spec, 4, "within 50 points", later_epochs=8, later_workers=8, **options)
    assert {look.strategy for look in found.outlooks} == {"bulk + allreduce", "local(8) + allreduce"}
    for look in found.outlooks:
        assert 0 < look.loss.low < look.loss.loss < look.loss.high
        assert "after 8 epochs of 8 workers a test loss of" in str(look)
    seconds = {look.strategy: look.seconds for look in found.outlooks}
    assert seconds["local(8) + allreduce"] < seconds["bulk + allreduce"], "predicted for 8 workers on that cluster"
    with pytest.raises(HocketError, match="two workers or more"):
        advise("mlp", "digits", spec, 4, later_workers=1, **options)


def test_a_goal_that_nothing_reaches_is_answered_with_the_nearest() -> None:
    found = asked(1e6, "100% soonest")
    assert found.strategy is None
    assert found.answer.startswith("No strategy is known to be soonest to 100 % accuracy. The nearest is ")
    assert asked(1e6, "within 50 points, fits 0.001MB").reasons == ("Nothing fits into that memory.",)


def test_the_cheapest_needs_a_price_and_counts_it() -> None:
    with pytest.raises(HocketError, match="The cluster links has no price"):
        asked(1e6, "cheapest")
    found = asked(1e5, "cheapest, within 2 points", price=36.0)
    enough = [c for c in found.contenders if c.why == "best" or c.why.endswith("the cost")]
    assert [c.cost for c in enough] == sorted(c.cost for c in enough if c.cost is not None)
    assert found.contenders[0].seconds is not None
    assert found.contenders[0].cost == pytest.approx(2 * found.contenders[0].seconds.mean * 36.0 / 3600)


@pytest.mark.parametrize(
    "text, goal",
    [
        ("within 1 point", Goal(1.0)),
        ("within 0.5 points of bulk", Goal(0.5)),
        ("70% accuracy soonest", Goal(accuracy=0.7)),
        ("70 % soonest, fits in 16 GB", Goal(accuracy=0.7, memory_bytes=16e9)),
        ("loss 1.5 soonest", Goal(loss=1.5)),
        ("cheapest, within 2 percent", Goal(2.0, cheapest=True)),
    ],
)
def test_goals_in_words(text: str, goal: Goal) -> None:
    assert Goal.parse(text) == goal


def test_other_goals_are_refused() -> None:
    with pytest.raises(HocketError, match="The goal 'best' is not known; use 'within 1 point'"):
        Goal.parse("best")
    with pytest.raises(HocketError, match="names an accuracy and a loss"):
        Goal.parse("70% soonest, loss 2")


def test_what_is_enough_is_a_point_of_accuracy_or_a_percent_of_the_loss() -> None:
    assert Goal(1.0).enough(0.72) == pytest.approx(0.71)
    assert Goal(1.0).enough(-2.0) == pytest.approx(-2.02)


def test_a_quality_is_reached_between_two_points_or_projected_at_the_pace_so_far() -> None:
    curve = Curve([Point(0.0, 0.1), Point(10.0, 0.5), Point(20.0, 0.7)])
    assert curve.reaches(0.6) == pytest.approx(15.0)
    assert curve.reaches(0.3) == pytest.approx(5.0)
    assert curve.reaches(0.8) == math.inf
    assert curve.projected(0.6) == pytest.approx(15.0)
    assert curve.projected(1.0) == pytest.approx(30.0)
    assert Curve([Point(0.0, 0.5), Point(1.0, 0.4)]).projected(0.6) == math.inf


def test_one_beats_another_that_is_clearly_worse_and_no_sooner() -> None:
    assert beats(Point(1.0, 0.8), Point(1.0, 0.78), 0.01)
    assert not beats(Point(1.0, 0.8), Point(0.9, 0.78), 0.01)
    assert not beats(Point(1.0, 0.8), Point(1.0, 0.795), 0.01)
    assert beats(Point(1.0, -2.0), Point(1.0, -2.1), 0.01)
    assert not beats(Point(1.0, -2.0), Point(1.0, -2.01), 0.01)


def test_an_interval_is_the_range_of_the_seeds_with_the_error_of_the_clock() -> None:
    found = Interval.of([2.0, 4.0], 0.1)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 1.8, 4.4))
    assert found.overlaps(Interval(5.0, 4.4, 6.0))
    assert not found.overlaps(Interval(5.0, 4.5, 6.0))


def test_a_training_that_diverges_leaves_and_the_others_go_on() -> None:
    found = advise("mlp", "digits", "1gbit", 2, strategies=["local(4)"], lr=1e8, batch_size=40, seeds=1, minutes=1e-6)
    assert found.strategy is None
    assert all(c.why == "it diverged" for c in found.contenders)


def test_bad_questions_meet_one_sentence() -> None:
    with pytest.raises(HocketError, match="one worker exchanges nothing"):
        advise("mlp", "digits", workers=1)
    for wrong, sentence in {
        ("--cluster", "1gbit", "--link", "1Gbit"): "leave --link out",
        ("--link", "fast"): "expected a rate such as '1Gbit'",
        ("--explain", "chart.pdf"): "a chart is a PNG file",
        ("--minutes", "0"): "more than 0 minutes",
    }.items():
        result = CliRunner().invoke(app, ["advise", "--model", "mlp", *wrong])
        assert isinstance(result.exception, HocketError)
        assert sentence in str(result.exception)


def test_the_command_prints_json() -> None:
    words = ["--model", "mlp", "--link", "1Mbit", "--step-s", "0.002", "-s", "local(8)", "--lr", "0.1", "-n", "2", "--seeds", "1"]
    result = CliRunner().invoke(app, ["advise", *words, "--batch-size", "40", "--minutes", "0.000001", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["strategy"] == "local(8) + allreduce"
    assert [row["strategy"] for row in found["contenders"]] == ["local(8) + allreduce", "bulk + allreduce"]


def test_the_race_keeps_bulk_to_the_end_and_the_better_rates() -> None:
    import torch

    from hocket.data import load
    from hocket.train.settings import RunSettings

    settings = RunSettings.of(workers=2, virtual=True, data="digits", model="mlp", batch_size=100, epochs=4, augment=False)
    names = ["bulk + allreduce", "local(2) + allreduce"]
    race = Race(settings, ClusterSpec(step_s=0.01, bandwidth=1e6), load("digits"), torch.device("cpu"), names, [0.1, 1e-5])
    left = race.run()
    assert (left[0].strategy, left[0].lr, len(left[0].curve.points)) == ("bulk + allreduce", 0.1, 5)
    assert {e.left for e in race.entrants if e.lr == 1e-5} == {"rate 0.1 is better"}


def test_a_training_that_diverges_with_another_seed_is_no_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Race.begin

    def begin_again(self: Race, strategy: str, lr: float, seed: int | None = None) -> Any:
        entrant = begin(self, strategy, lr, seed)
        if seed is not None and strategy.startswith("local"):
            entrant.metrics = iter([{"loss": math.nan}])
        return entrant

    monkeypatch.setattr(Race, "begin", begin_again)
    spec = ClusterSpec(name="links", bandwidth=1e5, step_s=0.002)
    found = advise("mlp", "digits", spec, 2, strategies=["local(8)"], lr=0.1, batch_size=40, seeds=2, minutes=1e-6)
    assert next(c.why for c in found.contenders if c.strategy.startswith("local")) == "it diverged with seed 1"
    assert found.strategy == "bulk + allreduce"
