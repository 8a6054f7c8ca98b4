"""Any model: shared, frozen, unused, float64 and bf16 parameters, BatchNorm, several groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from virtual.world import CLASSES, FEATURES, World, plain, row_of, seeded, sgd

STRATEGIES = [
    "bulk", "bulk + topk(0.3)", "local(2)", "local(2) + gossip", "gossip + sign", "bulk + lowrank(1)",
    "gossip + exchange=gradients",
    "diloco(2) + qsgd(4)", "hierarchical(allreduce, gossip, size=2) + threshold(keep=0.3)", "postlocal(2, 2) + cast(fp16)",
]  # fmt: skip


class Shared(nn.Module):
    """Two layers with one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x * self.frozen)))))


class Unused(nn.Module):
    """A branch that no step uses, and one that only some workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.some = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.used(x)
        return out + self.some(x) if float(x[0, 0].detach()) > 0 else out


class Mixed(nn.Module):
    """float32 and float64, or bf16, side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.dtype = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES).to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(self.dtype)).float()


class Normed(nn.Module):
    """BatchNorm, with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.a(x))))


MODELS = {
    "shared": Shared, "unused": Unused, "norm": Normed,
    "float64": lambda: Mixed(torch.float64), "bf16": lambda: Mixed(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_model_trains_under_every_kind_of_strategy(model: str, strategy: str) -> None:
    worlds = [World(strategy, make=MODELS[model]).step(16) for _ in range(2)]
    assert torch.equal(worlds[0].rows, worlds[1].rows)
    assert bool(torch.isfinite(worlds[0].rows).all())
    assert sum(worlds[0].losses[-4:]) < sum(worlds[0].losses[:4])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["bulk + topk(0.3)", "local(2)", "gossip + sign"])
def test_one_worker_of_any_model_is_plain_training(model: str, strategy: str) -> None:
    world = World(strategy, workers=1, make=MODELS[model]).step(8)
    assert torch.equal(world.rows[0], plain(world, make=MODELS[model]))


def test_frozen_parameters_stay_and_shared_ones_count_once() -> None:
    world = World("bulk", make=Shared).step(4)
    names = [s.name for b in world.replicas.layout.buckets for s in b.slots]
    assert sorted(names) == ["a.bias", "a.weight", "b.bias", "out.bias", "out.weight"]
    with world.replicas.averaged() as model:
        assert model.frozen.tolist() == [1.0] * FEATURES
        assert model.b.weight is model.a.weight


def test_a_parameter_that_nobody_uses_stays_and_one_that_somebody_uses_moves_with_all() -> None:
    """Weight decay would move it if its gradient were zero instead of None."""
    world = World("bulk", make=Unused, optimizer=sgd(0.1, weight_decay=0.5))
    world.x[..., 0] = world.x[..., 0].abs() * -1
    world.x[0, 1, 0, 0] = 1.0
    before = dict(seeded(Unused).named_parameters())
    world.step(1)
    with world.replicas.averaged() as model:
        assert torch.equal(model.never.weight, before["never.weight"])
        assert not torch.equal(model.some.weight, before["some.weight"])
    assert all(torch.equal(world.rows[0], row) for row in world.rows)


def test_groups_keep_their_own_rates() -> None:
    def groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[:2], "lr": 0.0}, {"params": params[2:]}], 0.2, momentum=0.9)

    world = World("bulk", optimizer=groups).step(6)
    assert {b.group for b in world.replicas.layout.buckets} == {0, 1}
    with world.replicas.averaged() as model:
        start = seeded()
        assert torch.equal(model.hidden.weight, start.hidden.weight)
        assert not torch.equal(model.out.weight, start.out.weight)
    alone = World("local(2) + topk(0.1)", workers=1, optimizer=groups).step(6)
    assert torch.equal(alone.rows[0], plain(alone, steps=6, optimizer=groups))


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.AdamW(p, 0.01), lambda p: torch.optim.RMSprop(p, 0.01),
    lambda p: torch.optim.Adagrad(p, 0.1), lambda p: torch.optim.Adafactor(p, 0.05),
], ids=["Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"])  # fmt: skip
def test_any_optimiser_under_any_strategy(optimizer) -> None:
    alone = World("gossip + sign", workers=1, optimizer=optimizer).step(6)
    torch.testing.assert_close(alone.rows[0], plain(alone, steps=6, optimizer=optimizer), rtol=0, atol=1e-7)
    for strategy in STRATEGIES[:5]:
        world = World(strategy, optimizer=optimizer).step(16)
        assert sum(world.losses[-4:]) < sum(world.losses[:4])


def test_batchnorm_buffers_are_averaged_for_evaluation_only() -> None:
    world = World("local(2)", make=Normed).step(5)
    own = world.replicas.buffers["norm.running_mean"].clone()
    assert (own[0] - own[1]).norm() > 1e-4
    with world.replicas.averaged() as model:
        torch.testing.assert_close(model.norm.running_mean, own.mean(0))
        assert int(model.norm.num_batches_tracked) == 5
    assert torch.equal(world.replicas.buffers["norm.running_mean"], own)


def test_the_mean_model_is_the_mean_and_leaves_the_replicas_alone() -> None:
    world = World("local(4)").step(3)
    rows, sent = world.rows, world.sent
    with world.replicas.averaged() as model:
        torch.testing.assert_close(row_of(model, world), rows.mean(0), rtol=0, atol=1e-6)
    assert torch.equal(world.rows, rows)
    assert world.sent == sent
    for row, model in zip(rows, world.replicas.each(), strict=True):
        assert torch.equal(row_of(model, world), row)


@pytest.mark.parametrize("strategy", ["bulk + qsgd(4)", "bulk + topk(0.3)", "gossip + sign"])
def test_another_cap_is_another_result_and_no_compression_is_not(strategy: str) -> None:
    one, two = (World(strategy, caps=caps).step(4) for caps in ((10**6, 10**6), (16, 16)))
    assert one.losses != two.losses
    plainly = [World("bulk", caps=caps).step(4).losses for caps in ((10**6, 10**6), (16, 16))]
    assert plainly[0] == plainly[1]


def test_clipping_sees_mixed_gradients() -> None:
    clipped, free = World("bulk", clip=1e-3).step(1), World("bulk").step(0)
    assert (clipped.rows[0] - free.rows[0]).norm() == pytest.approx(0.2 * 1e-3, rel=1e-3)


def test_dropout_is_a_function_of_the_worker() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    runs = [World("bulk", make=make).step(3) for _ in range(2)]
    assert torch.equal(runs[0].rows, runs[1].rows)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    World("bulk", make=make).step(1)
    assert torch.equal(torch.random.get_rng_state(), state)
