"""Laws of the virtual clock: what an exchange takes, who waits for whom, and that nothing but the spec and the seed decides."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket import ClusterSpec, HocketError, Strategy
from hocket.cluster import Message, Subgroups, VirtualCluster
from hocket.cluster.clock import Clock
from hocket.cluster.layout import Buckets
from hocket.cluster.message import FRAME_BYTES, PIECE_BYTES, framed, ring_bytes
from hocket.cluster.relay import gather_trips, radix_for
from hocket.data.base import DataSet, identity
from hocket.train import loop
from hocket.train.flops import step_flops
from hocket.train.loop import Training, TrainingPlan
from hocket.train.settings import RunSettings
from hocket.train.simulate import train_rows

FEATURES, BATCH = 6, 4
PARAMETERS = FEATURES * 50 + 50 + 50 * 2 + 2
SLOTS = 4
STRATEGIES = [
    "bulk", "bulk + topk(0.1)", "bulk + lowrank(1)", "local(3)", "local(3, mean=after) + sign", "gossip", "gossip(random)",
    "gossip + threshold(keep=0.2)", "gossip + exchange=gradients", "postlocal(2, 4)", "diloco(3)",
    "hierarchical(allreduce, gossip, size=2)", "hierarchical(gossip, allreduce, size=2)", "bulk + threshold(keep=0.2)",
]  # fmt: skip
ROUGH = ClusterSpec(
    step_s=0.01, slowdown=(1, 1, 3), jitter=0.3, stragglers=0.1, straggle=5, bandwidth=1e6, latency_s=1e-3,
    host_size=2, host_bandwidth=1e7, host_latency_s=1e-4,
)  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 50), nn.Tanh(), nn.Linear(50, 2))


def samples(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def training(
    strategy: str, spec: ClusterSpec | None, workers: int = 4, rounds: float = 8, epochs: int = 1, **more: Any
) -> Training:
    """Virtual workers about to train for ``rounds`` steps an epoch."""
    plan = TrainingPlan(epochs, BATCH, more.pop("seed", 0), evaluate=more.pop("evaluate", True), worst=False)
    data = DataSet("made up", samples(int(rounds * workers * BATCH)), samples(20), 0, identity)
    cluster = VirtualCluster(workers, more.pop("device", "cpu"), spec=spec, seed=plan.seed)
    sgd: Callable = lambda params: torch.optim.SGD(params, 0.05)  # noqa: E731
    return train_rows(net, F.cross_entropy, sgd, data, Strategy.parse(strategy), cluster, plan, **more)


def each(strategy: str, spec: ClusterSpec, **more: Any) -> tuple[Tensor, Training]:
    """Seconds, wait, transfer and hidden transfer of each worker in one epoch: ``[workers, 4]``."""
    trained = training(strategy, spec, **more)
    taken: list[Tensor] = []
    clock = trained.cluster.clock
    assert clock is not None

    def take() -> Tensor:
        taken.append(clock.take())
        return taken[-1]

    trained.cluster.ledger.predict = take
    for _ in trained.run():
        pass
    return torch.stack(taken).sum(0), trained


# --- what an exchange takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 7, 16])
def test_a_ring_takes_what_the_formula_says(workers: int) -> None:
    spec = ClusterSpec(step_s=0.01, bandwidth=1e6, latency_s=1e-3)
    seconds, _ = each("bulk", spec, workers=workers, rounds=5)

    def ring(payload: int) -> float:  # 2(N−1)(α + M/(N·B)), M/N being a message with its frame
        return 2 * (workers - 1) * (1e-3 + (FRAME_BYTES + int(payload / workers * 1.033)) / 1e6)

    trips = gather_trips(workers, radix_for(workers, 0, True))  # of the flags that agree on them
    flags = sum(1e-3 + len(trip.shifts) * framed(SLOTS + 1) / 1e6 for trip in trips)
    exchange = ring(4 * PARAMETERS) + flags
    assert seconds[:, 0].tolist() == pytest.approx([5 * (0.01 + exchange)] * workers, rel=1e-12)
    assert seconds[:, 2].tolist() == pytest.approx([5 * exchange] * workers, rel=1e-12)
    assert seconds[:, 1].tolist() == [0.0] * workers
    large = Clock(spec, workers)
    large.launch()
    large.ring(ring_bytes(40_000_000, workers), Subgroups.world(workers))
    assert float(large.net[0]) == pytest.approx(2 * (workers - 1) * 1e-3 + 2 * (workers - 1) / workers * 40, rel=0.04)


@pytest.mark.parametrize("size, latencies", [(PIECE_BYTES * 2, 2), (1000, 1)])
def test_gossip_takes_two_messages_however_many_workers(size: int, latencies: int) -> None:
    for workers in (5, 16, 210):
        clock = Clock(ClusterSpec(bandwidth=1e6, latency_s=0.5), workers)
        clock.launch()
        clock.neighbor_exchange(
            torch.full((workers,), size), Strategy.parse("gossip").topology.partners(workers, 1, 0).sources, False
        )
        assert clock.net.tolist() == pytest.approx([latencies * 0.5 + 2 * size / 1e6] * workers)
    spec = ClusterSpec(step_s=0.01, bandwidth=1e6, latency_s=1e-3)
    ring = [float(each("gossip(ring)", spec, workers=n)[0][0, 0]) for n in (4, 16, 40)]
    assert ring == pytest.approx([ring[0]] * 3, rel=1e-12)
    bulk = [float(each("bulk", spec, workers=n)[0][0, 0]) for n in (4, 16, 40)]
    assert bulk[0] < bulk[1] < bulk[2]


def test_messages_take_the_busier_direction_of_a_link() -> None:
    clock = Clock(ClusterSpec(bandwidth=100.0, latency_s=1.0), 3)
    clock.launch()
    clock.neighbor_exchange(
        torch.tensor([100, 200, 400]), torch.tensor([[1, -1, 1], [2, -1, -1]]), False
    )  # 0 hears 1 and 2, 2 hears 1
    assert clock.net.tolist() == [1 + 6.0, 1 + 4.0, 1 + 4.0]  # in 600; out 2 × 200; out 400, in 200
    clock = Clock(ClusterSpec(bandwidth=100.0, latency_s=1.0), 2)
    clock.launch()
    clock.all_to_all(torch.tensor([0, 100, 300, 0]), Subgroups.world(2), announced=True)
    assert clock.net.tolist() == [2 + 3.0] * 2
    clock.all_gather(torch.tensor([100, 200]), Subgroups.world(2), announced=False)
    assert clock.net.tolist() == [5 + 1 + 2.0] * 2


def test_messages_are_those_that_the_ledger_counts() -> None:
    cluster = VirtualCluster(4, spec=ClusterSpec(bandwidth=1000.0))
    assert cluster.clock is not None
    cluster.clock.launch()
    message = Message((torch.zeros(4, 100),))
    cluster.all_gather(message, cluster.world)
    assert cluster.clock.net.tolist() == pytest.approx((cluster.ledger.bytes_sent / 1000).tolist())
    before = cluster.clock.net
    cluster.neighbor_exchange(message, torch.tensor([[1, 2, 3, 0]]))
    assert (cluster.clock.net - before).tolist() == pytest.approx((cluster.ledger.bytes_sent / 1000 - before).tolist())
    before = cluster.clock.net
    already = cluster.ledger.bytes_sent
    varying = Message((torch.zeros(16, 100),), torch.randint(1, 100, (16, 1)))
    cluster.all_to_all(varying, cluster.world)
    took, sent = cluster.clock.net - before, (cluster.ledger.bytes_sent - already) / 1000
    assert float(took[0]) >= float(sent.max()) * (1 - 1e-6) > 0


def test_workers_of_one_host_use_its_link_and_the_slowest_link_decides() -> None:
    spec = ClusterSpec(bandwidth=100.0, latency_s=1.0, host_size=2, host_bandwidth=1000.0, host_latency_s=0.1)

    def ring(members: list[list[int]]) -> list[float]:
        clock = Clock(spec, 4)
        clock.launch()
        clock.ring(200, Subgroups(torch.tensor(members)))
        return clock.net.tolist()

    assert ring([[0, 1], [2, 3]]) == pytest.approx([2 * 0.1 + 0.2] * 4)
    assert ring([[0, 2], [1, 3]]) == pytest.approx([2 * 1 + 2.0] * 4)
    assert ring([[0, 1, 2, 3]]) == pytest.approx([6 * (1 + 0.1) / 2 + 2.0] * 4)  # every other hop stays on a host
    clock = Clock(spec, 4)
    clock.launch()
    clock.neighbor_exchange(torch.full((4,), 100), torch.tensor([[1, 0, -1, -1]]), False)
    assert clock.net.tolist() == pytest.approx([0.2, 0.2, 0, 0])
    clock.neighbor_exchange(torch.full((4,), 100), torch.tensor([[2, -1, 0, -1]]), False)
    assert clock.net.tolist() == pytest.approx([2.2, 0.2, 2.2, 0])


def test_hosts_with_fast_links_make_hierarchical_faster_than_a_flat_ring() -> None:
    spec = ClusterSpec(step_s=0.01, bandwidth=1e6, latency_s=1e-3, host_size=4, host_bandwidth=1e9, host_latency_s=1e-6)
    flat, _ = each("local(1)", spec, workers=16)
    hosts, trained = each("local(1) + hierarchical(allreduce, allreduce)", spec, workers=16)
    assert trained.cluster.host_size == 4
    assert float(hosts[0, 0]) < float(flat[0, 0]) / 2
    assert VirtualCluster(16, host_size=8, spec=spec).host_size == 8


# --- who waits for whom ----------------------------------------------------------------------------------------------------


def test_one_slow_worker_makes_bulk_as_slow_as_itself_and_the_others_wait() -> None:
    figures, _ = each("bulk", ClusterSpec(step_s=0.1, slowdown=(1, 1, 1, 4)), rounds=5)
    assert figures[:, 0].tolist() == pytest.approx([5 * 0.4] * 4)
    assert figures[:, 1].tolist() == pytest.approx([5 * 0.3] * 3 + [0])
    assert figures[:, 2].tolist() == pytest.approx([0] * 4, abs=1e-12)


def test_in_gossip_only_partners_wait() -> None:
    clock = Clock(ClusterSpec(step_s=1.0, slowdown=(1, 1, 1, 5, 1, 1)), 6)
    clock.compute(0)
    clock.launch()
    clock.neighbor_exchange(torch.full((6,), 1), torch.stack([(torch.arange(6) + o) % 6 for o in (1, 5)]), False)
    clock.wait()
    assert clock.now.tolist() == [1, 1, 5, 5, 5, 1]
    assert clock.take()[:, 1].tolist() == [0, 0, 4, 0, 4, 0]
    clock = Clock(ClusterSpec(step_s=1.0, slowdown=(5, 1, 1)), 3)
    clock.compute(0)
    clock.launch()
    clock.neighbor_exchange(torch.full((3,), 1), torch.tensor([[1, -1, -1]]), False)  # 1 sends to 0, which is not there yet
    clock.wait()
    assert clock.now.tolist() == [5, 5, 1]


def test_local_steps_hide_their_mean_behind_computing() -> None:
    fast, _ = each("local(4)", ClusterSpec(step_s=0.1, bandwidth=1e6, latency_s=1e-3), rounds=8)
    assert fast[:, 0].tolist() == pytest.approx([0.8] * 4)
    assert fast[:, 2].tolist() == [0.0] * 4
    assert fast[:, 3].tolist() == pytest.approx([2 * (6e-3 + ring_bytes(4 * PARAMETERS, 4) / 1e6)] * 4)
    slow, _ = each("local(4)", ClusterSpec(step_s=0.001, bandwidth=1e6, latency_s=1e-3), rounds=8)
    exchange = 6e-3 + ring_bytes(4 * PARAMETERS, 4) / 1e6
    assert slow[:, 2].tolist() == pytest.approx([2 * (exchange - 0.001)] * 4)
    after, _ = each("local(4, mean=after)", ClusterSpec(step_s=0.1, bandwidth=1e6, latency_s=1e-3), rounds=8)
    assert after[:, 2].tolist() == pytest.approx([2 * exchange] * 4)


def test_an_exchange_that_overlaps_steps_is_hidden_behind_all_of_them() -> None:
    exchange, overlapped = 6e-3 + ring_bytes(4 * PARAMETERS, 4) / 1e6, "diloco(4, overlap={})"
    spec = ClusterSpec(step_s=0.004, bandwidth=1e6, latency_s=1e-3)
    assert 2 * 0.004 < exchange < 4 * 0.004
    for steps, exposed in ((0, exchange), (1, exchange - 0.004), (2, exchange - 0.008), (4, 0.0)):
        figures, _ = each(overlapped.format(steps), spec, rounds=8)
        landed = 1 if steps else 2  # with an overlap the second exchange, after step 8, still travels at the end
        assert figures[:, 2].tolist() == pytest.approx([landed * exposed] * 4, abs=1e-12), steps
        assert figures[:, 3].tolist() == pytest.approx([landed * (exchange - exposed)] * 4, abs=1e-12), steps


def test_computing_and_an_exchange_without_a_core_to_spare_delay_each_other() -> None:
    def took(contention: float, transfer_s: float) -> float:
        clock = Clock(ClusterSpec(step_s=2.0, bandwidth=1.0, link_contention=contention), 2)
        clock.launch()
        clock.ring(transfer_s, Subgroups.world(2))
        clock.compute(0)
        clock.wait()
        return float(clock.now[0])

    assert (took(0.0, 1.0), took(0.5, 1.0), took(1.0, 1.0)) == (2.0, 2.5, 3.0)
    assert (took(0.0, 4.0), took(0.5, 4.0), took(1.0, 4.0)) == (4.0, 5.0, 6.0)
    pairs = Clock(ClusterSpec(step_s=2.0, bandwidth=1.0, link_contention=1.0, pairs_contention=0.0), 2)
    pairs.launch()
    pairs.neighbor_exchange(torch.tensor([1.0, 1.0]), torch.tensor([[1, 0]]), False)
    pairs.compute(0)
    pairs.wait()
    assert pairs.now.tolist() == [2.0, 2.0]
    # A bucket that is launched while the backward pass goes on delays it only as long as it travels meanwhile.
    bulk = Clock(ClusterSpec(step_s=3.0, bandwidth=1.0, link_contention=1.0), 2)
    bulk.compute(0)
    bulk.launch(0.5)
    bulk.ring(0.25, Subgroups.world(2))
    bulk.launch(1.0)
    bulk.ring(1.0, Subgroups.world(2))
    bulk.wait()
    assert bulk.now.tolist() == pytest.approx([3.0 + 0.25 + 1.0] * 2)


def test_weights_are_copied_and_messages_mixed_where_a_file_says_so() -> None:
    plain = ClusterSpec(step_s=0.1, coding={"other": (1.0, 0.0)})
    for strategy, name, exchanges in (("local(4)", "local", 2), ("diloco(4)", "weights", 2), ("bulk + gossip", "gossip", 8)):
        without, _ = each(strategy, plain, rounds=8)
        priced, _ = each(strategy, ClusterSpec(step_s=0.1, coding={name: (0.5, 0.0)}), rounds=8)
        assert float(without[0, 0]) == pytest.approx(0.8), "they are no codes"
        assert 0.8 + 0.4 * exchanges - 0.1 <= float(priced[0, 0]) <= 0.8 + 0.5 * exchanges + 1e-9, strategy


def test_shards_on_workers_machines_share_their_links() -> None:
    own, shared = (
        hocket.predict(
            parameters=1e6, step_s=0.01, cluster=ClusterSpec(bandwidth=1e8, servers_on_workers=where), workers=4,
            strategies=["async + server"],
        ).rows[0]
        for where in (False, True)
    )  # fmt: skip
    assert shared.step_s < own.step_s, "one of four workers sends its pushes nowhere"


def test_what_a_step_takes_whatever_its_samples() -> None:
    clock = Clock(ClusterSpec(step_s=1.0, fixed_s=0.4), 1)
    clock.compute(0, 0.5)
    assert clock.now.tolist() == pytest.approx([0.4 + 0.3])


def test_a_bucket_is_launched_when_the_backward_pass_has_produced_it() -> None:
    clock = Clock(ClusterSpec(step_s=3.0, bandwidth=1.0), 2)
    clock.compute(0)
    clock.launch(0.25)  # a third forward, then a quarter of two thirds
    clock.ring(1, Subgroups.world(2))
    assert clock.net.tolist() == [1.5 + 1] * 2
    clock.launch(1.0)
    clock.ring(1, Subgroups.world(2))
    clock.wait()
    assert clock.now.tolist() == [4.0] * 2
    spec = ClusterSpec(step_s=0.01, bandwidth=1e6)
    whole, _ = each("bulk", spec)
    cut, _ = each("bulk", spec, buckets=Buckets(1, 1))  # a bucket for each parameter
    assert float(cut[0, 0]) < float(whole[0, 0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_wait_and_transfer_are_the_seconds_of_every_worker(strategy: str) -> None:
    figures, trained = each(strategy, ROUGH, workers=6, rounds=7)
    computing = sum(ROUGH.step_s * ROUGH.factors(6) * ROUGH.disturbance(6, step, 0) for step in range(7))
    assert (figures[:, 0] - figures[:, 1] - figures[:, 2]).tolist() == pytest.approx(computing.tolist(), rel=1e-9)
    assert float(figures.min()) >= 0
    assert float(figures[:, 1:3].sum()) > 0
    entry = trained.metrics[-1]
    assert entry["seconds"] == pytest.approx(entry["compute_s"] + entry["wait_s"] + entry["transfer_s"])
    assert [entry[n] for n in ("seconds", "wait_s", "transfer_s", "transfer_hidden_s")] == figures.mean(0).tolist()


# --- what decides, and what does not ---------------------------------------------------------------------------------------


def predicted(trained: Training) -> list[tuple[float, ...]]:
    for _ in trained.run():
        pass
    return [tuple(m[n] for n in ("seconds", "compute_s", "wait_s", "transfer_s", "transfer_hidden_s")) for m in trained.metrics]


def test_the_seed_decides_and_nothing_else() -> None:
    once, again = (predicted(training("gossip + topk(0.1)", ROUGH, epochs=2)) for _ in range(2))
    assert once == again
    assert once != predicted(training("gossip + topk(0.1)", ROUGH, epochs=2, seed=1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clock_changes_nothing_else(strategy: str) -> None:
    with_clock, without = training(strategy, ROUGH), training(strategy, None)
    predicted(with_clock)
    assert {m for line in predicted(without) for m in line} == {None}
    same = ("accuracy", "loss", "bytes_sent", "exchanges")
    assert [[m[n] for n in same] for m in with_clock.metrics] == [[m[n] for n in same] for m in without.metrics]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rounds", [7, 8])  # with and without an exchange under way at the end of an epoch
def test_a_training_that_was_stopped_reports_the_seconds_of_one_that_was_not(strategy: str, rounds: int) -> None:
    whole = predicted(training(strategy, ROUGH, rounds=rounds, epochs=3))
    first = training(strategy, ROUGH, rounds=rounds, epochs=3)
    for _ in range(2):
        next(first.run())
        with first.cluster.uncounted():
            state = copy.deepcopy(first.state_dict())
        first = training(strategy, ROUGH, rounds=rounds, epochs=3)
        first.load_state_dict(state)
    assert predicted(first) == whole


@pytest.mark.parametrize("strategy", ["local(3)", "gossip", "bulk"])
def test_evaluations_and_checkpoints_take_no_virtual_time(strategy: str) -> None:
    watched, left_alone = (
        training(strategy, ROUGH, rounds=7, epochs=3),
        training(strategy, ROUGH, rounds=7, epochs=3, evaluate=False),
    )
    for _ in watched.run():
        with watched.cluster.uncounted():
            watched.state_dict()
        with watched.replicas.averaged():
            pass
    assert predicted(watched) == predicted(left_alone)


def test_fewer_samples_take_less_time() -> None:
    figures, _ = each("bulk", ClusterSpec(step_s=0.1), rounds=2.5)
    assert figures[:, 0].tolist() == pytest.approx([0.25] * 4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES[:1] + ["local(3)", "gossip", "hierarchical(allreduce, gossip, size=2)"])
def test_the_device_does_not_matter(strategy: str) -> None:
    spec = ClusterSpec(jitter=0.2, bandwidth=1e6, latency_s=1e-3, host_size=2, host_bandwidth=1e7)
    assert predicted(training(strategy, spec, epochs=2, device="cuda")) == predicted(training(strategy, spec, epochs=2))


# --- how many operations a step has ----------------------------------------------------------------------------------------


def test_operations_are_counted_forward_and_backward() -> None:
    x, y = samples(10)
    forward = 2 * (FEATURES * 50 + 50 * 2)
    assert step_flops(net(), F.cross_entropy, x, y, 100) == 100 * (2 * forward + 2 * 50 * 2)  # and once for the hidden values
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 2))
    before = copy.deepcopy(model.state_dict())
    image = torch.randn(5, 1, 8, 8)
    flops = step_flops(model, F.cross_entropy, image, y[:5], 10)
    assert flops == 10 * (2 * 2 * 4 * 9 * 64 + 3 * 2 * 4 * 64 * 2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "the model is left as it was"


def test_where_nothing_can_be_counted_parameters_are() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :2] * self.by

    x, y = samples(10)
    assert step_flops(Scale(), F.cross_entropy, x, y, 7) == 6 * 2 * 7


def test_a_step_takes_its_operations_or_what_the_spec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = training("bulk", ClusterSpec(flops=1e6))
    assert counted.cluster.clock is not None
    flops = step_flops(net(), F.cross_entropy, *samples(2), BATCH)
    assert counted.cluster.clock.step_s == flops / 1e6
    monkeypatch.setattr(loop, "step_flops", lambda *_: pytest.fail("nobody asked"))
    told = training("bulk", ClusterSpec(step_s=0.5))
    assert told.cluster.clock is not None
    assert told.cluster.clock.step_s == 0.5
    assert training("bulk", None).cluster.clock is None


# --- settings --------------------------------------------------------------------------------------------------------------


def test_settings_describe_a_cluster_for_virtual_workers_only(tmp_path: Path) -> None:
    assert RunSettings.of(virtual=True).spec is None
    spec = RunSettings.of(virtual=True, cluster="1gbit", slowdown="1, 4").spec
    assert spec is not None
    assert spec.slowdown == (1.0, 4.0)
    assert spec.bandwidth == 125e6
    (tmp_path / "mine.toml").write_text('[link]\nlatency = "3ms"\n[host]\nsize = 2\n')
    cluster = RunSettings.of(virtual=True, workers=4, cluster=str(tmp_path / "mine.toml")).virtual_cluster("cpu")
    assert cluster.host_size == 2
    assert cluster.clock is not None
    assert cluster.clock.spec.latency_s == 3e-3
    for options, words in (
        (dict(cluster="1gbit"), "describes virtual workers"),
        (dict(slowdown="1,0.5"), "can only be made slower"),
        (dict(virtual=True, slowdown="1,2"), "only with cluster=, such as 1gbit"),
        (dict(virtual=True, cluster="1gbit", slowdown="1,,2"), "commas"),
        (dict(virtual=True, cluster="1gbit", slowdown="0"), "above 0"),
        (dict(virtual=True, cluster="1gbi"), "did you mean '1gbit'"),
    ):
        with pytest.raises(HocketError, match=words):
            RunSettings.of(**options)


@pytest.mark.parametrize("cluster", ["1gbit", hocket.ClusterSpec.parse("1gbit")])
def test_simulate_predicts_for_a_cluster(cluster: str | ClusterSpec) -> None:
    x, y = samples(64)
    run = hocket.simulate(net, F.cross_entropy, (x, y), workers=4, batch_size=4, cluster=cluster)
    assert run.ledger.seconds is not None
    assert math.isfinite(run.ledger.seconds)
    assert hocket.simulate(net, F.cross_entropy, (x, y), workers=4, batch_size=4).ledger.seconds is None
