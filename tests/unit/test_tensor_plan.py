"""Plans of tensor parallelism: what is found, what is refused, what parts look like, and dropout that does not see the split."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.models import cnn, gpt, mlp, resnet20, vgg11
from hocket.split import Axis, Part
from hocket.split.branches import Branches
from hocket.split.draws import Draws, Dropout
from hocket.split.dropout import prepare_dropout
from hocket.split.tensor import explain_plan, find_plan, split_tensor
from hocket.split.tensor.attention import SplitMultihead
from hocket.split.tensor.layers import ParameterSlicer, SplitEmbedding


def axis(place: int = 0, size: int = 2) -> Axis:
    """As a plan sees it; nothing is sent."""
    return Axis("tensor", tuple(range(size)), place)


class Reads(nn.Module):
    """A head that reads the embedding's weight on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.first, self.second = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.second(F.relu(self.first(self.token(tokens)))), self.token.weight)


class Twice(nn.Module):
    """Hidden activations that somebody else needs too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden) + hidden.sum(-1, keepdim=True)


class Scaled(nn.Module):
    """One value that scales all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(4, 8), nn.Linear(4, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.gate(x))


class Normed(nn.Module):
    """Something between two layers that looks at all values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).softmax(-1))


class Optional(nn.Module):
    """Its second layer is not always used; a caller decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, raw=bool(x.sum() > 0))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, raw: bool = False) -> Tensor:
        hidden = self.first(x)
        return hidden if raw else self.second(hidden)


def tied() -> nn.Module:
    model = nn.Sequential(gpt(8, 4, 1, 2, 8).blocks[0].attention, nn.Linear(8, 8))
    model[1].weight = model[0].out.weight
    return model


def encoder(heads: int = 4, activation: Callable[[Tensor], Tensor] = F.relu) -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, heads, 32, activation=activation, batch_first=True), 1, enable_nested_tensor=False
    )


_ENCODER = {"layers.0.self_attn": "heads", "layers.0.linear1": "columns", "layers.0.linear2": "rows"}


@pytest.mark.parametrize(
    "build, size, expected",
    [
        (lambda: mlp(12, 10, (8, 8)), 2, {"1": "columns", "3": "rows", "5": "gather"}),
        (lambda: mlp(12, 10, (8, 8)), 4, {"1": "columns", "3": "rows", "5": "whole"}),
        (lambda: mlp(12, 10, (9, 8)), 2, {"1": "whole", "3": "columns", "5": "rows"}),
        (lambda: cnn((3, 8, 8), 10), 4, {"0": "gather", "3": "gather", "7": "columns", "9": "rows"}),
        (lambda: vgg11((3, 32, 32), 10), 2, dict.fromkeys(["0", "3", "6", "8", "11", "13", "16", "18", "22"], "gather")),
        (
            lambda: gpt(8, 4, 1, 2, 8),
            2,
            {
                "token": "vocabulary",
                "logits": "logits",
                "blocks.0.attention": "heads",
                "blocks.0.perceptron.into": "columns",
                "blocks.0.perceptron.out": "rows",
            },
        ),
        (encoder, 2, _ENCODER),
        (
            lambda: encoder(activation=lambda x: x.softmax(-1)),
            2,
            _ENCODER | {"layers.0.linear1": "gather", "layers.0.linear2": "gather"},
        ),
        (Reads, 2, {"token": "whole", "first": "columns", "second": "rows"}),
        (Twice, 2, {"first": "gather", "second": "gather"}),
        (Scaled, 2, {"first": "gather", "gate": "whole", "second": "gather"}),
        (Normed, 2, {"first": "gather", "second": "gather"}),
        (Optional, 2, {"inner.first": "gather", "inner.second": "gather"}),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1)), 2, {"0": "whole", "1": "gather"}),
        (lambda: nn.Sequential(Branches(nn.Linear(2, 2), nn.Linear(2, 2))), 2, {"0": "branches"}),
    ],
)  # fmt: skip
def test_plans_that_are_found(build: Callable[[], nn.Module], size: int, expected: dict[str, str]) -> None:
    assert find_plan(build(), size) == expected


