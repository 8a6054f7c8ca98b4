"""Laws of workers that do not go in step, on virtual workers with a virtual clock."""

from __future__ import annotations

import itertools
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
from hocket.cluster.spec import Spec
from hocket.data.base import DataSet, identity
from hocket.errors import HocketError
from hocket.messages import Envelope, Kind
from hocket.server.exchanges import Halves
from hocket.server.holding import Holding
from hocket.strategy import Strategy
from hocket.train.engines import LoopEngine
from hocket.train.free import FreeTraining
from hocket.train.free.crowd import Crowd
from hocket.train.loop import Plan
from virtual.methods import COMPRESSION, FREE
from virtual.world import Tiny, seeded, sgd

UNEVEN = Spec(step_s=0.01, slowdown=(1, 1, 1, 4), jitter=0.1, bandwidth=1e7, latency_s=1e-4)
EVEN = Spec(step_s=1.0)
SLOW = Spec(step_s=0.01, bandwidth=1e4, latency_s=1e-4)
"""A message takes longer than many steps."""


def _data(samples: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return torch.randn(samples, 4, generator=generator) + 2 * F.one_hot(y, 4), y


def _simulate(strategy: str, workers: int = 4, spec: Spec = UNEVEN, epochs: int = 2, **options: Any) -> hocket.train.simulate.Run:
    given_ = {"optimizer": sgd(0.1, momentum=0.9), "batch": 4, **options}
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
    strategy: str, workers: int = 4, spec: Spec = UNEVEN, epochs: int = 2, make: Callable = Tiny, **plan: Any
) -> FreeTraining:
    cluster = VirtualCluster(workers, spec=spec)
    model = seeded(make)

    def engine(layout: Any) -> LoopEngine:
        return LoopEngine(model, F.cross_entropy, layout)

    x, y = _data()
    crowd = Crowd(model, sgd(0.1, momentum=0.9), Strategy.parse(strategy), cluster, engine=engine)
    return FreeTraining(crowd, cluster, DataSet("tiny", (x, y), (x, y), 3, identity), F.cross_entropy, Plan(epochs, 4, **plan))


# --- equalities ------------------------------------------------------------------------------------------------------------


ALONE = (
    "bulk + server",
    "ssp(0)",
    "ssp(3) + server(2)",
    "async",
    "downpour(1, 1, overlap=False)",
    "stale(1)",
    "async + gossip",
    "async + gossip(pushsum)",
)


@pytest.mark.parametrize("strategy", ALONE)
def test_one_worker_equals_plain_training(strategy: str) -> None:
    torch.testing.assert_close(_weights(_simulate(strategy, 1)), _weights(_simulate("bulk", 1)), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["bulk + server", "bulk + server(3)", "ssp(0) + server(2)"])
def test_pushes_that_wait_for_each_other_equal_bulk(strategy: str) -> None:
    """Bit for bit, uneven last rounds and all: the shards sum in worker order and run the workers' own optimiser."""
    bulk, served = _simulate("bulk", batch=7), _simulate(strategy, batch=7)
    assert torch.equal(_weights(bulk), _weights(served))
    assert [m["accuracy"] for m in bulk.metrics] == [m["accuracy"] for m in served.metrics]
    for a, b in zip(bulk.metrics, served.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)


@pytest.mark.parametrize("strategy", ["async", "downpour(2, 3)", "ssp(2)"])
def test_the_number_of_shards_changes_nothing_but_time(strategy: str) -> None:
    free = Spec(step_s=0.01, slowdown=(1, 1, 1, 4), jitter=0.1)
    one, three = _simulate(f"{strategy} + server", spec=free), _simulate(f"{strategy} + server(3)", spec=free)
    assert torch.equal(_weights(one), _weights(three))


@pytest.mark.parametrize("strategy", FREE)
def test_the_same_seed_gives_the_same_run(strategy: str) -> None:
    one, two = _simulate(strategy), _simulate(strategy)
    assert torch.equal(_weights(one), _weights(two))
    assert [{**m, "wall_s": 0} for m in one.metrics] == [{**m, "wall_s": 0} for m in two.metrics]
    assert not torch.equal(_weights(one), _weights(_simulate(strategy, seed=1)))


