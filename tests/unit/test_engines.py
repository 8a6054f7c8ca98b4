"""Laws of the gradient engines and of the optimisers on rows: both equal N separate models, the loop bit for bit."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.cluster.layout import Layout, layout_of
from hocket.errors import HocketError
from hocket.train.engines import LoopEngine, VmapEngine, choose, convolution, stack_buffers
from hocket.train.stacked import ROWWISE, StackedOptimizer, clip_rows_

ROWS, BATCH, CLASSES = 3, 6, 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Unused(nn.Module):
    """A layer that no forward pass touches, and one that only some batches do."""

    def __init__(self, conditional: bool = False) -> None:
        super().__init__()
        self.a, self.idle, self.sometimes = nn.Linear(8, CLASSES), nn.Linear(3, 3), nn.Linear(8, CLASSES)
        self.conditional = conditional

    def forward(self, x: Tensor) -> Tensor:
        if self.conditional and x.sum() < 0:
            return self.a(x)
        return self.a(x) + self.sometimes(x)


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 5), nn.Linear(5, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).double())


def _convolutions() -> nn.Module:
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, bias=False)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, CLASSES))


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES))
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model


def _pooled() -> nn.Module:
    body = [
        nn.Conv2d(3, 5, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(5, 7, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(7, 6, (1, 3), padding=(0, 1)),
    ]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, CLASSES))


class Attention(nn.Module):
    """Attention of each kind: causal, masked by the inputs, with fewer heads for keys, in a layer of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1, 32), nn.Linear(16, CLASSES)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow = self.into(x.unsqueeze(-1)).tensor_split([16], -1)
        query = wide.unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = narrow.unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = (x > -1)[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        causal = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        masked = F.scaled_dot_product_attention(query, query, query, attn_mask=mask, scale=0.3)
        few = F.scaled_dot_product_attention(query, query[:1], query[:1]) + F.scaled_dot_product_attention(
            query, query[0], query[0]
        )
        shared = F.scaled_dot_product_attention(query, query, query, attn_mask=mask.new_ones(x.shape[1], x.shape[1]).tril())
        mixed = (causal + masked + shared + few).transpose(1, 2).flatten(-2)
        return self.out(self.layer(mixed, src_key_padding_mask=x > 1).mean(1))


IMAGES = {"convolutions", "frozen", "pooled"}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": _convolutions,
    "frozen": _frozen,
    "pooled": _pooled,
    "dropout": _dropout,
    "tied": Tied,
    "unused": Unused,
    "mixed": Mixed,
    "attention": Attention,
}


class Setup:
    """The same workers twice: as separate models and as rows."""

    def __init__(self, build: Callable[[], nn.Module], images: bool = False, groups: bool = False, rows: int = ROWS) -> None:
        torch.manual_seed(0)
        self.template = build()
        self.models = [copy.deepcopy(self.template) for _ in range(rows)]
        for model in self.models:
            for p in model.parameters():
                if p.requires_grad:
                    p.data.add_(0.1 * torch.randn_like(p))
        named = list(self.template.named_parameters())
        two = [[p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]] if groups else None
        self.layout = layout_of(named, two, first_bucket_cap_bytes=64)
        self.weights, self.grads = ([b.empty(rows) for b in self.layout.buckets] for _ in range(2))
        fill(self.layout, self.weights, self.models)
        self.buffers = stack_buffers(self.template, rows)
        shape = (3, 8, 8) if images else (8,)
        self.x, self.y = torch.randn(rows, BATCH, *shape), torch.randint(0, CLASSES, (rows, BATCH))
        self.keys = torch.arange(rows) + 11

    def arguments(self) -> tuple[list[Tensor], dict[str, Tensor], Tensor, Tensor, list[Tensor], Tensor]:
        return self.weights, self.buffers, self.x, self.y, self.grads, self.keys

    def plain(self, xs: list[Tensor] | Tensor, ys: list[Tensor] | Tensor) -> list[Tensor]:
        losses = []
        for model, x, y, key in zip(self.models, xs, ys, self.keys, strict=True):
            torch.manual_seed(int(key))
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.detach())
        return losses


