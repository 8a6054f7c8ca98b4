"""Laws of the models: their sizes, that they serve all workers at once, and which data they fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from hocket.data import DataSet, load
from hocket.data.base import identity
from hocket.errors import HocketError
from hocket.models import build, cnn, cross_entropy, gpt, loss_for, mlp, resnet20, vgg11


def data(shape: tuple[int, ...], classes: int = 10, text: bool = False) -> DataSet:
    x = torch.zeros(2, *shape, dtype=torch.int64 if text else torch.float32)
    pair = x, torch.zeros(2, *(shape if text else ()), dtype=torch.int64)
    return DataSet("texts" if text else "images", pair, pair, classes, identity)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (lambda: mlp(3072, 10), 4_206_602),
        (lambda: cnn((3, 32, 32), 10), 545_098),
        (lambda: cnn((1, 28, 28), 10), 421_642),
        (lambda: cnn((1, 8, 8), 10), 53_002),
        (lambda: resnet20((3, 32, 32), 10), 269_722),
        (lambda: vgg11((3, 32, 32), 10), 9_225_610),
        (lambda: vgg11((3, 32, 32), 10, batch_norm=True), 9_231_114),
        (lambda: gpt(65), 804_096),
    ],
)
def test_parameters_are_counted(model: Callable[[], nn.Module], size: int):
    assert count(model()) == size


# One thread of a small machine pays for every value: small images, narrow layers, three workers.
SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: mlp(48, 5, hidden=(16, 8)), lambda: torch.randn(3, 4, 3, 4, 4)),
    "cnn": (lambda: cnn((1, 8, 8), 5), lambda: torch.randn(3, 4, 1, 8, 8)),
    "resnet20": (lambda: resnet20((3, 8, 8), 5), lambda: torch.randn(3, 4, 3, 8, 8)),
    "vgg11": (lambda: vgg11((1, 32, 32), 5), lambda: torch.randn(3, 2, 1, 32, 32)),
    "gpt": (lambda: gpt(5, context=8, layers=2, heads=2, width=16), lambda: torch.randint(5, (3, 4, 8))),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_all_workers_at_once_equal_the_loop(name: str):
    torch.manual_seed(0)
    make, inputs = SMALL[name]
    models, x = [make() for _ in range(3)], inputs()
    y = torch.randint(5, x.shape if name == "gpt" else x.shape[:2])
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(models[0], (p, b), (x,)), y)

    together = vmap(grad(loss))(parameters, buffers, x, y)
    for i, model in enumerate(models):
        before = x[i].clone()
        cross_entropy(model(x[i]), y[i]).backward()
        assert torch.equal(before, x[i])
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (parameter.grad - together[key][i]).norm() / (parameter.grad.norm() + 1e-4)
            assert error < 1e-3, (key, float(error))
        for key, value in model.named_buffers():
            assert torch.allclose(value.float(), buffers[key][i].float(), atol=1e-5), key


def test_a_shortcut_takes_every_second_pixel_and_zeros():
    block = next(b for b in resnet20((3, 8, 8), 10) if getattr(b, "new", 0))
    x = torch.randn(2, 16, 8, 8)
    short = block._shortcut(x)  # type: ignore[operator]
    assert torch.equal(short[:, 8:24], x[:, :, ::2, ::2])
    assert not short[:, :8].any()
    assert not short[:, 24:].any()


def test_gpt_sees_only_the_past_and_its_head_is_its_embedding():
    torch.manual_seed(0)
    model = gpt(11, context=8, layers=2, heads=2, width=16)
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-4)
    assert [name for name, p in model.named_parameters() if p.shape[0] == 11] == ["token.weight"]
    with pytest.raises(HocketError, match="got a text of 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(HocketError, match="multiple of its heads"):
        gpt(11, heads=3)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_models_fit_images(name: str, shape: tuple[int, ...]):
    dataset = data(shape, classes=7)
    logits = build(name, dataset)(dataset.example)
    assert logits.shape == (1, 7)


def test_models_fit_named_sets():
    digits = load("digits")
    assert build("cnn", digits)(digits.example).shape == (1, 10)
    texts = data((12,), classes=9, text=True)
    assert build("gpt", texts)(texts.example).shape == (1, 12, 9)
    assert build("vgg11", data((3, 32, 32)))(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def own(dataset: DataSet) -> nn.Module:
    return nn.Linear(dataset.shape[0], dataset.classes)


def own_without(width: int = 3) -> nn.Module:
    return nn.Linear(width, 2)


def own_nonsense() -> int:
    return 3


def test_models_of_the_users_own():
    assert build(f"{__name__}:own", data((6,), 4)).weight.shape == (4, 6)
    assert build(f"{__name__}:own_without", data((6,), 4)).weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "dataset", "part"),
    [
        ("resnet2", data((1, 8, 8)), "did you mean 'resnet20'"),
        ("zzz", data((1, 8, 8)), "choose one"),
        ("gpt", data((1, 8, 8)), "use mlp, cnn or resnet20"),
        ("mlp", data((8,), text=True), "use gpt"),
        ("cnn", data((8,), text=True), "use gpt"),
        ("resnet20", data((8,)), "use mlp"),
        ("vgg11", data((1, 8, 8)), "use cnn or resnet20"),
        ("vgg11", data((1, 28, 28)), "got 28×28"),
        ("cnn", data((1, 3, 3)), "use mlp"),
        (f"{__name__}:own_nonsense", data((8,)), "got int"),
    ],
)
def test_what_does_not_fit_meets_one_sentence(name: str, dataset: DataSet, part: str):
    with pytest.raises(HocketError, match=part) as error:
        build(name, dataset)
    message = str(error.value)
    assert "\n" not in message
    assert ". " not in message


def test_cross_entropy_is_the_mean_over_all_targets():
    logits, targets = torch.randn(4, 6, 5), torch.randint(5, (4, 6))
    each = [F.cross_entropy(logits[i, t], targets[i, t]) for i in range(4) for t in range(6)]
    assert torch.allclose(cross_entropy(logits, targets), torch.stack(each).mean())
    assert torch.equal(cross_entropy(logits[:, 0], targets[:, 0]), F.cross_entropy(logits[:, 0], targets[:, 0]))
    shares = F.one_hot(targets, 5).float()
    assert torch.allclose(cross_entropy(logits, shares), cross_entropy(logits, targets))
    assert loss_for(data((1, 8, 8))) is cross_entropy
    values = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(HocketError, match="loss of your own"):
        loss_for(DataSet("values", values, values, 1, identity))


def test_a_deep_model_starts_with_a_signal():
    torch.manual_seed(0)
    logits = vgg11((3, 32, 32), 10)(torch.randn(4, 3, 32, 32)).detach()
    assert float(logits.std(0).mean()) > 0.05  # fan-in 0.1, fan-out 0.01, torch's own start 0.0001
