"""Shares by speed: nobody waits for a slow worker, and the training is the same but for noise."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.cluster import VirtualCluster
from hocket.cluster.spec import ClusterSpec
from hocket.data.base import DataSet, identity
from hocket.data.partition import Partition
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.balance import by_speed
from hocket.train.loop import TrainingPlan
from hocket.train.replicas import LiveReplica, StackedReplicas
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.settings import RunSettings
from hocket.train.simulate import train_rows
from virtual.world import FEATURES, Tiny, seeded, sgd

SLOWDOWN = (1.0, 1.0, 1.0, 4.0)
FAST, BOUND = 0.01, 4 / 3.25
"""Seconds of a fast worker's step, and how many times as long a round takes at best: N / Σ 1/s."""
SPEC = ClusterSpec(step_s=FAST, slowdown=SLOWDOWN, bandwidth=1e12, latency_s=0.0)


def samples(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))
    return x, (2 * x[:, 0] + x[:, 1] ** 2 > 1).long() + (x[:, 2] > 1).long()


def trained(strategy: str = "bulk + allreduce", count: int = 400, **options: Any) -> hocket.train.simulate.Run:
    given = {
        "workers": 4,
        "batch_size": 10,
        "epochs": 4,
        "seed": 1,
        "cluster": SPEC,
        "balance": "speed",
        "optimizer": sgd(0.1),
        **options,
    }
    return hocket.simulate(Tiny, F.cross_entropy, samples(count), samples(500), strategy=strategy, **given)


def weights_of(run: hocket.train.simulate.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_seconds_fall_to_those_of_workers_that_all_take_equally_long() -> None:
    even, speed = (trained(batch_size=100, count=1600, balance=balance).metrics for balance in ("even", "speed"))
    rounds = 4
    assert [m["seconds"] for m in even] == pytest.approx([rounds * FAST * 4] * 4, rel=1e-3)
    assert speed[0]["seconds"] == even[0]["seconds"]
    assert speed[0]["shares"] == [100] * 4
    for metrics in speed[1:]:
        assert metrics["shares"] == [124, 123, 123, 30]
        assert rounds * FAST * BOUND <= metrics["seconds"] <= rounds * FAST * BOUND * 1.01
        assert metrics["wait_s"] < 0.02 * metrics["seconds"]
    assert all("shares" not in m for m in even)
    assert [m["bytes_sent"] for m in speed] == [m["bytes_sent"] for m in even]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shares_add_up_and_nobody_is_left_out(seed: int) -> None:
    spec = ClusterSpec(step_s=FAST, slowdown=(1, 2.5, 1, 300), jitter=0.3, stragglers=0.05)
    for metrics in trained(cluster=spec, seed=seed, epochs=5).metrics:
        assert sum(metrics["shares"]) == 40
        assert min(metrics["shares"]) >= 1
    assert metrics["shares"][3] == 1
    assert metrics["shares"][1] < min(metrics["shares"][0], metrics["shares"][2])


def test_the_mean_gradient_is_that_of_all_samples() -> None:
    """One worker on the same samples: bulk, and means of weights where each worker has stepped by itself."""
    alone = trained(workers=1, batch_size=40, balance="even", cluster=None)
    for strategy in ("bulk + allreduce", "local(1, mean=after)"):
        run = trained(strategy)
        assert run.metrics[-1]["shares"] == [13, 12, 12, 3]
        torch.testing.assert_close(weights_of(run), weights_of(alone), rtol=1e-4, atol=1e-5)
        assert [m["loss"] for m in run.metrics] == pytest.approx([m["loss"] for m in alone.metrics], rel=1e-4)


@pytest.mark.parametrize(
    "strategy",
    ["bulk + allreduce", "bulk + topk(0.2)", "local(4)", "gossip", "gossip + exchange=gradients", "diloco(4)", "hierarchical"],
)
def test_it_learns_as_much_as_with_even_shares_in_less_time(strategy: str) -> None:
    def figures(balance: str) -> tuple[float, float]:
        runs = [trained(strategy, seed=seed, balance=balance, count=800, host_size=2, epochs=5) for seed in range(3)]
        return sum(run.accuracy or 0.0 for run in runs) / 3, sum(m["seconds"] for run in runs for m in run.metrics[2:])

    (even, before), (speed, after) = figures("even"), figures("speed")
    assert speed == pytest.approx(even, abs=0.02)
    assert after < 0.4 * before


@pytest.mark.parametrize("strategy", ["bulk + topk(0.2)", "local(3)", "gossip", "diloco(2)"])
def test_a_training_that_was_stopped_is_the_one_that_was_not(strategy: str) -> None:
    spec = ClusterSpec(step_s=FAST, slowdown=SLOWDOWN, jitter=0.3)  # other shares in every epoch

    def training() -> Any:
        data = DataSet("d", samples(450), samples(100), 3, identity)
        plan = TrainingPlan(epochs=4, batch_size=10, seed=1, balance="speed")
        cluster = VirtualCluster(4, spec=spec, seed=1)
        return train_rows(Tiny, F.cross_entropy, sgd(0.1, momentum=0.9), data, Strategy.parse(strategy), cluster, plan)

    whole, parts = training(), training()
    for _ in whole.run():
        pass
    while parts.epoch < 4:  # stopped after every epoch
        next(parts.run())
        file = io.BytesIO()
        torch.save(parts.state_dict(), file)
        file.seek(0)
        parts = training()
        parts.load_state_dict(torch.load(file, weights_only=True))
    assert len({tuple(m["shares"]) for m in whole.metrics}) > 2
    for name in ("shares", "loss", "accuracy", "seconds", "compute_s", "wait_s", "transfer_s", "bytes_sent"):
        assert [m[name] for m in parts.metrics] == [m[name] for m in whole.metrics]
    assert whole.shares == parts.shares
    assert all(torch.equal(a, b) for a, b in zip(whole.replicas.weights, parts.replicas.weights, strict=True))


def test_links_do_not_change_what_is_computed() -> None:
    runs = [
        trained(cluster=ClusterSpec(step_s=0.003, slowdown=SLOWDOWN, bandwidth=b, latency_s=a))
        for b, a in ((1e12, 0.0), (1e6, 1e-3))
    ]
    assert [m["shares"] for m in runs[0].metrics] == [m["shares"] for m in runs[1].metrics]
    assert torch.equal(*map(weights_of, runs))


def test_an_incomplete_round_and_an_early_end_are_shared_out_too() -> None:
    metrics = trained(count=415, max_steps=24, epochs=5).metrics
    assert [m["shares"] for m in metrics] == [[10] * 4, [13, 12, 12, 3], [13, 12, 12, 3]]
    assert Partition(415, 4, 10, 1).rounds(1, [13, 12, 12, 3])[-1].sizes == (5, 5, 4, 1)


def test_a_last_round_in_which_all_have_as_little_as_the_slowest_costs_as_little() -> None:
    run = trained(workers=2, count=22, epochs=2, cluster=ClusterSpec(step_s=FAST, slowdown=(1000, 1)))
    assert run.metrics[-1]["shares"] == [1, 19]
    assert run.metrics[-1]["seconds"] == pytest.approx(2 * 1000 * FAST / 10)  # 1 and 19 samples, then 1 and 1


def test_what_cannot_be_measured_changes_nothing() -> None:
    assert by_speed([3, 5], samples=[30, 50], seconds=[]) == [3, 5]
    assert by_speed([3, 5], samples=[30, 50], seconds=[0.0, 1.0]) == [3, 5]
    assert by_speed([3, 5], samples=[30, 50], seconds=[1.0, 1e12]) == [7, 1]
    # Equally fast but for the last bits: the first one has the odd sample whatever these say.
    assert by_speed([2, 3], samples=[30, 30], seconds=[1.0, 1.0 - 1e-12]) == [3, 2]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"balance": "sped"}, "did you mean 'speed'"),
        ({"cluster": None}, "describe a cluster for virtual workers"),
        ({"strategy": "async"}, "its workers take mini-batches one by one"),
        ({"strategy": "ssp(2)"}, "its workers take mini-batches one by one"),
    ],
)
def test_bad_input_meets_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HocketError, match=words) as error:
        trained(**options)
    assert str(error.value)[-1] in ".?"
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"balance": "fair"}, "balance=fair"),
        ({"virtual": True}, "virtual workers have speeds only with cluster="),
        ({"strategy": "async"}, "one by one"),
        ({"strategy": "async", "virtual": True}, "one by one"),
    ],
)
def test_settings_refuse_before_anything_is_started(given: dict[str, Any], words: str) -> None:
    with pytest.raises(HocketError, match=words):
        RunSettings.of(**{"workers": 4, "balance": "speed", **given})
    RunSettings.of(workers=4, balance="speed")
    RunSettings.of(workers=4, balance="speed", virtual=True, cluster="1gbit")


