"""Laws of cutting: the stages together are the model, parameters keep their names, and the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.models import cnn, cross_entropy, gpt, mlp, resnet20, vgg11
from hocket.split import Axis
from hocket.split.picture import held_bytes
from hocket.split.pipeline import BATCH_STATISTICS, Cut, PipelineRunner, cut_model
from hocket.split.pipeline.cut import _agreed, _best, _together
from hocket.split.pipeline.tied import LateTied

IMAGES, TEXTS = (2, 3, 32, 32), (2, 8)
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: mlp(3072, 10, hidden=(16,) * 3), IMAGES),
    "cnn": (lambda: cnn((3, 32, 32), 10), IMAGES),
    "vgg11": (lambda: vgg11((3, 32, 32), 10), IMAGES),
    "resnet20": (lambda: resnet20((3, 32, 32), 10).eval(), IMAGES),
    "gpt": (lambda: gpt(32, context=8, layers=2, heads=2, width=16), TEXTS),
}


def sample(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 32, shape) if len(shape) == 2 else torch.randn(shape)


def chained(cut: Cut, x: Tensor) -> Any:
    values: Any = (x,)
    for stage, wires in itertools.zip_longest(cut.stages, cut.wires):
        values = stage(*values)
        if wires is not None:
            shapes = [(tuple(v.shape), v.dtype, v.requires_grad) for v in values]
            assert shapes == [(w.shape(len(x)), w.dtype, w.grad) for w in wires]
    return values


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_stages_together_are_the_model(name: str, stages: int) -> None:
    build, shape = MODELS[name]
    model, x = build(), sample(shape)
    cut = cut_model(model, x, stages)
    assert len(cut.stages) == stages
    larger = torch.cat([x, x, x[:1]])
    torch.testing.assert_close(chained(cut, larger), model(larger), rtol=0, atol=0)
    held = [n for stage in cut.stages for n, _ in stage.named_parameters()]
    assert sorted(set(held)) == sorted(n for n, _ in model.named_parameters())
    assert {n for n in held if held.count(n) > 1} == set(cut.tied)
    assert cut.tied == ({"token.weight": (0, stages - 1)} if name == "gpt" and stages > 1 else {})
    assert all(p is model.get_parameter(n) for stage in cut.stages for n, p in stage.named_parameters())


@given(st.data())
@settings(max_examples=40)
def test_the_best_cut_is_the_best_of_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 8))
    seconds = st.floats(0.01, 10)
    costs = data.draw(st.lists(seconds, min_size=n, max_size=n))
    ahead, back = ([0.0, *data.draw(st.lists(seconds, min_size=n - 1, max_size=n - 1)), 0.0] for _ in range(2))
    able = [0 < i < n for i in range(n + 1)]
    stages = data.draw(st.integers(1, n))

    def slowest(bounds: tuple[int, ...]) -> float:
        pairs = itertools.pairwise((0, *bounds, n))
        return max(_together(sum(costs[a:b]), ahead[b] + back[a]) for a, b in pairs)

    found = _best(nn.Identity(), costs, ahead, back, able, stages)
    best = min(slowest(bounds) for bounds in itertools.combinations(range(1, n), stages - 1))
    assert slowest(tuple(found)) == pytest.approx(best)


def test_equal_layers_are_dealt_out_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    for measure in ("flops", "seconds"):
        cut = cut_model(model, torch.zeros(64, 256), 4, measure)
        assert sum(len(list(stage.parameters())) for stage in cut.stages) == 16
        if measure == "flops":
            assert [len(list(stage.parameters())) for stage in cut.stages] == [4] * 4


def test_slow_links_move_a_cut_to_where_little_crosses() -> None:
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1024)]
    model = nn.Sequential(*layers)
    fast, slow = (cut_model(model, torch.zeros(16, 64), 2, bandwidth=b) for b in (1e12, 1e6))
    assert fast.wires[0][0].shape(1) == (1, 512)
    assert slow.wires[0][0].shape(1) == (1, 8)


def test_a_model_without_memory_is_cut_alike() -> None:
    x = torch.zeros(2, 8, dtype=torch.int64)
    with torch.device("meta"):
        unborn = gpt(32, context=8, layers=2, heads=2, width=16)
    cut = cut_model(unborn, x, 2)
    assert all(p.is_meta for stage in cut.stages for p in stage.parameters())
    assert cut.rows == cut_model(gpt(32, context=8, layers=2, heads=2, width=16), x, 2).rows


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(4, 2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    for measure in ("flops", "seconds"):
        cut_model(model, torch.randn(8, 4, generator=torch.Generator()), 2, measure)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_table_says_what_was_weighed() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    told = cut_model(model, torch.zeros(3, 4), 2).explain()
    assert BATCH_STATISTICS in told
    head = told.splitlines()[0].split("  ")
    assert [word.strip() for word in head if word] == ["unit", "parameters", "forward ms", "backward ms", "kB after it", "stage"]
    assert "For 3 samples; times are estimated from operations and bytes." in told
    assert BATCH_STATISTICS not in cut_model(mlp(4, 2, (8,)), torch.zeros(3, 4), 2).explain()
    assert "token.weight is held by stages 0, 1" in cut_model(gpt(8, 4, 1, 1, 4), torch.zeros(1, 4, dtype=torch.int64), 2).explain()


class Twice(nn.Module):
    """A weight under two names, a module used twice, a value that skips ahead, and one that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, unused: Any = None) -> Tensor:
        size = x.size(0)
        y = self.again(self.first(x).relu())
        y = self.again(y).relu()
        return F.log_softmax((self.last(y) + x).view(size, -1), -1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("points", [None, ["first"], ["again"]])
def test_odd_models_train_alike_in_stages_on_one_process(schedule: str, points: list[str] | None) -> None:
    stages_per_rank = 2 if schedule in ("interleaved", "zero-bubble") else 1
    torch.manual_seed(1)
    model, alone = Twice(), Twice()
    alone.load_state_dict(model.state_dict())
    x, y = torch.randn(7, 4), torch.randint(0, 4, (7,))
    cut = cut_model(model, x, stages_per_rank, points=points if stages_per_rank == 2 else None)
    pipe = PipelineRunner(cut, Axis("pipeline"), cross_entropy, schedule, num_microbatches=3)
    loss = pipe.run(x, y)
    wanted = cross_entropy(alone(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for name, p in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
    torch.testing.assert_close(pipe.forward(x), alone(x).detach())


class Reshapes(nn.Module):
    """The size of a tensor that does not cross the cut is needed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        size = x.size(0)
        return self.last(self.first(x).view(2 * size, 3)).view(size, 2 * 2)


@pytest.mark.parametrize("samples", [3, 7])
def test_sizes_are_computed_anew_in_the_stage_that_needs_them(samples: int) -> None:
    """From a tensor that enters it, for every size of a batch."""
    model = Reshapes()
    cut = cut_model(model, torch.randn(5, 4), 2, points=["first"])
    assert [wire.name for wire in cut.wires[0]] == ["first"]
    x = torch.randn(samples, 4)
    pipe = PipelineRunner(cut, Axis("pipeline"), cross_entropy, "interleaved", num_microbatches=1)
    torch.testing.assert_close(pipe.forward(x), model(x).detach())


def test_micro_batches_say_where_they_begin() -> None:
    class Seen:
        def __init__(self) -> None:
            self.all: list[int] = []

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "first_sample":
                self.all.append(value)

    seen = Seen()
    pipe = PipelineRunner(cut_model(mlp(4, 2, (8,)), torch.zeros(2, 4), 1), Axis("pipeline"), cross_entropy, "gpipe", 3, draws=seen)
    pipe.run(torch.randn(7, 4), torch.zeros(7, dtype=torch.int64))
    assert seen.all == [0, 3, 5]


class Chooses(nn.Module):
    """Its own forward depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_part_that_cannot_be_traced_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Chooses()), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    cut = cut_model(model, x, 2, "seconds")
    torch.testing.assert_close(chained(cut, x), model(x))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": Chooses()}, "Chooses cannot be cut because its own forward cannot be traced"),
        ({"model": nn.Bilinear(4, 4, 2)}, "takes input1, input2: wrap it so that it takes one."),
        ({"stages": 9}, "Sequential has 4 places to cut, too few for 9 stages: use at most 5, or a deeper model."),
        ({"model": nn.Linear(4, 2)}, "Linear has 0 places to cut, too few for 2 stages"),
        ({"stages": 0}, "at least one stage; got 0."),
        ({"points": ["0", "2"]}, "2 stages need 1 points to cut at; got 2: 0, 2."),
        ({"points": ["2", "0"], "stages": 3}, "in the order of the model"),
        ({"points": ["33"]}, "'33' is not a module of Sequential to cut after"),
        ({"points": ["4"]}, "cannot be cut after '4'"),
        ({"measure": "hours"}, "Units are measured by flops or seconds; got 'hours': use flops."),
        ({"model": nn.Linear(4, 2, device="meta"), "measure": "seconds"}, "cannot be run, so seconds cannot be measured"),
    ],
)
def test_what_cannot_be_cut_meets_one_sentence(change: dict[str, Any], sentence: str) -> None:
    asked: dict[str, Any] = {"model": nn.Sequential(*mlp(4, 2, (8, 8))[1:]), "sample": torch.zeros(2, 4), "stages": 2, **change}
    with pytest.raises(HocketError) as caught:
        cut_model(**asked)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "sentence"),
    [
        ("1f1b", 0, "at least 1; got 0."),
        ("gpipe", 2, "gpipe has one stage on each process; got 2"),
        ("pipedream", 2, "pipedream has one stage on each process"),
        ("zb", 2, "There is no schedule 'zb'"),
    ],
)
def test_a_bad_pipeline_meets_one_sentence(schedule: str, num_microbatches: int, sentence: str) -> None:
    cut = cut_model(mlp(4, 2, (8,)), torch.zeros(2, 4), 2)
    with pytest.raises(HocketError) as caught:
        PipelineRunner(cut, Axis("pipeline"), cross_entropy, schedule, num_microbatches)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_batch_meets_one_sentence() -> None:
    pipe = PipelineRunner(cut_model(mlp(4, 2, (8,)), torch.zeros(2, 4), 1), Axis("pipeline"), cross_entropy, "gpipe", 2)
    for x, y in ((torch.zeros(0, 4), torch.zeros(0)), (torch.zeros(2, 4), torch.zeros(3))):
        with pytest.raises(HocketError, match="at least one sample, and as many targets as inputs"):
            pipe.run(x, y)
    with pytest.raises(HocketError, match="feed and drain are for the schedule pipedream"):
        pipe.feed(torch.zeros(2, 4), torch.zeros(2))


