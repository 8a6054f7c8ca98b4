"""Laws of 1-bit Adam: AdamW until its variance is fixed, then linear in the momentum, which is exchanged coded."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.data import load
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.train.adaptive import with_exchange
from hocket.train.run import make_training
from hocket.train.settings import RunSettings
from hocket.train.stacked import StackedOptimizer
from virtual.world import World, gradients, seeded

FREEZE, STEPS = 4, 12
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def onebit(lr: float = 0.05, **options: Any) -> Callable:
    return lambda params: hocket.OneBitAdam(params, lr, freeze_step=options.get("freeze_step", FREEZE))


def _gradients(steps: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) for _ in range(steps)]


# --- the optimiser -----------------------------------------------------------------------------------------------------------


def _trained(optimizer: Callable, gradients: list[Tensor]) -> Tensor:
    weight = nn.Parameter(torch.linspace(-1, 1, 7))
    made = optimizer([weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        made.step()
    return weight.detach()


def test_until_the_variance_is_fixed_it_is_adamw_bit_for_bit() -> None:
    gradients = _gradients(STEPS)
    ours = _trained(lambda p: hocket.OneBitAdam(p, 0.1, (0.8, 0.99), 1e-6, 0.05, freeze_step=STEPS), gradients)
    theirs = _trained(lambda p: torch.optim.AdamW(p, 0.1, (0.8, 0.99), 1e-6, 0.05), gradients)
    assert torch.equal(ours, theirs)


def test_afterwards_it_is_adam_with_the_variance_of_that_step() -> None:
    """The formula, in float64; steps and momentum go on, the corrected variance stays."""
    lr, (beta1, beta2), eps, decay = 0.1, (0.9, 0.99), 1e-8, 0.02
    gradients = _gradients(STEPS)
    found = _trained(lambda p: hocket.OneBitAdam(p, lr, (beta1, beta2), eps, decay, freeze_step=FREEZE), gradients)
    w, m, v = torch.linspace(-1, 1, 7).double(), torch.zeros(7).double(), torch.zeros(7).double()
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        if t <= FREEZE:
            v = beta2 * v + (1 - beta2) * g**2
        corrected = v / (1 - beta2 ** min(t, FREEZE))
        w = (1 - lr * decay) * w - lr * m / (1 - beta1**t) / (corrected.sqrt() + eps)
    torch.testing.assert_close(found.double(), w, **CLOSE)


def test_a_value_without_a_variance_is_held_and_a_late_parameter_too() -> None:
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = hocket.OneBitAdam([early, late], 0.1, weight_decay=0.0, freeze_step=1)
    early.grad = torch.tensor([1.0, 0.0, 2.0])
    optimizer.step()
    early.grad, late.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    assert early[1] == 1
    assert bool((early[[0, 2]] < 0.95).all())
    assert torch.equal(late, torch.ones(2))


@pytest.mark.parametrize("options, words", [
    ({"freeze_step": 0}, "freeze_step=0"), ({"freeze_step": 2.5}, "whole number"),
    ({"freeze_step": 1, "betas": (1.0, 0.9)}, "betas"),
    ({"freeze_step": 1, "lr": -1}, "lr must not be negative"),
])  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HocketError, match=words):
        hocket.OneBitAdam([torch.ones(2)], **options)


# --- rows --------------------------------------------------------------------------------------------------------------------


def test_rows_of_the_state_are_those_of_each_worker_stacked_or_not() -> None:
    world = World("bulk + exchange=momentum", optimizer=onebit()).step(2)
    stacked, layout = world.replicas._stacked, world.replicas.layout
    rows = [stacked.rows_of(b, "exp_avg") for b in range(len(layout.buckets))]
    assert all(bool(r.abs().sum() > 0) for r in rows)
    assert isinstance(stacked, StackedOptimizer)
    assert stacked.stacked
    stacked._unstack()
    for before, bucket in zip(rows, range(len(layout.buckets)), strict=True):
        assert torch.equal(stacked.rows_of(bucket, "exp_avg"), before)
    assert stacked.first.momentum_period == 1


# --- exchanged momentum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["allreduce", "hierarchical(size=2)", "server(2, role=sum)"])
def test_momentum_without_a_code_is_bulk(topology: str) -> None:
    """The mean of β₁m + (1−β₁)g_i is the momentum of the mean gradient."""
    world, plain = World(f"bulk + {topology} + exchange=momentum", optimizer=onebit()), World("bulk", optimizer=onebit())
    found = world.step(STEPS).rows
    torch.testing.assert_close(found, plain.step(STEPS).rows, **CLOSE)
    assert torch.equal(found, found[:1].expand_as(found))
    assert not world.replicas.program.linear, "a scaler's factor must be out of what is added to the momentum"


def test_clipping_takes_the_momentum_once_the_variance_is_fixed() -> None:
    world = World("bulk + topk(0.5) + momentum", optimizer=onebit(), clip=0.01).step(FREEZE + 2)
    rows = torch.cat([world.replicas._stacked.rows_of(b, "exp_avg") for b in range(len(world.replicas.layout.buckets))], 1)
    torch.testing.assert_close(rows.norm(dim=1), torch.full((4,), 0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("code", ["sign", "topk(0.2)", "qsgd(4)", "lowrank(1)"])
def test_until_the_variance_is_fixed_gradients_travel_whole_and_then_coded(code: str) -> None:
    coded, plain = World(f"bulk + {code} + exchange=momentum", optimizer=onebit()), World("bulk", optimizer=onebit())
    assert torch.equal(coded.step(FREEZE).rows, plain.step(FREEZE).rows)
    assert coded.sent == plain.sent
    assert coded.step(STEPS - FREEZE).sent != plain.step(STEPS - FREEZE).sent
    assert torch.equal(coded.rows, coded.rows[:1].expand_as(coded.rows))
    assert not torch.allclose(coded.rows, plain.rows, **CLOSE)


def test_what_is_sent_is_each_workers_momentum_with_feedback() -> None:
    """With a linear loss gradients do not depend on the weights: the momentum and the residuals together are those of bulk."""
    linear: dict[str, Any] = {"make": lambda: nn.Linear(4, 3), "loss": lambda out, y: out.gather(1, y[:, None]).mean()}
    coded = World("bulk + topk(0.3) + exchange=momentum", optimizer=onebit(), **linear).step(FREEZE)
    shared = coded.replicas._stacked.rows_of(0, "exp_avg")[0].double()
    error = owner = torch.zeros_like(shared)
    for _ in range(STEPS - FREEZE):
        coded.step()
        (state,) = coded.replicas.program.gradient_state
        inner = state["inner"]["error"].double().t().reshape(-1)[: shared.numel()]
        gradient = _mean_gradient(coded)
        now = coded.replicas._stacked.rows_of(0, "exp_avg")[0].double()
        # mean_i(β₁m + (1−β₁)g_i + e_i) + owner's residual = m' + mean_i e_i' + owner's new residual
        torch.testing.assert_close(
            0.9 * shared + 0.1 * gradient + error + owner, now + state["error"].double().mean(0) + inner, rtol=1e-4, atol=1e-6
        )
        shared, error, owner = now, state["error"].double().mean(0), inner


def _mean_gradient(world: World) -> Tensor:
    """Of the step just done, of the linear loss."""
    model, (x, y) = seeded(lambda: nn.Linear(4, 3)), (world.x[world.at - 1], world.y[world.at - 1])
    model(x.flatten(0, 1)).gather(1, y.flatten()[:, None]).mean().backward()
    named = dict(model.named_parameters())
    return torch.cat([named[s.name].grad.double().flatten() for b in world.replicas.layout.buckets for s in b.slots])


@pytest.mark.parametrize("stop", [2, FREEZE, 7])
def test_a_run_that_was_stopped_is_the_run_that_was_not(stop: int) -> None:
    whole = World("bulk + sign + momentum", optimizer=onebit()).step(STEPS)
    first, second = (World("bulk + sign + momentum", optimizer=onebit()) for _ in range(2))
    file = io.BytesIO()
    torch.save(first.step(stop).replicas.state_dict(), file)
    file.seek(0)
    second.replicas.load_state_dict(torch.load(file, weights_only=True))
    second.at = stop
    assert torch.equal(second.step(STEPS - stop).rows, whole.rows)


def test_one_worker_trains_as_without_a_strategy() -> None:
    found, plain = (World(text, 1, optimizer=onebit()).step(STEPS) for text in ("bulk + sign + momentum", "bulk"))
    assert torch.equal(found.rows, plain.rows)


def test_groups_have_betas_of_their_own() -> None:
    def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2]}, {"params": params[2:], "betas": (0.5, 0.9)}]
        return hocket.OneBitAdam(groups, 0.05, freeze_step=FREEZE)

    found = World("bulk + exchange=momentum", optimizer=grouped).step(STEPS)
    torch.testing.assert_close(found.rows, World("bulk", optimizer=grouped).step(STEPS).rows, **CLOSE)


# --- the choice --------------------------------------------------------------------------------------------------------------


def test_momentum_is_chosen_under_onebit_adam_and_refused_under_others() -> None:
    optimizer = hocket.OneBitAdam([torch.ones(2)], freeze_step=3)
    with pytest.warns(UserWarning, match="workers exchange their momentum"):
        assert with_exchange(Strategy.parse("bulk + sign"), optimizer).exchanged == "momentum"
    assert with_exchange(Strategy.parse("bulk"), optimizer).exchanged == "gradients"
    assert with_exchange(Strategy.parse("bulk + sign + updates"), optimizer).exchanged == "updates"
    with pytest.raises(HocketError, match=r"use hocket.OneBitAdam\(…, freeze_step=…\)"):
        with_exchange(Strategy.parse("bulk + sign + momentum"), torch.optim.AdamW([torch.ones(2)]))


def test_the_update_has_the_size_of_adams() -> None:
    """After the freeze steps do not jump: gradients of one size give updates of about the rate."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = hocket.OneBitAdam([weight], 0.01, weight_decay=0.0, freeze_step=50)
    generator, sizes = torch.Generator().manual_seed(0), []
    for _ in range(60):
        before = weight.detach().clone()
        weight.grad = torch.randn(1000, generator=generator)
        optimizer.step()
        sizes.append(float((weight.detach() - before).norm() / sqrt(1000)))
    assert sizes[50] == pytest.approx(sizes[49], rel=0.2)


