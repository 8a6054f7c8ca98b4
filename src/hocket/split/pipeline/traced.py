"""The units of a model that ``torch.fx`` can trace, and stages made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from hocket.split.pipeline import probe
from hocket.split.pipeline.trace import Units, Wire, affine, in_place, scopes, title


def traced(model: nn.Module, graph: fx.Graph, sample: Tensor, measure: str) -> Units:
    """The units of ``graph``: they can be cut wherever only tensors cross."""
    batch, work = len(sample), [node for node in graph.nodes if node.op.startswith("call_")]
    known = probe.study(model, graph, sample, measure)
    crossing = [_crossing(work, i) for i in range(len(work) + 1)]
    able = [_can_cut(model, work, i, crossing[i], known.values) for i in range(len(work) + 1)]
    wires = [_wires(nodes, known, batch) if able[i] else () for i, nodes in enumerate(crossing)]
    out = next(n for n in graph.nodes if n.op == "output").args[0]

    def stage(start: int, end: int) -> nn.Module:
        sizes = {n: (known.values[n], known.more[n]) for n in crossing[start] if not isinstance(known.values[n], Tensor)}
        return _stage(model, graph, work[start:end], wires[start], sizes, wires[end], batch)

    return Units(
        [title(node) for node in work],
        [sum(p.numel() for p in model.get_submodule(str(n.target)).parameters()) if n.op == "call_module" else 0 for n in work],
        [known.costs[node] for node in work],
        wires,
        able,
        {name: i + 1 for i, node in enumerate(work) for name in scopes(node) if name},
        next(iter(_wires([out], known, batch)), None) if isinstance(out, fx.Node) else None,
        stage,
    )


def _crossing(work: list[fx.Node], border: int) -> list[fx.Node]:
    """The nodes before a border whose values are used behind it, in order. Attributes of the model are available on both sides."""
    before, behind = set(work[:border]), set(work[border:])
    early = [n for n in work[0].graph.nodes if n in before or n.op == "placeholder"]
    return [n for n in early if any(user in behind or user.op == "output" for user in n.users)]


def _can_cut(model: nn.Module, work: list[fx.Node], border: int, crossing: list[fx.Node], values: probe.Values) -> bool:
    """Only tensors may cross, and none that a unit behind the border overwrites. Sizes need not cross: tensors determine them."""
    if not 0 < border < len(work):
        return False
    written = {n for node in work[border:] if in_place(node, model) for n in node.all_input_nodes}
    tensors = [n for n in crossing if isinstance(values[n], Tensor)]
    plain = all(isinstance(values[n], int | torch.Size | Tensor) for n in crossing)
    return bool(tensors) and plain and not written.intersection(tensors)


def _wires(nodes: list[fx.Node], known: probe.Found, batch: int) -> tuple[Wire, ...]:
    values = known.values
    tensors = [(n, values[n]) for n in nodes if isinstance(values[n], Tensor)]
    return tuple(Wire.between(n.name, batch, value, known.more[n], value.requires_grad) for n, value in tensors)


# --- the stages ------------------------------------------------------------------------------------------------------------


def _stage(
    model: nn.Module,
    graph: fx.Graph,
    work: list[fx.Node],
    enter: Sequence[Wire],
    sizes: dict[fx.Node, tuple[Any, Any]],
    leave: Sequence[Wire],
    batch: int,
) -> fx.GraphModule:
    """A module of the units ``work``. It takes what ``enter`` names, computes ``sizes`` anew, and returns what ``leave`` names as a
    tuple; the first stage takes the model's input, the last one returns its output."""
    part = fx.Graph()
    old = {node.name: node for node in graph.nodes}
    first = next(n for n in graph.nodes if n.op == "placeholder")
    new: dict[fx.Node, Any] = {old[name]: part.placeholder(name) for name in [wire.name for wire in enter] or [first.name]}
    entered = {new[old[wire.name]]: wire for wire in enter}
    new |= {node: _size(entered, *pair, batch) for node, pair in sizes.items()}

    def mapped(node: fx.Node) -> Any:
        if node not in new:  # an attribute of the model
            new[node] = part.node_copy(node, mapped)
        return new[node]

    for node in work:
        new[node] = part.node_copy(node, mapped)
    if leave:
        part.output(tuple(new[old[wire.name]] for wire in leave))
    else:
        part.output(fx.map_arg(next(n for n in graph.nodes if n.op == "output").args[0], mapped))
    return fx.GraphModule(model, part, f"{type(model).__name__}Stage")


def _size(entered: dict[fx.Node, Wire], value: Any, next_value: Any, batch: int) -> Any:
    """A number or a shape, multiples of the batch size plus constants, from the size of a tensor that enters the stage."""
    if not isinstance(value, int):
        return tuple(_size(entered, a, b, batch) for a, b in zip(value, next_value, strict=True))
    slope, constant = affine(value, next_value, batch)
    grown = [(n, d, dim) for n, wire in entered.items() for d, dim in enumerate(wire.dims) if dim[0]]
    if not slope or not grown:
        return constant
    node, d, (own_slope, own_constant) = grown[0]
    tensor: Any = fx.Proxy(node)
    return ((tensor.size(d) - own_constant) // own_slope * slope + constant).node
