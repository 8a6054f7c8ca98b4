"""A model as a prediction sees it: shapes on the ``meta`` device, operations of a step, bytes between its layers."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.spec import ClusterSpec
from hocket.data import DataSet, load
from hocket.data.base import identity
from hocket.errors import HocketError
from hocket.models.registry import build, cross_entropy
from hocket.train.checks import Factory, optimizer_for
from hocket.train.flops import on_meta, step_flops

LAYERS = 12
"""Matrices of a model of which only the number of parameters is known."""
_PER_PARAMETER = 6
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params),
    "adamw": lambda params: torch.optim.AdamW(params),
}


@dataclass(frozen=True)
class ModelSize:
    """What a prediction needs to know of a model and its mini-batch."""

    name: str
    module: nn.Module
    """Its parameters, on the ``meta`` device."""
    flops: float
    """Of a step on a mini-batch, forward and backward."""
    batch_size: int = 1
    step_s: float | None = None
    """What a step takes on a worker, whatever the cluster's file says."""
    layers: int = LAYERS
    activation_bytes: float | None = None
    """Of a mini-batch, between two layers; None: not known."""
    kept_bytes: float = 0.0
    """Of all outputs of a mini-batch that the backward pass needs; 0: not known."""

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def seconds(self, spec: ClusterSpec) -> float:
        """A step of a worker without slowdown."""
        return self.step_s if self.step_s is not None else spec.seconds(self.flops)

    def optimizer(self, of: str | Factory) -> torch.optim.Optimizer:
        """An optimiser of the parameters: one of :data:`OPTIMIZERS` by name, or what the function makes."""
        if isinstance(of, str) and of not in OPTIMIZERS:
            raise HocketError(f"optimizer={of}: use one of {', '.join(OPTIMIZERS)}, or a function of parameters.")
        return optimizer_for(OPTIMIZERS[of] if isinstance(of, str) else of, list(self.module.parameters()))


def of_size(parameters: float, batch_size: int = 1, step_s: float | None = None, layers: int = LAYERS, **more: Any) -> ModelSize:
    """A model of which only the size is known: ``layers`` square matrices, 6 operations per parameter and sample (or token).

    >>> size = of_size(124e6, batch_size=8)
    >>> round(size.parameters / 1e6), size.flops / 1e9
    (124, 5.952)
    """
    side = math.isqrt(max(1, round(parameters / layers)))
    shapes: list[tuple[int, ...]] = [(side, side)] * layers
    if (left := round(parameters) - layers * side * side) > 0:
        shapes.append((left,))
    module = nn.Module()
    for k, shape in enumerate(shapes):
        module.register_parameter(f"layer{k}", nn.Parameter(torch.empty(shape, device="meta")))
    name = f"{parameters / 1e6:.4g}M parameters"
    return ModelSize(name, module, _PER_PARAMETER * parameters * batch_size, batch_size, step_s, layers, **more)


def of_module(
    model: nn.Module | Callable[[], nn.Module], batch: tuple[Tensor, Tensor] | None, loss: Any, batch_size: int, name: str = ""
) -> ModelSize:
    """A model that is there; ``batch`` are a few samples to count operations on (None: 6 per parameter and sample)."""
    built = model if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise HocketError(f"A prediction needs an nn.Module, a function that makes one, or a size; got {type(built).__name__}.")
    parameters = sum(p.numel() for p in built.parameters() if p.requires_grad)
    if not parameters:
        raise HocketError("The model has no parameters to train; give another, or parameters=124e6, for example.")
    flops, sizes = _PER_PARAMETER * parameters * batch_size * 1.0, []
    if batch is not None:
        flops = step_flops(built, loss, *batch, batch_size)
        sizes = [size * batch_size / len(batch[0]) for size in _outputs(built, batch[0])]
    return ModelSize(
        name or type(built).__name__,
        on_meta(built),
        flops,
        batch_size,
        layers=max(1, sum(p.dim() > 1 for p in built.parameters()) // 2),
        activation_bytes=statistics.median(sizes) if sizes else None,
        kept_bytes=sum(sizes),
    )


def reads_text(name: str) -> bool:
    """Whether the model of that name is a language model."""
    return name.startswith(("gpt", "hf:"))


def _outputs(model: nn.Module, inputs: Tensor) -> list[int]:
    """Bytes of what each innermost module of the model gives for ``inputs``."""
    found: list[int] = []
    device = next(model.parameters()).device

    def hook(module: nn.Module, given: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            found.append(out.numel() * out.element_size())

    try:
        twin = copy.deepcopy(model)  # buffers change in a forward pass
        for module in twin.modules():
            if not list(module.children()):
                module.register_forward_hook(hook)
        with torch.no_grad(), torch.random.fork_rng():
            twin(inputs.to(device))
    except Exception:  # nothing is known of a model that cannot be copied or does not run on a CPU
        return []
    return found


def of_name(name: str, batch_size: int, data: str | None = None) -> ModelSize:
    """A model by its name or ``module:factory``, for a data set or, without one, for images of 32 × 32 or texts of 256 bytes."""
    dataset = load(data) if data is not None else made_up(text=reads_text(name))
    own = ":" not in name or name.startswith("gpt:")
    with torch.device("meta") if own else contextlib.nullcontext():  # no values are needed, which take seconds to draw
        built = build(name, dataset)
    x, y = (t[:2] for t in dataset.train)
    return of_module(built, (dataset.prepare(x), y), cross_entropy, batch_size, name)


def made_up(text: bool, samples: int = 2) -> DataSet:
    """Texts of 256 bytes, or images of 32 × 32, without meaning."""
    if text:
        tokens = torch.zeros(samples, 256, dtype=torch.int64)
        return DataSet("256 bytes", (tokens, tokens), None, 256, identity)
    images = torch.zeros(samples, 3, 32, 32), torch.zeros(samples, dtype=torch.int64)
    return DataSet("32 × 32 images", images, None, 10, identity)
