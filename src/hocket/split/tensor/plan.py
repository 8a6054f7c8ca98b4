"""Which module is split in which way: found in the model's data flow, or given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn import functional as F

from hocket.errors import HocketError, nearest
from hocket.models.gpt import Attention, Logits
from hocket.split.branches import Branches
from hocket.split.tensor.attention import DrawnAttention, SplitMultihead, common
from hocket.split.tensor.graph import ELEMENTWISE, Flow
from hocket.split.tensor.heads import find_heads, known_heads
from hocket.split.tensor.layers import features, is_linear, spared, transposed

KINDS = {
    "columns": "a Linear by its outputs, which stay split",
    "rows": "a Linear by its inputs, which are split; the outputs are summed",
    "gather": "a Linear or Conv2d by its outputs, which are gathered",
    "rotate": "a Linear between split activations, whose blocks are sent around a ring",
    "heads": "attention by its heads",
    "vocabulary": "an Embedding by its tokens",
    "logits": "the projection on a split vocabulary",
    "branches": "Branches, some on each process",
    "whole": "not split",
}
_ATTENTIONS = (Attention, DrawnAttention, nn.MultiheadAttention, SplitMultihead)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_FIT: dict[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys(("columns", "rows", "rotate"), (nn.Linear,)),
    "gather": (nn.Linear, nn.Conv2d),
    "heads": _ATTENTIONS,
    "vocabulary": (nn.Embedding,),
    "logits": (Logits,),
    "branches": (Branches,),
}
_Shared = dict[int, list[str]]
"""Parameters, by id, that several modules have, and the names of these."""


@dataclass
class TensorPlan:
    """Kinds by module name, and further information for the split."""

    kinds: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a layer that could have been split stays whole."""
    dropouts: set[str] = field(default_factory=set)
    """Those that see split activations."""
    closing: set[str] = field(default_factory=set)
    """Rotating layers after which nothing reads split activations."""
    together: list[list[str]] = field(default_factory=list)
    """Layers that one whole tensor enters."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {kind}{', ' + self.reasons[name] if name in self.reasons else ''}" for name, kind in self.kinds.items()
        )


def automatic(model: nn.Module, size: int) -> TensorPlan:
    """The plan for ``size`` processes, found in the model."""
    plan, flow = TensorPlan(), Flow(model)
    shared = _shared(flow)
    for name, module in flow.modules.items():
        if _inside(name, plan.kinds):
            continue
        if type(module) is Branches:
            plan.kinds[name] = "branches"
        elif isinstance(module, nn.MultiheadAttention) and type(module) in _ATTENTIONS and not common(module):
            plan.kinds[name], plan.reasons[name] = "whole", "it has inputs of several widths or adds to the sequence"
        elif type(module) in _ATTENTIONS or known_heads(module):
            _check(name, module, "heads", size)
            plan.kinds[name] = "heads"
        elif type(module) in _LAYERS and (module.activation in (F.relu, F.gelu) or type(module.activation) in ELEMENTWISE):
            _pair([f"{name}.linear1"], f"{name}.linear2", [f"{name}.dropout"], flow, size, shared, plan)
    for node, name in flow.linears():
        if not _inside(name, plan.kinds) and (found := flow.sources(node)):
            _pair(found[0], name, found[1], flow, size, shared, plan)
    declared = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]  # as in transformers
    for users in shared.values():
        _find_tied(users, flow, size, plan, declared)
    for name, module in flow.modules.items():
        if name not in plan.kinds and not _inside(name, plan.kinds):
            _find_left_over(name, module, flow, size, plan, declared)
    plan.kinds = {name: plan.kinds[name] for name in flow.modules if name in plan.kinds}
    plan.together = flow.together([name for name, kind in plan.kinds.items() if kind in ("columns", "gather")])
    _check_shared(flow, plan.kinds)
    if not set(plan.kinds.values()) - {"whole"}:
        why = next((f": '{name}' {reason}" for name, reason in plan.reasons.items()), "")
        raise HocketError(f"Nothing in this model can be split over {size} processes{why}; choose another size, or give a plan.")
    return plan


def explicit(model: nn.Module, size: int, given: Mapping[str, str]) -> TensorPlan:
    """A given plan, checked; modules that are not named stay whole. Names may be patterns: ``blocks.*.perceptron.into``."""
    flow = Flow(model)
    kinds: dict[str, str] = {}
    for pattern, kind in given.items():
        kinds |= dict.fromkeys(_named(pattern, kind, flow), kind)
    kinds = {name: kind for name, kind in kinds.items() if not _inside(name, kinds)}
    for name, kind in kinds.items():
        _check(name, flow.modules[name], kind, size)
    if not set(kinds.values()) - {"whole"}:
        raise HocketError(f"The plan splits nothing over {size} processes: give at least one module a kind other than 'whole'.")
    plan = TensorPlan({name: kinds[name] for name in flow.modules if name in kinds})
    _check_shared(flow, kinds)
    _check_readers(flow, kinds)
    _check_flow(flow, plan)
    plan.together = flow.together([name for name, kind in kinds.items() if kind in ("columns", "gather")])
    return plan


# --- finding ---------------------------------------------------------------------------------------------------------------


def _pair(first: list[str], second: str, dropouts: list[str], flow: Flow, size: int, shared: _Shared, plan: TensorPlan) -> None:
    """Split layers whose outputs meet, value by value, in the input of another: the first by columns, the other by rows."""
    names = {*first, second}
    taken = set(plan.kinds) | {name for users in shared.values() for name in users} | {r.rpartition(".")[0] for r in flow.read}
    layers = [module for name in names if is_linear(module := flow.modules[name]) and not spared(module)]
    width = _width(flow.modules[second], "rows")[0]
    equal = all(_width(flow.modules[name], "columns")[0] == width for name in first)  # not a single value that is broadcast
    if len(layers) == len(first) + 1 and not names & taken and equal and width % size == 0:
        plan.kinds |= dict.fromkeys(first, "columns") | {second: "rows"}
        plan.dropouts |= set(dropouts)


def _find_tied(users: list[str], flow: Flow, size: int, plan: TensorPlan, declared: list[Any]) -> None:
    """An embedding that is also the head, as one parameter of two modules: by the vocabulary in both. Anything else stays whole.

    That nothing else reads its weight is known of a model that was traced, and of one that names these modules itself (``told``).
    """
    if any(_inside(name, plan.kinds) or name in plan.kinds for name in users):
        return  # checked at the end
    modules = [flow.modules[name] for name in users]
    known = flow.complete or any(m is module for m in declared for module in modules)
    alike = known and all(type(m) in (nn.Embedding, nn.Linear) and not spared(m) for m in modules)
    unread = not any(f"{name}.weight" in flow.read for name in users)
    if alike and unread and not any(_width(m, "gather")[0] % size for m in modules):
        plan.kinds |= {
            name: "vocabulary" if isinstance(m, nn.Embedding) else "gather" for name, m in zip(users, modules, strict=True)
        }
        return
    for name in users:
        plan.kinds[name], plan.reasons[name] = "whole", "it shares a parameter with another module"


def _find_left_over(name: str, module: nn.Module, flow: Flow, size: int, plan: TensorPlan, declared: list[Any]) -> None:
    if not is_linear(module) and type(module) not in (nn.Conv2d, nn.Embedding):
        return
    kind = "vocabulary" if isinstance(module, nn.Embedding) else "gather"
    width, what = _width(module, kind)
    readers = [flow.names.get(node, "") for key in ("weight", "bias") for node in flow.read.get(f"{name}.{key}", [])]
    reason = None
    if spared(module):
        reason = "it has hooks or options that a split layer would ignore"
    elif kind == "vocabulary" and not flow.complete and all(m is not module for m in declared):
        reason = "the model cannot be traced, so other readers of its weight are unknown; a plan may name it"
    elif readers and not (kind == "vocabulary" and all(type(flow.modules.get(reader)) is Logits for reader in readers)):
        reason = "its weight is also read directly"
    elif width % size:
        reason = f"its {width} {what} do not divide by {size}"
    if reason is None:
        plan.kinds |= {name: kind} | dict.fromkeys(readers, "logits")
    else:
        plan.kinds[name], plan.reasons[name] = "whole", reason


def _shared(flow: Flow) -> _Shared:
    users: _Shared = {}
    for name, module in flow.modules.items():
        for key, parameter in module._parameters.items():
            if parameter is not None and not flow.only_names(f"{name}.{key}"):
                users.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in users.items() if len(names) > 1}


# --- checking --------------------------------------------------------------------------------------------------------------


def _named(pattern: str, kind: str, flow: Flow) -> list[str]:
    if kind not in KINDS:
        raise HocketError(
            f"The plan asks for '{kind}' at '{pattern}': choose one of {', '.join(KINDS)}{nearest(str(kind), KINDS)}."
        )
    names = [name for name in flow.modules if name and fnmatchcase(name, pattern)]
    if not names:
        raise HocketError(f"The plan names '{pattern}', but the model has no such module{nearest(pattern, flow.modules)}.")
    fitting = [name for name in names if kind == "whole" or _fits(flow.modules[name], kind)]
    if not fitting:
        is_a = type(flow.modules[names[0]]).__name__
        kinds = ", ".join(k for k in KINDS if k == "whole" or _fits(flow.modules[names[0]], k))
        raise HocketError(f"The plan asks for '{kind}' at '{names[0]}', which is a {is_a}: such a module can be {kinds}.")
    return fitting


def _fits(module: nn.Module, kind: str) -> bool:
    usual = not isinstance(module, nn.MultiheadAttention) or common(module)
    other = transposed(module) if kind in ("columns", "rows", "gather") else kind == "heads" and find_heads(module) is not None
    return (type(module) in _FIT[kind] or other) and usual and not spared(module)


def _check(name: str, module: nn.Module, kind: str, size: int) -> None:
    width, what = _width(module, kind)
    if width % size:
        other = "change the width, or leave the module out of the plan"
        instead = "use a tensor axis that divides them" if kind == "heads" else other
        raise HocketError(f"'{name}' has {width} {what}, which do not divide by {size} processes: {instead}.")
    if kind == "rotate" and module.in_features % size:  # type: ignore[operator]
        raise HocketError(f"'{name}' has {module.in_features} inputs, which do not divide by {size} processes: change the width.")


def _width(module: nn.Module, kind: str) -> tuple[int, str]:
    if is_linear(module):
        inputs, outputs = features(module)
        return (inputs, "inputs") if kind == "rows" else (outputs, "outputs")
    if kind == "heads" and (found := find_heads(module)):
        return found.groups, "heads of keys and values"
    match module:
        case nn.Conv2d():
            return module.out_channels, "channels"
        case nn.Embedding():
            return module.num_embeddings, "tokens"
        case nn.MultiheadAttention():
            return module.num_heads, "heads"
    return (module.heads, "heads") if isinstance(module, Attention) else (0, "")


def _check_shared(flow: Flow, kinds: Mapping[str, str]) -> None:
    alike = dict.fromkeys(("columns", "gather", "rotate", "vocabulary"), "outputs")
    for users in _shared(flow).values():
        ways = ["heads" if _inside(name, kinds) else kinds.get(name, "whole") for name in users]
        if len({alike.get(way, way) for way in ways}) > 1:
            named = ", ".join(f"'{name}'" for name in users)
            raise HocketError(
                f"The modules {named} share a parameter, but would be split differently: plan them alike, or leave them whole."
            )


def _check_readers(flow: Flow, kinds: Mapping[str, str]) -> None:
    """Check that split weights that are read directly are read by split logits, and that these read nothing else."""
    for parameter, readers in flow.read.items():
        name = parameter.rpartition(".")[0]
        for node in readers:
            reader = flow.names.get(node, "")
            if (kinds.get(name, "whole") != "whole") != (kinds.get(reader) == "logits"):
                raise HocketError(
                    f"The plan splits only one of '{name}' and '{reader or node.name}', which reads its weight: "
                    f"plan 'vocabulary' for the one and 'logits' for the other, or leave both whole."
                )


def _check_flow(flow: Flow, plan: TensorPlan) -> None:
    """Where the data flow is known: layers that read split activations get them, and layers that return them have such readers."""
    kinds, known, read = plan.kinds, set(flow.names.values()), set()
    for node, name in flow.linears():
        if kinds.get(name) not in ("rows", "rotate"):
            continue
        sources, dropouts = flow.sources(node) or ([], [])
        if not sources or any(kinds.get(source) not in ("columns", "rotate") for source in sources):
            raise HocketError(
                f"'{name}' is to be split by '{kinds[name]}', but its input is not split: "
                f"plan 'columns' for the Linear before it, or 'gather' for this one."
            )
        read |= set(sources)
        plan.dropouts |= set(dropouts)
    for name, kind in kinds.items():
        if name not in known or name in read:
            continue
        if kind == "rotate":
            plan.closing.add(name)
        elif kind == "columns":
            raise HocketError(
                f"'{name}' is to be split by 'columns', but no planned layer reads its part: "
                f"plan 'rows' or 'rotate' for the Linear after it, or 'gather' for this one."
            )
    for name, module in flow.modules.items():
        if type(module) in _LAYERS and kinds.get(f"{name}.linear1") == "columns" and kinds.get(f"{name}.linear2") == "rows":
            plan.dropouts.add(f"{name}.dropout")


def _inside(name: str, kinds: Mapping[str, str]) -> bool:
    """Whether an enclosing module is split as a whole."""
    parts = name.split(".")
    return any(kinds.get(".".join(parts[:k])) in ("heads", "branches") for k in range(len(parts)))
