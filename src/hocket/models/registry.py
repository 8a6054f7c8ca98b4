"""Models by name, built to fit a data set, and the loss of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.data import DataSet
from hocket.data.registry import named, resolve
from hocket.errors import HocketError
from hocket.models.gpt import gpt
from hocket.models.hugging_face import causal_lm
from hocket.models.images import cnn, mlp, resnet20, vgg11


def build(name: str, dataset: DataSet) -> nn.Module:
    """The model of that name for ``dataset``, with fresh weights from torch's current random state.

    ``gpt:10m`` is a gpt of about that many parameters (``GPT_SIZES``); ``hf:gpt2``, ``hf:config.json`` and ``hf:FOLDER`` are
    language models of transformers (:mod:`hocket.models.hugging_face`). ``module:factory`` is a function or class of your own; it
    is given the data set if it has a parameter without a default, and returns a module from a batch of inputs, as the data set
    prepares them, to logits ``[batch, classes]`` (of texts ``[batch, length, classes]``). Its weights are drawn from the seed of
    the run, so all workers start equal.

    >>> from hocket.data import load
    >>> build("cnn", load("digits"))(load("digits").example).shape
    torch.Size([1, 10])
    """
    if name.startswith("gpt:"):
        return _gpt(dataset, **named("size of gpt", name.removeprefix("gpt:"), GPT_SIZES))
    if name.startswith("hf:"):
        _check_text("a language model", dataset)
        return causal_lm(name.removeprefix("hf:"), dataset.classes, dataset.shape[0])
    if ":" in name:
        return _own(name, dataset)
    return named("model", name, MODELS, "gpt:10m", "hf:gpt2", "module:factory")(dataset)


def _mlp(dataset: DataSet) -> nn.Module:
    if dataset.text:
        raise HocketError(f"mlp reads values, but data set '{dataset.name}' holds tokens: use gpt.")
    return mlp(prod(dataset.shape), dataset.classes)


def _on_images(model: Callable[[Sequence[int], int], nn.Module]) -> Callable[[DataSet], nn.Module]:

    def made(dataset: DataSet) -> nn.Module:
        if dataset.text or len(dataset.shape) != 3:
            holds, instead = f"holds inputs of shape {dataset.shape}", "gpt" if dataset.text else "mlp"
            raise HocketError(f"{model.__name__} reads images, but data set '{dataset.name}' {holds}: use {instead}.")
        return model(dataset.shape, dataset.classes)

    return made


GPT_SIZES = {
    "1m": {"layers": 4, "heads": 4, "width": 128},
    "10m": {"layers": 6, "heads": 6, "width": 384},
    "30m": {"layers": 8, "heads": 8, "width": 512},
    "100m": {"layers": 8, "heads": 16, "width": 1024},
    "124m": {"layers": 12, "heads": 12, "width": 768},
}
"""Named by about how many parameters they have with 256 tokens, but the last: GPT-2's smallest, with its 50,257 tokens (85 million
with 256)."""


def _gpt(dataset: DataSet, **size: int) -> nn.Module:
    _check_text("gpt", dataset)
    return gpt(dataset.classes, context=dataset.shape[0], **size)


def _check_text(model: str, dataset: DataSet) -> None:
    if not dataset.text or len(dataset.shape) != 1:
        raise HocketError(
            f"{model} reads tokens, but data set '{dataset.name}' holds values of shape {dataset.shape}: use mlp, cnn or resnet20."
        )


MODELS: dict[str, Callable[[DataSet], nn.Module]] = {
    "mlp": _mlp,
    **{model.__name__: _on_images(model) for model in (cnn, resnet20, vgg11)},
    "gpt": _gpt,
}


def _own(reference: str, dataset: DataSet) -> nn.Module:
    factory = resolve(reference)
    parameters = inspect.signature(factory).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    model = factory(dataset) if required else factory()
    if not isinstance(model, nn.Module):
        raise HocketError(f"'{reference}' must return a torch.nn.Module; got {type(model).__name__}: change what it returns.")
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of ``[..., V]`` logits: one target for each image, or for each position of each text.

    Integer targets have the shape of the logits without its last axis; float targets, shares of classes, have its whole shape.

    >>> import torch
    >>> cross_entropy(torch.zeros(2, 7, 4), torch.zeros(2, 7, dtype=torch.int64))  # log 4
    tensor(1.3863)
    """
    shares = targets.is_floating_point()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(0, -2) if shares else targets.flatten().to(torch.int64))


def loss_for(dataset: DataSet) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss to train on ``dataset`` with: cross-entropy, since all its targets are classes."""
    targets = dataset.train[1]
    if targets.is_floating_point() and targets.dim() < 2:
        raise HocketError(
            f"Data set '{dataset.name}' has float targets, for which cross-entropy makes no sense: pass a loss of your own."
        )
    return cross_entropy
