"""Laws of workers that do not go in step, on virtual workers with a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.cluster import VirtualCluster
from hocket.cluster.message import framed
from hocket.cluster.spec import ClusterSpec
from hocket.data.base import DataSet, identity
from hocket.drivers.simulation import Call, Delivery
from hocket.errors import HocketError
from hocket.files import sealed, unsealed
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import weight_of
from hocket.programs.server.push_encoder import read
from hocket.programs.server.shard import AveragingShard
from hocket.programs.server.wire import as_messages, gradients_of
from hocket.strategy import Strategy
from hocket.train.asynchronous import AsyncReplicas, AsyncSimulation
from hocket.train.asynchronous.gossip import GossipProtocol
from hocket.train.asynchronous.servers import ServerProtocol
from hocket.train.engines import LoopEngine
from hocket.train.loop import TrainingPlan
from hocket.transport.frame import Envelope, Kind
from virtual.methods import COMPRESSION, FREE
from virtual.world import Tiny, seeded, sgd

UNEVEN = ClusterSpec(step_s=0.01, slowdown=(1, 1, 1, 4), jitter=0.1, bandwidth=1e7, latency_s=1e-4)
EVEN = ClusterSpec(step_s=1.0)
SLOW = ClusterSpec(step_s=0.01, bandwidth=1e4, latency_s=1e-4)
"""A message takes longer than many steps."""


def _data(samples: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return torch.randn(samples, 4, generator=generator) + 2 * F.one_hot(y, 4), y


def _simulate(
    strategy: str, workers: int = 4, spec: ClusterSpec = UNEVEN, epochs: int = 2, **options: Any
) -> hocket.train.simulate.Run:
    given_ = {"optimizer": sgd(0.1, momentum=0.9), "batch_size": 4, **options}
    return hocket.simulate(
        given_.pop("model", Tiny),
        F.cross_entropy,
        _data(),
        strategy=strategy,
        workers=workers,
        cluster=spec,
        epochs=epochs,
        **given_,
    )


def _weights(run: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def _training(
    strategy: str,
    workers: int = 4,
    spec: ClusterSpec = UNEVEN,
    epochs: int = 2,
    make: Callable = Tiny,
    optimizer: Callable | None = None,
    **plan: Any,
) -> AsyncSimulation:
    cluster = VirtualCluster(workers, spec=spec)
    model = seeded(make)

    def engine(layout: Any) -> LoopEngine:
        return LoopEngine(model, F.cross_entropy, layout)

    x, y = _data()
    replicas = AsyncReplicas(model, optimizer or sgd(0.1, momentum=0.9), Strategy.parse(strategy), cluster, engine=engine)
    data = DataSet("tiny", (x, y), (x, y), 3, identity)
    return AsyncSimulation(replicas, cluster, data, F.cross_entropy, TrainingPlan(epochs, 4, **plan))


def _global(training: AsyncSimulation) -> list[Tensor]:
    return training.protocol.global_weights(0)[0]


def _servers(training: AsyncSimulation) -> ServerProtocol:
    assert isinstance(training.protocol, ServerProtocol)
    return training.protocol


def _peers(training: AsyncSimulation) -> list[GossipPeer]:
    assert isinstance(training.protocol, GossipProtocol)
    return training.protocol.workers


def _under_way(training: AsyncSimulation, kind: Kind) -> list[Delivery]:
    """The messages of a kind that have been sent and have not arrived."""
    events = [event for _, _, event in sorted(training.simulation.queue, key=lambda entry: entry[:2])]
    return [event for event in events if isinstance(event, Delivery) and event.message.kind == kind]


def _on_computed(training: AsyncSimulation, look: Callable[[int], None]) -> None:
    """Call ``look(worker)`` whenever a worker's gradient is there."""
    computed = training.simulation.on_call

    def watched(call: Call) -> None:
        computed(call)
        look(call.node)

    training.simulation.on_call = watched


# --- equalities ------------------------------------------------------------------------------------------------------------


ALONE = (
    "bulk + server",
    "ssp(0)",
    "ssp(3) + server(2)",
    "async",
    "downpour(1, 1, overlap=False)",
    "asyncdiloco(4, lr=1, momentum=0)",
    "stale(1)",
    "async + gossip",
    "async + gossip(pushsum)",
)


@pytest.mark.parametrize("strategy", ALONE)
def test_one_worker_equals_plain_training(strategy: str) -> None:
    exact = {"rtol": 0, "atol": 0} if "diloco" not in strategy else {"rtol": 1e-5, "atol": 1e-6}  # w − (w − v) is rounded
    torch.testing.assert_close(_weights(_simulate(strategy, 1)), _weights(_simulate("bulk", 1)), **exact)


@pytest.mark.parametrize("optimizer", [sgd(0.1), lambda params: torch.optim.AdamW(params, 0.01)])
def test_one_worker_of_asynchronous_diloco_equals_diloco(optimizer: Callable) -> None:
    one, two = (
        _simulate(f"{name}(4, lr=0.7, momentum=0.6)", 1, EVEN, epochs=1, optimizer=optimizer) for name in ("asyncdiloco", "diloco")
    )
    torch.testing.assert_close(_weights(one), _weights(two), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["bulk + server", "bulk + server(3)", "ssp(0) + server(2)"])
