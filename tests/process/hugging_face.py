"""Models of transformers, split and whole, for tests/process/test_hugging_face.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import hocket

STEPS, LENGTH, PADDED = 4, 8, 2
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "split.md"
_TOKENS = {"vocab_size": 24, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_DECODER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_ENCODER = {**_DECODER, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 16, **{f"{k}_pdrop": 0.0 for k in ("resid", "embd", "attn")}},
    ),
    "llama": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    "llama, tied": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "bert": ("BertForMaskedLM", _ENCODER),
    "bert, classes": ("BertForSequenceClassification", {**_ENCODER, "num_labels": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
}


def build(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(3)
    kind, size = MODELS[name]
    model = getattr(transformers, kind)
    return model(model.config_class(**{**_TOKENS, **size, **changes}))  # type: ignore[no-any-return]


def batch(name: str, step: int, samples: int = 8) -> dict[str, Tensor]:
    """Keyword arguments of the model; the last tokens of each text are padding."""
    draw = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(1, 24, (samples, LENGTH - step), generator=draw)  # not as long in every step
    mask = torch.ones_like(tokens)
    tokens[:, -PADDED:] = mask[:, -PADDED:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    if name == "bert, classes":
        labels = torch.randint(0, 4, (samples,), generator=draw)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def by_logits(output: Any, labels: Tensor) -> Tensor:
    """A loss of one's own; of a classifier's logits it is also the model's."""
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def alone(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Training on one process, in plain PyTorch: the weights by all their names, and the losses."""
    model = build(name)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(name, step)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {n: t.detach().clone() for n, t in model.state_dict().items()}, losses


def equal(name: str, mesh: str, own_loss: bool = False, **staged: Any) -> dict[str, Any]:
    """The same training on a mesh; also what is predicted at its end."""
    model, placed = build(name), hocket.Mesh.parse(mesh)

    sample = {key: t for key, t in batch(name, 0, 8 // placed.data).items() if key != "labels" or not own_loss}
    pipeline = hocket.Pipeline(loss=by_logits if own_loss else None, sample=sample, **staged)
    job = hocket.parallelize(model, optimizer_of(model), mesh=placed, pipeline=pipeline)
    losses = []
    for step in range(STEPS):
        place = job.split.place.data.place
        x = {key: t.tensor_split(placed.data)[place] for key, t in batch(name, step).items()}
        y = x.pop("labels") if own_loss else None
        loss = job.train(x, y)
        losses += [] if loss is None else [float(loss)]
    state = job.full_state()
    held = {n: p.numel() for n, p in job.model.named_parameters()}
    job.model.eval()
    with torch.no_grad():
        x = batch(name, 0, 4)
        predicted = job.predict({key: t for key, t in x.items() if name == "t5" or key != "labels"})
    explained = "\n".join(job.explain())
    job.finish()
    return {
        "whole": None if state is None else state["model"],
        "losses": losses,
        "logits": predicted.logits,
        "held": held,
        "explained": explained,
    }


def loop(name: str, mesh: str) -> dict[str, Any]:
    """Where only operations are split, the plain loop trains; there is no sample."""
    model = build(name)
    optimizer = optimizer_of(model)
    job = hocket.parallelize(model, optimizer, mesh=mesh)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**batch(name, step)).loss.backward()
        optimizer.step()
    state = job.full_state()
    job.finish()
    return {"whole": None if state is None else state["model"]}


def refused(
    name: str, mesh: str, keys: tuple[str, ...] = ("input_ids", "attention_mask", "labels"), **changes: Any
) -> dict[str, Any]:
    """The sentence that a model meets that cannot be split."""
    model = build(name, **changes)
    sample = {key: t for key, t in batch(name, 0).items() if key in keys}
    try:
        hocket.parallelize(model, optimizer_of(model), mesh=mesh, pipeline=hocket.Pipeline(sample=sample))
    except hocket.HocketError as error:
        return {"sentence": str(error)}
    return {"sentence": ""}


def born(name: str, mesh: str | None) -> dict[str, Any]:
    """A model that was built without memory: its weights, whatever holds them, and its first loss."""
    with hocket.deferred():
        model = build(name)
    pipeline = hocket.Pipeline(sample=batch(name, 0)) if mesh else hocket.Pipeline()
    job = hocket.parallelize(model, optimizer_of(model), mesh=mesh, pipeline=pipeline)
    if mesh is None:
        whole: Any = {n: t.detach().clone() for n, t in model.state_dict().items()}
        loss = model(**batch(name, 0)).loss
    else:
        state = job.full_state()
        whole, loss = None if state is None else state["model"], job.train(batch(name, 0))
    job.finish()
    return {"whole": whole, "loss": float(loss)}


def documented() -> dict[str, Any]:
    """What the example of the guide computes."""
    section = GUIDE.read_text().partition("## Models of transformers")[2]
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(section.partition("```python")[2].partition("```")[0], found)
    found["job"].finish()
    return {"losses": found["losses"], "logits": found["logits"]}


CASES = {f.__name__: f for f in (equal, loop, born, refused, documented)}


def main(rank: int, folder: str, wanted: list[tuple[str, str, dict[str, Any]]]) -> None:
    hocket.init(backend="gloo", device="cpu")
    results = {label: CASES[function](**arguments) for label, function, arguments in wanted}
    torch.save(tree_map_only(Tensor, Tensor.cpu, results), f"{folder}/{rank}.pt")