def test_several_workers_in_one_process_have_no_speeds() -> None:
    data = DataSet("d", samples(100), samples(100), 3, identity)
    plan = TrainingPlan(batch_size=10, balance="speed")
    with pytest.raises(HocketError, match="a process of its own"):
        train_rows(Tiny, F.cross_entropy, sgd(0.1), data, Strategy.parse("bulk"), VirtualCluster(4, timed=True), plan)


@pytest.mark.parametrize("always", [False, True])
def test_a_worker_on_hooks_weighs_its_own_steps_as_rows_do(always: bool) -> None:
    x, y = samples(6)
    states = []
    for live in (True, False):
        given = seeded(), F.cross_entropy, sgd(0.5), Strategy.parse("local(2)")
        cluster = VirtualCluster(1)
        replicas: LiveReplica | StackedReplicas
        replicas = LiveReplica(*given, CollectiveRuntime(cluster)) if live else StackedReplicas(*given, cluster)
        replicas.step([x], [y], torch.zeros(1, dtype=torch.int64), [0.3], always=always)
        with replicas.averaged() as model:
            states.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    model = seeded()
    F.cross_entropy(model(x), y).backward()
    for new, p in zip(states[0], model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(new, p.detach() - 0.5 * (0.3 if always else 1.0) * p.grad)


def test_models_with_batch_norm_and_dropout_take_uneven_rounds() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 3))

    run = hocket.simulate(model, F.cross_entropy, samples(400), workers=4, batch_size=10, epochs=2, cluster=SPEC, balance="speed")
    assert run.metrics[-1]["shares"] == [13, 12, 12, 3]
