"""Pipelines over real processes: equal to one process for every schedule, bytes as the formulas say, timelines that make sense."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.cluster.message import framed, ring_bytes
from hocket.split.pipeline import Timeline, make
from hocket.split.pipeline.schedules import before
from process.launch import Nursery
from process.pipelines import FLUSHED, MICRO, MODELS, SIZES

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
STEPS = len(SIZES)


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process found, case by case; one world runs them all."""
    group = nursery.start("process.pipelines:real", request.param, tmp_path_factory.mktemp("pipeline"))
    assert group.wait(180, together=True) == [0] * request.param, group.said()
    return group.results()


def check_equal(world: list[dict[str, Any]], case: str) -> None:
    for found in (result[case] for result in world):
        assert found["losses"] <= 1e-5
        assert found["weights"] <= 1e-5
        assert found["output"] <= 1e-4
    assert max(result[case]["moved"] for result in world) > 1e-3


@pytest.mark.parametrize("schedule", FLUSHED)
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_trains_like_one_process(name: str, schedule: str, world: list[dict[str, Any]]) -> None:
    check_equal(world, f"{name} {schedule}")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_replicas_of_pipelines_train_like_one_process(name: str, schedule: str, world: list[dict[str, Any]]) -> None:
    if len(world) < 4:
        pytest.skip("two replicas of two stages take four processes")
    check_equal(world, f"data {name} {schedule}")


def test_cuts_may_lie_inside_a_residual_block(world: list[dict[str, Any]]) -> None:
    check_equal(world, "middle")
    assert "blocks.0.attention.out.weight" in world[0]["middle"]["held"]
    assert "blocks.0.norm2.weight" in world[1]["middle"]["held"]


def test_batch_statistics_are_those_of_each_micro_batch(world: list[dict[str, Any]]) -> None:
    check_equal(world, "norm 1")  # one micro-batch: as without a pipeline
    check_equal(world, "norm 4")  # four: as four small batches one after another, running statistics included


@pytest.mark.parametrize("name", MODELS)
def test_asynchronous_pipedream_equals_its_reference_with_stashed_weights(name: str, world: list[dict[str, Any]]) -> None:
    stages = len(world)
    for place, found in enumerate(result[f"{name} pipedream"] for result in world):
        assert found["losses"] <= 1e-6
        assert found["weights"] <= 1e-6
        assert found["count"] == STEPS
        assert found["filling"] == min(stages, STEPS)
        assert found["versions"] <= stages - place
        assert found["left"] == 0
    assert max(result[f"{name} pipedream"]["moved"] for result in world) > 1e-3


def test_bytes_follow_the_formulas(world: list[dict[str, Any]]) -> None:
    """16 values cross each cut for each sample, once ahead and once back; the loss is summed over the stages."""
    stages = len(world)
    for step, size in enumerate(SIZES):
        sizes = [size // MICRO + (j < size % MICRO) for j in range(MICRO)]
        crossing = sum(framed(n * 16 * 4) for n in sizes if n)
        for place, result in enumerate(world):
            borders = (place > 0) + (place < stages - 1)
            assert result["points"]["bytes"][step] == borders * crossing + ring_bytes(4, stages)


def test_pipedream_sends_what_crosses_and_the_loss(world: list[dict[str, Any]]) -> None:
    stages = len(world)
    for place, result in enumerate(world):
        ahead = sum(framed(n * 16 * 4) for n in SIZES) * (place < stages - 1)
        back = sum(framed(n * 16 * 4) + framed(4) for n in SIZES) * (place > 0)
        assert result["mlp pipedream"]["bytes"] == ahead + back


@pytest.mark.parametrize("schedule", [*FLUSHED, "pipedream"])
def test_timelines_tell_what_happened_in_an_order_that_makes_sense(schedule: str, world: list[dict[str, Any]]) -> None:
    found = world[0][f"gpt {schedule}"]["timeline"]
    assert all(result[f"gpt {schedule}"]["timeline"] == found for result in world)
    timeline = Timeline.from_dict(found)
    wanted = make(schedule, len(world), STEPS if schedule == "pipedream" else MICRO)
    assert [[span.action for span in row] for row in timeline.rows] == [list(row) for row in wanted]
    # PipeDream's backwards include the update, which comes after the gradient was sent on.
    ends = {span.action: span.start if schedule == "pipedream" else span.end for row in timeline.rows for span in row}
    for row in timeline.rows:
        for span in row:
            assert span.start >= max((ends[a] for a in before(span.action, frozenset(ends))), default=0.0)
            assert span.end > span.start
    assert 0 <= found["bubble_share"] < 1
    assert 0 <= found["communication_share"] < 1
