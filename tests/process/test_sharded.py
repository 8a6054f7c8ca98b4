"""Laws of sharded state on real processes: sharded training is unsharded training, and needs less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.cluster.message import framed, ring_bytes
from process.launch import Nursery
from process.sharded_cases import STEPS

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

STATE = [["state", "mlp", "momentum"], ["state", "gpt", "adamw"], ["state", "mlp", "adamw", "bulk + topk(0.2) + gradients"]]
SCALED = [["scaled", "momentum"], ["scaled", "fused"]]
BAD = 2
FULL: list[list[Any]] = [["full", "mlp", "momentum"], ["full", "gpt", "adamw"], ["weighed"]]
FULL += [["normed"], ["runs"], ["gathered", "raise", -1], ["gathered", "skip", BAD], ["gathered", "raise", BAD]]
MOMENTA = {"momentum": 1, "adamw": 2}

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Results]:
    """How many workers, and what each returned, per case."""
    size = request.param
    cases = STATE + SCALED + (FULL if size == 2 else [])
    group = nursery.start("process.sharded_cases:main", size, tmp_path_factory.mktemp("sharded"), cases=cases)
    assert group.wait(150, together=True) == [0] * size, group.said()
    workers = group.results()
    return size, {name: [worker[name] for worker in workers] for name in workers[0]}


@pytest.mark.parametrize("case", STATE, ids=" ".join)
def test_sharded_state_trains_bit_for_bit_like_unsharded(world: tuple[int, Results], case: list[str]) -> None:
    for worker in world[1][" ".join(case)]:
        assert not torch.equal(worker["sharded"], worker["start"])
        assert torch.equal(worker["sharded"], worker["plain"])


@pytest.mark.parametrize("case", STATE, ids=" ".join)
def test_each_worker_keeps_its_part_of_the_state(world: tuple[int, Results], case: list[str]) -> None:
    size, results = world
    momenta, workers = MOMENTA[case[2]], results[" ".join(case)]
    steps = 4 * 100 * (momenta == 2)  # Adam counts the steps of each parameter
    for worker in workers:
        assert worker["state"] <= momenta * (worker["weights"] / size + worker["largest"]) + steps
        assert worker["state again"] == worker["state"]
    total = sum(worker["state"] for worker in workers)
    assert momenta * workers[0]["weights"] <= total <= momenta * workers[0]["weights"] + steps


@pytest.mark.parametrize("case", STATE, ids=" ".join)
def test_checkpoints_go_from_sharded_to_unsharded_and_back(world: tuple[int, Results], case: list[str]) -> None:
    workers = world[1][" ".join(case)]
    assert [worker["consolidated"] for worker in workers] == [True] + [False] * (len(workers) - 1)
    for worker in workers:
        assert worker["equal state"]
        assert "consolidate()" in worker["part refused"]
        assert "without one" in worker["closure refused"]
        if "topk" not in " ".join(case):  # its memory is the job's, which went on in one of the two only
            assert torch.equal(worker["on"], worker["on unsharded"])


def test_new_weights_are_counted(world: tuple[int, Results]) -> None:
    """All-reduce of gradients, the small agreement, and one message from each owner to each other worker per step."""
    size, results = world
    worker = results["state mlp momentum"][0]
    least = STEPS * size * ring_bytes(worker["weights"], size) + STEPS * (size - 1) * worker["weights"]
    most = STEPS * size * (ring_bytes(worker["weights"], size) + ring_bytes(100, size) + (size - 1) * framed(0) * 4)
    most += STEPS * (size - 1) * int(worker["weights"] * 1.05)
    assert least < worker["sent"] < most


@pytest.mark.parametrize("case", SCALED, ids=" ".join)
def test_a_scaler_skips_on_all_and_changes_nothing_else(world: tuple[int, Results], case: list[str]) -> None:
    workers = world[1][" ".join(case)]
    for worker in workers:
        plain, sharded = worker["None"], worker["state"]
        assert sharded["scales"] == plain["scales"] == [1024, 1024, 1024, 512, 512, 512]
        assert all(torch.equal(a, b) for a, b in zip(sharded["weights"], plain["weights"], strict=True))
        assert torch.equal(sharded["weights"][3], sharded["weights"][2])
        assert not torch.equal(sharded["weights"][5], sharded["weights"][3])
    assert sum(worker["owned"] for worker in workers) == workers[0]["start"].numel() * 4


@pytest.mark.parametrize("world", [2], indirect=True)
@pytest.mark.parametrize("case", FULL[:2], ids=" ".join)
def test_full_sharding_equals_bulk(world: tuple[int, Results], case: list[str]) -> None:
    for worker in world[1][" ".join(case)]:
        assert (worker["sharded"] - worker["start"]).norm() > 0.05
        torch.testing.assert_close(worker["sharded"], worker["plain"], rtol=0, atol=1e-5)
        torch.testing.assert_close(worker["on"], worker["on plain"], rtol=0, atol=1e-5)
        assert torch.equal(worker["on"], worker["on again"])
        assert worker["local"] <= 0.6 * worker["all"]
        assert "before the first step" in worker["late"]
        assert all("use AdamW or SGD, or ZeRO-1" in sentence for sentence in worker["optimisers"])
        summary = worker["summary"]
        assert summary["computed"] == ["bytes_sent"]
        assert summary["seconds"] > 0
        assert summary["compute_s"] is None
        # Weights forward and backward, gradients once: half the model each on two workers.
        assert (
            2 * STEPS * 0.5 * 2 * 4 * worker["all"] < summary["bytes_sent"] < 2 * STEPS * (0.5 * 3 * 4.5 * worker["all"] + 20 * 350)
        )


@pytest.mark.parametrize("world", [2], indirect=True)
def test_full_sharding_weighs_by_samples(world: tuple[int, Results]) -> None:
    for worker in world[1]["weighed"]:
        torch.testing.assert_close(worker["full"], worker["none"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_full_sharding_sums_several_backward_passes(world: tuple[int, Results]) -> None:
    for worker in world[1]["gathered raise -1"]:
        assert (worker["full"] - worker["start"]).norm() > 0.05
        torch.testing.assert_close(worker["full"], worker["plain"], rtol=0, atol=1e-5)
        assert worker["nonfinite"] == 0


@pytest.mark.parametrize("world", [2], indirect=True)
def test_full_sharding_leaves_gradients_out_that_are_not_finite(world: tuple[int, Results]) -> None:
    for worker in world[1][f"gathered skip {BAD}"]:
        assert torch.isfinite(worker["full"]).all()
        torch.testing.assert_close(worker["full"], worker["plain"], rtol=0, atol=1e-5)
        assert worker["nonfinite"] == 1
    for worker in world[1][f"gathered raise {BAD}"]:  # all end together, in the same step
        assert "1.weight" in worker["sentence"]
        assert f"at step {BAD + 1};" in worker["sentence"]
        torch.testing.assert_close(worker["full"], worker["plain"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_full_sharding_keeps_each_workers_statistics_and_names_what_is_not_finite_before_clipping(
    world: tuple[int, Results],
) -> None:
    one, other = world[1]["normed"]
    assert not torch.equal(one["buffers"]["norm.running_mean"], other["buffers"]["norm.running_mean"])
    for worker in (one, other):
        assert all(torch.equal(worker["buffers"][name], worker["again"][name]) for name in worker["buffers"])
        assert "The gradient of bad holds NaN" in worker["sentence"]


@pytest.mark.parametrize("world", [2], indirect=True)
def test_runs_that_keep_parts_go_on_from_their_checkpoints(world: tuple[int, Results]) -> None:
    first = world[1]["runs"][0]
    figures = {name: [(m["loss"], m["accuracy"]) for m in first[name]] for name in ("plain", "state", "full", "stages", "alone")}
    assert [len(lines) for lines in figures.values()] == [3, 3, 2, 3, 3]
    assert figures["state"] == figures["plain"]
    for name, like in (("full", "plain"), ("stages", "alone")):
        for (loss, accuracy), (wanted, right) in zip(figures[name], figures[like], strict=False):
            assert loss == pytest.approx(wanted, abs=1e-5)
            assert accuracy == pytest.approx(right, abs=0.01)
    sent = [m["axes"]["pipeline"]["bytes_sent"] for m in first["stages"]]
    assert sent[0] == sent[1] > 1.9 * sent[2]  # after module 2 there cross 32 × 4 × 4 values per sample, after module 6 64 × 2 × 2
    assert "has shard 'full', not None" in first["other"]
    assert first["planned"].startswith("Operations over 2 processes\n3: gather\n7: gather\n\n")
    whole, part = (worker["momenta"] for worker in world[1]["runs"])
    assert 0 < part < whole
