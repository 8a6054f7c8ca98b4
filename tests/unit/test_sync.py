"""Laws of synchronisation: the schedule is data, and an outer optimiser is torch's own."""

from __future__ import annotations

import math

import pytest
import torch

from hocket.errors import HocketError
from hocket.programs.collective import _to
from hocket.strategy import Strategy
from hocket.sync import SSP, Async, Bulk, DiLoCo, Downpour, Local, Moment, PostLocal, ServerAction, Stale, Sync
from hocket.sync.guard import guarded, init_guard, limited


@pytest.mark.parametrize("p", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "make, moment", [(Local, Moment.BEFORE), (lambda p: Local(p, "after"), Moment.AFTER), (DiLoCo, Moment.AFTER)]
)
def test_periodic_exchanges_happen_when_t_mod_p_is_zero(p: int, make, moment: Moment) -> None:
    for t in range(1, 50):
        assert make(p).moment(t, weights=True) is (moment if t % p == 0 else Moment.NEVER)


@pytest.mark.parametrize("sync", [Bulk(), Local(3), PostLocal(3, 5)])
def test_exchanges_of_gradients_keep_the_period(sync: Sync) -> None:
    for t in range(1, 50):
        due = t % sync.period == 0 or (isinstance(sync, PostLocal) and t <= sync.after)
        assert sync.moment(t, weights=False) is (Moment.GRADIENTS if due else Moment.NEVER)


