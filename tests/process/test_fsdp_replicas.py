"""Laws of replicas that ``fully_shard`` has split, on real processes: PyTorch inside a replica, Hocket between replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from process.fsdp_cases import STEPS
from process.launch import Nursery

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

ALIKE = ("local(2)", "local(4, mean=after)", "diloco(2)", "local(2, moments=1)")
"""Strategies that compute each value by itself, so that it does not matter how a replica lies in processes."""
CODED = (
    "bulk + topk(0.2) | qsgd(4)",
    "bulk + lowrank(1)",
    "diloco(2) + sign",
    "local(2, mean=after, residual=weights) + topk(0.2)",
)
CASES: list[list[Any]] = [["bulk", 1], ["bulk", 2], ["weighed"], ["single"], ["refused"]]
CASES += [["steps", strategy] for strategy in (*ALIKE, *CODED)] + [["resumed", "local(2) + topk(0.3)"]]
REFUSED = {
    "two": "give fully_shard(…) the dimension inside a replica alone, such as mesh['shard']",
    "crossed": "replicas must be of the same number of consecutive processes",
    "async": "async + server(1) has servers",
    "acco": "updates that are taken back",
    "sum": "has servers",
    "scaler": "use bfloat16",
    "audit": "leave mesh=, fully_shard(…)",
    "sharding": "leave mesh=, sharding= and elastic= out",
    "mesh": "leave mesh=, sharding= and elastic= out",
    "half": "fully_shard(…) was not called on it",
    "mixed": "Parameter scale is not sharded",
    "unborn": "call model.to_empty(device=…)",
}

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def four(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(nursery, 4, tmp_path_factory.mktemp("sharded"), CASES)


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(nursery, 2, tmp_path_factory.mktemp("whole"), [["unsharded", strategy] for strategy in ALIKE])


def run(nursery: Nursery, size: int, folder: Any, cases: list[list[Any]]) -> Results:
    """What each worker returned, per case."""
    group = nursery.start("process.fsdp_cases:main", size, folder, cases=cases)
    assert group.wait(150, together=True) == [0] * size, group.said()
    workers = group.results()
    return {name: [worker[name] for worker in workers] for name in workers[0]}


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bulk_is_hybrid_sharding_of_pytorch(four: Results, accumulate: int) -> None:
    for worker in four[f"bulk {accumulate}"]:
        assert furthest(worker["hocket"], worker["torch"]) < 1e-6
        assert furthest(worker["hocket"], worker["start"]) > 1e-2
        assert worker["exchanges"] == STEPS


def test_processes_count_by_their_samples(four: Results) -> None:
    assert max(furthest(worker["hocket"], worker["alone"]) for worker in four["weighed"]) < 1e-6


@pytest.mark.parametrize("strategy", ALIKE)
def test_a_strategy_does_what_it_does_between_whole_replicas(four: Results, two: Results, strategy: str) -> None:
    for rank, worker in enumerate(four[f"steps {strategy}"]):
        other = two[f"unsharded {strategy}"][rank // 2]
        assert max(map(furthest, worker["weights"], other["weights"])) < 1e-5
        assert furthest(worker["own"], other["own"]) < 1e-5
        assert furthest(worker["mean"], other["mean"]) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "exchanged"), [("local(4, mean=after)", [4]), (CODED[2], [2, 4]), (CODED[0], [1, 2, 3, 4, 5])]
)
def test_replicas_are_equal_after_an_exchange(four: Results, strategy: str, exchanged: list[int]) -> None:
    first, *others = [worker["weights"] for worker in four[f"steps {strategy}"]]
    for step in range(1, STEPS + 1):
        differ = max(furthest(first[step - 1], weights[step - 1]) for weights in others)
        assert (differ == 0) == (step in exchanged), step


@pytest.mark.parametrize("strategy", CODED)
def test_codes_work_on_parts(four: Results, strategy: str) -> None:
    workers = four[f"steps {strategy}"]
    assert all(torch.isfinite(worker["last"]).all() and furthest(worker["last"], worker["start"]) > 1e-3 for worker in workers)
    assert len({worker["sent"] for worker in workers}) == 1
    assert 0 < workers[0]["sent"] < four["steps local(2)"][0]["sent"] * (1 if "bulk" not in strategy else STEPS / 2)


@pytest.mark.parametrize("strategy", [*ALIKE, *CODED])
def test_the_mean_model_is_for_a_while_and_at_the_end(four: Results, strategy: str) -> None:
    workers = four[f"steps {strategy}"]
    for worker in workers:
        assert torch.equal(worker["own"], worker["own again"])
        assert furthest(worker["mean"], worker["finished"]) < 1e-6
        assert torch.equal(worker["last"], workers[0]["last"])
        assert worker["mean seen"].tolist() == [1.5] * 3
    if strategy not in CODED[:2]:  # all others have gone apart by then
        assert furthest(workers[0]["own"], workers[2]["own"]) > 1e-4
        assert furthest(workers[0]["mean"], workers[0]["own"]) > 1e-4


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(four: Results) -> None:
    for rank, worker in enumerate(four["resumed local(2) + topk(0.3)"]):
        assert worker["entry"] == [f"process {rank}"]
        assert torch.equal(worker["on"], worker["again"])
        assert worker["has full"] == (rank in (0, 2))
        assert torch.equal(worker["loaded"], worker["plain"])
        assert all(worker["moments"])


def test_one_replica_is_fsdp2_itself(four: Results) -> None:
    assert all(torch.equal(worker["hocket"], worker["torch"]) for worker in four["single"])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_all_processes(four: Results, case: str) -> None:
    assert all(REFUSED[case] in worker[case] for worker in four["refused"])
