"""The data flow of a model, as far as needed to prove that two Linear layers may be split by columns and by rows.

Flows are ``torch.fx`` traces. A model that cannot be traced as a whole (its control flow depends on values) is traced child by
child; nothing is assumed that this does not prove.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from hocket.split import draws
from hocket.split.tensor.layers import is_linear, transposed

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Identity, nn.Dropout, draws.Dropout),
)
"""Elementwise modules without parameters."""
_FUNCTIONS = {
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.tanh, F.sigmoid, F.logsigmoid, F.hardtanh),
    *(F.hardswish, F.hardsigmoid, F.softplus, F.softsign, F.tanhshrink, torch.relu, torch.tanh, torch.sigmoid, torch.square),
    *(operator.add, operator.sub, operator.mul, operator.neg, torch.add, torch.sub, torch.mul),
}
_METHODS = {"relu", "relu_", "tanh", "tanh_", "sigmoid", "sigmoid_", "add", "sub", "mul", "square", "contiguous"}
_DROPOUTS = (nn.Dropout, draws.Dropout)


class Flow:
    """The traced parts of a model, by the module names of the whole."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.names: dict[fx.Node, str] = {}
        """Of every call of a module: its name."""
        self.read: dict[str, list[fx.Node]] = {}
        """The readers of every parameter that is read directly."""
        self.complete = False
        """Whether all of the model was traced."""
        self.elementwise = {module for module in self.modules.values() if elementwise(module)}
        for prefix, graph in _graphs(model, "", self.elementwise):
            self.complete |= prefix == ""
            for node in graph.nodes:
                if node.op == "call_module":
                    self.names[node] = f"{prefix}{node.target}"
                elif node.op == "get_attr":
                    self.read.setdefault(f"{prefix}{node.target}", []).extend(node.users)
        self.calls = Counter(self.names.values())

    def only_names(self, parameter: str) -> bool:
        """Whether a module that has layers only gives one of their parameters another name: its forward does not read it."""
        path, _, name = parameter.rpartition(".")
        code = getattr(inspect.unwrap(type(self.modules[path]).forward), "__code__", None)
        unread = parameter not in self.read and code is not None and name not in code.co_names
        return unread and any(True for _ in self.modules[path].children())

    def linears(self) -> Iterator[tuple[fx.Node, str]]:
        """Calls of Linear layers, in order, each layer called once."""
        for node, name in self.names.items():
            if is_linear(self.modules[name]) and self.calls[name] == 1:
                yield node, name

    def together(self, names: Collection[str]) -> list[list[str]]:
        """Those of ``names``, each called once, that read the very same tensor."""
        readers: dict[Any, list[str]] = {}
        for node, name in self.names.items():
            if name in names and self.calls[name] == 1 and isinstance(given := _input(node), fx.Node):
                readers.setdefault(given, []).append(name)
        return [group for group in readers.values() if len(group) > 1]

    def sources(self, node: fx.Node) -> tuple[list[str], list[str]] | None:
        """The Linear layers whose outputs the input of ``node`` is made of, value by value, and the dropouts between.

        None where another value contributes to it, or another module reads it.
        """
        sources: list[str] = []
        dropouts: list[str] = []
        return (sources, dropouts) if self._walk(_input(node), sources, dropouts) else None

    def _walk(self, node: Any, sources: list[str], dropouts: list[str]) -> bool:
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return False
        name = self.names.get(node)
        if name is not None:
            module = self.modules[name]
            if is_linear(module):
                sources.append(name)
                return self.calls[name] == 1
            if type(module) not in ELEMENTWISE and module not in self.elementwise:
                return False
            if isinstance(module, _DROPOUTS):
                dropouts.append(name)
                if self.calls[name] != 1:  # in another place its input may be a whole activation
                    return False
        elif not (
            (node.op == "call_function" and node.target in _FUNCTIONS) or (node.op == "call_method" and node.target in _METHODS)
        ):
            return False
        inputs = node.all_input_nodes
        return bool(inputs) and all(self._walk(each, sources, dropouts) for each in inputs)


def elementwise(module: nn.Module) -> bool:
    """Whether a module without parameters, not of torch, treats each value alone: a part of an input gives that of the output."""
    known = type(module).__module__.startswith("torch.nn") or getattr(module, "whole", False)
    if known or any(True for part in (module.parameters(), module.buffers(), module.children()) for _ in part):
        return False
    x = torch.linspace(-3, 3, 24).view(3, 8)
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # user code may raise anything
        whole, parts = module(x), torch.cat([module(x[:, :3]), module(x[:, 3:])], -1)
        return whole.shape == x.shape and torch.allclose(whole, parts)
    return False


def _input(node: fx.Node) -> Any:
    return node.args[0] if node.args else next(iter(node.kwargs.values()), None)


class _Tracer(fx.Tracer):
    def __init__(self, elementwise: Collection[nn.Module]) -> None:
        super().__init__()
        self.elementwise = elementwise

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = bool(getattr(m, "whole", False)) or transposed(m) or m in self.elementwise
        return known or super().is_leaf_module(m, module_qualified_name)


def _graphs(module: nn.Module, prefix: str, elementwise: Collection[nn.Module]) -> Iterator[tuple[str, fx.Graph]]:
    """Graphs of the largest modules that can be traced, with the beginning of their modules' names."""
    if getattr(module, "whole", False) or (prefix and not any(True for _ in module.children())):
        return
    given = inspect.signature(module.forward).parameters.values()
    optional = {p.name: p.default for p in given if p.default is not inspect.Parameter.empty}
    if not optional or not prefix:  # optional inputs may change the graph, and only a root is known to be called without them
        with suppress(Exception):  # user code may raise anything on a proxy
            yield prefix, _Tracer(elementwise).trace(module, optional or None)
            return
    for name, child in module.named_children():
        yield from _graphs(child, f"{prefix}{name}.", elementwise)