def fill(layout: Layout, storages: list[Tensor], models: list[nn.Module]) -> None:
    for row, model in enumerate(models):
        named = dict(model.named_parameters())
        for bucket, storage in zip(layout.buckets, storages, strict=True):
            for slot, view in zip(bucket.slots, bucket.views(storage, row), strict=True):
                view.copy_(named[slot.name].detach())


def same_gradients(s: Setup, used: Tensor) -> None:
    for row, model in enumerate(s.models):
        named, column = dict(model.named_parameters()), 0
        for bucket, storage in zip(s.layout.buckets, s.grads, strict=True):
            for slot, view in zip(bucket.slots, bucket.views(storage, row), strict=True):
                grad = named[slot.name].grad
                assert used[row, column] == (grad is not None), slot.name
                assert same_bits(view, torch.zeros_like(view) if grad is None else grad), slot.name
                column += 1


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal including the sign of zero."""
    return torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_loop_equals_separate_models_bit_for_bit(name: str, groups: bool) -> None:
    s = Setup(MODELS[name], name in IMAGES, groups)
    engine = LoopEngine(s.template, F.cross_entropy, s.layout)
    own = [p.detach().clone() for p in s.template.parameters()]
    for _ in range(3):
        for g in s.grads:
            g.fill_(float("nan"))
        state = torch.get_rng_state()
        losses, used = engine.gradients(*s.arguments())
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(losses, torch.stack(s.plain(s.x, s.y)))
        same_gradients(s, used)
        for row, model in enumerate(s.models):
            assert all(torch.equal(s.buffers[n][row], b) for n, b in model.named_buffers())
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(s.template.parameters(), own, strict=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [7, 17, 33])
def test_a_row_rounds_as_a_process_of_its_own_wherever_it_lies(batch: int, width: int) -> None:
    """Products of small matrices round by the addresses of their operands."""
    template = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1))
    layout = layout_of(template.named_parameters())
    weights = [torch.randn(4, b.size) for b in layout.buckets]
    x, y, keys = torch.randn(4, batch, 10), torch.randn(4, batch, 1), torch.arange(4)
    engine = LoopEngine(template, F.mse_loss, layout)
    grads = [torch.empty_like(w) for w in weights]
    engine.gradients(weights, {}, x, y, grads, keys)
    for row in range(4):
        alone, own = slice(row, row + 1), [torch.empty_like(w[:1]) for w in weights]
        engine.gradients([w[alone].clone() for w in weights], {}, x[alone].clone(), y[alone].clone(), own, keys[alone])
        assert all(same_bits(g[row], o[0]) for g, o in zip(grads, own, strict=True))


def test_uneven_batches_and_conditional_use() -> None:
    s = Setup(lambda: Unused(conditional=True))
    xs = [s.x[0, :2] - 5, s.x[1, :5] + 5, s.x[2]]
    ys = [s.y[0, :2], s.y[1, :5], s.y[2]]
    for engine in (
        LoopEngine(s.template, F.cross_entropy, s.layout),
        VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False),
    ):
        losses, used = engine.gradients(s.weights, s.buffers, xs, ys, s.grads, s.keys)
        assert torch.equal(losses, torch.stack(s.plain(xs, ys)))
        same_gradients(s, used)
        assert not torch.equal(used[0], used[1])


def test_the_loop_keeps_the_sign_of_zero() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.p * -0.0

    s = Setup(Nothing)
    LoopEngine(s.template, lambda out, y: out.sum(), s.layout).gradients(*s.arguments())
    assert same_bits(s.grads[0], torch.full((ROWS, 4), -0.0))


def test_moved_storage_is_noticed() -> None:
    s = Setup(Tied)
    engine = LoopEngine(s.template, F.cross_entropy, s.layout)
    engine.gradients(*s.arguments())
    expected = [g.clone() for g in s.grads]
    s.weights, s.grads = [w.clone() for w in s.weights], [torch.zeros_like(g) for g in s.grads]
    engine.gradients(*s.arguments())
    assert all(torch.equal(g, e) for g, e in zip(s.grads, expected, strict=True))


@pytest.mark.parametrize("parts", [2, 4, 100])
def test_micro_batches_give_the_gradient_of_the_whole(parts: int) -> None:
    s = Setup(Tied)
    whole, _ = LoopEngine(s.template, F.cross_entropy, s.layout).gradients(*s.arguments())
    expected = [g.clone() for g in s.grads]
    for engine in (
        LoopEngine(s.template, F.cross_entropy, s.layout, accumulate=parts),
        VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False, accumulate=parts),
    ):
        losses, _ = engine.gradients(*s.arguments())
        torch.testing.assert_close(losses, whole)
        for g, e in zip(s.grads, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-6)


def test_autocast_lowers_the_precision_of_both_engines() -> None:
    s = Setup(Tied)
    LoopEngine(s.template, F.cross_entropy, s.layout).gradients(*s.arguments())
    full = torch.cat([g.clone() for g in s.grads], 1)
    for engine in (
        LoopEngine(s.template, F.cross_entropy, s.layout, autocast=torch.bfloat16),
        VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False, autocast=torch.bfloat16),
    ):
        engine.gradients(*s.arguments())
        distance = (torch.cat(s.grads, 1) - full).norm() / full.norm()
        assert 1e-4 < distance < 2e-2


@pytest.mark.parametrize("row_convolutions", [False, True])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"dropout"}))
def test_vmap_equals_the_loop(name: str, chunk: int | None, row_convolutions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if row_convolutions:
        monkeypatch.setattr(convolution, "has_row_kernel", lambda m, dtype: type(m) is nn.Conv2d)
    s = Setup(MODELS[name], name in IMAGES)
    losses, used = LoopEngine(s.template, F.cross_entropy, s.layout).gradients(*s.arguments())
    expected, statistics = [g.clone() for g in s.grads], {n: b.clone() for n, b in s.buffers.items()}
    s.buffers = stack_buffers(s.template, ROWS)
    engine = VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False, chunk=chunk)
    warnings.filterwarnings("error", "There is a performance drop")  # an operation runs row by row
    for turn in range(2):
        got, flags = engine.gradients(*s.arguments())
        torch.testing.assert_close(got, losses, rtol=1e-5, atol=1e-5)
        assert torch.equal(flags, used)
        for g, e in zip(s.grads, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)
        for n, b in s.buffers.items():
            if turn == 0:
                torch.testing.assert_close(b, statistics[n], rtol=1e-5, atol=1e-5)


def test_vmap_follows_train_and_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "has_row_kernel", lambda m, dtype: type(m) is nn.Conv2d)
    s = Setup(_convolutions, images=True)
    engine = VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False)
    engine.gradients(*s.arguments())
    s.template.eval()
    before = {n: b.clone() for n, b in s.buffers.items()}
    losses, _ = engine.gradients(*s.arguments())
    expected, _ = LoopEngine(s.template, F.cross_entropy, s.layout).gradients(*s.arguments())
    torch.testing.assert_close(losses, expected)
    assert all(torch.equal(b, before[n]) for n, b in s.buffers.items())


def test_vmap_dropout_differs_by_row_and_repeats_for_the_same_keys() -> None:
    s = Setup(_dropout)
    for storage in s.weights:
        storage[:] = storage[:1].clone()
    s.x[:], s.y[:] = s.x[:1].clone(), s.y[:1].clone()
    engine = VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False)
    state = torch.get_rng_state()
    first, second = engine.gradients(*s.arguments())[0], engine.gradients(*s.arguments())[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert len(set(first.tolist())) == ROWS
    s.keys += 1
    assert not torch.equal(first, engine.gradients(*s.arguments())[0])


def test_a_model_that_vmap_cannot_do_goes_to_the_loop_with_a_note() -> None:
    s = Setup(lambda: nn.Sequential(nn.BatchNorm1d(8), Unused(conditional=True)))
    engine = VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False, fall_back=True)
    with pytest.warns(UserWarning, match="one after another"):
        losses, used = engine.gradients(*s.arguments())
    assert torch.equal(losses, torch.stack(s.plain(s.x, s.y)))
    same_gradients(s, used)
    for row, model in enumerate(s.models):
        assert all(torch.equal(s.buffers[n][row], b) for n, b in model.named_buffers()), "the failed attempt left traces"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.gradients(*s.arguments())
    with pytest.raises(HocketError, match="engine='loop'"):
        VmapEngine(s.template, F.cross_entropy, s.layout, ROWS, False).gradients(*s.arguments())


def test_every_engine_is_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """All share one code object, of which torch compiles a few shapes and no more."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=backend, **options))
    for rows in range(2, 14):
        s = Setup(Tied, rows=rows)
        seen = len(graphs)
        VmapEngine(s.template, F.cross_entropy, s.layout, rows, True).gradients(*s.arguments())
        assert len(graphs) > seen, f"{rows} rows ran without being compiled"


