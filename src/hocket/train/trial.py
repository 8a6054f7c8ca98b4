"""A trial batch before training: refuses a model, loss or metric that cannot work in one sentence, not after an epoch.

The contract: ``model(inputs)`` gives any output; ``loss(output, targets)`` gives one number, the mean over a batch, which autograd
can differentiate; ``metric(output, targets)`` gives one number. In eval mode the same holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.data.base import DataSet
from hocket.data.fields import Unpacking
from hocket.errors import HocketError
from hocket.models import build, loss_for
from hocket.train.engines.loop import forked, have_moved
from hocket.train.evaluate import Evaluator, logits_for


def check_own(name: str, data: DataSet, batch_size: int, model: nn.Module | None = None) -> None:
    """Try one batch of the model of that name (built, unless it is given) where it or the data are the user's own factories."""
    loss, built = loss_for(data), build(name, data) if model is None else model
    if ":" in name or ":" in data.name:
        try_batch(built, Evaluator(data, loss), batch_size, classes=data.classes)


def try_batch(model: nn.Module, evaluator: Evaluator, batch_size: int, evaluates: bool = True, classes: int = 0) -> bool:
    """Forward, loss and metric of one batch, in the model's mode and, if it ``evaluates``, in eval mode; whether they drew numbers.

    The model's buffers and torch's random state stay as they were. ``classes``: the logits must be as many.
    """
    data, device = evaluator.data, next((p.device for p in model.parameters()), torch.device("cpu"))
    with forked(True, device, 0), _as_it_was(model):
        output, y = _forward(model, data, data.train, batch_size, device)
        _check_classes(output, y, classes)
        loss = _called("loss", evaluator.loss, output, y)
        _check_loss(loss, model)
        if evaluates and data.test is not None:
            with torch.no_grad():
                output, y = _forward(model.eval(), data, data.test, batch_size, device)
                _number("loss", _called("loss", evaluator.loss, output, y))
                if evaluator.metric is not None:
                    _number("metric", _called("metric", evaluator.metric, output, y))
        return have_moved(0, device)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restores buffers (BatchNorm statistics) and modes."""
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    modes = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in kept:
                buffer.copy_(values)
                module._buffers[name] = buffer
        for module, training in modes:
            module.training = training


def _forward(
    model: nn.Module, data: DataSet, pair: tuple[Tensor, Tensor], batch_size: int, device: torch.device
) -> tuple[Any, Tensor]:
    x, y = (part[:batch_size].to(device) for part in pair)
    x = data.prepare(x)
    try:
        return model(x), y
    except (HocketError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        mode = "training" if model.training else "eval"
        shown = model.named(x) if isinstance(model, Unpacking) else x
        raise HocketError(
            f"The model fails in {mode} mode on a batch of inputs {_kind(shown)} ({_reason(error)}): it is called as model(inputs)."
        ) from error


def _called(name: str, function: Callable[[Any, Tensor], Any], output: Any, targets: Tensor) -> Any:
    try:
        return function(output, targets)
    except (HocketError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise HocketError(
            f"The {name} fails on an output {_kind(output)} and targets {_kind(targets)} ({_reason(error)}): "
            f"it is called as {name}(model(inputs), targets)."
        ) from error


def _check_classes(output: Any, targets: Tensor, classes: int) -> None:
    logits = logits_for(output, targets) if classes else None
    if logits is not None and logits.shape[-1] < classes:
        raise HocketError(
            f"The model gives {logits.shape[-1]} logits, but the data set has {classes} classes: make its last layer as wide."
        )


def _check_loss(loss: Any, model: nn.Module) -> None:
    if not isinstance(loss, Tensor):
        raise HocketError(f"The loss must be a tensor, for autograd to differentiate; got {_kind(loss)}: return the tensor itself.")
    if loss.dim():
        raise HocketError(f"The loss must be one number, the mean over samples; got shape {list(loss.shape)}: use its mean.")
    if not loss.requires_grad and any(p.requires_grad for p in model.parameters()):
        raise HocketError("The loss does not depend on the model's parameters: return it without detach() or no_grad().")


def _number(name: str, value: Any) -> None:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        raise HocketError(f"The {name} must be one number for a batch, got {_kind(value)}: use its mean.") from None


def _kind(value: Any) -> str:
    """A value by its shape or its type.

    >>> _kind(torch.zeros(2, 3)), _kind({"logits": torch.zeros(2)}), _kind(None)
    ('[2, 3] (float32)', "{'logits': [2] (float32)}", 'None')
    """
    if isinstance(value, Tensor):
        return f"{list(value.shape)} ({str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_kind(part)}' for key, part in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_kind, value))})"
    return "None" if value is None else type(value).__name__


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
