"""Models built without memory, whose weights are then initialised module by module, for the part that this process holds.

Under :func:`deferred` a model has shapes and no values (PyTorch's ``meta`` device). :func:`materialize` makes the weights of one
module at a time, whole and on the CPU, by the module's own ``reset_parameters``; takes the part that this process holds; and drops
the rest. The random numbers are a hash of the seed and the module's name, so the weights are the same for every split, and peak
memory is the held part plus one module.

Changes that a constructor makes to weights after it has made its modules are lost. A model with its own initialisation has a method
``init_parameter(name, weight) -> bool``, which fills a weight in place and returns whether it did; or, as those of transformers,
``_init_weights(module)``.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hocket import noise
from hocket.errors import HocketError
from hocket.split.parts import Parts, all_names, part_of


@contextmanager
def deferred() -> Iterator[None]:
    """Models built inside have shapes but no values, and take no memory until they are split.

    >>> with deferred():
    ...     model = nn.Linear(10**6, 10**6)
    >>> model.weight.is_meta
    True
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Skip random draws for tensors without values: for these, torch's ``normal_`` would first load its compiler, for seconds."""

    draws = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.draws or getattr(func, "__module__", None) == "torch.nn.init":
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


def materialize(
    module: nn.Module,
    parts: Parts | None = None,
    seed: int = 0,
    model: nn.Module | None = None,
    device: torch.device | str = "cpu",
    prefix: str = "",
) -> None:
    """Give every parameter and buffer of ``module`` without values its initial value, in place; parameters stay the same objects.

    Names in ``module``, after its own, ``prefix``, and in ``parts`` are those of the whole ``model`` (unless given: ``module``),
    which is asked for ``init_parameter``. A name without a part is held whole.

    >>> from hocket.split import Part
    >>> with deferred():
    ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> materialize(model, {"0.weight": Part((4, 4), 0, ((0, 2),)), "0.bias": Part((4,), 0, ((0, 2),))})
    >>> model[0].weight.shape, bool(model[1].weight.isfinite().all())
    (torch.Size([2, 4]), True)
    """
    model = module if model is None else model
    first = all_names(model)
    # Children first: a module may change their values (nn.MultiheadAttention zeroes a bias).
    for name, child in reversed(list(module.named_modules(prefix=prefix))):
        own = {**child._parameters, **child._buffers}
        unborn = {key: tensor for key, tensor in own.items() if tensor is not None and tensor.is_meta}
        if not unborn:
            continue
        names = {key: f"{name}.{key}".lstrip(".") for key in unborn}
        names = {key: first.get(full, full) for key, full in names.items()}  # a tied parameter has the values of its first name
        here = {key: tensor for key, tensor in unborn.items() if names[key].rpartition(".")[0] == name}
        full_state = _made(name, child, here, parts or {}, seed, model) if here else {}
        for key, tensor in unborn.items():
            path, _, theirs = names[key].rpartition(".")
            if key not in here:
                full_state[key] = _made(path, model.get_submodule(path), {theirs: tensor}, parts or {}, seed, model)[theirs]
            value = part_of(parts or {}, names[key], tensor).take(full_state.pop(key)).to(device)
            if isinstance(tensor, nn.Parameter):
                if weakref.getweakrefs(tensor):
                    raise HocketError(
                        f"{type(child).__name__} '{name}' keeps a weak reference to its weights, which cannot be "
                        "replaced; build it without hocket.deferred()."
                    )
                # The same object: optimisers and other modules that share it keep their reference.
                torch.utils.swap_tensors(tensor, nn.Parameter(value, requires_grad=tensor.requires_grad))
            else:
                child._buffers[key] = value