@pytest.mark.parametrize(("strategy", "spec"), [*((text, UNEVEN) for text in FREE), ("async + gossip(pushsum)", SLOW)])
def test_resume_equals_never_having_stopped(strategy: str, spec: Spec) -> None:
    whole = _training(strategy, spec=spec, epochs=3)
    list(whole.run())
    first = _training(strategy, spec=spec, epochs=3)
    next(first.run())
    kept = first.state_dict()
    list(first.run())
    second = _training(strategy, spec=spec, epochs=3)
    second.load_state_dict(kept)
    list(second.run())
    for training in (first, second):
        assert [{**m, "wall_s": 0} for m in training.metrics] == [{**m, "wall_s": 0} for m in whole.metrics]
        for a, b in zip(training.scheme.truth(), whole.scheme.truth(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", FREE)
def test_a_training_that_is_over_can_be_made_longer(strategy: str) -> None:
    short = _training(strategy, epochs=1)
    list(short.run())
    longer = _training(strategy, epochs=3)
    longer.load_state_dict(short.state_dict())
    list(longer.run())
    assert [m["epoch"] for m in longer.metrics] == [1, 2, 3]
    assert longer.scheme.counted() == 3 * longer.dealing.per_epoch
    assert min(longer._begun) > max(1, min(short._begun)), "everybody goes on"


@pytest.mark.parametrize("strategy", FREE)
def test_how_many_gradients_are_computed_at_a_time_decides_nothing(strategy: str) -> None:
    lazy, eager = _training(strategy), _training(strategy)
    begin = eager.replicas.begin

    def at_once(worker: int, hand: Any) -> None:
        begin(worker, hand)
        eager.settle(worker)

    eager.replicas.begin = at_once  # type: ignore[method-assign]
    list(lazy.run())
    list(eager.run())
    for a, b in zip(lazy.scheme.truth(), eager.scheme.truth(), strict=True):
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


def _seconds(strategy: str, spec: Spec, **options: Any) -> float:
    return sum(m["seconds"] for m in _simulate(strategy, spec=spec, epochs=8, batch=2, **options).metrics)


def test_a_slow_worker_holds_up_those_who_wait_for_it_and_nobody_else() -> None:
    """One of four takes four times as long; links cost nothing. Bulk goes at its pace, async at everybody's: 3.25 times as fast.

    (A little more than four times: otherwise it depends on who is first by a hair whether the slow one begins another step before
    a meeting.)
    """
    spec = Spec(step_s=1.0, slowdown=(1, 1, 1, 4.01))
    bulk = _seconds("bulk + server", spec)
    assert bulk == pytest.approx(4.01 * 12 * 8)
    assert bulk / _seconds("async", spec) == pytest.approx(3.25, abs=0.1)
    assert bulk / _seconds("downpour(4, 4)", spec) == pytest.approx(3.25, abs=0.15)
    assert bulk / _seconds("stale(4)", spec) == pytest.approx(3.25, abs=0.15)
    assert bulk / _seconds("ssp(4)", spec) == pytest.approx(1.0, abs=0.02)


def test_ssp_hides_transient_stragglers() -> None:
    spec = Spec(step_s=1.0, stragglers=0.1, straggle=5)
    assert _seconds("bulk + server", spec) / _seconds("ssp(4)", spec) > 1.3


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_nobody_is_further_ahead_than_allowed(lead: int) -> None:
    training = _training(f"ssp({lead})", spec=UNEVEN, epochs=3)
    furthest = 0
    begin = training.begin

    def watched(worker: int, now: float) -> bool:
        nonlocal furthest
        steps = [w.step for w in training.scheme.workers]  # type: ignore[attr-defined]
        furthest = max(furthest, steps[worker] - min(steps))
        return begin(worker, now)

    training.begin = watched  # type: ignore[method-assign]
    list(training.run())
    assert furthest == lead


def test_staleness_is_counted() -> None:
    """Equal workers, nothing else: each push finds the updates of the three others since its fetch."""
    ages = _simulate("async", spec=EVEN).metrics[-1]["staleness"]
    assert set(ages) == {"3"}
    assert set(_simulate("bulk + server", spec=EVEN).metrics[-1]["staleness"]) == {"0"}
    assert _simulate("stale(2)").metrics[-1].get("staleness") is None


GOSSIP = ("async + gossip", "async + gossip(ring)", "async + gossip(random)", "async + gossip(pushsum)")


@pytest.mark.parametrize("strategy", GOSSIP)
def test_without_servers_the_age_of_a_gradient_is_what_came_from_others_meanwhile(strategy: str) -> None:
    """Every gradient has one, and one who is alone hears of nobody."""
    alone, many = (_training(strategy, workers) for workers in (1, 4))
    assert [m["staleness"] for m in alone.run()] == [{"0": alone.dealing.per_epoch}] * 2
    found = list(many.run())
    assert sum(count for m in found for count in m["staleness"].values()) == len(many.dealing)
    heard = sum(int(age) * count for m in found for age, count in m["staleness"].items())
    assert 0 < heard <= len(many.dealing) * (2 if strategy in GOSSIP[:3] else 1), "one call or one half for each gradient"


@pytest.mark.parametrize(("strategy", "first"), [("async + gossip", "1"), ("async + gossip(pushsum)", "0")])
def test_equal_workers_hear_of_one_other_between_two_gradients(strategy: str, first: str) -> None:
    """In pairs calls come while everybody computes; halves leave after a gradient, so that nobody has one at the first."""
    found = [m["staleness"] for m in _simulate(strategy, spec=EVEN).metrics]
    assert found[1] == {"1": 24}
    assert found[0] == ({"1": 24} if first == "1" else {"0": 4, "1": 20})


def test_a_shared_server_is_the_bottleneck_and_shards_widen_it() -> None:
    spec = Spec(step_s=1e-3, bandwidth=1e6)
    one, two, four = (_seconds(f"async + server({n})", spec, model=lambda: nn.Linear(4, 4000)) for n in (1, 2, 4))
    assert one / two == pytest.approx(2, abs=0.1)
    assert two / four > 1.4  # here the workers' own links begin to be the limit


def test_overlap_hides_the_transfer() -> None:
    spec = Spec(step_s=0.1, bandwidth=1e5, latency_s=1e-3)
    waiting, overlapping = _simulate("async", spec=spec).ledger, _simulate("async(overlap=True)", spec=spec).ledger
    assert overlapping.seconds < waiting.seconds
    assert overlapping.transfer_hidden_s > 0
    assert waiting.transfer_hidden_s == 0


def test_every_epoch_has_its_loss_where_links_are_slow() -> None:
    """All of the last epoch was computed before the one before it had arrived; together they are the losses of all mini-batches."""
    slow = Spec(step_s=1e-3, bandwidth=1e4)
    training = _training("downpour(1, 1)", workers=24, spec=slow, epochs=3)
    found: list[float] = []
    computed = training.scheme.computed

    def watched(worker: int, now: float) -> None:
        found.append(float(training.replicas.losses[worker]))
        computed(worker, now)

    training.scheme.computed = watched  # type: ignore[method-assign]
    losses = [metrics["loss"] for metrics in training.run()]
    assert len(losses) == 3
    assert sum(losses) / 3 == pytest.approx(sum(found) / len(found))


def test_downpour_pushes_and_fetches_as_rarely_as_told() -> None:
    often, rarely = _simulate("downpour(1, 1)").ledger, _simulate("downpour(6, 6)").ledger
    assert rarely.bytes_sent < often.bytes_sent / 4


def test_a_warm_start_is_made_by_one_worker_alone() -> None:
    training = _training("downpour(1, 1, warm=5)", spec=EVEN)
    order: list[int] = []
    computed = training.scheme.computed

    def watched(worker: int, now: float) -> None:
        order.append(worker)
        computed(worker, now)

    training.scheme.computed = watched  # type: ignore[method-assign]
    list(training.run())
    assert order[:5] == [0] * 5
    assert set(order[5:9]) == {0, 1, 2, 3}


# --- meetings --------------------------------------------------------------------------------------------------------------


def test_a_meeting_takes_the_mean_weighted_by_steps() -> None:
    training = _training("stale(4)", workers=2, spec=Spec(step_s=1.0, slowdown=(1, 3)))
    scheme, crowd = training.scheme, training.replicas
    seen: list[tuple[list[int], list[Tensor]]] = []
    seconds = scheme._seconds  # type: ignore[attr-defined]
    before: list[Tensor] = []
    step_alone = crowd.step_alone

    def stepped(worker: int, rates: list[float]) -> None:
        step_alone(worker, rates)
        before[:] = [w.clone() for w in crowd.weights]

    def met() -> float:
        seen.append((list(scheme.since), [w.clone() for w in crowd.weights]))  # type: ignore[attr-defined]
        if len(seen) == 1:
            shares = torch.tensor(seen[0][0]) / sum(seen[0][0])
            for rows, old in zip(crowd.weights, before, strict=True):
                torch.testing.assert_close(rows[0], (shares.unsqueeze(1) * old).sum(0))
                assert torch.equal(rows[0], rows[1])
        return seconds()

    crowd.step_alone, scheme._seconds = stepped, met  # type: ignore[method-assign, attr-defined]
    list(training.run())
    assert seen[0][0] == [4, 2]  # the slow one finishes the step in hand
    assert all(max(steps) <= 4 for steps, _ in seen)


@settings(max_examples=25)
@given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7), st.integers(0, 3))
def test_partners_always_find_each_other(workers: int, slowdown: list[float], bandwidth: float, seed: int) -> None:
    """Whatever the speeds: the training ends (nobody waits for ever), and averaging alone keeps the mean of the weights."""
    spec = Spec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip", workers, spec, epochs=1, seed=seed)
    crowd = training.replicas
    generator = torch.Generator().manual_seed(seed)
    means = [rows.mean(0) for rows in crowd.weights]
    pushed: dict[int, list[Tensor]] = {}

    def once(worker: int, rates: list[float]) -> None:
        """The first update of each worker is random, all others are zero."""
        if worker not in pushed:
            pushed[worker] = [torch.randn(rows.shape[1], generator=generator) for rows in crowd.weights]
            for rows, update in zip(crowd.weights, pushed[worker], strict=True):
                rows[worker] += update

    crowd.step_alone = once  # type: ignore[method-assign, assignment]
    list(training.run())
    halves = {**training.scheme.answers, **{e[3]: e[5] for e in training._queue if e[2] == "answer"}}  # type: ignore[attr-defined]
    for worker, answer in halves.items():  # a pair that is half done: the other half is still to come
        for rows, theirs in zip(crowd.weights, answer, strict=True):
            rows[worker] = (rows[worker] + theirs) / 2
    for b, (rows, mean) in enumerate(zip(crowd.weights, means, strict=True)):
        expected = mean + sum(updates[b] for updates in pushed.values()) / workers
        torch.testing.assert_close(rows.mean(0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bandwidth", [1e4, 1e9])
def test_every_call_that_was_answered_is_an_exchange(bandwidth: float) -> None:
    """Whether the caller stood still for it or not, as on real processes."""
    spec = Spec(step_s=0.01, slowdown=(1.0, 2.0), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip", 4, spec, epochs=2)
    counted = sum(metrics["exchanges"] for metrics in training.run())
    callers = training.scheme.workers  # type: ignore[attr-defined]
    answered = sum(caller.calls - caller.out for caller in callers)
    assert counted == answered > 0


@settings(max_examples=25)
@given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7))
def test_push_sum_loses_nothing(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """Whatever the speeds: masses add up to N, values to what they were, with what is on its way; all tend to the same."""
    spec = Spec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip(pushsum)", workers, spec, epochs=1)
    scheme: Any = training.scheme
    noise = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in scheme.x]
    for x, n in zip(scheme.x, noise, strict=True):
        x += n
    totals = [x.sum(0) for x in scheme.x]
    training.replicas.step_alone = lambda worker, rates: None  # type: ignore[method-assign, assignment, misc]
    list(training.run())
    halves = [e[5] for e in training._queue if e[2] == "half"]
    assert float(scheme.mass.sum()) + sum(mass for _, mass in halves) == pytest.approx(workers)
    for b, (x, total) in enumerate(zip(scheme.x, totals, strict=True)):
        torch.testing.assert_close(x.sum(0) + sum(values[b] for values, _ in halves), total, rtol=0, atol=1e-4)


class _Links:
    """Stands for a real worker's links: what it gave away waits here for the moment when the virtual worker's has arrived."""

    def __init__(self, worker: int, workers: int) -> None:
        self.worker, self.addresses = worker, [""] * workers
        self.asked: list[tuple[int, Any]] = []
        self.acknowledged: set[int] = set()

    def reachable(self, peer: int) -> bool:
        return True

    def turn(self, timeout_s: float) -> None:
        """Nothing comes by itself."""

    def ask(self, peer: int, kind: Kind, tensors: Any) -> int:
        self.asked.append((peer, tensors))
        return len(self.asked) - 1

    def answered(self, number: int) -> bool:
        return number in self.acknowledged

    def take(self, number: int) -> Envelope:
        return Envelope(Kind.REPLY, self.worker)

    def under_way(self, peer: int) -> int:
        """The number of the half that has not been acknowledged; there is one at most."""
        (number,) = [n for n, (whom, _) in enumerate(self.asked) if whom == peer and n not in self.acknowledged]
        return number


@settings(max_examples=15)
@given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7))
def test_push_sum_is_that_of_real_workers(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """Real ones whose gradients and messages come at the same moments send the same halves, and hold, count and send the same."""
    spec = Spec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip(pushsum)", workers, spec, epochs=1)
    scheme: Any = training.scheme
    generator = torch.Generator().manual_seed(1)
    links = [_Links(w, workers) for w in range(workers)]
    holdings = [Holding([x[w] for x in scheme.x]) for w in range(workers)]
    real = [Halves(links[w], holdings[w], "pushsum", 0) for w in range(workers)]  # type: ignore[arg-type]
    computed, arrived = scheme.computed, scheme.arrived

    def stepped(worker: int, rates: list[float]) -> None:
        shown, changes, _ = holdings[worker].look()
        updates = [torch.randn(row.shape, generator=generator) for row in shown]
        for rows, update in zip(training.replicas.weights, updates, strict=True):
            rows[worker] += update
        holdings[worker].add(shown, [row + update for row, update in zip(shown, updates, strict=True)], changes)

    def both_computed(worker: int, now: float) -> None:
        computed(worker, now)
        real[worker].start()
        compare(worker)

    def both_arrived(kind: str, worker: int, end: int, payload: Any, now: float) -> None:
        arrived(kind, worker, end, payload, now)
        number = links[worker].under_way(end)
        if kind == "half":
            *part, mass = links[worker].asked[number][1]
            holdings[end].take_in(part, float(mass))
            holdings[end].sent(framed(0))
            compare(end)
        else:
            links[worker].acknowledged.add(number)

    def compare(worker: int) -> None:
        assert float(scheme.mass[worker]) == holdings[worker].mass
        for x, own in zip(scheme.x, holdings[worker].x, strict=True):
            torch.testing.assert_close(x[worker], own, rtol=1e-4, atol=1e-4)

    training.replicas.step_alone = stepped  # type: ignore[method-assign]
    scheme.computed, scheme.arrived = both_computed, both_arrived
    (metrics,) = training.run()
    for exchanges in real:
        exchanges.land()
    accounts = [holding.account for holding in holdings]
    assert metrics["exchanges"] == sum(account.exchanges for account in accounts)
    assert metrics["bytes_sent"] == sum(account.bytes_sent for account in accounts)
    assert sum(len(link.asked) for link in links) > 0


@settings(max_examples=25)
@given(st.integers(2, 7), st.lists(st.floats(0.2, 5.0), min_size=1, max_size=7), st.floats(1e3, 1e7))
def test_push_sum_leaves_nobody_with_little_mass(workers: int, slowdown: list[float], bandwidth: float) -> None:
    """However long halves are on their way: who has less than 1/2 gives none, and to one worker there is one half at a time."""
    spec = Spec(step_s=0.01, slowdown=tuple(slowdown), jitter=0.3, bandwidth=bandwidth, latency_s=1e-3)
    training = _training("async + gossip(pushsum)", workers, spec, epochs=1)
    scheme: Any = training.scheme
    least: list[float] = []
    computed = scheme.computed

    def watched(worker: int, now: float) -> None:
        computed(worker, now)
        least.append(float(scheme.mass.min()))
        halves = [(e[3], e[4]) for e in training._queue if e[2] == "half"]
        assert len(halves) == len(set(halves))

    scheme.computed = watched
    list(training.run())
    assert min(least) >= 0.25


def test_push_sum_learns_where_halves_are_long_on_their_way() -> None:
    losses = [m["loss"] for m in _simulate("async + gossip(pushsum)", spec=SLOW, epochs=6, optimizer=sgd(0.3)).metrics]
    assert losses[-1] < 0.7 * losses[0]


# --- the product -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["async", "ssp(2) + server(shards=3)", "downpour(2, 3) + server(2)", "bulk + server(2)"])
def test_every_code_can_be_pushed(strategy: str) -> None:
    accepted = 0
    for compression in COMPRESSION:
        try:
            parsed = Strategy.parse(f"{strategy} + {compression}")
        except HocketError:
            continue
        accepted += 1
        run = _simulate(str(parsed), epochs=1)
        assert bool(torch.isfinite(_weights(run)).all()), parsed
        again = _simulate(str(parsed), epochs=1)
        assert torch.equal(_weights(run), _weights(again)), parsed
    assert accepted >= len(COMPRESSION) - 6


@pytest.mark.parametrize("shards", [1, 3])
def test_what_a_code_holds_back_is_pushed_later(shards: int) -> None:
    """With feedback, what was pushed and what is held back add up to all gradients."""
    training = _training(f"async + server({shards}) + topk(0.1)", epochs=1)
    outbox = training.scheme.outboxes[0]  # type: ignore[attr-defined]
    total = torch.zeros_like(training.replicas.grads[0][0])
    sent = torch.zeros_like(total)
    generator = torch.Generator().manual_seed(0)
    from hocket.programs.server.push_encoder import read

    for step in range(1, 6):
        gradient = torch.randn(total.shape, generator=generator)
        total += gradient
        for s, messages in enumerate(outbox.encode(step, [gradient])):
            width = outbox.slices.widths(s)[0]
            part = read(training.strategy, messages[0], width, 0, step, 0, 4, training.plan.seed)
            outbox.slices.cut(0, sent)[s].add_(part)
    torch.testing.assert_close(sent + outbox.errors[0], total, rtol=0, atol=1e-5)


def test_batch_statistics_belong_to_each_worker() -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    training = _training("async", make=norm)
    list(training.run())
    tracked = training.replicas.buffers["1.num_batches_tracked"].tolist()
    assert sum(tracked) == len(training.dealing)
    assert tracked[0] > 2 * tracked[3]


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


def test_every_pair_of_free_strategy_and_optimiser_trains() -> None:
    for strategy, (name, lr) in itertools.product(("async + server(2)", "downpour(2, 2)"), (("Adam", 0.01), ("Adagrad", 0.1))):
        run = _simulate(strategy, optimizer=lambda p, n=name, r=lr: getattr(torch.optim, n)(p, lr=r), epochs=4)
        assert run.accuracy > 0.7, (strategy, name)