class Recorded(Axis):
    """An axis of two processes whose messages are written down."""

    def __init__(self, place: int) -> None:
        super().__init__("pipeline", (0, 1), place)
        self.sent: list[tuple[int, int]] = []
        self.waited: list[Any] = []
        self.coming: list[Tensor] = []

    def send(self, values: Tensor, to: int, tag: int = 0) -> Any:
        self.sent.append((to, tag))
        return len(self.sent)

    def receive(self, into: Tensor, source: int, tag: int = 0) -> Any:
        into.copy_(self.coming.pop(0))
        return "received"

    def wait(self, work: Any) -> None:
        self.waited.append(work)


def test_under_pipedream_the_first_stage_updates_a_tied_parameter_and_the_others_take_it_late() -> None:
    """Gradients are added up on the first; stage 1 takes a new value one update later, and the rest at the end."""
    first, second = Recorded(0), Recorded(1)
    held = [{"w": nn.Parameter(torch.zeros(2)), "own": nn.Parameter(torch.zeros(2))} for _ in range(2)]
    tied = [LateTied(h, {"w": (0, 1)}, a) for h, a in zip(held, (first, second), strict=True)]
    assert ["w" in t and "own" not in t and t.first("own") for t in tied] == [True, True]
    assert [t.first("w") for t in tied] == [True, False]
    for minibatch in range(1, 4):
        for h in held:
            h["w"].grad = torch.full((2,), float(minibatch))
        first.coming = [torch.full((2,), 10.0 * minibatch)]
        for t in tied:
            t.before_update()
        assert torch.equal(held[0]["w"].grad, torch.full((2,), 11.0 * minibatch))  # type: ignore[arg-type]
        assert held[1]["w"].grad is None
        held[0]["w"].data.fill_(minibatch)
        second.coming = [torch.full((2,), float(minibatch - 1))] if minibatch > 1 else []
        for t in tied:
            t.after_update(minibatch)
        assert held[1]["w"][0] == max(minibatch - 1, 0)
        assert not second.coming
    second.coming = [torch.full((2,), 7.0), torch.full((2,), 8.0)]
    for t in tied:
        t.finish(3)
    assert held[1]["w"][0] == 8.0
    assert first.sent == [(1, first.sent[0][1])] * 3
    assert [w for w in first.waited if w != "received"] == [1, 2, 3], "all have left"
    assert [w for w in second.waited if w != "received"] == [1, 2, 3]


@pytest.mark.parametrize("optimizer, copies", [("SGD", 0), ("Adagrad", 1), ("AdamW", 2)])
def test_what_a_process_holds_is_weights_gradients_and_the_optimisers_values(optimizer: str, copies: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)
    weights, trained = 4 * (32 + 8 + 16 + 2), 4 * (32 + 16 + 2)
    found = held_bytes(model, getattr(torch.optim, optimizer)(model.parameters(), 0.1), 1000)
    assert (found.what, found.weights, found.gradients, found.state) == ("0 … 1", weights, trained, copies * trained)
    assert found.total == weights + trained + copies * trained + 1000
    sharded: Any = SimpleNamespace(owned_bytes=100)
    assert held_bytes(model, getattr(torch.optim, optimizer)(model.parameters(), 0.1), 0, sharded).state == copies * 100


@pytest.mark.parametrize("bounds, measure, wanted", [([2, 5], "seconds", [3, 6]), ([], "seconds", []), ([2, 5], "flops", [2, 5])])
def test_where_seconds_are_measured_all_processes_cut_where_the_first_does(
    bounds: list[int], measure: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda values, source: values.add_(1) if values.numel() else 1 / 0)
    assert _agreed(bounds, measure, torch.device("cpu")) == wanted
