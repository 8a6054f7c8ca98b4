"""Laws of Muon: it equals PyTorch's own on matrices and AdamW on the rest; its directions are orthogonal."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.errors import HocketError
from hocket.models import cnn, gpt, resnet20
from hocket.optim.muon import hidden_matrices, orthogonal
from hocket.train.settings import RunSettings


def _trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draws)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_equals_pytorchs_muon_and_adamw(nesterov: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 20, bias=False), nn.Linear(20, 3))
    twin = copy.deepcopy(model)
    own = hocket.Muon(model, lr=0.02, momentum=0.8, weight_decay=0.1, nesterov=nesterov, rest_lr=0.01, betas=(0.8, 0.9))
    inside = [twin[0].weight, twin[2].weight]
    rest = [p for p in twin.parameters() if all(p is not w for w in inside)]
    muon = torch.optim.Muon(inside, 0.02, momentum=0.8, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, 0.01, weight_decay=0.1, betas=(0.8, 0.9))
    start = [p.detach().clone() for p in model.parameters()]
    for (name, _), got, expected, before in zip(
        model.named_parameters(), _trained(model, own), _trained(twin, muon, adamw), start, strict=True
    ):
        if name in ("0.weight", "2.weight"):  # PyTorch's iterates in bfloat16, also on a CPU
            assert (got - expected).norm() < 0.02 * (expected - before).norm(), name
        else:
            assert torch.equal(got, expected), name


@pytest.mark.parametrize("shape", [(5, 24, 24), (1, 10, 40), (3, 40, 10)])
def test_singular_values_become_about_one_and_vectors_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    inside = u.mT @ orthogonal(matrices) @ v.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-9
    assert values[s > 0.05 * s.amax(1, keepdim=True)].min() > 0.6
    assert values.max() < 1.3


def test_several_matrices_of_one_parameter_are_orthogonal_each() -> None:
    fused, apart = nn.Parameter(torch.zeros(12, 4)), [nn.Parameter(torch.zeros(4, 4)) for _ in range(3)]
    fused.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))
    for p, g in zip(apart, fused.grad.chunk(3), strict=True):
        p.grad = g
    hocket.Muon([fused], matrices=[3]).step()
    hocket.Muon(apart).step()
    assert torch.equal(fused, torch.cat(list(apart)))


def test_a_convolution_is_a_matrix_of_its_filters() -> None:
    conv, matrix = nn.Parameter(torch.zeros(6, 2, 3, 3)), nn.Parameter(torch.zeros(6, 18))
    conv.grad = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(4))
    matrix.grad = conv.grad.flatten(1)
    for p in (conv, matrix):
        hocket.Muon([p]).step()
    assert torch.equal(conv.flatten(1), matrix)


def test_which_parameters_are_matrices() -> None:
    def found(model: nn.Module) -> list[str]:
        return [name for (name, _), n in zip(model.named_parameters(), hidden_matrices(model), strict=True) if n]

    names = ("attention.into", "attention.out", "perceptron.into", "perceptron.out")
    assert found(gpt(65, 16, 1, 2, 8)) == [f"blocks.0.{name}.weight" for name in names]
    assert found(cnn((3, 8, 8), 10)) == ["0.weight", "3.weight", "7.weight"]
    assert len(found(resnet20((3, 32, 32), 10))) == 19
    assert hidden_matrices(gpt(65, 16, 1, 2, 8))[2:-1] == [0, 3, 1, 0, 1, 1]
    assert hidden_matrices(nn.TransformerEncoderLayer(8, 2, 24))[0] == 3
    square = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    assert found(square) == ["1.weight", "2.weight"]
    untied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    assert found(untied) == ["1.weight"]


@pytest.mark.parametrize("strategy", ["bulk", "diloco(2, 0.9, 0.5) + sign(block=64)", "local(2) + gossip"])
def test_virtual_workers_with_muon_equal_one_optimiser_for_each(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 6, generator=draws), torch.randint(0, 3, (96,), generator=draws)

    def weights() -> list[torch.Tensor]:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = lambda params: hocket.Muon(params, lr=0.02, matrices=hidden_matrices(net))  # noqa: E731
        run = hocket.simulate(
            lambda: copy.deepcopy(net), F.cross_entropy, (x, y), strategy=strategy, workers=4, batch_size=8, epochs=2,
            optimizer=optimizer, lr_schedule="cosine",
        )  # fmt: skip
        return run.replicas.weights

    torch.manual_seed(6)
    together = weights()
    monkeypatch.setattr("hocket.train.stacked.ROWWISE", ())
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(together, weights(), strict=True))


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].weight.requires_grad_(False)
    assert hidden_matrices(model) == [0, 1, 0, 0, 0]
    assert sum(len(group["params"]) for group in hocket.Muon(model).param_groups) == 5
    settings = RunSettings.of(optimizer="muon")
    for params in (list(model.parameters()), [p for p in model.parameters() if p.requires_grad]):
        assert [len(group["params"]) for group in settings.optimizer_for(model)(params).param_groups] == [1, 4]


def test_parameters_may_have_names() -> None:
    model = nn.Linear(4, 4)
    assert [group["matrices"] for group in hocket.Muon(model.named_parameters()).param_groups] == [1, 0]


def test_refusals() -> None:
    matrix, vector = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    with pytest.raises(HocketError, match=r"shape \(4,\) is no matrix"):
        hocket.Muon([vector], matrices=[1])
    with pytest.raises(HocketError, match=r"shape \(4, 4\) does not hold 3"):
        hocket.Muon([matrix], matrices=[3])
    with pytest.raises(HocketError, match="2 numbers for 1 parameters"):
        hocket.Muon([matrix], matrices=[1, 0])
    with pytest.raises(HocketError, match="lr must not be negative"):
        hocket.Muon([matrix], lr=-1)
    with pytest.raises(HocketError, match="momentum"):
        hocket.Muon([matrix], momentum=1.0)


def test_a_saved_state_goes_on() -> None:
    torch.manual_seed(0)
    whole, model = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    once = hocket.Muon(whole)
    _trained(whole, once)
    expected = _trained(whole, once)
    first = hocket.Muon(model)
    _trained(model, first)
    second = hocket.Muon(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(expected, _trained(model, second), strict=True))