@pytest.mark.parametrize("build", [lambda: gpt(8, 4, 1, 2, 8), lambda: mlp(12, 10, (8, 8)), encoder, lambda: cnn((3, 8, 8), 10)])
def test_a_plan_that_was_found_may_be_given(build: Callable[[], nn.Module]) -> None:
    whole = build()
    found, given = copy.deepcopy(whole), copy.deepcopy(whole)
    assert split_tensor(found, axis()) == split_tensor(given, axis(), find_plan(whole, 2))
    assert repr(found) == repr(given)


def test_what_stays_whole_is_explained() -> None:
    assert "token: whole, its 65 tokens do not divide by 2" in explain_plan(gpt(65, 4, 1, 2, 8), 2)
    assert set(find_plan(resnet20((3, 8, 8), 10), 2).values()) == {"gather"}


@pytest.mark.parametrize(
    "build, size, plan, words",
    [
        (
            lambda: gpt(8, 4, 1, 2, 8),
            4,
            None,
            "'blocks.0.attention' has 2 heads, which do not divide by 4 processes: use a tensor axis",
        ),
        (lambda: encoder(heads=2), 4, None, "'layers.0.self_attn' has 2 heads"),
        (lambda: mlp(12, 9, (7, 7)), 2, None, "Nothing in this model can be split over 2 processes: '1' its 7 outputs"),
        (
            lambda: mlp(12, 10, (9, 8)),
            2,
            {"1": "columns", "3": "rows"},
            "'1' has 9 outputs, which do not divide by 2 processes: change the width",
        ),
        (lambda: mlp(12, 10, (8, 8)), 2, {"1": "colums"}, "did you mean 'columns'"),
        (lambda: gpt(8, 4, 1, 2, 8), 2, {"blocks.0.atention": "heads"}, "did you mean 'blocks.0.attention'"),
        (lambda: mlp(12, 10, (8, 8)), 2, {"2": "columns"}, "'2', which is a ReLU: such a module can be whole"),
        (lambda: mlp(12, 10, (8, 8)), 2, {"3": "rows"}, "'3' is to be split by 'rows', but its input is not split"),
        (lambda: mlp(12, 10, (8, 8)), 2, {"1": "columns"}, "'1' is to be split by 'columns', but no planned layer reads"),
        (lambda: mlp(12, 10, (8, 8)), 2, {"*": "whole"}, "The plan splits nothing over 2 processes"),
        (lambda: gpt(8, 4, 1, 2, 8), 2, {"token": "vocabulary"}, "splits only one of 'token' and 'logits'"),
        (lambda: gpt(8, 4, 1, 2, 8), 2, {"logits": "logits"}, "splits only one of 'token' and 'logits'"),
        (tied, 2, None, "'0.out', '1' share a parameter, but would be split differently"),
        (lambda: nn.Linear(4, 4), 2, None, "wrap it in nn.Sequential"),
        (lambda: nn.Sequential(Branches(nn.Linear(2, 2), nn.Linear(2, 2))), 3, None, "'0' has 2 branches for 3 processes"),
    ],
)
def test_refusals_are_one_sentence(
    build: Callable[[], nn.Module], size: int, plan: dict[str, str] | None, words: str
) -> None:  # fmt: skip
    with pytest.raises(HocketError) as refusal:
        split_tensor(build(), axis(size=size), plan)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("arguments", [{"join": "summ"}, {"join": "sum", "none": True}])
def test_branches_refuse(arguments: dict) -> None:
    with pytest.raises(HocketError, match=r"Branches"):
        Branches(*[] if arguments.pop("none", False) else [nn.Linear(1, 1)], **arguments)


