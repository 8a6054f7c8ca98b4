"""Laws of DeMo: an orthonormal transform of chunks, the paper's update, and momentum that keeps what was not sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.cluster import VirtualCluster
from hocket.compression.base import Context
from hocket.compression.demo import CHUNK, SIDE, DeMo, restored, transformed
from hocket.errors import HocketError
from hocket.strategy import Strategy
from hocket.topology import AllReduce
from virtual.world import World, sgd

SHAPES = [
    ((64, 64),),
    ((70, 130), (7,), (33, 5), (40, 3, 3, 4), (9,)),
    ((5,), (128, 64), (6000,)),
    None,
]


def _context(shapes: Any, world: int = 1, step: int = 0) -> Context:
    return Context(0, step, step, 0, torch.arange(world), world, shapes)


def _rows(shapes: Any, rows: int = 2) -> Tensor:
    size = 5000 if shapes is None else sum(map(math.prod, shapes))
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_the_transform_keeps_norms_and_has_an_inverse(shapes: Any, world: int) -> None:
    rows, context = _rows(shapes), _context(shapes, world)
    values = transformed(rows, context)
    assert values.shape[1] % (CHUNK * world) == 0, "slices of an all-reduce are whole chunks"
    torch.testing.assert_close(values.norm(dim=1), rows.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(restored(values, rows.shape[1], context), rows, rtol=0, atol=1e-5)


def test_the_transform_is_the_cosine_transform_of_both_sides() -> None:
    """A product of cosines is one coefficient, a constant matrix the first one; each chunk of a matrix has its own."""
    at = torch.arange(SIDE) + 0.5
    wave = torch.outer(torch.cos(math.pi * 3 * at / SIDE), torch.cos(math.pi * 11 * at / SIDE))
    whole = torch.cat([torch.cat([wave, torch.full((SIDE, SIDE), 2.0)], 1), torch.zeros(SIDE, 2 * SIDE)], 0)
    values = transformed(whole.view(1, -1), _context(((2 * SIDE, 2 * SIDE),))).view(4, SIDE, SIDE)
    expected = torch.zeros(4, SIDE, SIDE)
    expected[0, 3, 11], expected[1, 0, 0] = SIDE / 2, 2.0 * SIDE
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 70), nn.Tanh(), nn.Linear(70, 65), nn.Tanh(), nn.Linear(65, 3))


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_workers_with_equal_gradients_make_the_papers_update(decay: float) -> None:
    """m ← βm + g; q = TopK(DCT(m)); m ← m − IDCT(q); w ← w − η·sign(IDCT(q))."""
    k, lr = 20, 0.01
    world = World(f"bulk + demo({k}, decay={decay})", make=_net, optimizer=sgd(lr))
    world.x[:], world.y[:] = world.x[:, :1].clone(), world.y[:, :1].clone()
    (bucket,) = world.replicas.layout.buckets
    context = _context(tuple(s.shape for s in bucket.slots))
    momentum = torch.zeros(1, bucket.size)
    for _ in range(4):
        before = world.rows[0].clone()
        plain = World("bulk", make=_net, optimizer=sgd(1.0))  # its update is the gradient
        plain.replicas.weights[0].copy_(before.float().expand(4, -1))
        plain.x, plain.y, plain.at = world.x, world.y, world.at
        gradient = (before - plain.step().rows[0]).float().view(1, -1)
        momentum = decay * momentum + gradient
        chunks = transformed(momentum, context).view(-1, CHUNK)
        kept = chunks.abs() >= chunks.abs().topk(k, dim=1).values[:, -1:]
        sent = restored((chunks * kept).view(1, -1), bucket.size, context)
        momentum = momentum - sent
        moved = (world.step().rows[0] - before).float()
        clear = sent[0].abs() > 1e-5  # where rounding does not decide the sign
        assert bool(clear.float().mean() > 0.5)
        torch.testing.assert_close(moved[clear], -lr * sent[0].sign()[clear], rtol=0, atol=1e-6)
        kept_back = world.replicas.program.gradient_state[0]["momentum"]
        torch.testing.assert_close(kept_back, momentum.expand(4, -1), rtol=0, atol=1e-4)


def test_the_mean_has_the_selected_values_of_all_workers() -> None:
    """The owner of a slice sends all of them on, so that nothing is lost after the selection of each worker."""
    shapes, k = ((128, 64),), 12
    rows = torch.randn(4, 128 * 64, generator=torch.Generator().manual_seed(0))
    cluster = VirtualCluster(4)
    context = Context(0, 0, 0, 0, torch.arange(4), 4, shapes)
    heard = DeMo(k, 0.0, sign=False).mean(rows, AllReduce().bind(cluster, cluster.world, 0), {}, context).mixed
    chunks = transformed(rows, context).view(4, -1, CHUNK)
    kept = chunks * (chunks.abs() >= chunks.abs().topk(k, dim=2).values[:, :, -1:])
    expected = restored(kept.flatten(1).mean(0, keepdim=True), rows.shape[1], context)
    torch.testing.assert_close(heard, expected.expand(4, -1), rtol=0, atol=1e-5)


def test_all_values_sent_without_decay_and_signs_are_bulk() -> None:
    found, plain = (World(text, make=_net).step(4) for text in (f"bulk + demo({CHUNK}, 0, sign=False)", "bulk"))
    torch.testing.assert_close(found.rows, plain.rows, rtol=1e-4, atol=1e-5)


def test_it_learns_and_sends_few_bytes() -> None:
    found, plain = (World(text, make=_net, optimizer=sgd(0.01)).step(60) for text in ("bulk + demo(32)", "bulk"))
    assert sum(found.losses[-10:]) < 0.7 * sum(found.losses[:10])
    assert plain.sent[0] / found.sent[0] > 3
    assert torch.equal(found.rows, found.rows[:1].expand_as(found.rows))


@pytest.mark.parametrize("text, words", [
    ("demo(0)", "from 1 to 4,096"), ("demo(5000)", "from 1 to 4,096"), ("demo(2.5)", "from 1 to 4,096"), ("demo(8, 1.0)", "lie in"),
    ("demo(8, sign=3)", "True or False"), ("local(2) + demo", "cannot carry weights"), ("demo + updates", "cannot carry updates"),
    ("async + demo", "a shard cannot decode demo"),
])  # fmt: skip
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(HocketError, match=words):
        Strategy.parse(text)


def test_a_clip_of_signs_is_refused() -> None:
    with pytest.raises(HocketError, match="leave clip out"):
        World("bulk + demo(16)", clip=1.0)
    World("bulk + demo(16, sign=False)", clip=1.0)


def test_an_optimiser_with_momentum_is_refused() -> None:
    with pytest.raises(HocketError, match=r"demo includes the momentum, and AdamW has one, too: use SGD\(momentum=0\)"):
        World("bulk + demo", optimizer=lambda params: torch.optim.AdamW(params))


def test_the_notation_gives_it_back() -> None:
    strategy = Strategy.parse("bulk + demo(16, decay=0.99) | qsgd(8)")
    assert Strategy.parse(str(strategy)) == strategy
    assert strategy.compression == hocket.DeMo(16, 0.99, precision=hocket.QSGD(8))
    with pytest.raises(HocketError, match="write 'demo'"):
        Strategy.parse("bulk + decoupled_momentum")
