"""A batch as a model takes it: one tensor, a mapping of keyword arguments, or a tuple of positional ones.

Tensors with as many rows as the first one hold samples; other values are the same for every part of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.errors import HocketError
from hocket.split.parts import evaluating

Inputs = Tensor | Mapping[str, Any] | tuple[Any, ...]


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call with a batch."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return ((x,) if isinstance(x, Tensor) else x), {}


def call(model: nn.Module, x: Inputs) -> Any:
    """The output of ``model`` for a batch."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def first_tensor(x: Inputs) -> Tensor:
    values = [x] if isinstance(x, Tensor) else x.values() if isinstance(x, Mapping) else x
    found = next((v for v in values if isinstance(v, Tensor) and v.dim()), None)
    if found is None:
        raise HocketError("A batch is a tensor, or a mapping or tuple with at least one; got none.")
    return found


def map_samples(x: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """``x`` with ``f`` of each tensor that holds samples.

    >>> map_samples({"ids": torch.zeros(4, 2), "scale": torch.ones(1)}, lambda t: t[:1])["ids"].shape
    torch.Size([1, 2])
    """
    samples = len(first_tensor(x))

    def one(value: Any) -> Any:
        return f(value) if isinstance(value, Tensor) and value.dim() and len(value) == samples else value

    if isinstance(x, Tensor):
        return one(x)
    return {key: one(value) for key, value in x.items()} if isinstance(x, Mapping) else tuple(map(one, x))


def micro_batches(x: Any, count: int) -> tuple[Any, ...]:
    """``count`` parts, the first ones larger by one sample where they do not divide the batch."""
    return tuple(map_samples(x, lambda t, k=k: t.tensor_split(count)[k]) for k in range(count))  # type: ignore[misc]


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The tensors in the outputs for parts of ``sizes`` samples as those of the whole batch; of single numbers, the mean."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else sum(o * n for o, n in zip(outputs, sizes, strict=True)) / sum(sizes)
    if not isinstance(first, (Mapping, tuple, list)):
        return joined([vars(o) for o in outputs], sizes)
    if isinstance(first, Mapping):
        keys = [key for key, value in first.items() if isinstance(value, Tensor)]
        return type(first)(**{key: joined([o[key] for o in outputs], sizes) for key in keys})
    return tuple(joined(some, sizes) for some in zip(*outputs, strict=True) if isinstance(some[0], Tensor))


def outputs(model: nn.Module, x: Inputs) -> list[Tensor] | None:
    """The tensors that ``model`` gives in evaluation; None of a model without values."""
    if any(p.is_meta for p in model.parameters()):
        return None
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        return tree_leaves(joined([call(model, x)], [1]))


def alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether outputs are equal but for rounding."""

    def same(a: Tensor, b: Tensor) -> bool:
        if not b.is_floating_point() or not b.numel():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()), equal_nan=True)

    return all(same(a, b) for a, b in zip(found, wanted, strict=True))


def loss_in(output: Any, _: Any = None) -> Tensor:
    """The loss that a model has computed itself."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise HocketError(
            "The model's output has no loss: give it labels among its inputs, or give what to minimise with "
            "pipeline=hocket.Pipeline(loss=…), a function of output and target."
        )
    return found