@pytest.mark.parametrize("build", [lambda: gpt(8, 4, 1, 2, 8), lambda: mlp(12, 10, (8, 8)), encoder, lambda: cnn((3, 8, 8), 10)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_order_and_gradients_wanted_stay(build: Callable[[], nn.Module], device: str) -> None:
    whole = build().to(device)
    next(whole.parameters()).requires_grad_(False)
    split = copy.deepcopy(whole)
    parts = split_tensor(split, axis(place=1))
    assert list(parts) == [name for name, _ in split.named_parameters()] == [name for name, _ in whole.named_parameters()]
    for (name, own), original in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert own.device.type == device
        assert own.requires_grad == original.requires_grad
        assert parts[name].shape == original.shape
        expected = parts[name].take(original.detach())
        assert own.shape == expected.shape
        assert device == "meta" or torch.equal(own, expected)
    assert sum(p.numel() for p in split.parameters()) < 0.75 * sum(p.numel() for p in whole.parameters())
    copy.deepcopy(split)


def test_one_process_changes_nothing() -> None:
    model = gpt(8, 4, 1, 2, 8)
    before = repr(model)
    assert split_tensor(model, Axis("tensor")) == {n: Part(tuple(p.shape)) for n, p in model.named_parameters()}
    assert repr(model) == before


def test_branches_of_others_are_gone_and_ones_own_are_all_there() -> None:
    model = nn.Sequential(Branches(*(nn.Linear(2, 2) for _ in range(4))))
    parts = split_tensor(model, axis(place=1))
    assert list(parts) == [f"0.{i}.{name}" for i in (2, 3) for name in ("weight", "bias")]
    assert parts["0.2.weight"] == Part((2, 2), 0, ((0, 2),))


def test_branches_of_several_processes_share_nothing() -> None:
    tower = nn.Linear(2, 2)
    with pytest.raises(HocketError, match="branch 1 shares a parameter"):
        split_tensor(nn.Sequential(Branches(tower, nn.Sequential(tower))), axis())


# --- dropout ---------------------------------------------------------------------------------------------------------------


def test_micro_batches_draw_what_the_mini_batch_draws() -> None:
    model, draws = nn.Sequential(nn.Dropout(0.4), nn.Dropout2d(0.4)), Draws(seed=3)
    prepare_dropout(model, draws)
    x = torch.ones(6, 4, 3, 3)
    draws.begin(step=7)
    whole = model(x)
    halves = []
    for first in (0, 2, 4):
        draws.begin(step=7, first_sample=first)
        halves.append(model(x[first : first + 2]))
    assert torch.equal(whole, torch.cat(halves))
    draws.begin(step=8)
    assert not torch.equal(whole, model(x))


def test_micro_batches_of_a_layer_that_takes_the_sequence_first_draw_so_too() -> None:
    layer, draws = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), Draws(seed=3)
    prepare_dropout(layer, draws)
    x = torch.randn(5, 4, 8)
    whole = layer(x)
    halves = []
    for first in (0, 2):
        draws.begin(step=0, first_sample=first)
        halves.append(layer(x[:, first : first + 2]))
    torch.testing.assert_close(whole, torch.cat(halves, 1))


@pytest.mark.parametrize("dim, samples", [(-1, 0), (1, 0), (2, 1), (0, 1)])
def test_slices_draw_what_the_whole_draws(dim: int, samples: int) -> None:
    x = torch.ones(4, 6, 8)

    def drawn(own: Tensor, place: int, size: int) -> Tensor:
        layer = Dropout(0.3, "layer", Draws(seed=1), dim=dim, samples=samples, lies=(place, size))
        return layer(own)

    pieces = [drawn(own, place, 2) for place, own in enumerate(x.chunk(2, dim))]
    assert torch.equal(drawn(x, 0, 1), torch.cat(pieces, dim))


def test_dropout_keeps_the_mean_and_differs_by_layer_call_sample_and_replica() -> None:
    draws = Draws()
    first, second = (Dropout(0.25, name, draws) for name in ("first", "second"))
    x = torch.ones(64, 1000)
    masks = [first(x), first(x), second(x)]
    draws.replica = 1
    masks.append(first(x))
    draws.begin(step=0, replica=0)
    assert torch.equal(first(x), masks[0])
    for k, mask in enumerate(masks):
        assert mask.mean().item() == pytest.approx(1.0, abs=0.01)
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert not any(torch.equal(mask, other) for other in masks[:k])
        assert len({tuple(row.tolist()) for row in mask}) == 64
    # Independent: two masks agree where chance says.
    agreement = ((masks[0] > 0) == (masks[2] > 0)).float().mean().item()
    assert agreement == pytest.approx(0.75**2 + 0.25**2, abs=0.01)


def test_evaluation_is_left_alone_and_a_gradient_meets_the_same_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    prepare_dropout(model, Draws())
    x = torch.randn(4, 10, requires_grad=True)
    assert model.eval()(x) is x
    out = model.train()(x)
    out.sum().backward()
    assert torch.equal(out, x * x.grad)


@pytest.mark.parametrize("batch_first", [True, False])
def test_prepared_attention_equals_torchs_without_dropout(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=batch_first)
    prepared = copy.deepcopy(layer)
    prepare_dropout(prepared, Draws())
    x, padding = torch.randn(4, 4, 16), torch.tensor([[False, False, True, True]]).expand(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(prepared.eval()(x, src_key_padding_mask=padding), layer.eval()(x, src_key_padding_mask=padding))
    assert [n for n, _ in prepared.named_parameters()] == [n for n, _ in layer.named_parameters()]


def test_other_random_layers_are_refused() -> None:
    with pytest.raises(HocketError, match="'0' is AlphaDropout"):
        prepare_dropout(nn.Sequential(nn.AlphaDropout()), Draws())
    with pytest.raises(HocketError, match="unusual form"):
        prepare_dropout(nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.1, kdim=4)), Draws())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("padding", [None, 0, 3, 5, 11])
