"""Gradient engines for workers as rows; :func:`choose` picks the one for a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.notation import read
from hocket.train.checks import SPARSE
from hocket.train.engines.base import Engine, Loss, stack_buffers
from hocket.train.engines.loop import LoopEngine
from hocket.train.engines.vmap import SPARSE_GRADIENTS, VmapEngine, obstacle

__all__ = ["Engine", "LoopEngine", "VmapEngine", "choose", "engine_of", "stack_buffers"]


def engine_of(
    engine: str | Callable[[Layout], Engine], model: nn.Module, loss: Loss, cluster: Cluster, autocast: torch.dtype | None
) -> Callable[[Layout], Engine]:
    """The factory of an engine for a layout, by the engine's name or as given."""
    if not isinstance(engine, str):
        return engine
    return lambda layout: choose(model, loss, layout, cluster.rows, cluster.device, engine, autocast=autocast)


def choose(
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    rows: int,
    device: torch.device | str,
    name: str = "auto",
    *,
    autocast: torch.dtype | None = None,
) -> LoopEngine | VmapEngine:
    """The engine for ``device``: the loop on a CPU, compiled vmap on CUDA, unless ``name`` says ``"loop"`` or ``"vmap"``.

    ``"vmap(8)"`` computes 8 rows at a time, ``"vmap(recompute=True)"`` keeps fewer activations.
    """
    name, options = _options(name)
    cuda = torch.device(device).type == "cuda"
    if name == "vmap" or (name == "auto" and cuda and rows > 1):
        found = obstacle(model)
        if found is None:
            return VmapEngine(model, loss, layout, rows, compile=cuda, autocast=autocast, fall_back=name == "auto", **options)
        if name == "vmap" and found == SPARSE_GRADIENTS:
            raise HocketError(SPARSE)
        if name == "vmap":
            raise HocketError(f"the vmap engine cannot run a model with {found}; use engine='loop' or 'auto'.")
        warnings.warn(
            f"The model has {found}, which vmap cannot do: its workers are computed one after another, so that a step takes {rows} "
            "times as long as that of one worker.",
            stacklevel=2,
        )
    return LoopEngine(model, loss, layout, autocast=autocast)


def _options(text: str) -> tuple[str, dict[str, Any]]:
    """An engine's name and its options in parentheses."""
    term = read(text)[0][0]
    if term.name not in ("auto", "loop", "vmap"):
        raise HocketError(f"there is no gradient engine {text!r}; use 'auto', 'loop' or 'vmap'.")
    given = {**dict(zip(("chunk", "recompute"), term.arguments, strict=False)), **dict(term.options)}
    if (given and term.name != "vmap") or not given.keys() <= {"chunk", "recompute"} or len(term.arguments) > 2:
        raise HocketError(f"engine={text!r}: only vmap takes options, which are chunk and recompute, such as 'vmap(8)'.")
    return term.name, given
