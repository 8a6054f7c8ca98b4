"""Laws of models that are born in parts: the same weights for every split, in the distribution of the constructor."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.models import cnn, gpt, mlp, resnet20, vgg11
from hocket.split import Part
from hocket.split.materialize import deferred, materialize
from hocket.split.tensor.layers import ParameterSlicer, SplitEmbedding

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(16, 8, (32, 24)),
    "cnn": lambda: cnn((1, 8, 8), 8),
    "gpt": lambda: gpt(64, context=16, layers=2, heads=2, width=32),
    "vgg11": lambda: vgg11((3, 32, 32), 8, batch_norm=True),
    "resnet20": lambda: resnet20((3, 32, 32), 8),
    "attention": lambda: nn.Sequential(nn.MultiheadAttention(16, 4), nn.GroupNorm(2, 16)),
}


def unborn(name: str) -> nn.Module:
    with deferred():
        return MODELS[name]()


def parts_of(model: nn.Module, place: int, size: int) -> dict[str, Part]:
    """Along the first axis, or along the second of every second parameter that has one, where it can be divided."""
    found = {}
    for k, (name, p) in enumerate(model.named_parameters()):
        dim = k % 2 if p.dim() > 1 else 0
        if p.shape[dim] % size == 0:
            found[name] = Part.even(p, dim, place, size)
    return found


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_the_same_for_every_split(name: str) -> None:
    whole = unborn(name)
    assert all(t.is_meta for t in whole.state_dict().values())
    materialize(whole, seed=3)
    full_state = values(whole)
    for size in (4,) if name == "vgg11" else (2, 4):
        shapes = {n: tuple(p.shape) for n, p in whole.named_parameters()}
        together = {n: torch.full(shape, torch.nan) for n, shape in shapes.items()}
        for place in range(size):
            model = unborn(name)
            parts = parts_of(model, place, size)
            assert parts
            materialize(model, parts, seed=3)
            for n, p in model.named_parameters():
                parts.get(n, Part(shapes[n])).put(p.detach(), together[n])
        for n, found in together.items():
            assert torch.equal(found, full_state[n])


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_drawn_like_those_of_the_constructor(name: str) -> None:
    model = unborn(name)
    materialize(model, seed=3)
    torch.manual_seed(0)
    built = values(MODELS[name]())
    for n, value in values(model).items():
        assert value.dtype == built[n].dtype
        if value.numel() < 64:
            assert bool(value.isfinite().all())
            assert (value == value.flatten()[0]).all() == (built[n] == built[n].flatten()[0]).all()
        else:
            torch.testing.assert_close(value.std(), built[n].std(), rtol=0.35, atol=1e-6)
            torch.testing.assert_close(value.mean(), built[n].mean(), rtol=0, atol=float(built[n].std()) + 1e-6)


def test_a_module_draws_by_its_name_and_the_seed_and_touches_no_other_randomness() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, other = unborn("mlp"), unborn("mlp")
    materialize(one, seed=0)
    materialize(other, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(one[1].weight, other[1].weight)
    twins = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
    materialize(twins)
    assert not torch.equal(twins[0].weight, twins[1].weight)


def test_a_stage_is_born_like_the_whole() -> None:
    """Also where it holds a bare weight of a module that is elsewhere, and where the model has a start of its own."""
    for name, weight in (("gpt", "token.weight"), ("mlp", "1.weight")):
        whole, model = unborn(name), unborn(name)
        materialize(whole, seed=2)
        bare, stage = nn.Module(), nn.Module()
        bare.register_parameter("weight", model.get_parameter(weight))
        stage.add_module(weight.split(".")[0], bare)
        materialize(stage, {}, 2, model)
        assert torch.equal(stage.get_parameter(weight), whole.get_parameter(weight))


def test_a_module_that_has_the_shape_of_its_part_is_born_like_the_whole() -> None:
    """A layer that was split before it had values: the scale of its start is that of the whole."""
    with deferred():
        whole, part = nn.Sequential(nn.Linear(64, 6)), nn.Sequential(nn.Linear(16, 6))
    lies = Part.even(whole[0].weight, 1, place=2, size=4)
    materialize(whole, seed=1)
    materialize(part, {"0.weight": lies}, seed=1)
    assert torch.equal(part[0].weight, lies.take(whole[0].weight))
    assert torch.equal(part[0].bias, whole[0].bias)


def test_parameters_stay_the_same_objects_and_tied_ones_tied() -> None:
    with deferred():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    materialize(model)
    assert model[1].weight is model[0].weight
    model(torch.ones(1, 4)).sum().backward()
    before = model[0].weight.clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_what_has_values_already_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    model[1].bias = nn.Parameter(torch.tensor([5.0, 6.0]))
    first = model[0].weight.clone()
    materialize(model)
    assert torch.equal(model[0].weight, first)
    assert model[1].bias.tolist() == [5.0, 6.0]
    assert not model[1].weight.is_meta


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(4.0))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("kind, name", [(Table, "places"), (Bare, "gain")])
def test_what_cannot_be_made_is_refused(kind: type[nn.Module], name: str) -> None:
    with deferred():
        model = nn.Sequential(nn.Linear(2, 2), kind())
    with pytest.raises(HocketError, match=f"'1.{name}' of {kind.__name__} cannot be given a value"):
        materialize(model)


def test_layers_that_watch_their_weights_are_refused() -> None:
    with deferred():
        model = nn.Sequential(nn.LSTM(4, 4))
    with pytest.raises(HocketError, match="LSTM '0' keeps a weak reference to its weights"):
        materialize(model)


@pytest.mark.parametrize("padding", [1, 6, 7])
def test_a_split_embedding_has_zeros_where_the_whole_one_has_its_padding(padding: int) -> None:
    with deferred():
        whole = nn.Embedding(8, 4, padding_idx=padding)
    found = []
    for place in range(2):
        cut = ParameterSlicer(SimpleNamespace(size=2, place=place))  # type: ignore[arg-type]
        own = SplitEmbedding(whole, cut)
        materialize(own, {"weight": cut.lies[id(own.weight)]}, seed=3)
        found.append(own.weight.detach())
    materialize(whole, seed=3)
    assert torch.equal(torch.cat(found), whole.weight)
    assert torch.equal(torch.cat(found)[padding], torch.zeros(4))