def test_only_the_padding_row_learns_nothing_whichever_shard_holds_it(
    padding: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs of all shards add up to the whole embedding, and the gradients of their rows are the whole one's."""
    monkeypatch.setattr(Axis, "all_reduce", lambda self, values: values)  # the sum is taken below
    whole = nn.Embedding(12, 3, padding_idx=padding)
    nn.init.normal_(whole.weight)
    tokens = torch.arange(12).repeat(2).view(4, 6)
    wanted = whole(tokens)
    wanted.square().sum().backward()
    shards = [SplitEmbedding(copy.deepcopy(whole), ParameterSlicer(axis(place, size))) for place in range(size)]
    for shard in shards:
        shard.weight.grad = None
    found = sum(shard(tokens) for shard in shards)
    assert torch.equal(found, wanted)
    found.square().sum().backward()
    assert torch.equal(torch.cat([shard.weight.grad for shard in shards]), whole.weight.grad)
    held = [shard.own_padding for shard in shards if shard.own_padding is not None]
    assert held == ([] if padding is None else [padding % (12 // size)])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "heads", "padding", "both"])
@pytest.mark.parametrize("form", ["batch first", "batch second", "one sample"])
def test_the_heads_of_all_processes_are_the_whole_attention(
    form: str, mask: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs add up (the bias comes once), and so do the mean weights; with each kind of mask."""
    monkeypatch.setattr(Axis, "all_reduce", lambda self, values: values)  # the sums are taken below
    torch.manual_seed(3)
    whole = nn.MultiheadAttention(16, 4, batch_first=form == "batch first")
    nn.init.normal_(whole.in_proj_bias)
    nn.init.normal_(whole.out_proj.bias)
    shape = {"batch first": (3, 5, 16), "batch second": (5, 3, 16), "one sample": (5, 16)}[form]
    query, other = torch.randn(shape), torch.randn(shape)
    samples = 1 if form == "one sample" else 3
    later = torch.ones(5, 5).triu(1).bool()
    masks = {
        "bool": {"attn_mask": later},
        "float": {"attn_mask": torch.randn(5, 5)},
        "heads": {"attn_mask": torch.randn(samples * 4, 5, 5)},
        "padding": {"key_padding_mask": torch.arange(5).expand(samples, 5) > 3},
        "both": {"attn_mask": later, "key_padding_mask": torch.arange(5).expand(samples, 5) > 3},
    }
    given = masks.get(mask, {})
    if form == "one sample" and "key_padding_mask" in given:
        given = {**given, "key_padding_mask": given["key_padding_mask"][0]}
    wanted, looked = whole(query, other, other, **given)
    parts = [SplitMultihead(copy.deepcopy(whole), ParameterSlicer(axis(place, size))) for place in range(size)]
    found = [part(query, other, other, **given) for part in parts]
    bias = whole.out_proj.bias
    torch.testing.assert_close(sum(out - bias for out, _ in found) + bias, wanted)
    torch.testing.assert_close(sum(weights for _, weights in found), looked)
    for part, (out, _) in zip(parts, found, strict=True):
        quick, nothing = part(query, other, other, need_weights=False, **given)
        torch.testing.assert_close(quick, out)
        assert nothing is None
    parts[0].dropout = 0.5
    assert parts[0](query, other, other, need_weights=False, **given)[1] is None, "also where dropout needs them"
    alone = SplitMultihead(copy.deepcopy(whole), ParameterSlicer(axis(0, 1)))
    torch.testing.assert_close(
        alone(query, other, other, average_attn_weights=False, **given)[1],
        whole(query, other, other, average_attn_weights=False, **given)[1],
    )
