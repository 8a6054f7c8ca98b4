"""Attention written with Linear layers, as in transformers: found by their names and widths, and reduced to some of its heads.

Query, key and value are three layers whose names start with q, k and v, or the three blocks of a Conv1D; the layer after them
reads all heads. Keys and values may have fewer heads (grouped queries). Each process takes whole groups of heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hocket.split.tensor.layers import (
    ColumnLinear,
    ParameterSlicer,
    RowLinear,
    SplitLayer,
    features,
    is_linear,
    spared,
    swap,
    transposed,
)

_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_key_value_heads")
_WIDTHS = ("split_size", "all_head_size", "inner_dim")


@dataclass(frozen=True)
class Heads:
    """The layers of an attention module."""

    holder: nn.Module
    """The module that has the projections, and computes with as many heads as they give it."""
    into: tuple[nn.Module, ...]
    out: nn.Module
    groups: int
    """The heads of keys and values, of which each process needs whole ones."""
    bias: nn.Embedding | None
    """An embedding with a value for each head."""


def find_heads(module: nn.Module) -> Heads | None:
    """The heads of ``module``, if it is attention in a known form: that of its layers, with nothing else that has parameters."""
    layers = {name: layer for name, layer in module.named_modules() if is_linear(layer)}
    words, found = [name.rpartition(".") for name in layers], list(layers.values())
    into = tuple(found[:-1])
    if len(found) not in (2, 4) or len({parent for parent, _, _ in words[:-1]}) > 1:
        return None
    holder = module.get_submodule(words[0][0])
    if len(found) == 4:
        order = {word[2][0]: layer for word, layer in zip(words[:-1], into, strict=True)}
        if set(order) != {"q", "k", "v"}:
            return None
        query, key, value = (features(order[letter])[1] for letter in "qkv")
    else:
        query = key = value = getattr(holder, "split_size", 0)
        if not transposed(into[0]) or features(into[0])[1] != 3 * query:
            return None
    width = next((w for name in _HEAD_WIDTHS if isinstance(w := getattr(holder, name, None), int)), 0)
    if not width or key != value or key % width or query % key or features(found[-1])[0] != query:
        return None
    bias = next((m for m in holder.children() if type(m) is nn.Embedding and m.embedding_dim * width == query), None)
    known = {id(p) for layer in (*found, *((bias,) if bias else ())) for p in layer.parameters()}
    if any(id(p) not in known for p in holder.parameters()):
        return None  # such as a norm of queries, which would see some of the heads
    return Heads(holder, into, found[-1], key // width, bias)


def known_heads(module: nn.Module) -> bool:
    """Whether the code of an attention module is known to take as many heads as its layers give: that of transformers does."""
    found = find_heads(module) if type(module).__module__.startswith("transformers.") else None
    return found is not None and not any(map(spared, (*found.into, found.out)))


def split_projections(module: nn.Module, cut: ParameterSlicer) -> None:
    """Reduce attention, in place, to this process's heads."""
    heads = find_heads(module)
    assert heads is not None
    columns = [ColumnLinear(layer, cut, blocks=3 if len(heads.into) == 1 else 1) for layer in heads.into]
    for layer in columns:  # queries, keys and values of one input enter together
        layer.enter = columns[0].enter
    columns[0].enter.layers = len(columns)
    holder: Any = heads.holder
    for old, new in zip(heads.into, columns, strict=True):
        swap(module, old, new)
    swap(module, heads.out, RowLinear(heads.out, cut))
    if heads.bias is not None:
        swap(module, heads.bias, HeadEmbedding(heads.bias, cut))
    for name in (*_HEADS, *_WIDTHS):
        if isinstance(getattr(holder, name, None), int):
            setattr(holder, name, getattr(holder, name) // cut.axis.size)


class HeadEmbedding(SplitLayer, nn.Embedding):
    """The values of an embedding for this process's heads."""

    def __init__(self, embedding: nn.Embedding, cut: ParameterSlicer) -> None:
        super().__init__(embedding, cut, {"weight": 1})
        self.embedding_dim //= self.axis.size