def test_choose() -> None:
    s = Setup(Tied)
    assert isinstance(choose(s.template, F.cross_entropy, s.layout, ROWS, "cpu"), LoopEngine)
    assert isinstance(choose(s.template, F.cross_entropy, s.layout, ROWS, "cpu", "vmap"), VmapEngine)
    assert isinstance(choose(s.template, F.cross_entropy, s.layout, ROWS, "cuda", "loop"), LoopEngine)
    recurrent = nn.LSTM(4, 4, proj_size=2)
    layout = layout_of(recurrent.named_parameters())
    with pytest.warns(UserWarning, match="LSTM"):
        assert isinstance(choose(recurrent, F.mse_loss, layout, ROWS, "cuda"), LoopEngine)
    with pytest.raises(HocketError, match="LSTM"):
        choose(recurrent, F.mse_loss, layout, ROWS, "cuda", "vmap")
    with pytest.raises(HocketError, match="no gradient engine 'fast'"):
        choose(s.template, F.cross_entropy, s.layout, ROWS, "cpu", "fast")


class Shapes(nn.Module):
    """Parameters of all kinds of shapes, scalars and single values among them."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate([(5, 3), (1,), (), (7,), (4, 2, 3, 3), (1, 1), (33,)]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))


OPTIONS: dict[str, dict[str, object]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "ASGD": {"t0": 2},
    "Muon": {"weight_decay": 0.1},
    "OneBitAdam": {"freeze_step": 4, "weight_decay": 0.1},
    "LARS": {"weight_decay": 0.1, "nesterov": True},
    "LAMB": {"lr": 0.02, "weight_decay": 0.1},
}
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _by_kind(cls: type[torch.optim.Optimizer], options: dict[str, object]) -> Factory:
    """Matrices and vectors in groups of their own, with different rates."""

    def factory(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        high, flat = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
        return cls([{"params": high}, {"params": flat, "lr": 0.003, "matrices": 0}], **options)  # type: ignore[call-arg]

    return factory


def _train(
    s: Setup,
    factory: Factory,
    stacked: StackedOptimizer,
    steps: int,
    others: list[torch.optim.Optimizer] | None = None,
    apart: int = sys.maxsize,
) -> list[torch.optim.Optimizer]:
    """Steps with random gradients, in both worlds; the parameter p3 is unused in the first and in the last step.

    From step ``apart`` on, one row after the other leaves p4 out.
    """
    others = others or [factory(list(m.parameters())) for m in s.models]
    names = [slot.name for b in s.layout.buckets for slot in b.slots]
    for t in range(steps):
        used = torch.ones(len(s.models), len(names), dtype=torch.bool)
        used[:, names.index("p3")] = t not in (0, steps - 1)
        if t >= apart:
            used[t % len(s.models), names.index("p4")] = False
        for g in s.grads:
            g.normal_()
        for row, (model, optimizer) in enumerate(zip(s.models, others, strict=True)):
            named = dict(model.named_parameters())
            for bucket, storage in zip(s.layout.buckets, s.grads, strict=True):
                for slot, view in zip(bucket.slots, bucket.views(storage, row), strict=True):
                    named[slot.name].grad = view.clone() if used[row, names.index(slot.name)] else None
            optimizer.step()
        stacked.step(used)
    return others


def _same_weights(s: Setup) -> bool:
    expected = [torch.empty_like(w) for w in s.weights]
    fill(s.layout, expected, s.models)
    return all(torch.equal(w, e) for w, e in zip(s.weights, expected, strict=True))


@pytest.mark.parametrize("apart", [sys.maxsize, 0, 2], ids=["together", "apart", "apart later"])
@pytest.mark.parametrize("granularity", ["slots", "buckets"])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("cls", ROWWISE, ids=lambda c: c.__name__)
def test_stacked_optimisers_equal_one_per_worker_bit_for_bit(
    cls: type[torch.optim.Optimizer], groups: bool, granularity: str, apart: int
) -> None:
    options = OPTIONS.get(cls.__name__, {})
    factory: Factory = _by_kind(cls, options) if groups else lambda params: cls(params, **options)  # type: ignore[call-arg]
    s = Setup(Shapes, groups=groups)
    names = [n for n, _ in s.template.named_parameters()]
    stacked = StackedOptimizer(factory, s.layout, s.weights, s.grads, granularity, names=names)
    assert stacked.stacked
    assert len(stacked.optimizer.param_groups) == len(factory(list(s.template.parameters())).param_groups)
    others = _train(s, factory, stacked, 5, apart=apart)
    assert stacked.stacked == (apart > 5)
    assert _same_weights(s)
    # A new optimiser that takes up the saved state goes on as if nothing had happened.
    resumed = StackedOptimizer(factory, s.layout, s.weights, s.grads, granularity, names=names)
    resumed.load_state_dict(copy.deepcopy(stacked.state_dict()))
    _train(s, factory, resumed, 3, others, apart)
    assert _same_weights(s)


class Counting(TorchDispatchMode):
    """How many operations are made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def _operations(step: Callable[[], object]) -> int:
    step()  # makes the state
    with Counting() as counting:
        step()
    return counting.count


