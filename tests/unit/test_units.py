"""Laws of models that cannot be traced: cut by running them, their stages are the model, whatever they take and return."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hocket.errors import HocketError
from hocket.split import Axis
from hocket.split.draws import Draws
from hocket.split.dropout import prepare_dropout
from hocket.split.inputs import joined, loss_in, map_samples, micro_batches
from hocket.split.pipeline import Cut, PipelineRunner, cut_model


class Block(nn.Module):
    """Its second output is made by the first block alone and read by all."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.linear, self.dropout = first, nn.Linear(8, 8), nn.Dropout(0.0)
        self.bias = nn.Parameter(torch.randn(8)) if first else None

    def forward(self, x: Tensor, *, mask: Tensor, bias: Tensor | None, note: list[str]) -> tuple[Tensor, Tensor, str]:
        note.append("called")
        bias = self.bias.tanh() if bias is None and self.bias is not None else bias
        assert bias is not None
        mixed = (x * mask.unsqueeze(-1)).cumsum(1)
        return x + self.dropout(torch.tanh(self.linear(mixed) + bias)), bias, "a word"


class Body(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(k == 0) for k in range(layers))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():  # the forward depends on values
            mask = torch.ones_like(mask)
        bias, start, note = None, x, list[str]()
        for layer in self.layers:
            x, bias, _ = layer(x, mask=mask, bias=bias, note=note)
        return self.norm(x + start)


