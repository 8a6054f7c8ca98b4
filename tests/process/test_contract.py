"""One contract for every job, on real processes: whatever the strategy, ``parallelize`` returns a ``Job`` that means the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.strategy import Strategy
from hocket.train.job import Job
from hocket.train.runtimes.messages import server_runtime
from process.cases import batch, flat, net, refusal, sgd
from process.launch import Nursery
from shard_servers import ShardServers

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

LIMIT_S = 120.0
STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    "bulk": {},
    "local(2)": {},
    "bulk + gossip": {},
    "async + gossip": {},
    "bulk + server": {},
    "mesh": {"mesh": "tensor=2"},
    "zero1": {"sharding": "zero1"},
    "fsdp": {"sharding": "fsdp"},
}
FIGURES = {"seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s", "bytes_sent", "exchanges", "nonfinite"}
TOGETHER = "bulk + server + topk(0.2)"
RESUMED = (
    "bulk + server(shards=2) + topk(0.2)",
    "async + server(shards=2) + qsgd(4)",
    "ssp(2) + server(shards=2) + sign",
    "downpour(4, 2, overlap=False) + server(shards=2) + topk(0.1)",
)


def begin(strategy: str, **options: Any) -> Any:
    torch.manual_seed(3)
    model = net()
    return hocket.parallelize(model, sgd(model, momentum=0.0), strategy, **options)  # momentum would be on the shards


def loop(job: Any, steps: range, rank: int) -> None:
    for t in steps:
        job.optimizer.zero_grad()
        x, y = batch(t, rank)
        F.cross_entropy(job.model(x), y).backward()
        job.optimizer.step()


def asking(rank: int, folder: str) -> None:
    """Worker 0 alone asks for its figures, in the middle of the training; worker 1 never does until all ask together."""
    hocket.init(device="cpu")
    found: dict[str, Any] = {}
    for name, options in WAYS.items():
        job = begin(name if "+" in name or name in ("bulk", "local(2)") else "bulk", **options)
        loop(job, range(STEPS), 0 if name == "mesh" else rank)
        told: dict[str, Any] = {"attached": job.attached, "step": None if name == "async + gossip" else job.step}
        if rank == 0:
            told["alone"] = job.summary()  # if it waited for worker 1, it would wait for ever
        loop(job, range(STEPS, 2 * STEPS), 0 if name == "mesh" else rank)
        job.finish()
        told["ended"] = job.summary()
        if name != "fsdp" and name != "mesh":  # the data cluster of a split model is closed
            told["all"] = job.summary(all_workers=True)
        found[name] = {**told, "detached": not job.attached, "class": type(job).__name__}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def asked(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    group = nursery.start("process.test_contract:asking", 2, tmp_path_factory.mktemp("asked"))
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    return group.results()


@pytest.mark.parametrize("name", WAYS)
def test_one_worker_may_ask_for_its_figures_alone(asked: list[dict[str, Any]], name: str) -> None:
    told = asked[0][name]
    for summary in (told["alone"], told["ended"]):
        assert set(summary) >= FIGURES
        assert summary["seconds"] > 0
        assert summary["nonfinite"] == 0
    assert told["attached"]
    assert told["detached"]
    assert told["step"] in (None, STEPS)
    assert 0 < told["alone"]["bytes_sent"] < told["ended"]["bytes_sent"]


@pytest.mark.parametrize("name", ["bulk", "local(2)", "bulk + gossip", "zero1"])
def test_own_figures_add_up_and_are_a_part_of_all(asked: list[dict[str, Any]], name: str) -> None:
    alone, ended, everyone = (asked[0][name][key] for key in ("alone", "ended", "all"))
    assert alone["wait_s"] is None, "which part was wait takes everybody's times"
    assert alone["compute_s"] + alone["synchronisation_s"] == pytest.approx(alone["seconds"])
    assert ended["compute_s"] + ended["wait_s"] + ended["transfer_s"] == pytest.approx(ended["seconds"])
    assert ended["wait_s"] + ended["transfer_s"] == pytest.approx(ended["synchronisation_s"])
    assert everyone["bytes_sent"] == ended["bytes_sent"] + asked[1][name]["ended"]["bytes_sent"]
    assert everyone == asked[1][name]["all"]


def test_a_mesh_tells_its_axes_to_one_process(asked: list[dict[str, Any]]) -> None:
    axes = asked[0]["mesh"]["alone"]["axes"]
    assert axes["tensor"]["bytes_sent"] == asked[0]["mesh"]["alone"]["bytes_sent"] > 0
    assert axes["pipeline"]["bytes_sent"] == axes["data"]["bytes_sent"] == 0


def test_every_strategy_gives_the_same_class(asked: list[dict[str, Any]]) -> None:
    assert {told["class"] for name, told in asked[0].items() if name != "async + gossip"} == {"Job"}


def went_on(job: Any, again: Callable[[nn.Module], Any], rank: int) -> dict[str, Any]:
    """Steps that are stopped in the middle, and gone on with on other shards, from what was saved."""
    loop(job, range(STEPS), rank)
    state = copy.deepcopy(job.state_dict())
    with job.averaged() as mean:
        model = copy.deepcopy(mean)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    job.detach()
    other = again(model)
    foreign = refusal(lambda: other.load_own_state({**job.own_state(), "seed": -1}))
    other.load_state_dict(state)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # all have loaded before anybody goes on
    step = other.step
    loop(other, range(STEPS, 2 * STEPS), rank)
    found = {"step": step, "late": refusal(lambda: other.load_state_dict(state)), "foreign": foreign}
    found["lost"] = other.summary()["lost"]
    return {**found, "weights": flat(other.finish())}


@pytest.mark.parametrize("text", RESUMED)
def test_a_worker_of_servers_goes_on_from_its_state(text: str) -> None:
    """Residuals, sums that are not pushed yet and the step, from which randomness follows, are the worker's."""
    strategy = Strategy.parse(text)
    with ShardServers(2) as one, ShardServers(2) as two, ShardServers(2) as three:

        def made(shards: ShardServers, model: nn.Module) -> Job:
            runtime = server_runtime(lambda layout: shards.runtime(text, layout, 0, 1))
            return Job(model, sgd(model, momentum=0.0), strategy, runtime)

        straight = made(one, net())
        loop(straight, range(2 * STEPS), 0)
        ended = straight.finish()
        found = went_on(made(two, net()), lambda model: made(three, model), 0)
    assert found["step"] == STEPS
    assert torch.equal(found["weights"], flat(ended))
    assert not torch.equal(found["weights"], flat(net()))
    assert "before the first step" in found["late"]
    assert "The checkpoint's seed is -1" in found["foreign"]
    assert found["lost"] == 0