def test_pushes_that_wait_for_each_other_equal_bulk(strategy: str) -> None:
    """Bit for bit, uneven last rounds and all: the shards sum in worker order and run the workers' own optimiser."""
    bulk, served = _simulate("bulk", batch_size=7), _simulate(strategy, batch_size=7)
    assert torch.equal(_weights(bulk), _weights(served))
    assert [m["accuracy"] for m in bulk.metrics] == [m["accuracy"] for m in served.metrics]
    for a, b in zip(bulk.metrics, served.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["async", "downpour(2, 3)", "ssp(2)", "asyncdiloco(2, quorum=2)"])
def test_the_number_of_shards_changes_nothing_but_time(strategy: str) -> None:
    free = ClusterSpec(step_s=0.01, slowdown=(1, 1, 1, 4), jitter=0.1)
    one, three = _simulate(f"{strategy} + server", spec=free), _simulate(f"{strategy} + server(3)", spec=free)
    assert torch.equal(_weights(one), _weights(three))


@pytest.mark.parametrize("strategy", ["async", "async + gossip"])
def test_progress_is_told_once_per_round_of_mini_batches(strategy: str) -> None:
    told: list[Any] = []
    training = _training(strategy)
    list(training.run(told.append))
    assert [progress.step for progress in told] == list(range(1, training.steps + 1))
    assert {progress.steps for progress in told} == {training.steps}


@pytest.mark.parametrize("strategy", FREE)
def test_the_same_seed_gives_the_same_run(strategy: str) -> None:
    one, two = _simulate(strategy), _simulate(strategy)
    assert torch.equal(_weights(one), _weights(two))
    assert [{**m, "wall_s": 0} for m in one.metrics] == [{**m, "wall_s": 0} for m in two.metrics]
    assert not torch.equal(_weights(one), _weights(_simulate(strategy, seed=1)))


RESUMED = [(text, UNEVEN) for text in FREE]
RESUMED += [
    ("async + gossip(pushsum)", SLOW),
    ("async(overlap=True) + topk(0.1)", SLOW),
    ("async(overlap=True) + server(2) + topk(0.1)", UNEVEN),
]


