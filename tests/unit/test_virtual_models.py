"""Real models as rows: what the vmap engine computes for all workers at once is what the loop computes one after another."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.cluster.layout import layout_of
from hocket.errors import HocketError
from hocket.train.engines import LoopEngine, VmapEngine, choose, stack_buffers

TRITON = importlib.util.find_spec("triton") is not None
FILE = Path(__file__).parents[2] / "benchmarks" / "virtual_models.py"
SPEC = importlib.util.spec_from_file_location("virtual_models", FILE)
assert SPEC is not None
assert SPEC.loader is not None
table = importlib.util.module_from_spec(SPEC)
sys.modules["virtual_models"] = table
SPEC.loader.exec_module(table)

ROWS, BATCH = 3, 4
HUGGING_FACE = ("vit", "gpt2", "llama", "bert")


class Rows:
    """A model, weights that differ from row to row, and samples."""

    def __init__(self, build: Callable[[], nn.Module], x: Tensor, y: Tensor, loss: Any = table.loss) -> None:
        self.model, self.x, self.y, self.loss = build().train(), x, y, loss
        self.layout, named = layout_of(self.model.named_parameters()), dict(self.model.named_parameters())
        flat = [torch.cat([named[s.name].detach().flatten() for s in b.slots]) for b in self.layout.buckets]
        self.weights = [f + 0.02 * torch.randn(len(x), len(f)) for f in flat]

    def engine(self, compile: bool = False, **options: Any) -> VmapEngine:
        return VmapEngine(self.model, self.loss, self.layout, len(self.x), compile, **options)

    def loop(self, **options: Any) -> LoopEngine:
        return LoopEngine(self.model, self.loss, self.layout, **options)

    def gradients(self, engine: LoopEngine | VmapEngine, seed: int = 0) -> SimpleNamespace:
        buffers, grads = stack_buffers(self.model, len(self.x)), [torch.full_like(w, torch.nan) for w in self.weights]
        keys = torch.arange(len(self.x)) + seed
        losses, used = engine.gradients(self.weights, buffers, self.x, self.y, grads, keys)
        return SimpleNamespace(losses=losses, used=used, flat=torch.cat(grads, 1), buffers=buffers)


def same(found: SimpleNamespace, expected: SimpleNamespace) -> None:
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.losses, expected.losses, **close)
    torch.testing.assert_close(found.flat, expected.flat, **close)
    assert torch.equal(found.used, expected.used)
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, **close, msg=lambda text, name=name: f"{name}: {text}")


def rows_of(name: str) -> Rows:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    kind, build = table.MODELS[name]
    return Rows(lambda: build(True), *table.samples(kind, ROWS, BATCH, True))


@pytest.mark.filterwarnings("error::UserWarning")  # nothing falls back, in whole or for one operation
@pytest.mark.parametrize("name", table.MODELS)
def test_ten_kinds_of_models_are_computed_for_all_workers_at_once(name: str) -> None:
    rows = rows_of(name)
    engine = rows.engine()
    same(rows.gradients(engine), rows.gradients(rows.loop()))
    half = rows.gradients(rows.engine(autocast=torch.bfloat16)).flat
    full = rows.gradients(engine).flat
    assert 1e-4 < (half - full).norm() / full.norm() < 0.1


class Recurrent(nn.Module):
    """A recurrent layer of any kind, from a given state or from zeros, over batches or a single sequence."""

    def __init__(self, kind: type[nn.RNNBase], starts: bool, single: bool, **options: Any) -> None:
        super().__init__()
        self.layer, self.starts, self.single = kind(5, 3, num_layers=2, **options), starts, single
        self.double = 1 + bool(options.get("bidirectional"))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0] if self.single else x
        shape = (2 * self.double, *(() if self.single else (x.shape[0] if self.layer.batch_first else x.shape[1],)), 3)
        given = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
        start = None if not self.starts else (given, -given) if isinstance(self.layer, nn.LSTM) or self.paired else given
        out, last = self.layer(x, start)
        ends = last if isinstance(last, tuple) else (last,)
        return torch.cat([out.flatten(), *(end.flatten() for end in ends)])

    @property
    def paired(self) -> bool:
        return self.layer.mode == "LSTM"


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("starts, single", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **o: nn.RNN(*a, **o, nonlinearity="relu")])
def test_recurrent_layers_of_any_kind(kind: Any, starts: bool, single: bool, options: dict[str, Any]) -> None:
    rows = Rows(
        lambda: Recurrent(kind, starts, single and not options.get("batch_first"), **options),
        torch.randn(ROWS, 6, BATCH, 5),
        torch.zeros(ROWS, 1),
        lambda out, y: (out * torch.linspace(0.5, 2, len(out))).sum(),
    )
    same(rows.gradients(rows.engine()), rows.gradients(rows.loop()))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "build, shape",
    [
        (lambda: nn.BatchNorm1d(4, momentum=None), (4,)),
        (lambda: nn.BatchNorm1d(4, affine=False), (4, 3)),
        (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 2)),
        (lambda: nn.BatchNorm3d(4, momentum=0.3), (4, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_any_kind(build: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    size = torch.Size(shape).numel()
    layers = [nn.Flatten(), nn.Linear(size, size), nn.Unflatten(1, shape), build(), nn.Flatten()]
    rows = Rows(lambda: nn.Sequential(*layers), torch.randn(ROWS, BATCH, *shape), torch.randint(4, (ROWS, BATCH)))
    rows.model.train(training)
    same(rows.gradients(rows.engine()), rows.gradients(rows.loop()))


class Attending(nn.Module):
    """Attention with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0].mean(1)