@pytest.mark.parametrize("cls", ROWWISE, ids=lambda c: c.__name__)
def test_on_cuda_all_rows_take_no_more_operations_than_one_model(
    cls: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU Muon, LARS and LAMB go row by row, so that results do not depend on who hosts whom: the branch is forced."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    options = OPTIONS.get(cls.__name__, {})
    factory: Factory = _by_kind(cls, options)
    counts = []
    for rows in (1, 8):
        s = Setup(Shapes, groups=True, rows=rows)
        for g in s.grads:
            g.normal_()
        names = [n for n, _ in s.template.named_parameters()]
        counts.append(_operations(StackedOptimizer(factory, s.layout, s.weights, s.grads, names=names).step))
    model = Shapes()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    assert counts[0] == counts[1] <= 1.2 * _operations(factory(list(model.parameters())).step)


class OfTheUser(torch.optim.SGD):
    """A class we do not know, though it derives from one we do."""


PER_ROW: dict[str, Factory] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.05),
    "fused": lambda params: torch.optim.Adam(params, 0.1, fused=True),
    "the user's": lambda params: OfTheUser(params, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_other_optimisers_run_once_per_row(name: str) -> None:
    s = Setup(Shapes)
    stacked = StackedOptimizer(PER_ROW[name], s.layout, s.weights, s.grads, "buckets")
    assert not stacked.stacked
    others = _train(s, PER_ROW[name], stacked, 3)
    assert _same_weights(s)
    for optimizer in (stacked.optimizer, *others):
        optimizer.param_groups[0]["lr"] *= 0.5
    saved = copy.deepcopy(stacked.state_dict())
    stacked = StackedOptimizer(PER_ROW[name], s.layout, s.weights, s.grads)
    stacked.load_state_dict(saved)
    _train(s, PER_ROW[name], stacked, 3, others)
    assert _same_weights(s)


def test_muon_sees_true_matrices() -> None:
    def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in params if p.ndim == 2], 0.05)

    s = Setup(Shapes)
    stacked = StackedOptimizer(muon, s.layout, s.weights, s.grads)
    assert not stacked.stacked
    _train(s, muon, stacked, 2)
    assert _same_weights(s)