@pytest.mark.parametrize(("strategy", "spec"), RESUMED)
def test_resume_equals_never_having_stopped(strategy: str, spec: ClusterSpec) -> None:
    whole = _training(strategy, spec=spec, epochs=3)
    list(whole.run())
    first = _training(strategy, spec=spec, epochs=3)
    next(first.run())
    kept = unsealed(sealed(first.state_dict()))
    list(first.run())
    second = _training(strategy, spec=spec, epochs=3)
    second.load_state_dict(kept)
    list(second.run())
    for training in (first, second):
        assert [{**m, "wall_s": 0} for m in training.metrics] == [{**m, "wall_s": 0} for m in whole.metrics]
        for a, b in zip(_global(training), _global(whole), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", FREE)
def test_a_training_that_is_over_can_be_made_longer(strategy: str) -> None:
    short = _training(strategy, epochs=1)
    list(short.run())
    longer = _training(strategy, epochs=3)
    longer.load_state_dict(short.state_dict())
    list(longer.run())
    assert [m["epoch"] for m in longer.metrics] == [1, 2, 3]
    assert longer.protocol.progress == 3 * longer.batches.per_epoch
    assert min(longer._begun) > max(1, min(short._begun)), "everybody goes on"


@pytest.mark.parametrize("strategy", FREE)
def test_how_many_gradients_are_computed_at_a_time_decides_nothing(strategy: str) -> None:
    lazy, eager = _training(strategy), _training(strategy)
    begin = eager.replicas.begin

    def at_once(worker: int, minibatch: Any) -> None:
        begin(worker, minibatch)
        eager.compute(worker)

    eager.replicas.begin = at_once  # type: ignore[method-assign]
    list(lazy.run())
    list(eager.run())
    for a, b in zip(_global(lazy), _global(eager), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", ["async", "downpour(2, 2)", "async + gossip"])
def test_all_rows_at_once_equal_one_after_another(strategy: str) -> None:
    """The engine of GPUs, here on a CPU: it always computes all rows, and puts back those of workers that do not wait."""
    loop, rows = _simulate(strategy), _simulate(strategy, engine="vmap")
    torch.testing.assert_close(_weights(loop), _weights(rows), rtol=1e-4, atol=1e-5)
    assert loop.metrics[-1]["seconds"] == rows.metrics[-1]["seconds"]


# --- time ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FREE)
def test_seconds_add_up(strategy: str) -> None:
    for m in _simulate(strategy).metrics:
        assert m["compute_s"] + m["wait_s"] + m["transfer_s"] == pytest.approx(m["seconds"], rel=1e-9)
        assert min(m["compute_s"], m["wait_s"], m["transfer_s"], m["transfer_hidden_s"]) >= 0
        assert m["bytes_sent"] > 0


def _seconds(strategy: str, spec: ClusterSpec, **options: Any) -> float:
    return sum(m["seconds"] for m in _simulate(strategy, spec=spec, epochs=8, batch_size=2, **options).metrics)


def test_a_slow_worker_holds_up_those_who_wait_for_it_and_nobody_else() -> None:
    """One of four takes four times as long; links cost nothing. Bulk goes at its pace, async at everybody's: 3.25 times as fast.

    (A little more than four times: otherwise it depends on who is first by a hair whether the slow one begins another step before
    a meeting.) The last epoch is longer: the slow worker still has the mini-batches that its last answer gave it, as a real one.
    """
    spec = ClusterSpec(step_s=1.0, slowdown=(1, 1, 1, 4.01))

    def but_last(strategy: str) -> float:
        return sum(m["seconds"] for m in _simulate(strategy, spec=spec, epochs=8, batch_size=2).metrics[:-1])

    bulk = _seconds("bulk + server", spec)
    assert bulk == pytest.approx(4.01 * 12 * 8)
    for strategy in ("async", "downpour(4, 4)", "stale(4)"):
        assert but_last("bulk + server") / but_last(strategy) == pytest.approx(3.25, abs=0.05)
        assert _seconds(strategy, spec) - but_last(strategy) < 3 * 4.01 * 4, "the last epoch ends soon"
    assert bulk / _seconds("ssp(4)", spec) == pytest.approx(1.0, abs=0.02)


def test_ssp_hides_transient_stragglers() -> None:
    spec = ClusterSpec(step_s=1.0, stragglers=0.1, straggle=5)
    assert _seconds("bulk + server", spec) / _seconds("ssp(4)", spec) > 1.3


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_nobody_is_further_ahead_than_allowed(lead: int) -> None:
    training = _training(f"ssp({lead})", spec=UNEVEN, epochs=3)
    furthest = 0

    def look(worker: int) -> None:
        nonlocal furthest
        steps = [w.step for w in _servers(training).workers]
        furthest = max(furthest, steps[worker] - min(steps))

    begin = training.replicas.begin

    def begun(worker: int, minibatch: Any) -> None:
        look(worker)
        begin(worker, minibatch)

    training.replicas.begin = begun  # type: ignore[method-assign]
    list(training.run())
    assert furthest == lead


def test_staleness_is_counted() -> None:
    """Equal workers, nothing else: each push finds the updates of the three others since its fetch."""
    ages = _simulate("async", spec=EVEN).metrics[-1]["staleness"]
    assert set(ages) == {"3"}
    assert set(_simulate("bulk + server", spec=EVEN).metrics[-1]["staleness"]) == {"0"}
    assert _simulate("stale(2)").metrics[-1].get("staleness") is None


@pytest.mark.parametrize("strategy", ["async(overlap=True)", "downpour(1, 1)", "async(overlap=True) + server(2)"])
def test_overlap_makes_gradients_one_step_of_everybody_more_stale(strategy: str) -> None:
    """The weights of a gradient were asked for before the gradient ahead of it was pushed: 3 others, then all 4 once more."""
    first, second = (m["staleness"] for m in _simulate(strategy, spec=EVEN).metrics)
    assert first == {**{str(age): 1 for age in range(7)}, "7": 17}
    assert second == {"7": 24}


GOSSIP = ("async + gossip", "async + gossip(ring)", "async + gossip(random)", "async + gossip(pushsum)")


@pytest.mark.parametrize("strategy", GOSSIP)
def test_without_servers_the_age_of_a_gradient_is_what_came_from_others_meanwhile(strategy: str) -> None:
    """Every gradient has one, and one who is alone hears of nobody."""
    alone, many = (_training(strategy, workers) for workers in (1, 4))
    assert [m["staleness"] for m in alone.run()] == [{"0": alone.batches.per_epoch}] * 2
    found = list(many.run())
    assert sum(count for m in found for count in m["staleness"].values()) == len(many.batches)
    heard = sum(int(age) * count for m in found for age, count in m["staleness"].items())
    assert 0 < heard <= len(many.batches) * (2 if strategy in GOSSIP[:3] else 1), "one call or one half for each gradient"


@pytest.mark.parametrize("strategy", ["async + gossip", "async + gossip(pushsum)"])
def test_equal_workers_hear_of_one_other_between_two_gradients(strategy: str) -> None:
    """Exchanges begin after an update, so nobody has heard of another worker at the first gradient."""
    found = [m["staleness"] for m in _simulate(strategy, spec=EVEN).metrics]
    assert found == [{"0": 4, "1": 20}, {"1": 24}]


def test_a_shared_server_is_the_bottleneck_and_shards_widen_it() -> None:
    spec = ClusterSpec(step_s=1e-3, bandwidth=1e6)
    one, two, four = (_seconds(f"async + server({n})", spec, model=lambda: nn.Linear(4, 4000)) for n in (1, 2, 4))
    assert one / two == pytest.approx(2, abs=0.1)
    assert two / four > 1.4  # here the workers' own links begin to be the limit


def test_overlap_hides_the_transfer() -> None:
    spec = ClusterSpec(step_s=0.1, bandwidth=1e5, latency_s=1e-3)
    waiting, overlapping = _simulate("async", spec=spec).ledger, _simulate("async(overlap=True)", spec=spec).ledger
    assert overlapping.seconds < waiting.seconds
    assert overlapping.transfer_hidden_s > 0
    assert waiting.transfer_hidden_s == 0


def test_every_epoch_has_its_loss_where_links_are_slow() -> None:
    """All of the last epoch was computed before the one before it had arrived; together they are the losses of all mini-batches."""
    slow = ClusterSpec(step_s=1e-3, bandwidth=1e4)
    training = _training("downpour(1, 1)", workers=24, spec=slow, epochs=3)
    found: list[float] = []
    _on_computed(training, lambda worker: found.append(float(training.replicas.losses[worker])))
    losses = [metrics["loss"] for metrics in training.run()]
    assert len(losses) == 3
    assert sum(losses) / 3 == pytest.approx(sum(found) / len(found))


def _messages(training: AsyncSimulation) -> list[Envelope]:
    """All messages that are sent from now on."""
    found: list[Envelope] = []
    network = training.protocol.network
    arrivals = network.arrivals

    def watched(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        found.append(message)
        return arrivals(now, source, target, message)

    network.arrivals = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("push, fetch", [(1, 1), (2, 3), (3, 2), (4, 4), (1, 5), (5, 1), (7, 7)])
def test_downpour_pushes_and_fetches_at_the_steps_that_it_is_told(push: int, fetch: int, overlap: bool) -> None:
    """Of 24 steps, and whatever was not pushed by then at the end; the sum of all pushes is the sum of all gradients."""
    training = _training(f"downpour({push}, {fetch}, overlap={overlap})", workers=1, spec=EVEN, epochs=1, optimizer=sgd(0.1))
    total = torch.zeros_like(training.replicas.grads[0][0])
    _on_computed(training, lambda worker: total.add_(training.replicas.grads[0][worker]))
    messages = _messages(training)
    list(training.run())
    while training.simulation.step():
        pass
    pushes = [m for m in messages if m.kind == Kind.PUSH]
    rest = [24] if 24 % push else []
    assert [m.step for m in pushes] == [step for step in range(1, 25) if step % push == 0] + rest
    fetched = [m for m in messages if m.metadata.get("fetch")]
    assert [m.step for m in fetched] == [step for step in range(1, 25) if step % fetch == 0]
    assert all(m.kind == (Kind.PUSH if m.step % push == 0 else Kind.FETCH) for m in fetched)
    torch.testing.assert_close(torch.stack([m.tensors[0] for m in pushes]).sum(0), total)


@pytest.mark.parametrize(
    "strategy", ["async", "async + server(2) + threshold(0.05)", "downpour(2, 3) + server(3) + threshold(0.1) | qsgd(4)"]
)
def test_bytes_are_those_of_every_message_whatever_its_size(strategy: str) -> None:
    """What a push carries, with the length of each part where these vary, and what a reply carries; a bare fetch is a frame."""
    training = _training(strategy, spec=EVEN)
    joined = sum(worker.account.bytes_sent for worker in training.protocol.workers)
    messages = _messages(training)
    list(training.run())
    while training.simulation.step():
        pass
    counted = sum(worker.account.bytes_sent for worker in training.protocol.workers) - joined
    wanted = 0
    for message in messages:
        if message.kind == Kind.PUSH:
            lengths = sum(parts for parts, varying in message.metadata["parts"] if varying)
            assert (lengths > 0) == ("threshold" in strategy)
            wanted += framed(message.tensor_bytes + 4 * lengths)
        elif message.kind in (Kind.FETCH, Kind.REPLY):
            wanted += framed(message.tensor_bytes)
    assert counted == wanted
    sizes = {message.tensor_bytes for message in messages if message.kind == Kind.PUSH}
    assert (len(sizes) > 3) == ("threshold" in strategy)


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_fetched_weights_are_rounded_and_half_as_large(dtype: torch.dtype, bits: str) -> None:
    """Between the shards and the workers only: the shards keep every bit."""
    rounded, full = (_training(f"async + server(fetch={f})", spec=EVEN, epochs=1) for f in (bits, "fp32"))
    found = []
    for training in (rounded, full):
        shard = _servers(training).servers[0].shard
        assert shard is not None
        messages, given_ = _messages(training), []
        give = shard.give

        def giving(worker: int, shard: Any = shard, give: Any = give, given_: list[Tensor] = given_) -> list[Tensor]:
            given_.append(shard.weights[0].clone())
            return give(worker)

        shard.give = giving  # type: ignore[method-assign]
        list(training.run())
        while training.simulation.step():
            pass
        replies = [m for m in messages if m.kind == Kind.REPLY and m.tensors]
        assert len(given_) == len(replies) == 24
        found.append((replies, given_, shard.weights[0]))
    (replies, given_, weights), (plain, _, _) = found
    for reply, sent in zip(replies, given_, strict=True):
        assert reply.tensors[0].dtype == dtype
        assert torch.equal(reply.tensors[0], sent.to(dtype))
    assert [r.tensor_bytes for r in replies] == [r.tensor_bytes // 2 for r in plain]
    assert not torch.equal(weights, weights.to(dtype).float())


def test_a_warm_start_is_made_by_one_worker_alone() -> None:
    training = _training("downpour(1, 1, warm=5)", spec=EVEN)
    order: list[int] = []
    _on_computed(training, order.append)
    list(training.run())
    assert order[:5] == [0] * 5
    assert set(order[5:9]) == {0, 1, 2, 3}


@pytest.mark.parametrize("given_, meant", [("", "delay=4"), ("quorum=2", "quorum=2, delay=2"), ("quorum=3", "quorum=3, delay=2")])
def test_the_momentum_of_an_outer_optimiser_changes_with_one_push_of_each_worker(given_: str, meant: str) -> None:
    texts = [f"asyncdiloco({', '.join(filter(None, ['2', text]))})" for text in (given_, meant, "delay=1")]
    found, expected, other = (_weights(_simulate(text)) for text in texts)
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)


def test_a_quorum_of_one_whose_grace_is_long_waits_for_all() -> None:
    """And one that is short does not: the slow worker's pushes come later than the grace ends."""
    spec = ClusterSpec(step_s=1.0, slowdown=(1, 1, 1, 3))
    texts = ("quorum=4", "grace=1000, delay=1", "grace=0.5, delay=1", "delay=1")
    all_, waits, little, none = (_training(f"asyncdiloco(2, {text})", spec=spec, epochs=3) for text in texts)
    versions = []
    for training in (all_, waits, little, none):
        list(training.run())
        shard = _servers(training).servers[0].shard
        assert shard is not None
        versions.append(shard.version)
    assert all(torch.equal(a, b) for a, b in zip(_global(all_), _global(waits), strict=True))
    assert versions[0] == versions[1] < versions[2] < versions[3]


# --- meetings --------------------------------------------------------------------------------------------------------------


def test_a_meeting_takes_the_mean_weighted_by_steps() -> None:
    """``Σ k_i w_i / Σ k_i`` over the weights after the last steps, summed in worker order, bit for bit; all go on from it."""
    training = _training("stale(4)", workers=2, spec=ClusterSpec(step_s=1.0, slowdown=(1, 3)))
    replicas, protocol = training.replicas, _servers(training)
    local_step, begin = replicas.local_step, replicas.begin
    brought: dict[int, list[Tensor]] = {}
    meetings: list[list[int]] = []

    def stepped(worker: int, lrs: list[float]) -> None:
        local_step(worker, lrs)
        brought[worker] = [w[worker].clone() for w in replicas.weights]

    def begun(worker: int, minibatch: Any) -> None:
        if protocol.workers[worker]._steps_since_meeting == 0:
            assert all(torch.equal(rows[worker], mean[0]) for rows, mean in zip(replicas.weights, _global(training), strict=True))
        begin(worker, minibatch)

    def watch(place: int, shard: AveragingShard) -> None:
        meet = shard._meet

        def met() -> None:
            arrived, version = dict(shard._arrived), shard.version
            meet()
            if shard.version == version:
                return
            steps = [arrived[worker][0] for worker in sorted(arrived)]
            if place == 0:
                meetings.append(steps)
            for b, own in enumerate(shard.weights):
                expected = torch.zeros_like(own)
                for worker, taken in enumerate(steps):
                    part = protocol.workers[worker].slices.cut(b, brought[worker][b])[place]
                    expected += part * (taken / sum(steps))
                assert torch.equal(own, expected)

        shard._meet = met  # type: ignore[method-assign]

    for place, server in enumerate(protocol.servers):
        assert isinstance(server.shard, AveragingShard)
        watch(place, server.shard)
    replicas.local_step, replicas.begin = stepped, begun  # type: ignore[method-assign]
    list(training.run())
    assert meetings[0] == [4, 2]  # the slow one finishes the step in hand
    assert len(meetings) > 2
    assert all(max(steps) <= 4 for steps in meetings)


@settings(max_examples=25)
@given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7), st.integers(0, 3))
def test_partners_always_find_each_other(workers: int, slowdown: list[float], bandwidth: float, seed: int) -> None:
    """Whatever the speeds: the training ends (nobody waits for ever), and averaging alone keeps the mean of the weights."""
    spec = ClusterSpec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip", workers, spec, epochs=1, seed=seed)
    replicas, peers = training.replicas, _peers(training)
    generator = torch.Generator().manual_seed(seed)
    means = [rows.mean(0) for rows in replicas.weights]
    pushed: dict[int, list[Tensor]] = {}

    def once(worker: int, lrs: list[float]) -> None:
        """The first update of each worker is random, all others are zero."""
        if worker not in pushed:
            pushed[worker] = [torch.randn(rows.shape[1], generator=generator) for rows in replicas.weights]
            for rows, update in zip(replicas.weights, pushed[worker], strict=True):
                rows[worker] += update

    replicas.local_step = once  # type: ignore[method-assign]
    list(training.run())
    for b, mean in enumerate(means):
        total = sum(peer.state.x[b] for peer in peers)
        for caller in peers:
            for request in caller.exchanges_open:  # a pair that is half done: the other half is still to come
                decision = peers[request.peer].decisions.get(caller.worker)
                if decision is not None and decision.number == request.message.number and decision.taken:
                    assert decision.reply is not None
                    total = total + (decision.reply.tensors[b] - request.message.tensors[b]) / 2
        expected = mean + sum(updates[b] for updates in pushed.values()) / workers
        torch.testing.assert_close(total / workers, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bandwidth", [1e4, 1e9])
def test_every_call_that_was_answered_is_an_exchange(bandwidth: float) -> None:
    """Whether the caller stood still for it or not, as on real processes."""
    spec = ClusterSpec(step_s=0.01, slowdown=(1.0, 2.0), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip", 4, spec, epochs=2)
    calls = 0
    arrivals = training.protocol.network.arrivals

    def counted_arrivals(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        nonlocal calls
        calls += message.kind == Kind.PUSH
        return arrivals(now, source, target, message)

    first = sum(len(peer.exchanges_open) for peer in _peers(training))
    training.protocol.network.arrivals = counted_arrivals  # type: ignore[method-assign]
    counted = sum(metrics["exchanges"] for metrics in training.run())
    open_ = sum(len(peer.exchanges_open) for peer in _peers(training))
    assert counted == first + calls - open_ > 0


# --- push-sum ----------------------------------------------------------------------------------------------------------------

CLUSTERS = given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7))


def _push_sum(workers: int, slowdown: list[float], bandwidth: float) -> AsyncSimulation:
    spec = ClusterSpec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    return _training("async + gossip(pushsum)", workers, spec, epochs=1)


@settings(max_examples=25)
@CLUSTERS
def test_push_sum_loses_nothing(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """Whatever the speeds: push-sum weights add up to N, values to what they were, with what is on its way."""
    training = _push_sum(workers, slowdown, bandwidth)
    peers, generator = _peers(training), torch.Generator().manual_seed(1)
    for peer in peers:
        peer.state.x = [x + torch.randn(x.shape, generator=generator) for x in peer.state.x]
    totals = [sum(peer.state.x[b] for peer in peers) for b in range(len(peers[0].state.x))]
    training.replicas.local_step = lambda worker, lrs: None  # type: ignore[method-assign]
    list(training.run())
    halves = [delivery.message.tensors for delivery in _under_way(training, Kind.PUSH)]
    weight = sum(peer.state.push_sum_weight for peer in peers) + sum(weight_of(half[-1]) for half in halves)
    assert weight == workers, "halving and adding are exact"
    for b, total in enumerate(totals):
        found = sum(peer.state.x[b] for peer in peers) + sum(half[b] for half in halves)
        torch.testing.assert_close(found, total, rtol=0, atol=1e-4)


@settings(max_examples=15)
@CLUSTERS
def test_push_sum_is_that_of_the_paper(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """Stochastic gradient push, in double precision, in the order of events: ``x += u``; halve ``x`` and ``ω``; add what arrives.

    The model shows ``x / ω``. Halves, push-sum weights, exchanges and bytes are those of these equations.
    """
    training = _push_sum(workers, slowdown, bandwidth)
    replicas, peers, simulation = training.replicas, _peers(training), training.simulation
    generator = torch.Generator().manual_seed(1)
    x = [torch.cat([row.double() for row in peer.state.x]) for peer in peers]
    weights = [1.0] * workers
    taken, sent_bytes = 0, 0
    arrivals = training.protocol.network.arrivals

    def stepped(worker: int, lrs: list[float]) -> None:
        shown = torch.cat([rows[worker] for rows in replicas.weights]).double()
        torch.testing.assert_close(shown, x[worker] / weights[worker], rtol=1e-4, atol=1e-4)
        update = [torch.randn(rows.shape[1], generator=generator) for rows in replicas.weights]
        for rows, part in zip(replicas.weights, update, strict=True):
            rows[worker] += part
        x[worker] = x[worker] + torch.cat(update).double()

    def sent(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        nonlocal sent_bytes
        sent_bytes += framed(message.tensor_bytes)
        if message.kind == Kind.PUSH:
            x[source[1]], weights[source[1]] = x[source[1]] / 2, weights[source[1]] / 2
            half = torch.cat(message.tensors[:-1]).double()
            torch.testing.assert_close(half, x[source[1]], rtol=1e-4, atol=1e-4)
            assert weight_of(message.tensors[-1]) == weights[source[1]]
        return arrivals(now, source, target, message)

    replicas.local_step = stepped  # type: ignore[method-assign]
    training.protocol.network.arrivals = sent  # type: ignore[method-assign]

    def watch(peer: GossipPeer) -> None:
        handle = peer.on_message

        def on_message(sender: Any, message: Envelope) -> None:
            nonlocal taken
            if message.kind == Kind.PUSH:
                x[peer.worker] = x[peer.worker] + torch.cat(message.tensors[:-1]).double()
                weights[peer.worker] += weight_of(message.tensors[-1])
            taken += message.kind == Kind.REPLY
            handle(sender, message)
            assert peer.state.push_sum_weight == weights[peer.worker]
            torch.testing.assert_close(torch.cat(peer.state.x).double(), x[peer.worker], rtol=1e-4, atol=1e-4)

        peer.on_message = on_message  # type: ignore[method-assign]

    for peer in peers:
        watch(peer)
    (metrics,) = training.run()
    assert simulation.nodes["worker", 0].program is peers[0]
    assert metrics["exchanges"] == taken
    assert metrics["bytes_sent"] == sent_bytes > 0


@settings(max_examples=25)
@CLUSTERS
def test_push_sum_leaves_nobody_with_little_weight(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """However long halves are on their way: who has less than 1/2 gives none, and to one worker there is one half at a time."""
    training = _push_sum(workers, slowdown, bandwidth)
    least: list[float] = []

    def look(worker: int) -> None:
        least.append(min(peer.state.push_sum_weight for peer in _peers(training)))
        halves = [(delivery.source, delivery.target) for delivery in _under_way(training, Kind.PUSH)]
        assert len(halves) == len(set(halves))

    _on_computed(training, look)
    list(training.run())
    assert min(least) >= 0.25


def test_push_sum_learns_where_halves_are_long_on_their_way() -> None:
    losses = [m["loss"] for m in _simulate("async + gossip(pushsum)", spec=SLOW, epochs=6, optimizer=sgd(0.3)).metrics]
    assert losses[-1] < 0.7 * losses[0]


# --- the product -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["async", "ssp(2) + server(shards=3)", "downpour(2, 3) + server(2)", "bulk + server(2)"])
def test_every_code_can_be_pushed(strategy: str) -> None:
    """The weights on the shards are those of the start, less all pushes as the code says they are to be read, times the rate.

    With error feedback that is all gradients, less what the workers still hold back (unless that decays).
    """
    accepted = 0
    for compression in COMPRESSION:
        try:
            parsed = Strategy.parse(f"{strategy} + {compression}")
        except HocketError:
            continue
        accepted += 1
        training = _training(str(parsed), epochs=1, optimizer=sgd(0.1))
        moved = -_global(training)[0][0]
        gradients = torch.zeros_like(moved)
        _on_computed(training, lambda worker, g=gradients, t=training: g.add_(t.replicas.grads[0][worker]))
        messages = _messages(training)
        list(training.run())
        while training.simulation.step():
            pass
        moved += _global(training)[0][0]
        encoders = [worker._encoder for worker in _servers(training).workers]
        pushed = torch.zeros_like(moved)
        widths = [[part.shape[-1]] for part in encoders[0].slices.cut(0, pushed)]
        for m in messages:
            if m.kind == Kind.PUSH:
                own = [torch.zeros(width) for width in widths[m.place]]
                parts = gradients_of(parsed, as_messages(m.metadata["parts"], m.tensors), own, m.step, m.sender, 4, 0)
                encoders[0].slices.cut(0, pushed)[m.place].add_(parts[0])
        mean = 4 if parsed.sync.max_staleness == 0 else 1
        torch.testing.assert_close(moved, -0.1 * pushed / mean, rtol=1e-4, atol=1e-5, msg=str(parsed))
        if parsed.compression.uses_error_feedback and parsed.compression.feedback_decay == 1:
            held = sum(encoder.errors[0] for encoder in encoders)
            torch.testing.assert_close(pushed + held, gradients, rtol=1e-4, atol=1e-5, msg=str(parsed))
    assert accepted >= len(COMPRESSION) - 8


@pytest.mark.parametrize("shards", [1, 3])
def test_what_a_code_holds_back_is_pushed_later(shards: int) -> None:
    """With feedback, what was pushed and what is held back add up to all gradients."""
    training = _training(f"async + server({shards}) + topk(0.1)", epochs=1)
    encoder = _servers(training).workers[0]._encoder
    total = torch.zeros_like(training.replicas.grads[0][0])
    sent = torch.zeros_like(total)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        gradient = torch.randn(total.shape, generator=generator)
        total += gradient
        for s, messages in enumerate(encoder.encode(step, [gradient])):
            width = encoder.slices.cut(0, torch.empty(encoder.slices.sizes[0]))[s].numel()
            part = read(training.replicas.strategy, messages[0], width, 0, step, 0, 4, training.plan.seed)
            encoder.slices.cut(0, sent)[s].add_(part)
    torch.testing.assert_close(sent + encoder.errors[0], total, rtol=0, atol=1e-5)


REFUSED = {
    "async + allreduce": "async + server",
    "ssp(2) + gossip": "ssp + server",
    "local(4) + server": "downpour(push=4, fetch=4)",
    "async + server + lowrank(2)": "topk",
    "stale(2) + topk(0.1)": "leave the compression out",
    "async + gossip + topk(0.1)": "bulk + gossip",
    "async + server(shards=0)": "at least one shard",
    "async + server(optimizer=lbfgs)": "adagrad",
    "ssp(-1)": "at least 0",
    "stale(2) + server(optimizer=adagrad)": "server(shards=n)",
    "bulk + gossip(pushsum)": "async + gossip(pushsum)",
    "async + gossip(exponential)": "gossip(ring)",
    "downpour(0)": "at least 1",
    "async(compensation=sometimes)": "taylor",
    "async(compensation=taylor, overlap=True)": "leave one of the two out",
    "async(strength=2)": "taylor and adaptive",
    "async + server(role=sum)": "bulk",
    "downpour + exchange=weights": "leave exchange=weights out",
}


@pytest.mark.parametrize("text, word", REFUSED.items())
def test_what_makes_no_sense_is_refused_with_a_way_out(text: str, word: str) -> None:
    with pytest.raises(HocketError) as caught:
        Strategy.parse(text)
    assert word in str(caught.value)
    assert str(caught.value).endswith(".")


def test_more_shards_than_parameters_are_refused() -> None:
    with pytest.raises(HocketError, match="only 43 parameters"):
        _simulate("async + server(44)")


def test_optimisers_that_look_at_whole_tensors_are_refused_on_shards() -> None:
    with pytest.raises(HocketError, match="role=sum"):
        _simulate("async", optimizer=lambda p: torch.optim.Adafactor(p))


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("strategy", ["async + server(2)", "downpour(2, 2)", "ssp(1) + server(3)"])
def test_the_shards_optimiser_is_torchs_on_the_pushes_in_their_order(strategy: str, name: str) -> None:
    training = _training(strategy, optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.05))
    flat = nn.Parameter(_global(training)[0][0].clone())
    optimizer = getattr(torch.optim, name)([flat], lr=0.05)
    server = _servers(training).servers[0]
    slices, handle = training.protocol.workers[0].slices, server.on_message
    pushes: dict[tuple[int, int], list[Tensor]] = {}

    def on_message(sender: Any, message: Envelope) -> None:
        if message.kind == Kind.PUSH:
            flat.grad = torch.zeros_like(flat)
            for shard, part in enumerate(pushes[message.sender, message.step]):
                slices.cut(0, flat.grad)[shard].copy_(part)
            optimizer.step()
        handle(sender, message)

    server.on_message = on_message  # type: ignore[method-assign]
    arrivals = training.protocol.network.arrivals

    def watched(now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        if message.kind == Kind.PUSH:
            pushes.setdefault((message.sender, message.step), []).append(message.tensors[0])
        return arrivals(now, source, target, message)

    training.protocol.network.arrivals = watched  # type: ignore[method-assign]
    start = flat.detach().clone()
    list(training.run())
    while training.simulation.step():
        pass
    assert torch.equal(_global(training)[0][0], flat.detach())
    assert float((flat.detach() - start).norm()) > 0.3


# --- what a worker has of its own --------------------------------------------------------------------------------------------


class _Unused(nn.Module):
    """A model with a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = Tiny(), nn.Linear(3, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("strategy", ["stale(2)", "stale(3) + server", "async + gossip", "async + gossip(pushsum)"])
def test_an_unused_parameter_does_not_decay(strategy: str, engine: str) -> None:
    """Its gradient stays None on every worker, as in a plain loop, so AdamW leaves it alone."""

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, 0.05, weight_decay=0.5)

    run = _simulate(strategy, spec=EVEN, model=_Unused, optimizer=adamw, engine=engine)
    start = seeded(_Unused)
    torch.testing.assert_close(run.model.unused.weight, start.unused.weight, rtol=1e-6, atol=0)  # type: ignore[union-attr, arg-type]
    assert not torch.allclose(run.model.used.out.weight, start.used.out.weight, rtol=0.05)  # type: ignore[union-attr, arg-type]


def _norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_batch_statistics_belong_to_each_worker() -> None:
    training = _training("async", make=_norm)
    list(training.run())
    tracked = training.replicas.buffers["1.num_batches_tracked"].tolist()
    assert sum(tracked) == len(training.batches)
    assert tracked[0] > 2 * tracked[3]


@pytest.mark.parametrize("strategy", ["async + server(2)", "downpour(2, 2)", "ssp(1)", "stale(2)"])
def test_batch_statistics_of_the_evaluated_model_are_the_mean_of_those_pushed(strategy: str) -> None:
    """Not of those that workers have by now: they go on while an epoch's weights are evaluated."""
    training = _training(strategy, make=_norm, spec=SLOW)
    first = _servers(training).servers[0]
    pushed: dict[int, Tensor] = {}
    means: dict[int, Tensor] = {}
    handle = first.on_message

    def on_message(sender: Any, message: Envelope) -> None:
        if message.kind == Kind.PUSH and message.metadata["buffers"]:
            pushed[message.sender] = message.tensors[-1]
        done = first.epochs.done
        handle(sender, message)
        for epoch in range(done, first.epochs.done):
            means[epoch + 1] = torch.stack([pushed[worker] for worker in sorted(pushed)]).mean(0)

    first.on_message = on_message  # type: ignore[method-assign]
    for metrics in training.run():
        with training.averaged() as model:
            found = torch.cat([model[1].running_mean, model[1].running_var])
        assert torch.equal(found, means[metrics["epoch"]])
    assert len(means) == 2


@pytest.mark.parametrize("strategy", ["async + gossip", "async + gossip(pushsum)"])
def test_batch_statistics_of_workers_without_servers_are_the_mean_of_all(strategy: str) -> None:
    training = _training(strategy, make=_norm)
    for _ in training.run():
        with training.averaged() as model:
            for name in ("running_mean", "running_var"):
                rows = training.replicas.buffers[f"1.{name}"]
                assert torch.equal(getattr(model[1], name), rows.mean(0))
                assert len(rows.unique(dim=0)) == 4, "all differ"
    assert torch.equal(training.replicas.model[1].running_mean, torch.zeros(5)), "the model itself is left alone"  # type: ignore[union-attr, index]
