"""Laws of moments that are averaged rarely (DES-LOC): when, what, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.cluster.message import ring_bytes
from hocket.errors import HocketError
from hocket.optim import moment_name
from hocket.strategy import Strategy
from virtual.world import World, sgd

NAMES = ("exp_avg", "exp_avg_sq")


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 0.01)


def rows(world: World, name: str) -> Tensor:
    """One kind of state of all workers."""
    return torch.cat([world.replicas._stacked.rows_of(b, name) for b in range(len(world.replicas.layout.buckets))], 1)


def equal(found: Tensor) -> bool:
    return torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("sync", ["local(2, moments=3)", "local(2, mean=after, moments=3)", "local(1, moments=6) + topk(0.2)"])
@pytest.mark.parametrize("caps", [(10**6, 10**6), (16, 16)], ids=["one bucket", "many buckets"])
def test_first_moments_are_averaged_at_their_period_and_second_ones_half_as_often(sync: str, caps: tuple[int, int]) -> None:
    world = World(sync, optimizer=adam, caps=caps)
    met = [[equal(rows(at, name)) for name in NAMES] for at in (world.step() for _ in range(12))]
    assert [t for t, (first, _) in enumerate(met, 1) if first] == [6, 12]
    assert [t for t, (_, second) in enumerate(met, 1) if second] == [12]


@pytest.mark.parametrize("optimizer", [adam, lambda params: hocket.Muon(params, matrices=[1, 0, 1, 0])], ids=["adam", "muon"])
def test_they_become_their_mean_and_weights_go_on_as_they_were(optimizer: Callable) -> None:
    name = "exp_avg" if optimizer is adam else "momentum_buffer"
    apart, averaged = World("local(2)", optimizer=optimizer).step(4), World("local(2, moments=2)", optimizer=optimizer).step(4)
    assert torch.equal(apart.rows, averaged.rows)
    found = rows(averaged, name)
    assert equal(found)
    torch.testing.assert_close(found, rows(apart, name).mean(0).expand_as(found), rtol=1e-5, atol=1e-7)
    assert not torch.equal(apart.step().rows, averaged.step().rows)


def test_workers_whose_rows_part_average_what_each_has() -> None:
    """Also after the stacked optimiser became one per worker."""
    world = World("local(2, moments=2)", optimizer=adam).step(3)
    before = rows(world, "exp_avg")
    world.replicas._stacked._unstack()
    assert torch.equal(rows(world, "exp_avg"), before)
    assert equal(rows(world.step(), "exp_avg"))


def test_they_cost_a_mean_of_all_values_each() -> None:
    apart, averaged = (World(text, optimizer=adam).step(8) for text in ("local(2, mean=after)", "local(2, mean=after, moments=2)"))
    each = sum(ring_bytes(4 * b.size, 4) for b in apart.replicas.layout.buckets)
    assert averaged.sent[0] - apart.sent[0] == (2 + 1) * each  # first moments after steps 4 and 8, second ones after 8


def test_one_worker_exchanges_none() -> None:
    alone = World("local(2, moments=1)", 1, optimizer=adam).step(4)
    assert alone.sent == [0]
    assert torch.equal(alone.rows, World("local(2)", 1, optimizer=adam).step(4).rows)


def test_optimisers_have_names_for_them() -> None:
    params = [torch.ones(2, 2)]
    assert [moment_name(hocket.OneBitAdam(params, freeze_step=1), 0, second) for second in (False, True)] == list(NAMES)
    muon = hocket.Muon([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    assert [moment_name(muon, group, False) for group in range(2)] == ["momentum_buffer", "exp_avg"]
    assert [moment_name(muon, group, True) for group in range(2)] == [None, "exp_avg_sq"]


@pytest.mark.parametrize("text, words", [
    ("local(2, moments=3) + gossip", "moments= is for weights that all workers average"),
    ("local(2, moments=3) + gradients", "moments= is for weights that all workers average"),
    ("local(2, moments=-1)", "at least 0"), ("local(2, moments=1.5)", "whole number"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError, match=words):
        Strategy.parse(text)


def test_an_optimiser_without_moments_is_refused() -> None:
    with pytest.raises(HocketError, match="SGD has no moments that could be averaged; leave moments= out"):
        World("local(2, moments=3)", optimizer=sgd())


def test_the_notation_gives_it_back() -> None:
    assert str(Strategy.parse("local(4, moments=3)")) == "local(4, moments=3) + allreduce"
    with pytest.raises(HocketError, match=r"write 'local\(16, moments=3\)'"):
        Strategy.parse("des_loc")
