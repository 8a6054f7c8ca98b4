"""Laws of ``hocket.parallelize`` on four real processes: each trap of the design, and what an ordinary loop may contain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cluster.ledger import Span, split
from process.cases import CASES, RESUMED, WORKERS
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What each worker returned, per case; one group of processes runs all of them."""
    group = nursery.start("process.cases:main", WORKERS, tmp_path_factory.mktemp("job"), names=list(CASES))
    assert group.wait(240, together=True) == [0] * WORKERS, group.said()
    workers = group.results()
    return {name: [worker[name] for worker in workers] for name in CASES}


def mean(values: list[Tensor]) -> Tensor:
    """The mean in worker order, as ``exact`` clusters compute it."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values)


def near(a: Tensor, b: Tensor, start: Tensor, share: float = 1e-5) -> bool:
    """Whether two trainings ended at the same place, but for a small share of the way they went."""
    way = (b - start).norm()
    return bool(way > 0.05) and bool((a - b).norm() <= share * way)


def all_equal(values: list[Any]) -> bool:
    return all(torch.equal(v, values[0]) if isinstance(v, Tensor) else v == values[0] for v in values)


# --- bulk equals what it should --------------------------------------------------------------------------------------------


def test_bulk_all_reduce_equals_ddp(results: dict[str, Results]) -> None:
    for worker in results["ddp"]:
        assert near(worker["hocket"], worker["ddp"], worker["start"])
    assert all_equal([worker["hocket"] for worker in results["ddp"]])


def test_groups_schedules_frozen_tied_and_mixed_dtypes_equal_plain_training(results: dict[str, Results]) -> None:
    for worker in results["any_model"]:
        assert near(worker["ours"], worker["plain"], worker["start"], 1e-3)  # Adam divides rounding by small numbers
        assert worker["tied"]
        assert worker["rates"] == pytest.approx([0.003 / 8, 0.02 / 8])
    assert all_equal([worker["ours"] for worker in results["any_model"]])


def test_replicas_start_equal_whatever_their_seeds(results: dict[str, Results]) -> None:
    first, *others = results["replicas_start_equal"]
    assert first["1.running_mean"].abs().sum() > 0
    for worker in others:
        assert all(torch.equal(worker[name], first[name]) for name in first)


def test_uneven_last_batches_hang_nobody_and_weigh_by_samples(results: dict[str, Results]) -> None:
    sizes = [worker["sizes"] for worker in results["uneven"]]
    assert {len(s) for s in sizes} == {16}
    assert [s[7] for s in sizes] == [2, 1, 1, 1]
    for worker in results["uneven"]:
        assert worker["weight"] == 1.0
        assert near(worker["ours"], worker["plain"], worker["start"])
    assert all_equal([worker["ours"] for worker in results["uneven"]])
    for worker in results["uneven_accumulated"]:
        assert near(worker["ours"], worker["plain"], worker["start"])


# --- order and use of parameters -------------------------------------------------------------------------------------------


def test_gradients_that_get_ready_in_another_order_meet_their_own_kind(results: dict[str, Results]) -> None:
    for name in results["order"][0]["own"]:
        expected = mean([worker["own"][name] for worker in results["order"]])
        for worker in results["order"]:
            for mixed in worker["mixed"]:
                assert torch.equal(mixed[name], expected)


@pytest.mark.parametrize("key", ["one bucket True", "one bucket False", "many True", "many False"])
def test_a_gradient_stays_none_only_if_unused_by_all(results: dict[str, Results], key: str) -> None:
    workers = [worker[key] for worker in results["unused"]]
    assert all_equal([worker["weights"] for worker in workers])
    for time in (0, 1):
        for name in workers[0]["seen"][0][0]:
            own = [worker["seen"][time][0][name] for worker in workers]
            mixed = [worker["seen"][time][1][name] for worker in workers]
            if all(g is None for g in own):
                assert all(g is None or not g.any() for g in mixed)
                assert name.startswith(f"parts.{WORKERS}.")
                assert time == 1 or mixed == [None] * WORKERS
            else:
                shape = next(g for g in own if g is not None)
                expected = mean([torch.zeros_like(shape) if g is None else g for g in own])
                assert all(torch.equal(g, expected) for g in mixed)


@pytest.mark.parametrize("key", ["True", "False"])
def test_what_only_an_early_pass_used_is_exchanged_too(results: dict[str, Results], key: str) -> None:
    workers = [worker[key] for worker in results["used_early"]]
    assert all_equal([worker["weights"] for worker in workers])
    for name in workers[0]["own"]:
        own = [worker["own"][name] for worker in workers]
        if any(g is not None for g in own):
            shape = next(g for g in own if g is not None)
            expected = mean([torch.zeros_like(shape) if g is None else g for g in own])
            assert all(torch.equal(worker["mixed"][name], expected) for worker in workers)


# --- the moment of an exchange ---------------------------------------------------------------------------------------------


def test_clipping_sees_mixed_gradients(results: dict[str, Results]) -> None:
    for steps in zip(*(worker["steps"] for worker in results["clipping"]), strict=True):
        assert all_equal([step["norm"] for step in steps])
        assert all_equal([step["weights"] for step in steps])
        means = [mean([step["own"][name] for step in steps]) for name in steps[0]["own"]]
        assert torch.allclose(steps[0]["norm"], torch.cat([m.flatten() for m in means]).norm(), rtol=1e-6)


def test_local_steps_follow_their_formula(results: dict[str, Results]) -> None:
    workers = results["local_formula"]
    common = mean([worker["before"].float() for worker in workers])
    for worker in workers:
        assert worker["launched"]
        assert worker["waiting"]
        expected = common.double() - 0.1 * worker["gradient"]
        assert torch.allclose(worker["after"], expected, atol=1e-6)


def test_gradients_are_nobody_elses(results: dict[str, Results]) -> None:
    workers = results["gradients_are_not_in_flight"]
    assert [worker.pop("others") for worker in workers] == [False, True, True, True]
    for key in workers[0]:
        if key.endswith(" False"):
            for worker in workers:
                assert torch.equal(worker[key], worker[key.replace(" False", " True")]), key


def test_messages_in_pieces_are_the_same_messages(results: dict[str, Results]) -> None:
    for worker in results["pieces"]:
        both = list(worker.values())
        assert len(both) == 8
        assert all(torch.equal(whole, cut) for whole, cut in zip(both[::2], both[1::2], strict=True))


@pytest.mark.parametrize("strategy", ["bulk", "bulk + gossip + exchange=gradients", "local(2)"])
def test_accumulation_equals_one_big_batch(results: dict[str, Results], strategy: str) -> None:
    for worker in results["accumulation"]:
        assert near(worker[f"{strategy} 3"], worker[f"{strategy} 1"], worker["start"])
        assert worker[f"{strategy} 3 bytes"] == worker[f"{strategy} 1 bytes"] > 0


def test_a_step_in_the_middle_of_an_accumulation_is_exchanged(results: dict[str, Results]) -> None:
    for worker in results["accumulation_cut_short"]:
        assert torch.equal(worker["1 of 3"], worker["1 of 1"])
        assert not torch.equal(worker["1 of 3"], worker["start"])


def test_checkpointing_is_right_or_refused(results: dict[str, Results]) -> None:
    for worker in results["checkpointing"]:
        assert torch.equal(worker["non-reentrant"]["weights"], worker["plain"]["weights"])
        assert torch.equal(worker["non-reentrant twice"]["weights"], worker["plain twice"]["weights"])
        assert torch.equal(worker["reentrant with a head"]["weights"], worker["plain"]["weights"])
        assert {name for name, found in worker.items() if found["refused"]} == {"reentrant", "reentrant twice"}
        for name in ("reentrant", "reentrant twice"):
            assert "use checkpoint(…, use_reentrant=False)" in worker[name]["refused"]


# --- precision -------------------------------------------------------------------------------------------------------------


def test_bf16_autocast_trains(results: dict[str, Results]) -> None:
    workers = results["autocast"]
    assert all_equal([worker["weights"] for worker in workers])
    assert sum(worker["losses"][-1] for worker in workers) < sum(worker["losses"][0] for worker in workers)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("strategy", ["bulk", "bulk + topk(0.2)", "local(2)", "local(3) + gossip", "diloco(2)"])
def test_overflow_on_one_worker_makes_all_skip_together(results: dict[str, Results], strategy: str, unscaled: bool) -> None:
    workers = [worker[f"{strategy} {unscaled}"] for worker in results["scaler"]]
    for worker in workers:
        assert worker["moved"] == [True, True, True, False, True, True]
        assert worker["scales"] == [1024, 1024, 1024, 512, 512, 512]
        assert worker["counted"] == [1, 2, 3, 4, 5, 6]
        assert torch.isfinite(worker["weights"]).all()
    assert all_equal([worker["mean"] for worker in workers])
    if strategy.startswith("bulk"):
        assert all_equal([worker["weights"] for worker in workers])


# --- state -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", RESUMED)
def test_resuming_equals_never_having_stopped(results: dict[str, Results], strategy: str) -> None:
    for worker in results["resume"]:
        assert torch.equal(worker[strategy]["resumed"], worker[strategy]["straight"])


def test_a_checkpoint_of_another_strategy_is_refused(results: dict[str, Results]) -> None:
    for worker in results["resume_refused"]:
        assert worker["sentence"].startswith("The checkpoint's strategy is local(4)")


def test_the_mean_model_comes_and_goes(results: dict[str, Results]) -> None:
    workers = results["averaged"]
    for name in workers[0]["own"]:
        own = [worker["own"][name] for worker in workers]
        for worker in workers:
            expected = mean(own) if worker["own"][name].is_floating_point() else worker["own"][name]
            assert torch.equal(worker["inside"][name], expected)
            assert torch.equal(worker["restored"][name], worker["own"][name])
            assert torch.equal(worker["finished"][name], expected)
    assert not all_equal([worker["own"]["1.weight"] for worker in workers])
    assert not all_equal([worker["own"]["2.running_mean"] for worker in workers])
    assert not all_equal([worker["after"] for worker in workers])


def test_evaluation_neither_counts_nor_loses_bytes(results: dict[str, Results]) -> None:
    """Two means of all parameters: the one of step 4 and the one under way, wherever the evaluation finds it."""
    for worker in results["averaged"]:
        before, after = worker["sent"]
        assert before <= after
        assert after.tolist() == results["averaged"][0]["sent"][1].tolist()


# --- bad input -------------------------------------------------------------------------------------------------------------

SENTENCES = {
    "shape": ["Worker 2's", "parameter 1.weight (6, 3) float32", "against parameter 1.weight (5, 3) float32"],
    "dtype": ["Worker 3's", "parameter 1.weight (5, 3) float64", "against parameter 1.weight (5, 3) float32"],
    "fewer": ["Worker 2's", "nothing against parameter 1.weight"],
    "more": ["Worker 1's", "parameter 1.weight (5, 3) float32", "against nothing"],
    "buffer": ["Worker 1's", "buffer table (4,) float32 against buffer table (3,) float32"],
    "frozen": ["Worker 1's", "parameter 1.weight", "against parameter 0.bias (3,) float32 (frozen)"],
    "frozen on one": [
        "Worker 1's",
        "parameter 0.weight (3, 4) float32 (frozen) against parameter 0.weight (3, 4) float32 in group 0",
    ],
    "strategy": ["Worker 1's", "local(2) + allreduce", "against the terms local(3) + allreduce"],
    "accumulate": ["Worker 3's", "accumulate=2 against the terms accumulate=1"],
    "groups": ["Worker 1's", "in group 0 against", "in group 1"],
    "lbfgs": ["LBFGS", "use a first-order optimiser"],
    "device": ["Parameter 0.weight is on meta", "exchanges on cpu", "move the model there"],
    "another model": ["The optimiser holds no trainable parameter of this model"],
    "partly another": ["The optimiser holds a parameter of shape", "that this model lacks"],
    "not a model": ["parallelize needs an nn.Module, got generator"],
    "not an optimiser": ["parallelize needs a torch.optim optimiser, got Sequential"],
    "nonfinite": ["nonfinite='ignore'", "use 'raise'"],
    "dgc": ["dgc includes the momentum"],
    "strategy name": ["Unknown method 'gosip' — did you mean 'gossip'?"],
    "hosts": ["4 workers do not divide into hosts of 3"],
    "sparse": ["A gradient is sparse", "sparse=False"],
    "unfrozen": ["one was unfrozen, after hocket.parallelize(…)", "parallelize again"],
}


@pytest.mark.parametrize("what", SENTENCES)
def test_bad_input_meets_one_clear_sentence_on_every_worker(results: dict[str, Results], what: str) -> None:
    sentences = [worker[what] for worker in results["refused"]]
    assert len(set(sentences)) == 1
    assert set(results["refused"][0]) == set(SENTENCES)
    for part in SENTENCES[what]:
        assert part in sentences[0]
    assert "\n" not in sentences[0]


@pytest.mark.parametrize("strategy", ["bulk", "bulk + topk(0.2)", "local(3)", "bulk + gossip"])
def test_a_skipped_gradient_is_counted_and_counts_as_zero(results: dict[str, Results], strategy: str) -> None:
    for worker in results["nonfinite_skipped"]:
        assert worker["buckets"][0] == ["3.bias", "3.weight"]
        assert len(worker["buckets"]) > 1
        assert torch.equal(worker[f"{strategy} nan"], worker[f"{strategy} zero"])
        assert worker[f"{strategy} nan count"] == 1
        assert worker[f"{strategy} zero count"] == 0
        assert torch.isfinite(worker[f"{strategy} nan"]).all()


# --- the ledger ------------------------------------------------------------------------------------------------------------


def test_the_seconds_add_up(results: dict[str, Results]) -> None:
    for worker in results["waiting"]:
        summary = worker["summary"]
        parts = summary["compute_s"] + summary["wait_s"] + summary["transfer_s"]
        assert parts == pytest.approx(summary["seconds"], rel=1e-9)
        assert min(summary["compute_s"], summary["wait_s"], summary["transfer_s"]) > 0
        assert summary["exchanges"] == 12
    assert all_equal([worker["summary"] for worker in results["waiting"]])


def test_the_others_wait_for_the_slow_one(results: dict[str, Results]) -> None:
    workers = results["waiting"]
    latest = torch.tensor([[s[1] for s in worker["spans"]] for worker in workers], dtype=torch.float64).amax(0)
    waits = [split([Span(*s) for s in worker["spans"]], latest)[0] for worker in workers]
    assert waits[2] < min(waits[k] for k in (0, 1, 3))
    assert sum(waits) / WORKERS == pytest.approx(workers[0]["summary"]["wait_s"])