class Speaker(nn.Module):
    """Keyword arguments, a mapping as output, a tied head, a parameter of its own, and a value that skips all blocks."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(12, 8), Body(layers), nn.Linear(8, 12, bias=False)
        self.scale, self.spare = nn.Parameter(torch.ones(8)), nn.Linear(2, 2)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, **words: Any) -> dict[str, Any]:
        mask = (ids >= 0).float() if mask is None else mask.float()
        logits = self.head(self.body(self.token(ids) * self.scale, mask))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "cache": words}


def batch(samples: int = 5, length: int = 6, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (samples, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"ids": ids, "mask": mask, "labels": ids.roll(-1, 1), "use_cache": False}


def pipe_of(cut: Cut, schedule: str = "interleaved", **options: Any) -> PipelineRunner:
    return PipelineRunner(cut, Axis("pipeline"), loss_in, schedule, num_microbatches=3, **options)


def check_gradients(model: nn.Module, alone: nn.Module) -> None:
    for name, p in alone.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(torch.zeros_like(p) if grad is None else grad, torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_train_as_the_whole_on_one_process(schedule: str, stages: int) -> None:
    model = Speaker()
    alone = copy.deepcopy(model)
    pipe = pipe_of(cut_model(model, batch(), stages), schedule)
    for x in (batch(7, seed=1), batch(4, length=9, seed=2), batch(2, length=3, seed=3)):  # not the sample's lengths
        loss, wanted = pipe.run(x), alone(**x)["loss"]
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
    check_gradients(model, alone)
    x = {key: value for key, value in batch(6, seed=4).items() if key != "labels"}
    found, whole = pipe.forward(x), alone.eval()(**x)
    assert found.keys() == {"logits"}
    torch.testing.assert_close(found["logits"], whole["logits"].detach())


def test_parameters_keep_their_names_and_each_is_held_once_or_tied() -> None:
    model = Speaker()
    cut = cut_model(model, batch(), 3, points=["body.layers.0", "body.layers.2"])
    held = [[n for n, _ in stage.named_parameters(remove_duplicate=False)] for stage in cut.stages]
    assert held[0] == ["scale", "token.weight", "body.layers.0.bias", "body.layers.0.linear.weight", "body.layers.0.linear.bias"]
    assert all(p is model.get_parameter(n) for stage in cut.stages for n, p in stage.named_parameters())
    assert {n for names in held for n in names} == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert cut.tied == {"scale": (0, 1, 2), "token.weight": (0, 2)}
    crossing = [[wire.name for wire in wires] for wires in cut.wires]
    assert crossing[1] == ["0: token, 0", "3: body.layers.2, 0", "3: body.layers.2, 1"]  # what skips, the activations, the bias
    assert [wire.shape(2) for wire in cut.wires[1]] == [(2, 6, 8), (2, 6, 8), (8,)]


@pytest.mark.parametrize("measure", ["flops", "seconds"])
def test_recording_changes_nothing_and_weighs_every_unit(measure: str) -> None:
    model = Speaker()
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    cut = cut_model(model, batch(), 2, measure)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training and "forward" not in vars(m) for m in model.modules())
    assert [row.name for row in cut.rows] == ["token", *(f"body.layers.{k}" for k in range(4)), "body.norm", "head"]
    assert all(row.forward_s > 0 for row in cut.rows)


def test_a_model_without_memory_is_cut_alike() -> None:
    with torch.device("meta"):
        unborn = Speaker()
    unborn.scale = nn.Parameter(torch.ones(8))  # the model's own code reads it
    assert cut_model(unborn, batch(), 2).rows == cut_model(Speaker(), batch(), 2).rows


def test_what_is_frozen_gets_no_gradient() -> None:
    model = Speaker()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("body.layers.3"))
    alone, x = copy.deepcopy(model), batch(6)
    cut = cut_model(model, batch(), 3, points=["token", "body.layers.3"])
    assert [[wire.grad for wire in wires] for wires in cut.wires] == [[False], [False, True]]
    pipe = pipe_of(cut)
    pipe.run(x)
    alone(**x)["loss"].backward()
    check_gradients(model, alone)


def test_dropout_draws_what_the_whole_model_draws() -> None:
    model = Speaker()
    for block in model.body.layers:
        block.dropout.p = 0.5
    draws = Draws()
    prepare_dropout(model, draws)
    alone, x = copy.deepcopy(model), batch(6)
    pipe = pipe_of(cut_model(model, batch(), 3), draws=draws)
    loss = pipe.run(x)
    draws.begin(0)
    for module in alone.modules():
        if hasattr(module, "draws"):
            module.draws = draws
    torch.testing.assert_close(loss, alone(**x)["loss"].detach())
    pipe.module.eval()
    evaluated = pipe.forward(x)["loss"]
    torch.testing.assert_close(evaluated, alone.eval()(**x)["loss"].detach())


def test_a_micro_batch_counts_as_its_weight_says() -> None:
    model, x = Speaker(), batch(6)
    x["labels"][0, 2:] = -100  # targets that do not count: micro-batches have different numbers of others
    alone = copy.deepcopy(model)
    pipe = pipe_of(cut_model(model, batch(), 2), weight=lambda x, y: int((x["labels"] != -100).sum()))
    wanted = alone(**x)["loss"]
    wanted.backward()
    torch.testing.assert_close(pipe.run(x), wanted.detach())
    check_gradients(model, alone)
    pipe.weight = lambda x, y: 0
    with pytest.raises(HocketError, match="a sum above 0"):
        pipe.run(x)


class Hidden(Speaker):
    """The last units read a value of the first one in a way that autograd does not see."""

    def forward(self, ids: Tensor, **others: Any) -> dict[str, Any]:
        mask, bias, note = (ids >= 0).float(), None, list[str]()
        values = [self.token(ids)]
        for layer in self.body.layers:
            x, bias, _ = layer(values[-1], mask=mask, bias=bias, note=note)
            values.append(x)
        return {"logits": self.head(values[1].detach() + values[-1])}


class Reads(Speaker):
    def forward(self, ids: Tensor, **others: Any) -> dict[str, Any]:
        return {"logits": F.linear(self.body(self.token(ids), (ids >= 0).float()), self.token.weight)}


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Hidden(), "Hidden cannot be cut: its stages give another output than the whole"),
        (Reads(), "Reads reads 'token.weight' outside of its module"),
        (Speaker(1), "Speaker has 3 places to cut, too few for 9 stages"),
    ],
)
def test_what_cannot_be_cut_meets_one_sentence(model: nn.Module, sentence: str) -> None:
    with pytest.raises(HocketError) as caught:
        cut_model(model, {"ids": batch()["ids"]}, 9 if type(model) is Speaker else 2)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_inputs_of_another_kind_than_the_sample_meet_one_sentence() -> None:
    model = Speaker()
    pipe = pipe_of(cut_model(model, batch(), 2))
    model.body.layers.append(Block(False))
    with pytest.raises(HocketError, match=r"called 'body.layers.4' where it called 'body.norm' for hocket.Pipeline"):
        pipe.run(batch())


def test_batches_are_parted_and_joined_by_samples() -> None:
    x = {"ids": torch.arange(10).view(5, 2), "scale": torch.ones(3), "word": "a", "nothing": None}
    parts = micro_batches(x, 3)
    assert [part["ids"].shape[0] for part in parts] == [2, 2, 1]
    assert all(part["scale"] is x["scale"] and part["word"] == "a" for part in parts)
    whole = joined([{"ids": part["ids"], "loss": part["ids"].float().mean(), "word": "a"} for part in parts], [2, 2, 1])
    assert torch.equal(whole["ids"], x["ids"])
    assert whole["loss"] == x["ids"].float().mean()
    assert whole.keys() == {"ids", "loss"}
    assert map_samples((x["ids"], 3), lambda t: t[:1])[1] == 3
    with pytest.raises(HocketError, match="at least one; got none"):
        micro_batches({"word": "a"}, 2)
    assert len(list(itertools.chain(*joined([(torch.ones(2), None)], [2])))) == 2


class Changing(nn.Module):
    """Changes outputs of its modules in place, may checkpoint its blocks, and returns flags and an empty tensor."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.token, self.head, self.reentrant = nn.Embedding(12, 8), nn.Linear(8, 12), reentrant
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert not torch.jit.is_tracing()
        x = self.token(ids)
        for block in list(self.blocks):
            made = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + made.tanh_() if bool(ids.sum() > -1) else x
            x += 1
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "flags": ids > 3, "nothing": logits[:0]}


def _few(samples: int = 6) -> dict[str, Tensor]:
    return {key: value for key, value in batch(samples).items() if key in ("ids", "labels")}


@pytest.mark.parametrize("reentrant", [None, False])
def test_outputs_may_be_changed_in_place_and_checkpointed(reentrant: bool | None) -> None:
    model = Changing(reentrant)
    alone = copy.deepcopy(model)
    pipe = pipe_of(cut_model(model, _few(), 3))
    loss, wanted = pipe.run(_few()), alone(**_few())["loss"]
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    check_gradients(model, alone)


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(HocketError, match="use_reentrant=False"):
        cut_model(Changing(True), _few(), 3)
    model = Changing()
    pipe = pipe_of(cut_model(model, _few(), 3))
    model.reentrant = True
    with pytest.raises(HocketError, match="use_reentrant=False"):
        pipe.run(_few())


def test_a_micro_batch_without_labels_counts_nothing() -> None:
    x = _few()
    x["labels"] = x["labels"].clone()
    x["labels"][:2] = -100  # the first of three micro-batches
    model = Changing()
    alone = copy.deepcopy(model)
    pipe = pipe_of(cut_model(model, _few(), 2), weight=lambda x, _: int((x["labels"] >= 0).sum()))
    loss, wanted = pipe.run(x), alone(**x)["loss"]
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    check_gradients(model, alone)
