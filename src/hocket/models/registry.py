"""Models by name, built to fit a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod

from torch import nn

from hocket.data import DataSet
from hocket.data.factory import resolve
from hocket.errors import HocketError, nearest
from hocket.models.cnn import cnn
from hocket.models.gpt import gpt
from hocket.models.mlp import mlp
from hocket.models.resnet import resnet20
from hocket.models.vgg import vgg11


def build(name: str, dataset: DataSet) -> nn.Module:
    """The model of that name for ``dataset``, with fresh weights from torch's current random state.

    ``module:factory`` names a function or class of your own; it is given the data set if it has a parameter without a default.

    >>> from hocket.data import load
    >>> build("cnn", load("digits"))(load("digits").example).shape
    torch.Size([1, 10])
    """
    if ":" in name:
        return _own(name, dataset)
    if name not in MODELS:
        hint = nearest(name, MODELS) or ": choose one of these."
        raise HocketError(f"There is no model '{name}' among {', '.join(MODELS)} and 'module:factory'{hint}")
    return MODELS[name](dataset)


def _mlp(dataset: DataSet) -> nn.Module:
    if dataset.text:
        raise HocketError(f"mlp reads values, but data set '{dataset.name}' holds tokens: use gpt.")
    return mlp(prod(dataset.shape), dataset.classes)


def _cnn(dataset: DataSet) -> nn.Module:
    return cnn(_image("cnn", dataset), dataset.classes)


def _resnet20(dataset: DataSet) -> nn.Module:
    return resnet20(_image("resnet20", dataset), dataset.classes)


def _vgg11(dataset: DataSet) -> nn.Module:
    return vgg11(_image("vgg11", dataset), dataset.classes)


def _gpt(dataset: DataSet) -> nn.Module:
    if not dataset.text or len(dataset.shape) != 1:
        raise HocketError(
            f"gpt reads tokens, but data set '{dataset.name}' holds values of shape {dataset.shape}: use mlp, cnn or resnet20."
        )
    return gpt(dataset.classes, context=dataset.shape[0])


MODELS: dict[str, Callable[[DataSet], nn.Module]] = {"mlp": _mlp, "cnn": _cnn, "resnet20": _resnet20, "vgg11": _vgg11, "gpt": _gpt}


def _image(model: str, dataset: DataSet) -> tuple[int, ...]:
    if dataset.text or len(dataset.shape) != 3:
        instead = "gpt" if dataset.text else "mlp"
        raise HocketError(
            f"{model} reads images, but data set '{dataset.name}' holds inputs of shape {dataset.shape}: use {instead}."
        )
    return dataset.shape


def _own(reference: str, dataset: DataSet) -> nn.Module:
    factory = resolve(reference)
    parameters = inspect.signature(factory).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    model = factory(dataset) if required else factory()
    if not isinstance(model, nn.Module):
        raise HocketError(f"'{reference}' must return a torch.nn.Module; got {type(model).__name__}: change what it returns.")
    return model
