"""The part of a model that a process holds: the modules and parameters of its stages, under their names in the whole model."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor, fx, nn


def held(stages: Sequence[fx.GraphModule]) -> nn.Module:
    """A module of all that these stages use; ``named_parameters``, ``state_dict`` and ``train`` are as in the whole model.

    >>> whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> [name for name, _ in held([fx.symbolic_trace(whole)]).named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    if len(stages) == 1:
        return stages[0]
    root = nn.Module()
    nodes = [(stage, node) for stage in stages for node in stage.graph.nodes]
    for stage, node in nodes:
        if node.op == "call_module":
            _put(root, str(node.target), stage.get_submodule(str(node.target)))
    for stage, node in nodes:
        if node.op == "get_attr" and not _has(root, str(node.target)):
            _put(root, str(node.target), operator.attrgetter(str(node.target))(stage))
    return root


def _put(root: nn.Module, path: str, value: nn.Module | Tensor) -> None:
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


def _has(root: nn.Module, path: str) -> bool:
    try:
        operator.attrgetter(path)(root)
    except AttributeError:
        return False
    return True
