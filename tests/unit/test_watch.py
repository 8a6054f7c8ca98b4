"""Laws of NaN and Inf: found wherever they are, named, counted, and left out with the whole bucket."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hocket.cluster import VirtualCluster
from hocket.cluster.layout import layout_of
from hocket.errors import NonFiniteGradient
from hocket.strategy import Strategy
from hocket.train.replicas import LiveReplica, StackedReplicas
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.watch import NonFinite, check_weights, first_nonfinite


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))


def watching(policy: str) -> tuple[nn.Sequential, list[list[nn.Parameter]], NonFinite]:
    made = model()
    layout = layout_of(made.named_parameters())
    named = dict(made.named_parameters())
    where: Any = SimpleNamespace(ledger=SimpleNamespace(nonfinite=0), workers=range(4, 6))
    return made, [[named[s.name] for s in b.slots] for b in layout.buckets], NonFinite(policy, layout, where)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_a_workers_own_bad_gradient_is_named_and_the_bucket_left_out(count: int, bad: float) -> None:
    made, params, watch = watching("skip")
    for p in made.parameters():
        p.grad = torch.ones_like(p)
    made[0].weight.grad = None if count < 6 else made[0].weight.grad
    holders = [p for group in params for p in group if p.grad is not None][:count]
    for p in holders:
        p.grad.view(-1)[-1] = bad
    watch.check_local(params, 7)
    assert watch.cluster.ledger.nonfinite == 1
    assert all(float(p.grad.abs().sum()) == 0 for p in made.parameters() if p.grad is not None)
    names = [n for n, p in made.named_parameters() if any(p is h for h in holders)]
    order = [s.name for b in watch.layout.buckets for s in b.slots if s.name in names]
    more = f" and {count - 3} more" if count > 3 else ""
    assert watch.sentence.startswith(f"The gradient of {', '.join(order[:3])}{more} holds NaN or Inf at step 7 on worker 4; ")
    assert not watch.found, "it has been judged"


def test_finite_gradients_and_missing_ones_are_left_alone() -> None:
    made, params, watch = watching("raise")
    watch.check_local(params, 1)
    made[1].bias.grad = torch.full((2,), 3e38)  # their sum is Inf, but they are not
    watch.check_local(params, 1)
    assert watch.cluster.ledger.nonfinite == 0
    assert float(made[1].bias.grad[0]) == pytest.approx(3e38)
    made[1].bias.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(NonFiniteGradient, match=r"1\.bias"):
        watch.check_local(params, 1)


def test_rows_that_hold_nan_are_zeroed_one_by_one_and_everybody_raises() -> None:
    _, _, watch = watching("raise")
    slots = watch.layout.buckets[0].slots
    rows = torch.ones(2, sum(s.size for s in slots))
    watch.look(0, rows, 3)
    assert not watch.found
    rows[1, slots[-1].offset] = math.nan
    watch.look(0, rows, 3)
    assert (rows[0].sum(), rows[1].sum()) == (rows.shape[1], 0)
    assert watch.cluster.ledger.nonfinite == 1
    with pytest.raises(NonFiniteGradient, match=f"The gradient of {slots[-1].name} holds NaN or Inf at step 3 on worker 5"):
        watch.judge(True)
    watch.judge(False)
    with pytest.raises(NonFiniteGradient, match="Another worker's gradient"):
        watch.judge(True)


def test_the_first_bad_weight_is_named() -> None:
    layout = layout_of(model().named_parameters())
    slots = layout.buckets[0].slots
    rows = torch.ones(3, sum(s.size for s in slots))
    assert first_nonfinite(layout, [rows]) is None
    check_weights(layout, [rows], 2)
    for slot in slots:
        for place in (slot.offset, slot.offset + slot.size - 1):
            bad = rows.clone()
            bad[2, place] = math.inf
            assert first_nonfinite(layout, [bad]) == (2, slot.name)
    with pytest.raises(NonFiniteGradient, match=f"{slots[0].name} hold NaN or Inf after epoch 2"):
        check_weights(layout, [torch.full_like(rows, math.nan)], 2)


def test_where_steps_are_not_looked_at_weights_are_after_an_epoch() -> None:
    """As on a GPU."""
    layout = layout_of(model().named_parameters())
    rows = torch.ones(3, sum(s.size for s in layout.buckets[0].slots))
    replicas: Any = SimpleNamespace(_audits=True, layout=layout, weights=[rows], cluster=SimpleNamespace(workers=range(4, 7)))
    StackedReplicas.audit(replicas)
    rows[1] = math.nan
    with pytest.raises(NonFiniteGradient, match="held NaN or Inf in this epoch on worker 5"):
        StackedReplicas.audit(replicas)
    replicas._audits = False
    StackedReplicas.audit(replicas)


def test_what_is_written_into_the_mean_model_is_undone() -> None:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sgd, runtime = partial(torch.optim.SGD, lr=0.1), CollectiveRuntime(VirtualCluster(1))
    replica = LiveReplica(made, nn.functional.cross_entropy, sgd, Strategy(), runtime)
    kept = {name: value.clone() for name, value in made.state_dict().items()}
    with replica.averaged() as mean, torch.no_grad():
        mean.get_parameter("0.weight").fill_(5.0)
        mean.get_buffer("1.running_mean").fill_(5.0)
        assert float(made[0].weight[0, 0]) == 5.0
    assert all(torch.equal(value, kept[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 6, 11, 16])
def test_what_is_found_on_a_device_without_waiting_is_what_is_found_at_once(place: int, bad: float) -> None:
    found: list[Any] = []
    for look in (NonFinite._look_now, NonFinite._look_later):
        _, _, watch = watching("skip")
        size = sum(s.size for s in watch.layout.buckets[0].slots)
        rows = torch.arange(2.0 * size).view(2, size)
        look(watch, 0, rows.clone(), 6)
        assert not watch.found
        rows[1, place] = bad
        look(watch, 0, rows, 7)
        found.append((watch.found, watch.sentence, watch.cluster.ledger.nonfinite, rows.tolist()))
        watch.judge(True)
        assert not watch.found
    assert found[0] == found[1]
    seen, sentence, count, rows = found[0]
    assert (seen, count, rows[0], any(rows[1])) == (True, 1, list(range(size)), False)
    assert "step 7 on worker 5" in sentence
