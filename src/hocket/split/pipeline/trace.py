"""A model as a list of units in the order in which they run, with their inputs and outputs.

The list is that of ``torch.fx``. Modules of ``torch.nn``, modules with the class attribute ``whole = True`` and
modules that cannot be traced, because their control flow depends on values, are single units. No value of the model is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.errors import HocketError

BLOCKS = (nn.ModuleList, nn.Sequential)


class _Opaque(Exception):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name, self.reason = name, reason


class _Tracer(fx.Tracer):
    def __init__(self, opaque: set[str]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            getattr(m, "whole", False) or module_qualified_name in self.opaque or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Opaque:
            raise
        except Exception as error:
            raise _Opaque(self.path_of_module(m), _first_line(error)) from error


def trace(model: nn.Module) -> fx.Graph:
    """The graph of ``model``; modules in it that cannot be traced stay whole."""
    opaque: set[str] = set()
    while True:
        try:
            graph = _Tracer(opaque).trace(model)
            break
        except _Opaque as found:
            opaque.add(found.name)  # the next attempt treats it as a unit
        except Exception as error:
            raise HocketError(
                f"{type(model).__name__} cannot be cut because its own forward cannot be traced ({_first_line(error)}): move what "
                "depends on values into a submodule, or make it an nn.Sequential."
            ) from error
    inputs = [n for n in graph.nodes if n.op == "placeholder" and not n.args]
    if len(inputs) != 1:
        names = ", ".join(n.name for n in inputs) or "none"
        raise HocketError(
            f"A pipeline feeds a model one tensor; {type(model).__name__} takes {names}: wrap it so that it takes one."
        )
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.args]:
        if node.users:
            raise HocketError(f"A pipeline feeds a model one tensor; {type(model).__name__} also uses '{node.name}': wrap it.")
        graph.erase_node(node)
    return graph


def hides_blocks(model: nn.Module, graph: fx.Graph) -> bool:
    """Whether a unit that could not be traced contains a list of blocks."""
    units = [model.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module"]
    opaque = [m for m in units if not getattr(m, "whole", False) and not type(m).__module__.startswith("torch.nn")]
    return any(isinstance(m, BLOCKS) and len(m) > 1 for unit in opaque for m in unit.modules())


def scopes(node: fx.Node) -> Iterator[str]:
    """The names of all modules that a node is part of."""
    yield from (path for path, _ in node.meta.get("nn_module_stack", {}).values())
    if node.op == "call_module":
        yield str(node.target)


def title(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    inside = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
    what = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{inside[-1]}: {what}" if inside else str(what)


def in_place(node: fx.Node, model: nn.Module) -> bool:
    """Whether a unit overwrites its inputs."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inside = node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
    return inside or bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


@dataclass(frozen=True)
class Wire:
    """A tensor that crosses a cut. Each size of its shape is a multiple of the batch size plus a constant."""

    name: str
    dtype: torch.dtype
    dims: tuple[tuple[int, int], ...]
    grad: bool
    """Whether its gradient comes back."""

    def shape(self, batch: int) -> tuple[int, ...]:
        return tuple(slope * batch + constant for slope, constant in self.dims)

    def num_bytes(self, batch: int) -> int:
        """Its payload for a batch of that size."""
        return self.dtype.itemsize * prod(self.shape(batch))

    @classmethod
    def between(cls, name: str, batch: int, value: Tensor, next_value: Tensor, grad: bool) -> Wire:
        """From the values for ``batch`` and for ``batch + 1`` samples."""
        dims = tuple(affine(a, b, batch) for a, b in zip(value.shape, next_value.shape, strict=True))
        return cls(name, value.dtype, dims, grad and value.is_floating_point())


@dataclass(frozen=True)
class Units:
    """A model as units in the order in which they run. Border ``i`` lies before unit ``i``."""

    names: list[str]
    parameters: list[int]
    """How many each has."""
    costs: list[tuple[float, float]]
    """Seconds of each for the sample, forward and backward."""
    wires: list[tuple[Wire, ...]]
    """What crosses each border."""
    able: list[bool]
    """Whether the model can be cut at each border."""
    borders: dict[str, int]
    """The border after each module that can be named."""
    output: Any
    """The model's own output: a wire where that is one tensor, else tensors without values or None."""
    stage: Callable[[int, int], nn.Module]
    """A module of the units between two borders."""
    check: Callable[[Sequence[nn.Module]], None] = lambda stages: None
    """Refuses stages that together are not the model, where that is not known already."""


def affine(size: int, next_size: int, batch: int) -> tuple[int, int]:
    """Slope and constant of a size in the number of samples, of which there are ``batch`` and one more."""
    return next_size - size, size - (next_size - size) * batch


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