@pytest.mark.parametrize("p, after", [(1, 0), (2, 5), (4, 4), (3, 100)])
def test_postlocal_is_bulk_and_then_local(p: int, after: int) -> None:
    for t in range(1, 120):
        expected = Bulk().moment(t, False) if t <= after else Local(p).moment(t, True)
        assert PostLocal(p, after).moment(t, weights=True) is expected
        assert PostLocal(p, after).rebases(t) is (t == after)


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0), (0.3, 0.5)])
def test_diloco_lands_like_torchs_nesterov(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 5, generator=generator)
    spec = DiLoCo(3, lr, momentum)
    state = spec.init_state(rows)
    outer = torch.nn.Parameter(rows.clone())
    optimizer = torch.optim.SGD([outer], lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        mixed = outer.detach() + torch.randn(2, 5, generator=generator)
        landed, state = spec.apply(mixed, state)
        outer.grad = outer.detach() - mixed
        optimizer.step()
        torch.testing.assert_close(landed, outer.detach(), rtol=1e-6, atol=1e-6)


def test_without_an_outer_optimiser_the_mix_lands_as_it_is() -> None:
    mixed = torch.randn(2, 3)
    for sync in (Bulk(), Local(2), PostLocal(2, 2)):
        assert sync.apply(mixed, {})[0] is mixed
        assert sync.init_state(mixed) == {}


NAMES = ("asynchronous", "static_partition", "keeps_replicas_equal", "pushes_gradients", "averages_weights", "only_weights")
NAMES += ("default_weights", "default_topology", "period", "max_staleness", "overlaps", "warm_steps", "delay_compensation")
TOGETHER = (False, True, False, False, False, False, True, "allreduce")
SERVED = (True, False, False, True, False, False, False, "server")
PLAIN = (False, 0, ("none", 0.0))
MEANING = {
    "bulk": (False, True, True, True, False, False, False, "allreduce", 1, 0, *PLAIN),
    "local": (*TOGETHER, 1, 0, *PLAIN),
    "acco": (False, True, True, False, False, False, False, "allreduce", 1, 0, *PLAIN),
    "local(5)": (*TOGETHER, 5, 0, *PLAIN),
    "postlocal": (*TOGETHER, 16, 0, *PLAIN),
    "diloco": (*TOGETHER[:5], True, True, "allreduce", 500, 0, *PLAIN),
    "async": (*SERVED, 1, math.inf, *PLAIN),
    "async(overlap=True)": (*SERVED, 1, math.inf, True, 0, ("none", 0.0)),
    "async(compensation=taylor)": (*SERVED, 1, math.inf, False, 0, ("taylor", 0.04)),
    "async(compensation=adaptive, strength=3)": (*SERVED, 1, math.inf, False, 0, ("adaptive", 3.0)),
    "ssp": (True, True, *SERVED[2:], 1, 3, *PLAIN),
    "ssp(0)": (True, True, *SERVED[2:], 1, 0, *PLAIN),
    "ssp(2, overlap=True)": (True, True, *SERVED[2:], 1, 2, True, 0, ("none", 0.0)),
    "ssp(2, compensation=taylor, strength=7)": (True, True, *SERVED[2:], 1, 2, False, 0, ("taylor", 7.0)),
    "ssp(2, compensation=adaptive)": (True, True, *SERVED[2:], 1, 2, False, 0, ("adaptive", 2.0)),
    "ssp(2, compensation=rate)": (True, True, *SERVED[2:], 1, 2, False, 0, ("rate", 0.0)),
    "downpour": (*SERVED, 1, math.inf, True, 0, ("none", 0.0)),
    "downpour(4, 2, warm=3, overlap=False)": (*SERVED, 4, math.inf, False, 3, ("none", 0.0)),
    "asyncdiloco": (*SERVED, 50, math.inf, *PLAIN),
    "stale": (True, False, False, False, True, True, True, "allreduce", 4, math.inf, *PLAIN),
    "stale(7)": (True, False, False, False, True, True, True, "allreduce", 7, math.inf, *PLAIN),
}
"""What each method is, with its published defaults: who steps, who has the weights, how often, and how stale it may get."""


@pytest.mark.parametrize("text", MEANING)
def test_methods_are_what_their_papers_say(text: str) -> None:
    sync = Strategy.parse(text).sync
    assert {name: getattr(sync, name) for name in NAMES} == dict(zip(NAMES, MEANING[text], strict=True))


@pytest.mark.parametrize("push, fetch", [(1, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("overlap", [True, False])
def test_downpour_acts_at_its_periods_and_steps_locally_unless_it_waits_for_weights(push: int, fetch: int, overlap: bool) -> None:
    sync = Downpour(push, fetch, overlap=overlap)
    for step in range(1, 30):
        fetches = step % fetch == 0
        assert sync.server_action(step) == ServerAction(step % push == 0, fetches, overlap or not fetches)
        assert sync.moment(step, weights=False) is (Moment.GRADIENTS if step % push == 0 else Moment.NEVER)


def test_with_servers_every_gradient_is_pushed_and_new_weights_are_fetched() -> None:
    for sync in (Bulk(), Async(), SSP(2)):
        assert sync.server_action(5) == ServerAction(push=True, fetch=True, local=False)
        assert sync.moment(5, weights=False) is Moment.GRADIENTS


@pytest.mark.parametrize("s", [1, 2, 5])
def test_stale_workers_step_alone_and_meet_after_s_steps_at_the_latest(s: int) -> None:
    for step in range(1, 30):
        assert Stale(s).server_action(step) == ServerAction(push=False, fetch=False, local=True)
        assert Stale(s).moment(step, weights=True) is (Moment.AFTER if step % s == 0 else Moment.NEVER)


@pytest.mark.parametrize(
    "text, words",
    [
        ("ssp(2, compensation=taylor, overlap=True)", "leave one of the two out"),
        ("ssp(2, compensation=adaptive, overlap=True)", "leave one of the two out"),
        ("async(compensation=adaptive, overlap=True)", "leave one of the two out"),
        ("ssp(0, overlap=True)", "never stale"),
        ("ssp(0, compensation=rate)", "never stale"),
        ("ssp(2, overlap=3)", "True or False"),
        ("async(overlap=3)", "True or False"),
        ("downpour(overlap=3)", "True or False"),
        ("async(compensation=rate, strength=1)", "only the compensations taylor and adaptive"),
        ("async(compensation=taylor, strength=-1)", "[0, inf)"),
        ("diloco(2, lr=0.7, momentum=1.0)", "[0, 1)"),
        ("local(True)", "whole number of at least 1"),
        ("downpour(2, 0)", "fetch must be a whole number of at least 1"),
        ("downpour(warm=-1)", "at least 0"),
        ("stale(0)", "at least 1"),
        ("postlocal(0)", "at least 1"),
        ("postlocal(2, -1)", "at least 0"),
        ("diloco(0)", "at least 1"),
        ("diloco(2, fragments=3)", "at most 2"),
        ("asyncdiloco(4) + server(optimizer=adam)", "leave optimizer= out"),
        ("asyncdiloco(4) + allreduce", "use asyncdiloco + server"),
        ("asyncdiloco(4, quorum=0)", "at least 1"),
        ("asyncdiloco(4, quorum=2, grace=-1)", "[0, inf)"),
        ("asyncdiloco(4, quorum=2, weights=step)", "use equal or steps"),
        ("asyncdiloco(4, direction=True)", "give quorum= or grace="),
        ("diloco(4, fragments=2, overlap=3)", "at most 2 steps"),
        ("diloco(4, keep=0.5)", "give overlap="),
        ("diloco(4, overlap=1, keep=0.5, mix=0.5)", "give one"),
        ("diloco(4, overlap=1, keep=2)", "[0, 1"),
        ("diloco(4, overlap=1, mix=1)", "mix must be a number in [0, 1)"),
        ("diloco(4, outer=adam)", "nesterov or heavyball"),
        ("diloco(4, outer=nesterov(0.7, 0.9, 3))", "takes a rate and a momentum"),
        ("diloco(4, guard=3) + gossip", "leave it out"),
        ("diloco(2, lr=-1)", "[0, inf)"),
        ("ssp(-1)", "at least 0"),
        ("downpour(0)", "push must be a whole number of at least 1"),
        ("local(2, mean=after) + gradients", "mean=after is about weights"),
        ("diloco(2) + gradients", "exchanges weights by definition"),
        ("acco + exchange=weights", "leave exchange=weights out"),
        ("acco + updates", "leave exchange=updates out"),
        ("acco + momentum", "is for bulk"),
        ("acco + gossip + gradients", "use allreduce"),
        ("acco + server", "async + server"),
        ("acco + dgc(0.1)", "use topk, or bulk"),
        ("local(2, residual=weights)", "residual=weights needs"),
        ("local(2, residual=weights) + gossip + topk(0.1)", "residual=weights needs"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError) as caught:
        Strategy.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["ssp(2, compensation=rate, overlap=True)", "async(compensation=rate, overlap=True)", "downpour(warm=0)", "ssp(0)",
     "async(compensation=taylor, strength=0)", "local(2, residual=weights) + topk(0.1)", "diloco(2, momentum=0)"],
)  # fmt: skip
def test_what_only_looks_like_a_contradiction_is_allowed(text: str) -> None:
    assert Strategy.parse(str(Strategy.parse(text))) == Strategy.parse(text)


def test_a_checkpoint_goes_to_the_clusters_device_wherever_its_tensors_lie() -> None:
    """Plain numbers and words stay as they are."""
    state = {"a": torch.ones(2), "b": [{"c": torch.ones(3)}, 4], "d": [1, "x"], "e": [torch.ones(1)], "f": 2.5}
    found = _to(state, torch.device("meta"))
    assert [t.device.type for t in (found["a"], found["b"][0]["c"], found["e"][0])] == ["meta"] * 3
    assert (found["b"][1], found["d"], found["f"]) == (4, [1, "x"], 2.5)


def test_the_guard_leaves_out_what_exceeds_its_running_mean() -> None:
    norms = torch.rand(40, 1, 5, generator=torch.Generator().manual_seed(0)) + 1
    state = init_guard(norms[0])
    for row in norms:
        factors, state = guarded(row, state, 3.0)
        torch.testing.assert_close(factors, torch.softmax(-row, 1) * 5)
    outlier = torch.tensor([[1.5, 1.5, 9.0, 1.5, 1.5]])
    factors, after = guarded(outlier, state, 3.0)
    torch.testing.assert_close(factors, torch.tensor([[1.25, 1.25, 0.0, 1.25, 1.25]]))
    assert after["mean"][0, 2] == state["mean"][0, 2]  # it is not learnt from
    assert guarded(torch.full((1, 5), 99.0), state, 3.0)[0].tolist() == [[0.0] * 5]
    assert guarded(torch.full((1, 5), 99.0), init_guard(outlier), 3.0)[0].tolist() == [[1.0] * 5]  # the first ones are not judged


def test_a_guarded_step_is_limited() -> None:
    torch.testing.assert_close(limited(torch.tensor([[30.0, 40.0], [3.0, 4.0]])), torch.tensor([[6.0, 8.0], [3.0, 4.0]]))