@pytest.mark.parametrize("apart", [sys.maxsize, 0])
@pytest.mark.filterwarnings("error")
def test_schedulers_drive_stacked_optimisers(apart: int) -> None:
    s = Setup(Shapes)
    factory: Factory = lambda params: torch.optim.SGD(params, 0.1)  # noqa: E731
    stacked = StackedOptimizer(factory, s.layout, s.weights, s.grads)
    scheduler = torch.optim.lr_scheduler.StepLR(stacked.optimizer, 1, 0.5)
    others = None
    for t in range(3):
        others = _train(s, factory, stacked, 1, others, apart)
        scheduler.step()
        for optimizer in others:
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (t + 1)
    assert _same_weights(s)


def test_refusals_of_optimisers() -> None:
    s = Setup(Shapes)
    with pytest.raises(HocketError, match="LBFGS"):
        StackedOptimizer(lambda params: torch.optim.LBFGS(params), s.layout, s.weights, s.grads)
    with pytest.raises(HocketError, match="granularity"):
        StackedOptimizer(lambda params: torch.optim.SGD(params), s.layout, s.weights, s.grads, "rows")
    with pytest.raises(HocketError, match="names lacks"):
        StackedOptimizer(lambda params: torch.optim.SGD(params), s.layout, s.weights, s.grads, names=["p0"])