def _made(
    name: str, child: nn.Module, unborn: Mapping[str, Tensor], parts: Parts, seed: int, model: nn.Module
) -> dict[str, Tensor]:
    """The whole values of one module, drawn from the seed and its name."""
    body, prefix = copy.copy(_able(child, name, model)), f"{name}." if name else ""
    own = {**body._parameters, **body._buffers, **unborn}
    full_state = {key: _whole(tensor, prefix + key, parts) for key, tensor in own.items() if tensor is not None}
    body._parameters = {k: None if p is None else nn.Parameter(full_state[k], False) for k, p in body._parameters.items()}
    body._buffers = {k: full_state.get(k) for k in body._buffers}
    reset: Any = getattr(body, "reset_parameters", None) or getattr(body, "_reset_parameters", None)
    with torch.no_grad():
        if reset is not None:
            with _drawing(seed, name):
                reset()
        with _drawing(seed, name), _Undrawn():
            _by_library(model, name, body)
        for key in unborn:
            with _drawing(seed, prefix + key):
                _by_model(model, prefix + key, full_state[key])
    missing = next((key for key in unborn if _is_blank(full_state[key])), None)
    if missing is not None:
        raise HocketError(
            f"'{prefix}{missing}' of {type(child).__name__} cannot be given a value: the module has no reset_parameters() "
            "that fills it; write one, give the model init_parameter(name, weight), or build it without hocket.deferred()."
        )
    return full_state


def _able(child: nn.Module, name: str, model: nn.Module) -> nn.Module:
    """A module that can initialise itself: ``child``, or the one of its name in ``model`` (a stage may hold only its weight)."""
    same = (child, *(m for n, m in model.named_modules() if n == name))
    return next((m for m in same if hasattr(m, "reset_parameters") or hasattr(m, "_reset_parameters")), child)


def _whole(tensor: Tensor, name: str, parts: Parts) -> Tensor:
    """A tensor of the whole's shape that shows whether it was filled; a copy, if it has values already."""
    if not tensor.is_meta:
        return tensor.detach().clone()
    shape, dtype = part_of(parts, name, tensor).shape, tensor.dtype
    if dtype is torch.bool or dtype.is_complex:
        raise HocketError(f"'{name}' is of {dtype} and its values were lost; build that module without hocket.deferred().")
    try:
        return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype, device="cpu")
    except RuntimeError as error:
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes / 1e9
        raise HocketError(
            f"'{name}' alone takes {size:,.1f} GB, more than there is memory for; make that layer narrower."
        ) from error


def _by_library(model: nn.Module, name: str, body: nn.Module) -> None:
    """Let a model of transformers, which has ``_init_weights(module)``, fill ``body`` and what the module around changes in it."""
    init: Any = getattr(model, "_init_weights", None)
    if init is None:
        return
    init(body)
    path, _, last = name.rpartition(".")
    around = next((m for n, m in model.named_modules() if n == path), None)
    if name and around is not None and last in around._modules:
        alone = copy.copy(around)
        alone._modules = {key: None if child is None else _emptied(child) for key, child in around._modules.items()} | {last: body}
        init(alone)


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose own parameters have no values, so that filling them does nothing."""
    empty = copy.copy(module)
    empty._parameters = {key: None if p is None else nn.Parameter(p.to("meta"), False) for key, p in module._parameters.items()}
    return empty


def _by_model(model: nn.Module, name: str, whole: Tensor) -> None:
    """Let the innermost module around ``name`` that has an ``init_parameter`` for it fill ``whole``."""
    words = name.split(".")
    for depth in range(len(words) - 1, -1, -1):
        holder: Any = model
        for word in words[:depth]:
            holder = getattr(holder, word, None)
        init = getattr(holder, "init_parameter", None)
        if init is not None and init(".".join(words[depth:]), whole):
            return


@contextmanager
def _drawing(seed: int, name: str) -> Iterator[None]:
    """Inside, torch's random numbers on the CPU depend on ``seed`` and ``name``; outside, its generator is unchanged."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(noise.fold(seed, key))
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.default_generator.set_state(before)


def _is_blank(tensor: Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min).any())
