"""Tensor parallelism: the operations inside layers split over processes that all see the same samples.

Linear–activation–Linear by columns then rows, attention by heads, embeddings and their projection by the vocabulary (Megatron-LM,
Shoeybi et al. 2019); other Linear and Conv2d layers by neurons or channels, gathered (the classical intra-layer scheme); as an
alternative a block-rotating matrix product; branches. Parts are plain parameters, so that optimisers, hooks and checkpoints
work on them, and every byte goes through an ``Axis``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.models.gpt import Attention
from hocket.split.axis import Axis
from hocket.split.inputs import Inputs, alike, outputs
from hocket.split.parts import Part
from hocket.split.tensor.attention import SplitMultihead, split_heads, without_fast_path
from hocket.split.tensor.heads import split_projections
from hocket.split.tensor.layers import (
    ColumnLinear,
    GatheredConv2d,
    GatheredLinear,
    ParameterSlicer,
    RowLinear,
    SplitEmbedding,
    SplitLogits,
    swap,
)
from hocket.split.tensor.plan import KINDS, TensorPlan, automatic, explicit
from hocket.split.tensor.rotate import RotatingLinear

__all__ = ["KINDS", "explain_plan", "find_plan", "split_tensor"]

_FORMS: dict[str, Any] = {
    "columns": ColumnLinear,
    "rows": RowLinear,
    "gather": GatheredLinear,
    "rotate": RotatingLinear,
    "heads": SplitMultihead,
    "vocabulary": SplitEmbedding,
    "logits": SplitLogits,
}


def find_plan(model: nn.Module, size: int) -> dict[str, str]:
    """How ``model`` would be split over ``size`` processes: kinds by module name; other modules stay whole.

    >>> from hocket.models import mlp
    >>> find_plan(mlp(12, 10, (8, 8)), 2)
    {'1': 'columns', '3': 'rows', '5': 'gather'}
    """
    return automatic(model, size).kinds


def explain_plan(model: nn.Module, size: int, plan: Mapping[str, str] | None = None) -> str:
    """The plan, a line for each module, with the reason where one stays whole.

    >>> from hocket.models import mlp
    >>> print(explain_plan(mlp(12, 10, (8, 8)), 4))
    1: columns
    3: rows
    5: whole, its 10 outputs do not divide by 4
    """
    return str(automatic(model, size) if plan is None else explicit(model, size, plan))


def split_tensor(
    model: nn.Module, axis: Axis, plan: Mapping[str, str] | None = None, sample: Inputs | None = None
) -> dict[str, Part]:
    """Split ``model`` in place over ``axis``: planned modules are replaced by forms that hold only this process's part.

    All processes start with the same weights (or with parameters on the meta device, which give meta parts). Parameters keep their
    names. Returns each one's part; parameters of ``Branches`` on other processes have none, and are removed from the
    model. Dropout is independent of the split only after ``prepare_dropout``, which may come before or after. With keyword
    arguments as a ``sample``, the model is checked to give the output that it gave before: the code of such models is not traced.
    """
    if axis.size == 1:
        return {name: Part(tuple(p.shape)) for name, p in model.named_parameters()}
    found = automatic(model, axis.size) if plan is None else explicit(model, axis.size, plan)
    wanted = outputs(model, sample) if isinstance(sample, Mapping) else None
    cut = ParameterSlicer(axis)
    modules = dict(model.named_modules())
    for name, kind in found.kinds.items():
        if kind != "whole":
            _split(model, name, modules[name], kind, cut, found)
    for names in found.together:  # all inputs enter as the first does
        layers: list[Any] = [model.get_submodule(name) for name in names]
        layers[0].enter.layers = len(layers)
        for layer in layers[1:]:
            layer.enter = layers[0].enter
    for name in found.dropouts:
        modules[name].lies = (axis.place, axis.size)
    cut.rename(model)
    without_fast_path(model)
    if wanted is not None and sample is not None:
        _check_output(model, sample, wanted)
    return {name: cut.lies.get(id(p), Part(tuple(p.shape))) for name, p in model.named_parameters()}


def _check_output(model: nn.Module, sample: Inputs, wanted: Sequence[Tensor]) -> None:
    reason = "the output is another"
    try:
        if alike(outputs(model, sample) or [], wanted):
            return
    except Exception as error:  # the model's own code may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    raise HocketError(
        f"{type(model).__name__} does not work when its operations are split as planned ({reason}): give "
        "hocket.Mesh(plan=…) the layers to split, or use a pipeline."
    )


def _split(model: nn.Module, name: str, module: Any, kind: str, cut: ParameterSlicer, plan: TensorPlan) -> None:
    if kind == "branches":
        cut.lies |= module.split(cut.axis, name)
    elif isinstance(module, Attention):
        split_heads(module, cut)
    elif kind == "heads" and not isinstance(module, nn.MultiheadAttention):
        split_projections(module, cut)
    else:
        new = (GatheredConv2d if isinstance(module, nn.Conv2d) else _FORMS[kind])(module, cut)
        if isinstance(new, RotatingLinear):
            new.closing = name in plan.closing
        swap(model, module, new)