# --- 0/1 Adam ----------------------------------------------------------------------------------------------------------------


def zeroone(freeze_step: int = 1, refresh: int = 2, lr: float = 0.05, **options: Any) -> Callable:
    return lambda params: hocket.OneBitAdam(params, lr, freeze_step=freeze_step, refresh=refresh, **options)


def _sends(steps: int, period: int, freeze_step: int, refresh: int) -> list[str]:
    """What workers exchange in each step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, found = hocket.OneBitAdam([weight], freeze_step=freeze_step, refresh=refresh), []
    optimizer.momentum_period = period
    for _ in range(steps):
        found.append(optimizer.sends)
        weight.grad = torch.ones(1)
        optimizer.step()
    return found


def test_the_variance_is_refreshed_at_intervals_that_double() -> None:
    """Three times at every step, three times at every second, three times at every fourth."""
    found = _sends(29, 1, 2, 3)
    assert [t for t, what in enumerate(found, 1) if what == "gradients"] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24]
    assert {what for what in found if what != "gradients"} == {"momentum"}


@pytest.mark.parametrize("period", [3, 4])
def test_with_local_steps_it_is_refreshed_after_an_exchange_alone(period: int) -> None:
    """As often as without: periods are shorter as long as refreshes are frequent, and every interval ends with an exchange."""
    found = _sends(33, period, 2, 2)
    assert [what == "gradients" for what in found] == [what == "gradients" for what in _sends(33, 1, 2, 2)]
    assert all(before != "nothing" for before, what in pairwise(found) if what == "gradients")
    letters = "".join(what[0] for what in found)  # gradients, momentum, nothing
    assert letters == "gg" + "gg" + "gm" * 2 + {3: "gnmm" * 2 + "gnmnnmnm" * 2 + "g", 4: "gnnm" * 2 + "gnnmnnnm" * 2 + "g"}[period]
    assert "".join(what[0] for what in _sends(9, 3, 2, 0)) == "gg" + "nnm" * 2 + "n"


def test_a_refreshed_variance_is_adams_with_as_many_gradients() -> None:
    """The formula, in float64: refreshed in steps 2, 3, 4, 6, 8, 12."""
    lr, (beta1, beta2), eps, decay = 0.1, (0.9, 0.99), 1e-8, 0.02
    gradients = _gradients(STEPS)
    found = _trained(zeroone(1, 2, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay), gradients)
    w, m, v, count = torch.linspace(-1, 1, 7).double(), torch.zeros(7).double(), torch.zeros(7).double(), 0
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        if t in (1, 2, 3, 4, 6, 8, 12):
            v, count = beta2 * v + (1 - beta2) * g**2, count + 1
        w = (1 - lr * decay) * w - lr * m / (1 - beta1**t) / ((v / (1 - beta2**count)).sqrt() + eps)
    torch.testing.assert_close(found.double(), w, **CLOSE)


def test_a_parameter_that_comes_late_is_updated_from_the_next_refresh_on() -> None:
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = hocket.OneBitAdam([early, late], 0.1, weight_decay=0.0, freeze_step=1, refresh=1)
    for step in range(1, 6):
        early.grad, late.grad = torch.ones(3), None if step < 4 else torch.ones(2)
        optimizer.step()
        assert bool((late < 1).all()) == (step == 5)  # refreshed in steps 2, 3 and 5


def test_the_first_local_steps_with_a_linear_loss_are_bulk() -> None:
    """Without a code all move by the mean of the momenta; gradients that do not depend on weights make both equal. (From then on
    the momentum is a mean over steps.)"""
    linear: dict[str, Any] = {"make": lambda: nn.Linear(4, 3), "loss": lambda out, y: out.gather(1, y[:, None]).mean()}
    own: dict[str, Any] = {"optimizer": zeroone(2, 0, weight_decay=0.0), **linear}
    local, bulk = World("local(4) + exchange=momentum", **own), World("bulk", **own)
    for step in range(1, 13):
        found, plain = local.step().rows, bulk.step().rows
        assert torch.equal(found, found[:1].expand_as(found)) == (step <= 2 or step % 4 == 2)
        if step in (1, 2, 6):
            torch.testing.assert_close(found, plain, **CLOSE)
    assert local.sent[0] < 0.5 * bulk.sent[0]  # in 4 of 12 steps


def test_after_an_exchange_momentum_is_the_mean_over_local_steps_weighed_by_rates() -> None:
    world = World("local(3) + exchange=momentum", optimizer=zeroone(1, 0)).step(4)
    m = world.replicas._stacked.rows_of(0, "exp_avg")
    assert torch.equal(m, m[:1].expand_as(m))
    world.step(2)
    rates, total = [0.05 / (1 - 0.9**t) for t in (5, 6, 7)], world.replicas._stacked.rows_of(0, "sum")
    own = world.replicas._stacked.rows_of(0, "exp_avg")
    rows = world.rows.clone()
    world.step()
    after = world.replicas._stacked.rows_of(0, "exp_avg")
    gradient = gradients(rows, world, world.at - 1)
    expected = ((total + rates[2] * (0.9 * own + 0.1 * gradient)) / sum(rates)).mean(0)
    torch.testing.assert_close(after, expected.float().expand_as(after), rtol=1e-4, atol=1e-6)


def test_weight_decay_acts_on_the_weights_of_the_last_exchange_once_for_every_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = hocket.OneBitAdam([weight], 0.1, weight_decay=0.5, freeze_step=1)
    optimizer.momentum_period = 3
    weights = []
    for gradient in (1.0, 3.0, -2.0, 0.0):  # the last one is the mean momentum: no worker moves
        weight.grad = torch.full((2,), gradient)
        optimizer.step()
        weights.append(weight.detach().clone())
    torch.testing.assert_close(weights[3], weights[0] * 0.95**3)


def test_a_schedule_reaches_rows_that_have_parted_before_they_are_exchanged() -> None:
    together, apart = (World("local(3) + exchange=momentum", optimizer=zeroone(1, 0)).step(2) for _ in range(2))
    apart.replicas._stacked._unstack()
    for lr in (0.05, 0.02, 0.01):
        for world in (together, apart):
            world.replicas.optimizer.param_groups[0]["lr"] = lr
            world.step()
    assert torch.equal(together.rows, apart.rows)


@pytest.mark.parametrize("stop", [1, 4, 5, 6])
def test_local_momentum_that_was_stopped_is_the_run_that_was_not(stop: int) -> None:
    text = "local(3) + topk(0.3) + momentum"
    whole = World(text, optimizer=zeroone()).step(STEPS)
    first, second = (World(text, optimizer=zeroone()) for _ in range(2))
    file = io.BytesIO()
    torch.save(first.step(stop).replicas.state_dict(), file)
    file.seek(0)
    second.replicas.load_state_dict(torch.load(file, weights_only=True))
    second.at = stop
    assert torch.equal(second.step(STEPS - stop).rows, whole.rows)


def test_workers_that_use_different_parameters_meet_all_the_same() -> None:
    """In local steps a row may leave a parameter out: rows part then, and agree again after the exchange."""
    world = World("local(3) + exchange=momentum", optimizer=zeroone(1, 0)).step(4)
    world.replicas._stacked._unstack()
    assert torch.equal(world.step(3).rows, world.rows[:1].expand_as(world.rows))


def test_one_worker_alone_has_no_local_steps() -> None:
    found, plain = (World(text, 1, optimizer=zeroone()).step(STEPS) for text in ("local(3) + sign + momentum", "bulk"))
    assert torch.equal(found.rows, plain.rows)


@pytest.mark.parametrize("text", ["diloco(4) + momentum", "gossip + momentum", "local(2) + gossip + momentum", "async + momentum"])
def test_momentum_is_for_bulk_and_local_steps(text: str) -> None:
    with pytest.raises(HocketError, match=r"exchange=momentum is for bulk and local\(p\)"):
        Strategy.parse(text)


def test_refresh_is_a_whole_number() -> None:
    with pytest.raises(HocketError, match=r"refresh=1\.5"):
        hocket.OneBitAdam([torch.ones(2)], freeze_step=1, refresh=1.5)


# --- as a setting ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:sign under OneBitAdam")
@pytest.mark.parametrize(
    "given, whole", [({}, 3), ({"freeze_step": 5}, 5), ({"refresh": 2, "strategy": "local(4) + sign + momentum"}, 10)]
)
def test_as_a_setting_its_warm_up_is_a_share_of_the_steps(given: dict[str, Any], whole: int) -> None:
    """Whole gradients in 15 % of 20 steps, then signs; 0/1 Adam sends more of them later."""
    usual = {"strategy": "bulk + sign", "workers": 2, "virtual": True, "lr": 1e-9, "optimizer": "onebit", "max_steps": 20}
    settings, sent = RunSettings.of(**{**usual, "batch_size": 10, **given}), [0]
    cluster = settings.virtual_cluster("cpu")
    for _ in make_training(settings, cluster, load("digits")).run(lambda _: sent.append(int(cluster.ledger.bytes_sent.sum()))):
        pass
    steps = [after - before for before, after in pairwise(sent)]
    assert sum(n == steps[0] for n in steps) == whole
    assert max(n for n in steps if n != steps[0]) < steps[0] / 10


@pytest.mark.parametrize(
    "given, words",
    [
        ({"strategy": "diloco(4)"}, r"under diloco\(4\) \+ allreduce it is not; use bulk"),
        ({"strategy": "local(4) + sign"}, r"use bulk, such as bulk \+ sign, or local\(4\) \+ sign \+ exchange=momentum"),
        ({"strategy": "bulk + gossip"}, "must be the same on all workers"),
        ({"strategy": "async + server"}, "must be the same on all workers"),
        ({"strategy": "bulk + sign + updates"}, "must be the same on all workers"),
        ({"zero": 1}, "leave zero=1 out"),
        ({"freeze_step": 0}, "at least 1"),
        ({"refresh": 2, "optimizer": "adamw"}, "only onebit fixes its variance"),
    ],
)
def test_a_setting_that_does_not_go_with_it_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(HocketError, match=words):
        RunSettings.of(**{"optimizer": "onebit", "workers": 2, **given})