def resuming(rank: int, folder: str) -> None:
    """The same on two processes that step together; and what an unsplit model says."""
    hocket.init(device="cpu", seed=5)
    found: dict[str, Any] = {}
    straight = begin(TOGETHER)
    loop(straight, range(2 * STEPS), rank)
    found["straight"] = flat(straight.finish())
    again = lambda model: hocket.parallelize(model, sgd(model, momentum=0.0), TOGETHER)  # noqa: E731
    found |= went_on(begin(TOGETHER), again, rank)
    plain = begin("bulk")
    x, y = batch(0, rank)
    calls = {
        "train": lambda: plain.train(x, y),
        "backward": lambda: plain.backward(x, y),
        "clip": lambda: plain.clip(1.0),
        "predict": lambda: plain.predict(x),
        "drain": plain.drain,
        "picture": plain.picture,
        "timeline": plain.timeline,
        "explain": plain.explain,
        "full_state": plain.full_state,
        "load_full_state": lambda: plain.load_full_state({}),
    }
    found["unsplit"] = {name: refusal(call) for name, call in calls.items()}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def resumed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    group = nursery.start("process.test_contract:resuming", 2, tmp_path_factory.mktemp("resumed"))
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    return group.results()


def test_workers_that_step_together_on_servers_go_on_together(resumed: list[dict[str, Any]]) -> None:
    for worker in resumed:
        assert worker["step"] == STEPS
        assert torch.equal(worker["weights"], worker["straight"])
        assert worker["lost"] == 0


def test_what_needs_a_split_model_says_so_in_one_sentence(resumed: list[dict[str, Any]]) -> None:
    for name, sentence in resumed[0]["unsplit"].items():
        assert "not split" in sentence, name
        assert "\n" not in sentence