def test_dropout_inside_attention_differs_by_row_and_repeats() -> None:
    rows = Rows(Attending, torch.randn(1, BATCH, 5, 8).repeat(ROWS, 1, 1, 1), torch.zeros(ROWS, BATCH, dtype=torch.int64))
    rows.weights = [w[:1].repeat(ROWS, 1) for w in rows.weights]
    engine = rows.engine()
    first, again, other = (rows.gradients(engine, seed).losses for seed in (0, 0, 7))
    assert torch.equal(first, again)
    assert len({*first.tolist(), *other.tolist()}) == 2 * ROWS


class Breaks(nn.Module):
    """What vmap can do and torch.compile cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.out(x)


def test_what_cannot_be_compiled_is_computed_uncompiled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="eager", **options))
    rows = Rows(Breaks, torch.randn(ROWS, BATCH, 8), torch.randint(4, (ROWS, BATCH)))
    engine = rows.engine(compile=True)
    with pytest.warns(UserWarning, match="uncompiled.*graph_break"):
        found = rows.gradients(engine)
    same(found, rows.gradients(rows.loop()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(rows.gradients(engine), found)


def test_where_memory_is_short_fewer_workers_are_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(8, BATCH, 3, 16, 16), torch.randint(4, (8, BATCH))
    rows = Rows(lambda: table.resnet18(True), x, y)
    whole, sizes = VmapEngine._some, []

    def short(engine: VmapEngine, weights: Any, buffers: Any, x: Any, y: Any, grads: Any, part: slice) -> Tensor:
        sizes.append(len(weights[0][part]))
        losses = whole(engine, weights, buffers, x, y, grads, part)  # BatchNorm's statistics have moved when memory is out
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return losses

    monkeypatch.setattr(VmapEngine, "_some", short)
    engine = rows.engine()
    with pytest.warns(UserWarning, match="2 of 8 workers"):
        found = rows.gradients(engine)
    same(found, rows.gradients(rows.loop()))
    assert sizes == [8, 4, 2, 2, 2, 2]
    monkeypatch.setattr(VmapEngine, "_some", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.warns(UserWarning, match="1 of 8"), pytest.raises(torch.OutOfMemoryError):
        rows.gradients(rows.engine())


def test_recomputing_keeps_less_for_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    partition = "aot_eager_decomp_partition"  # the part of torch's compiler that decides what is kept
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=partition, **options))
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    rows = Rows(lambda: nn.Sequential(*layers), torch.randn(2, 256, 64), torch.randint(64, (2, 256)))
    expected, kept = rows.gradients(rows.loop()), []
    for recompute in (False, True):
        engine = rows.engine(compile=True, recompute=recompute)
        engine._losses = _counting(engine._losses, kept)
        same(rows.gradients(engine), expected)
    assert kept[1] < 0.7 * kept[0]


def _counting(losses: Callable[..., Tensor], kept: list[int]) -> Callable[..., Tensor]:
    """Notes how many values the graph of the losses keeps for the backward pass."""

    def counted(*given: Any) -> Tensor:
        found = losses(*given)
        kept.append(sum(t.numel() for t in found.grad_fn.saved_tensors))  # type: ignore[union-attr]
        return found

    return counted


def test_engines_are_named_with_their_options() -> None:
    rows = Rows(lambda: nn.Linear(8, 4), torch.randn(ROWS, BATCH, 8), torch.randint(4, (ROWS, BATCH)))

    def chosen(name: str) -> Any:
        return choose(rows.model, F.cross_entropy, rows.layout, ROWS, "cpu", name)

    assert (chosen("vmap(2)").chunk, chosen("vmap").chunk, chosen("vmap(recompute=True)").recompute) == (2, ROWS, True)
    for name, said in (("vmap(0)", "at least 1"), ("vmap(rows=2)", "chunk and recompute"), ("loop(2)", "chunk and recompute")):
        with pytest.raises(HocketError, match=said):
            chosen(name)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed")
@pytest.mark.parametrize(
    "into, out, kernel, padding, stride",
    [(3, 5, (3, 3), [1, 1], [1, 1]), (3, 5, (3, 3), [1, 1], [2, 2]), (4, 6, (7, 7), [3, 3], [2, 2]), (4, 3, (1, 1), [0, 0], [2, 2]),
     (2, 4, (4, 4), [0, 0], [4, 4]), (3, 3, (1, 3), [0, 1], [2, 1])],
)  # fmt: skip
def test_row_convolutions_of_any_stride(
    into: int, out: int, kernel: tuple[int, int], padding: list[int], stride: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels, without CUDA in Triton's interpreter, and the gradients, against torch's own."""
    from hocket.train.engines import convolution

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.randn(2, 3, into, 9, 8), torch.randn(2, out, into, *kernel), torch.randn(2, out)]
    x, weight, bias = (t.to(device) for t in tensors)
    one, two = ([t.clone().requires_grad_() for t in (x, weight, bias)] for _ in range(2))
    y = torch.stack([F.conv2d(a, w, b, stride, padding) for a, w, b in zip(*one, strict=True)])
    dy = torch.randn_like(y)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(convolution._launch_forward(x, weight, bias, padding, stride), y, **close)
    dw, db = convolution._launch_weight(dy, x, kernel, padding, stride)
    y.backward(dy)
    torch.testing.assert_close(dw, one[1].grad, **close)
    torch.testing.assert_close(db, one[2].grad, **close)
    convolution._rows_conv2d(*two, padding, stride).backward(dy)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **close)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("error:.*computed:UserWarning")
@pytest.mark.parametrize("name", table.MODELS)
def test_ten_kinds_of_models_compiled_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    rows = rows_of(name)
    rows.model, rows.weights = rows.model.cuda(), [w.cuda() for w in rows.weights]
    rows.x, rows.y = rows.x.cuda(), rows.y.cuda()
    engine, expected = rows.engine(compile=True), rows.gradients(rows.loop())
    for _ in range(4):  # plain, recorded, replayed, replayed
        found = rows.gradients(engine)
        torch.testing.assert_close(found.flat, expected.flat, rtol=1e-3, atol=1e-4)