@pytest.mark.parametrize("build", [Shapes, Mixed])
def test_clipping_rows_equals_clip_grad_norm(build: Callable[[], nn.Module]) -> None:
    s = Setup(build)
    for g in s.grads:
        g.normal_()
        g[0] *= 0.001  # this row stays below the limit
    for row, model in enumerate(s.models):
        named = dict(model.named_parameters())
        for bucket, storage in zip(s.layout.buckets, s.grads, strict=True):
            for slot, view in zip(bucket.slots, bucket.views(storage, row), strict=True):
                named[slot.name].grad = view.clone()
    norms = clip_rows_(s.grads, 0.5)
    for row, model in enumerate(s.models):
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norms[row].float(), expected.float())
        named = dict(model.named_parameters())
        for bucket, storage in zip(s.layout.buckets, s.grads, strict=True):
            for slot, view in zip(bucket.slots, bucket.views(storage, row), strict=True):
                torch.testing.assert_close(view, named[slot.name].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "name, row_convolutions", [("convolutions", False), ("convolutions", True), ("pooled", True), ("attention", False)]
)
def test_compiled_vmap_equals_the_loop_on_cuda(name: str, row_convolutions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(convolution, "has_row_kernel", lambda m, dtype: row_convolutions and type(m) is nn.Conv2d)
    s = Setup(lambda: MODELS[name]().cuda(), images=name in IMAGES)
    s.x, s.y = s.x.cuda(), s.y.cuda()
    losses, _ = LoopEngine(s.template, F.cross_entropy, s.layout).gradients(*s.arguments())
    expected = [g.clone() for g in s.grads]
    engine = VmapEngine(s.template, F.cross_entropy, s.layout, ROWS)
    for _ in range(4):  # plain, recorded, replayed, replayed
        for g in s.grads:
            g.zero_()
        torch.testing.assert_close(engine.gradients(*s.arguments())[0], losses, rtol=1e-4, atol=1e-5)
        for g, e in zip(s.grads, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-4)
    assert all(b.tolist() == [5] * ROWS for n, b in s.buffers.items() if n.endswith("num_batches_tracked"))
    assert any(type(m) is convolution.RowConv2d for m in engine._model.modules()) == row_convolutions, "they were given up"
