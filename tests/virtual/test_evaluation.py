"""What is evaluated, on what, and of what outputs; and that random numbers drawn by functions repeat with the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.data.base import DataSet, identity
from hocket.data.fields import pack, unpack
from hocket.errors import HocketError
from hocket.train.evaluate import Evaluator
from hocket.train.trial import try_batch
from virtual.world import CLASSES, FEATURES, Tiny, sgd

SERVED = "async + server"


@dataclass
class Output:
    """As Hugging Face models return."""

    loss: Tensor
    logits: Tensor


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda o: o),
    "dict": (lambda t: {"hidden": t.sum(), "logits": t}, lambda o: o["logits"]),
    "object": (lambda t: Output(t.sum(), t), lambda o: o.logits),
    "tuple": (lambda t: (t.sum(-1), t), lambda o: o[1]),
}


class Wrapped(Tiny):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.randn(count, FEATURES, generator=generator) + 2 * F.one_hot(y, FEATURES), y


def simulated(model: Callable[[], nn.Module], loss: Any = F.cross_entropy, test: Any = None, **options: Any) -> Any:
    given = {"workers": 3, "batch_size": 4, "epochs": 2, "optimizer": sgd(), **options}
    return hocket.simulate(model, loss, samples(60), test, **given)


@pytest.mark.parametrize("strategy", ["bulk", "local(2) + gossip", SERVED])
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_of_any_kind_trains_alike_and_is_evaluated(kind: str, strategy: str) -> None:
    wrap, logits = KINDS[kind]
    test = samples(1203, 1)  # more than one batch of an evaluation, and a last one that is smaller
    metric = lambda output, y: (logits(output) - F.one_hot(y, CLASSES)).square().mean()  # noqa: E731
    loss = lambda output, y: F.cross_entropy(logits(output), y)  # noqa: E731
    run = simulated(lambda: Wrapped(wrap), loss, test, metric=metric, strategy=strategy)
    plain = simulated(Tiny, F.cross_entropy, test, strategy=strategy)
    with torch.no_grad():
        output = run.model(test[0])
    assert run.test_loss == pytest.approx(plain.test_loss) == pytest.approx(float(loss(output, test[1])), rel=1e-5)
    assert run.metric == pytest.approx(float(metric(output, test[1])), rel=1e-5)
    assert plain.metric is None
    assert run.perplexity is None
    assert run.accuracy == (None if kind == "tuple" else plain.accuracy)
    assert [set(m) - {"metric", "accuracy_worst"} for m in run.metrics] == [set(m) - {"accuracy_worst"} for m in plain.metrics]


def test_classes_in_the_second_place_as_torch_has_them() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.unsqueeze(-1)).movedim(-1, 1)  # [batch, classes, positions]

    x = torch.arange(40.0).view(8, 5) % 3
    run = hocket.simulate(Positions, F.cross_entropy, (x, x.long()), (x, x.long()), workers=2, batch_size=2)
    with torch.no_grad():
        right = (run.model(x).argmax(1) == x.long()).double().mean()
    assert run.accuracy == pytest.approx(float(right))


def test_a_language_model_has_a_perplexity_and_a_regression_a_test_loss_only() -> None:
    tokens = torch.randint(0, 7, (24, 6), generator=torch.Generator().manual_seed(0))
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    run = hocket.simulate(lambda: nn.Embedding(7, 7), loss, (tokens, tokens), (tokens, tokens), workers=2, batch_size=3)
    assert run.perplexity == pytest.approx(math.exp(run.test_loss))
    values = samples(30)[0]
    run = hocket.simulate(lambda: nn.Linear(4, 1), F.mse_loss, (values, values[:, :1]), (values, values[:, :1]), batch_size=2)
    assert run.accuracy is None
    assert run.test_loss > 0


@pytest.mark.parametrize("strategy", ["bulk", SERVED])
def test_tokens_are_those_of_all_mini_batches_of_an_epoch(strategy: str) -> None:
    """Of 25 windows of 6 tokens an epoch takes 24, since two workers cannot share the last one; the second epoch is cut short."""
    tokens = torch.randint(0, 7, (25, 6), generator=torch.Generator().manual_seed(0))
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    given: dict[str, Any] = {"strategy": strategy, "workers": 2, "batch_size": 3, "epochs": 2, "max_steps": 6, "cluster": "1gbit"}
    run = hocket.simulate(lambda: nn.Embedding(7, 7), loss, (tokens, tokens), (tokens, tokens), **given)
    assert [m["tokens"] for m in run.metrics] == [24 * 6, 12 * 6]
    x, y = samples(30)
    assert all("tokens" not in m for m in hocket.simulate(lambda: nn.Linear(4, 3), F.cross_entropy, (x, y), batch_size=2).metrics)


@pytest.mark.parametrize("strategy", ["bulk", SERVED])
@pytest.mark.parametrize("given", ["no test set", "evaluate=False"])
def test_without_a_test_set_or_with_evaluate_false_nothing_is_evaluated(given: str, strategy: str) -> None:
    modes: list[bool] = []

    class Watched(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return super().forward(x)

    options = {"test": samples(9), "evaluate": False} if "False" in given else {}
    run = simulated(Watched, strategy=strategy, **options)
    assert all(modes)
    assert [(m["accuracy"], m["test_loss"]) for m in run.metrics] == [(None, None)] * 2
    assert not any("accuracy_worst" in m for m in run.metrics)


@pytest.mark.parametrize("count", [40, 700])
def test_the_worst_replica_is_found_on_a_sample_and_only_it_is_evaluated_on_a_large_test_set(count: int) -> None:
    """40 samples are fewer than a worker trains on or than the least sample: every replica looks at all of them."""
    seen: list[int] = []

    class Watched(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend([len(x)] * (not self.training))
            return super().forward(x)

    test = samples(count, 1)
    run = simulated(Watched, test=test, strategy="local(100) + gossip", workers=4)
    tried, means = 4, 2 * count
    assert sum(seen) == tried + means + 4 * min(count, 256) + (count if count > 256 else 0)
    with torch.no_grad():
        each = [float((model(test[0]).argmax(1) == test[1]).double().mean()) for model in run.replicas.each()]
    assert run.metrics[-1].get("accuracy_worst", run.accuracy) in ([min(each)] if count == 40 else each)


class Dropped(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Noisy(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


def noisy_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output + 0.5 * torch.rand(()), y)


RANDOM = {"dropout": (Dropped, F.cross_entropy), "noise": (Noisy, F.cross_entropy), "loss": (nn.Linear, noisy_loss)}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("strategy", ["bulk", "local(2) + gossip", SERVED])
@pytest.mark.parametrize("name", RANDOM)
def test_numbers_drawn_by_functions_repeat_with_the_seed(name: str, strategy: str, engine: str) -> None:
    made, loss = RANDOM[name]
    model = made if made is not nn.Linear else lambda: nn.Linear(FEATURES, CLASSES)

    def trained(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)  # the global state must not matter
        before = torch.get_rng_state()
        run = simulated(model, loss, samples(40, 1), strategy=strategy, engine=engine, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        return run.test_loss, torch.cat([p.detach().flatten() for p in run.model.parameters()]).tolist()

    assert trained(1) == trained(2)


def test_rows_and_steps_draw_different_numbers() -> None:
    seen: list[float] = []

    class Seen(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return super().forward(x)

    simulated(Seen, engine="loop")
    drawn = seen[1:]  # the first is the batch that is tried
    assert len(drawn) == len(set(drawn)) == 3 * 5 * 2


class Narrow(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES + 1, 5)


class TrainsOnly(Tiny):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if self.training else None


def detached(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), y)


def per_sample(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


FLOATS = (torch.zeros(40, FEATURES), torch.zeros(40))
WRONG: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "model": (
        Narrow,
        F.cross_entropy,
        {},
        r"The model fails in training mode on a batch of inputs \[4, 4\] \(float32\)",
    ),
    "loss": (Tiny, F.nll_loss, {"train": FLOATS}, r"The loss fails on an output \[4, 3\].* targets \[4\]"),
    "per sample": (Tiny, per_sample, {}, r"one number, the mean over samples; got shape \[4\]"),
    "no tensor": (Tiny, lambda o, y: 0.5, {}, "The loss must be a tensor, for autograd to differentiate; got float"),
    "detached": (Tiny, detached, {}, "The loss does not depend on the model's parameters"),
    "eval": (TrainsOnly, F.cross_entropy, {}, "The loss fails on an output None"),
    "metric": (Tiny, F.cross_entropy, {"metric": lambda o, y: o}, r"The metric must be one number for a batch, got \[4, 3\]"),
    "metric fails": (Tiny, F.cross_entropy, {"metric": lambda o, y: o["logits"]}, r"The metric fails on an output \[4, 3\]"),
}


@pytest.mark.parametrize("strategy", ["bulk", SERVED])
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_refused_before_the_first_step_in_one_sentence(name: str, strategy: str) -> None:
    model, loss, options, said = WRONG[name]
    train, steps = options.get("train", samples(40)), []
    given = {"workers": 2, "batch_size": 4, "strategy": strategy, "watch": steps.append, "metric": options.get("metric")}
    with pytest.raises(HocketError, match=said) as refused:
        hocket.simulate(model, loss, train, samples(40), **given)
    assert not steps
    assert "\n" not in str(refused.value)


def test_the_batch_that_is_tried_leaves_no_trace() -> None:
    class Normed(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(F.dropout(x, 0.1, self.training)))

    model, data = Normed(), DataSet("mine", samples(40), samples(40), CLASSES, identity)
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    assert try_batch(model, Evaluator(data, F.cross_entropy), 4)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not try_batch(Tiny(), Evaluator(data, F.cross_entropy), 4)


class Two(Tiny):
    def forward(self, x: Tensor, shift: Tensor, keep: Tensor | None = None) -> Tensor:
        out = super().forward(x + shift.to(x.dtype).unsqueeze(-1))
        return out if keep is None else out * keep.to(out.dtype)


def several(count: int, kind: str, seed: int = 0) -> Any:
    (x, y), shift = samples(count, seed), torch.arange(count) % 3
    keep = torch.ones(count, 1, dtype=torch.bool)
    inputs: Any = {"x": x, "shift": shift, "keep": keep} if "dict" in kind else (x, shift, keep)
    if "examples" not in kind:
        return inputs, y
    if kind == "labelled dict examples":
        return [{**{name: t[i] for name, t in inputs.items()}, "labels": int(y[i])} for i in range(count)]
    parts = lambda i: {name: t[i] for name, t in inputs.items()} if "dict" in kind else tuple(t[i] for t in inputs)  # noqa: E731
    return [(parts(i), int(y[i])) for i in range(count)]


class Shifted(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :-1] + x[:, -1:])


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("strategy", ["bulk", SERVED])
@pytest.mark.parametrize("kind", ["dict", "tuple", "dict examples", "tuple examples", "labelled dict examples"])
def test_inputs_of_several_tensors_train_as_one_tensor_does(kind: str, strategy: str, engine: str) -> None:
    options: dict[str, Any] = {
        "workers": 3,
        "batch_size": 4,
        "epochs": 2,
        "strategy": strategy,
        "optimizer": sgd(),
        "engine": engine,
    }
    (x, shift, _), y = several(60, "tuple")
    (u, v, _), w = several(33, "tuple", 1)
    joined = [(torch.cat([a, b.float().unsqueeze(1)], 1), c) for a, b, c in ((x, shift, y), (u, v, w))]
    one = hocket.simulate(Shifted, F.cross_entropy, *joined, **options)
    run = hocket.simulate(Two, F.cross_entropy, several(60, kind), several(33, kind, 1), **options)
    assert isinstance(run.model, Two)
    assert run.test_loss == pytest.approx(one.test_loss, rel=1e-5)
    assert run.accuracy == one.accuracy


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(HocketError, match="differ in names, types or shapes"):
        hocket.simulate(Two, F.cross_entropy, several(20, "dict"), several(20, "tuple"), batch_size=4)
    with pytest.raises(HocketError, match="needs its target as 'labels'"):
        hocket.simulate(Two, F.cross_entropy, [{"x": torch.zeros(4)}] * 8, batch_size=2)
    with pytest.raises(HocketError, match=r"as many samples each; got \[3, 4\]"):
        hocket.simulate(Two, F.cross_entropy, ((torch.zeros(3, 4), torch.zeros(4)), torch.zeros(3)), batch_size=2)
    with pytest.raises(HocketError, match=r"on a batch of inputs \{'x': \[4, 4\] \(float32\), 'shift'"):
        hocket.simulate(Tiny, F.cross_entropy, several(20, "dict"), batch_size=4)


def test_one_sample_of_several_tensors_is_unpacked() -> None:
    given = {"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 1, dtype=torch.bool)}
    packed, fields = pack(given)
    for number in range(3):
        ids, mask = unpack(packed[number : number + 1], fields)
        assert torch.equal(ids, given["ids"][number : number + 1])
        assert bool(mask.all())


def test_ignored_targets_are_no_answers() -> None:
    """-100 is what cross-entropy ignores."""
    x, y = torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    ignoring = torch.where(torch.arange(20) % 5 == 0, y, -100)
    run = hocket.simulate(
        lambda: nn.Linear(4, 4), nn.functional.cross_entropy, (x, y), (x, ignoring), workers=2, batch_size=2, epochs=20,
        optimizer=lambda p: torch.optim.SGD(p, 1.0),
    )  # fmt: skip
    assert run.accuracy == 1.0
