"""Laws of LARS and LAMB: they are the formulas of their papers, per layer and per worker; norms and biases step plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hocket
from hocket.errors import HocketError
from hocket.optim import decay_groups
from hocket.train.lr_schedule import factor
from hocket.train.settings import RunSettings

STEPS = 6
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
BOTH: dict[str, Factory] = {
    "lars": lambda p: hocket.LARS(p, lr=0.5, momentum=0.8, weight_decay=0.1, trust=0.02),
    "lamb": lambda p: hocket.LAMB(p, lr=0.02, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1),
}


def _gradients(model: nn.Module) -> list[list[torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=made, dtype=p.dtype) for p in model.parameters()] for _ in range(STEPS)]


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    for step in gradients:
        for p, grad in zip(model.parameters(), step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4)).double()


def _lars(w: torch.Tensor, gradients: list[torch.Tensor], plain: bool) -> torch.Tensor:
    """You 2017, algorithm 1, with a constant rate inside the velocity."""
    velocity = torch.zeros_like(w)
    for g in gradients:
        decay = 0.0 if plain else 0.1
        local = 1.0 if plain else 0.02 * w.norm() / (g.norm() + decay * w.norm())
        velocity = 0.8 * velocity + 0.5 * local * (g + decay * w)
        w = w - velocity
    return w


def _lamb(w: torch.Tensor, gradients: list[torch.Tensor], plain: bool) -> torch.Tensor:
    """You 2020, algorithm 2."""
    m = v = torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        u = (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-5) + (0.0 if plain else 0.1) * w
        w = w - 0.02 * u * (1.0 if plain else w.norm() / u.norm())
    return w


@pytest.mark.parametrize("name, formula", [("lars", _lars), ("lamb", _lamb)])
def test_each_is_its_papers_formula_and_plain_on_norms_and_biases(name: str, formula: Callable[..., torch.Tensor]) -> None:
    model = _net()
    gradients, before = _gradients(model), [p.detach().clone() for p in model.parameters()]
    found = _trained(model, BOTH[name](list(model.parameters())), gradients)
    for i, (start, end) in enumerate(zip(before, found, strict=True)):
        expected = formula(start, [step[i] for step in gradients], start.dim() < 2)
        torch.testing.assert_close(end, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_a_layer_without_weights_or_gradient_takes_finite_steps(name: str) -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    zeros = [[torch.zeros_like(p) for p in model.parameters()]]
    assert all(w.isfinite().all() for w in _trained(model, BOTH[name](list(model.parameters())), zeros + _gradients(model)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("strategy", ["bulk", "local(2) + gossip"])
def test_virtual_workers_together_equal_one_optimiser_for_each(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    data = (x, (x.sum(1) > 0).long())

    def weights() -> list[torch.Tensor]:
        torch.manual_seed(6)
        run = hocket.simulate(
            lambda: nn.Sequential(nn.Linear(5, 80), nn.ReLU(), nn.Linear(80, 2)), nn.functional.cross_entropy, data,
            strategy=strategy, workers=4, batch_size=8, epochs=2, optimizer=BOTH[name], lr_schedule="cosine",
            scale_lr="sqrt", warmup_epochs=1.0,
        )  # fmt: skip
        return run.replicas.weights

    together = weights()
    monkeypatch.setattr("hocket.train.stacked.ROWWISE", ())
    assert all(torch.equal(a, b) for a, b in zip(together, weights(), strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_a_saved_state_goes_on(name: str) -> None:
    model, gradients = _net(), _gradients(_net())
    whole = _trained(twin := copy.deepcopy(model), BOTH[name](list(twin.parameters())), gradients)
    first = BOTH[name](list(model.parameters()))
    _trained(model, first, gradients[:3])
    second = BOTH[name](list(model.parameters()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(whole, _trained(model, second, gradients[3:]), strict=True))


def test_settings_make_them_and_say_what_decays() -> None:
    model = _net()

    def decays(**given: object) -> list[tuple[int, float]]:
        groups = RunSettings.of(weight_decay=0.1, **given).optimizer_for(model)(list(model.parameters())).param_groups
        return [(len(group["params"]), group["weight_decay"]) for group in groups]

    assert decays() == decays(optimizer="adamw", decay="all") == [(6, 0.1)]
    apart = [(2, 0.1), (4, 0.0)]
    assert decays(decay="matrices") == decays(optimizer="adamw", decay="matrices") == apart
    assert decays(optimizer="lars") == decays(optimizer="lamb", decay="matrices") == apart
    model[0].weight.requires_grad_(False)
    assert [len(group["params"]) for group in decay_groups(model, 0.1)] == [1, 4]
    assert [len(group["params"]) for group in hocket.LARS(model).param_groups] == [1, 4]


@pytest.mark.parametrize("rule, scale", [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0), (True, 9.0), (False, 1.0)])
def test_the_rate_is_one_workers_times_the_rule(rule: str | bool, scale: float) -> None:
    settings = RunSettings.of(workers=9, lr=0.5, scale_lr=rule, warmup=2.0)
    model = _net()
    assert settings.optimizer_for(model)(list(model.parameters())).param_groups[0]["lr"] == pytest.approx(0.5 * scale)
    start = settings.plan().warmup_start
    assert start == pytest.approx(0.0 if scale == 1.0 else 1 / scale), "a warm-up starts from one worker's rate"
    rise = [scale * factor("constant", 100, 10, start)(step) for step in range(12)]
    assert rise[0] == pytest.approx(scale * start + scale * (1 - start) / 10)
    assert rise[9:] == pytest.approx([scale] * 3)


def test_an_elastic_run_scales_by_the_same_rule() -> None:
    for rule, factors in {"linear": (2.0, 0.5), "sqrt": (2**0.5, 0.5**0.5), "none": (1.0, 1.0)}.items():
        elastic = hocket.Elastic(1, 8, rule, counted=4)
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
        for size, before, expected in ((8, 0, factors[0]), (4, 8, 1.0), (2, 4, factors[1])):
            elastic.rescale(sgd, [], elastic.change(size, before))
            assert sgd.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda: hocket.LARS(_net(), lr=-1.0), "lr must not be negative"),
        (lambda: hocket.LARS(_net(), momentum=1.0), "momentum must be at least 0 and below 1"),
        (lambda: hocket.LAMB(_net(), betas=(0.9, 1.0)), "betas"),
        (lambda: RunSettings.of(scale_lr="squared"), "Use one of none, linear, sqrt"),
        (lambda: RunSettings.of(decay="some"), "use all, or matrices"),
        (lambda: RunSettings.of(optimizer="lars", decay="all"), "leave it out"),
        (lambda: RunSettings.of(optimizer="muon", decay="matrices"), "leave it out"),
        (lambda: hocket.Elastic(1, 2, "cubic"), "Use one of none, linear, sqrt"),
    ],
)
def test_refusals(made: Callable[[], object], said: str) -> None:
    with pytest.raises(HocketError, match=said):
        made()
