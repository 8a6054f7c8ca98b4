"""Optimisers on rows: the user's torch optimiser for every worker hosted here.

An elementwise optimiser treats each value by itself, so one optimiser over stacked tensors ``[rows, *shape]`` does exactly what one
optimiser per worker would, bit for bit; so do :class:`hocket.Muon`, :class:`hocket.LARS` and
:class:`hocket.LAMB`, which know rows. Others that look at a whole tensor
(Adafactor), fused ones (silently wrong on strided slices) and classes we do not know run once per row, on views of the true shapes;
so does every optimiser from the first step on which some rows used a parameter and others did not. LBFGS evaluates closures and is
refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hocket.cluster.layout import Bucket, Layout
from hocket.errors import HocketError
from hocket.optim import LAMB, LARS, Muon, OneBitAdam
from hocket.train.checks import optimizer_for

Factory = Callable[[list[nn.Parameter]], Optimizer]
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
COUNTERS = ("step", "eta", "mu", "mu_product")
"""What torch's optimisers keep once for a whole parameter."""
ROWWISE = (*ELEMENTWISE, LAMB, LARS, Muon, OneBitAdam)


class StackedOptimizer:
    """``factory``'s optimiser over all rows of ``weights``, which reads ``grads`` (one tensor ``[rows, values]`` per bucket).

    The factory receives parameters of the true shapes in ``names`` order (the model's ``named_parameters`` order) and may build
    several groups of them; without names the reverse of the layout's order stands in, which is the model's for a single group
    and dtype. ``granularity="buckets"`` makes one tensor of each whole bucket (fast; for engines whose unused slots never change),
    ``"slots"`` one per parameter, which may be left out of a step when no row used it.

    ``optimizer`` is a real torch optimiser, for learning-rate schedulers.

    >>> from hocket.cluster.layout import layout_of
    >>> layout = layout_of(nn.Linear(3, 2).named_parameters())
    >>> weights, grads = [[b.empty(4) for b in layout.buckets] for _ in range(2)]
    >>> _ = grads[0].fill_(1.0)
    >>> StackedOptimizer(lambda params: torch.optim.SGD(params, 0.5), layout, weights, grads).step()
    >>> weights[0].shape, set(weights[0].flatten().tolist())
    (torch.Size([4, 8]), {-0.5})
    """

    def __init__(
        self,
        factory: Factory,
        layout: Layout,
        weights: list[Tensor],
        grads: list[Tensor],
        granularity: str = "slots",
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        if granularity not in ("slots", "buckets"):
            raise HocketError(f"granularity must be 'slots' or 'buckets', got {granularity!r}.")
        self._factory, self._layout, self._weights, self._grads = factory, layout, weights, grads
        self._granularity = granularity
        self._slots = [s.name for b in layout.buckets for s in b.slots]
        self._order = _model_order(self._slots, names)
        template = optimizer_for(factory, self._row(0))
        if isinstance(template, torch.optim.LBFGS):
            raise HocketError(
                "LBFGS needs a closure and cannot run on virtual workers; use an optimiser without a closure, such as SGD or Adam."
            )
        self.stacked = type(template) in ROWWISE and not any(g.get("fused") for g in template.param_groups)
        if self.stacked:
            shaped = {i for i, group in enumerate(template.param_groups) if group.get("matrices") or group.get("layerwise")}
            self._pieces = _pieces(layout, weights, grads, self._groups_of(template), granularity, shaped)
            self._all = [_stack(template, self._pieces)]
        else:
            self._make_rows()
        self._leader = self._all[0]

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimiser to schedule; where every row has its own, these follow it."""
        return self._leader

    def step(self, used: Tensor | None = None) -> None:
        """One update of every row; ``used`` ``[rows, slots]`` says which slots have a gradient (None: all of them)."""
        if self.stacked and used is not None and not bool((used == used[0]).all()):
            self._unstack()
        if self.stacked:
            flags = [True] * len(self._slots) if used is None else used[0].tolist()
            self._split_where_needed(flags)
            for piece in self._pieces:
                piece.attach(flags)
            self._all[0].step()
            return
        for row, (optimizer, pieces) in enumerate(zip(self._all, self._row_pieces, strict=True)):
            flags = [True] * len(self._slots) if used is None else used[row].tolist()
            _follow(self._leader, optimizer)
            for piece in pieces:
                piece.attach(flags)
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state from which :meth:`load_state_dict` resumes exactly."""
        split = sorted({p.bucket for p in self._pieces if not p.whole}) if self.stacked else []
        return {
            "split": split,
            "stacked": self.stacked,
            "granularity": self._granularity,
            "leader": self._leader.state_dict()["param_groups"],
            "optimizers": [o.state_dict() for o in self._all],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state saved by an optimiser of the same factory, layout and granularity."""
        if self.stacked and not state["stacked"]:
            self._unstack()
        if len(state["optimizers"]) != len(self._all):
            raise HocketError(
                f"the saved optimiser state is for {len(state['optimizers'])} optimisers, this run has {len(self._all)}; "
                "resume with the same optimiser and the same number of workers."
            )
        if self.stacked:
            for bucket in state["split"]:
                self._split(bucket)
        for optimizer, saved in zip(self._all, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for group, saved in zip(self._leader.param_groups, state["leader"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})

    def by_row(self) -> list[dict[str, dict[str, Any]]]:
        """The state of each row's parameters, by name, as that row's own optimiser would have it."""
        slots = [s for b in self._layout.buckets for s in b.slots]
        found: list[dict[str, dict[str, Any]]] = [{} for _ in range(self._weights[0].shape[0])]
        for row, own in enumerate(found):
            for piece in self._pieces if self.stacked else self._row_pieces[row]:
                parameter = piece.parameter
                for k, (key, value) in ((k, entry) for k in piece.slots for entry in self._state_of(row, parameter).items()):
                    part = value
                    if self.stacked and isinstance(value, Tensor) and value.shape == parameter.shape:
                        at = slots[k].offset
                        part = value[row, at : at + slots[k].size].view(slots[k].shape) if piece.whole else value[row]
                    own.setdefault(slots[k].name, {})[key] = part
        return found

    def load_on_all(self, state: dict[str, dict[str, Any]]) -> None:
        """Load one worker's state, by parameter name, into every row."""
        for piece in list(self._pieces) if self.stacked else []:
            if piece.whole and len({tuple(state.get(self._slots[k], {})) for k in piece.slots}) > 1:
                self._split(piece.bucket)  # some of its parameters were never used
        for row, optimizer in enumerate(self._all):
            for piece in self._pieces if self.stacked else self._row_pieces[row]:
                parts = [state.get(self._slots[k], {}) for k in piece.slots]
                like = piece.parameter
                optimizer.state[like] = {key: _on_rows([p[key] for p in parts], key, like, self.stacked) for key in parts[0]}

    def _state_of(self, row: int, parameter: nn.Parameter) -> dict[str, Any]:
        return (self._all[0] if self.stacked else self._all[row]).state.get(parameter, {})

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimiser of all rows, or one for each."""
        return self._all

    @property
    def first(self) -> Optimizer:
        """The optimiser of all rows, or of the first one."""
        _follow(self._leader, self._all[0])
        return self._all[0]

    def rows_of(self, bucket: int, name: str) -> Tensor:
        """One kind of the optimiser's state (such as ``exp_avg``) as rows ``[rows, values]``; zeros where there is none yet."""
        rows = self._layout.buckets[bucket].empty(self._weights[bucket].shape[0])
        for view, state in self._state_views(bucket, name, rows):
            view.copy_(state)
        return rows

    def write_rows(self, bucket: int, name: str, rows: Tensor) -> None:
        """The inverse; what is not there yet stays so."""
        for view, state in self._state_views(bucket, name, rows):
            state.copy_(view)

    def _state_views(self, bucket: int, name: str, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of ``rows``, each with the state that belongs there."""
        spec, start = self._layout.buckets[bucket], sum(len(b.slots) for b in self._layout.buckets[:bucket])
        if self.stacked:
            own = [p for p in self._pieces if p.bucket == bucket]
            views = [rows if p.whole else spec.stacked(rows)[p.slots[0] - start] for p in own]
            found = [(view, self._all[0].state.get(p.parameter, {})) for view, p in zip(views, own, strict=True)]
        else:
            found = [
                (view, optimizer.state.get(piece.parameter, {}))
                for row, (optimizer, pieces) in enumerate(zip(self._all, self._row_pieces, strict=True))
                for view, piece in zip(spec.views(rows, row), pieces[start : start + len(spec.slots)], strict=True)
            ]
        return [(view, state[name]) for view, state in found if name in state]

    def _make_rows(self) -> None:
        """One optimiser per row."""
        rows = [self._row(i) for i in range(self._weights[0].shape[0])]
        named = [dict(zip(self._order, row, strict=True)) for row in rows]
        self._all = [self._factory(row) for row in rows]
        self._row_pieces = [_row_pieces(self._layout, self._grads, row, i) for i, row in enumerate(named)]

    def _unstack(self) -> None:
        """Goes over to one optimiser per row, with the state gathered so far: the rows' counters and momenta part here."""
        for bucket in range(len(self._layout.buckets)):
            self._split(bucket)
        stacked, pieces = self._all[0], self._pieces
        self.stacked = False
        self._make_rows()
        for row, own in enumerate(self._row_pieces):
            for piece in pieces:
                state = stacked.state.get(piece.parameter, {})
                shape = piece.parameter.shape
                self._all[row].state[own[piece.slots[0]].parameter] = {
                    k: v[row].clone() if isinstance(v, Tensor) and v.shape == shape else copy.deepcopy(v) for k, v in state.items()
                }
        # Kept only as the optimiser of learning-rate schedulers; the empty step avoids their warning about the order of calls.
        stacked.state.clear()
        stacked.zero_grad()
        stacked.step()

    def _row(self, row: int) -> list[nn.Parameter]:
        """One row as parameters of the true shapes, in the model's order."""
        by_name = {
            s.name: nn.Parameter(view)
            for b, w in zip(self._layout.buckets, self._weights, strict=True)
            for s, view in zip(b.slots, b.views(w, row), strict=True)
        }
        return [by_name[name] for name in self._order]

    def _groups_of(self, template: Optimizer) -> list[int | None]:
        """Per slot, in the layout's order, its group in the factory's optimiser (None: not optimised)."""
        found = {p.data_ptr(): g for g, group in enumerate(template.param_groups) for p in group["params"]}
        starts = [view.data_ptr() for b, w in zip(self._layout.buckets, self._weights, strict=True) for view in b.views(w, 0)]
        return [found.get(start) for start in starts]

    def _split_where_needed(self, flags: list[bool]) -> None:
        for piece in list(self._pieces):
            if piece.whole and not all(flags[i] for i in piece.slots):
                self._split(piece.bucket)

    def _split(self, bucket: int) -> None:
        """Goes over from one tensor per bucket to one per slot, with the state gathered so far."""
        old = next((p for p in self._pieces if p.bucket == bucket and p.whole), None)
        if old is None:
            return
        optimizer, spec = self._all[0], self._layout.buckets[bucket]
        new = _slot_pieces(spec, self._weights[bucket], self._grads[bucket], old.slots[0], [old.group] * len(old.slots))
        at = self._pieces.index(old)
        self._pieces[at : at + 1] = new
        group = optimizer.param_groups[old.group]
        held = next(i for i, p in enumerate(group["params"]) if p is old.parameter)
        group["params"][held : held + 1] = [p.parameter for p in new]
        state = optimizer.state.pop(old.parameter, {})
        for piece, slot in zip(new, spec.slots, strict=True):
            shape = old.parameter.shape
            optimizer.state[piece.parameter] = {k: _cut(v, shape, slot.offset, slot.size, slot.shape) for k, v in state.items()}


def clip_rows_(grads: list[Tensor], max_norm: float, eps: float = 1e-6) -> Tensor:
    """Scales each row's gradient, over all buckets, down to the norm ``max_norm``; returns the norms before, ``[rows]``.

    Per row this is ``torch.nn.utils.clip_grad_norm_``, up to the order of summation.
    """
    if max_norm <= 0:
        raise HocketError(f"the largest gradient norm must be positive, got {max_norm}.")
    home = grads[0].device
    kind = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    parts = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=_wide(g.dtype)).to(home, kind) for g in grads])
    norms = torch.linalg.vector_norm(parts, dim=0)
    scale = (max_norm / (norms + eps)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale.to(g.device, g.dtype)[:, None])
    return norms


class _Piece:
    """One tensor the optimiser sees, with its gradient and the slots it covers."""

    def __init__(self, bucket: int, group: int, slots: range, whole: bool, parameter: nn.Parameter, grad: Tensor) -> None:
        self.bucket, self.group, self.slots, self.whole = bucket, group, slots, whole
        self.parameter, self.grad = parameter, grad

    def attach(self, flags: list[bool]) -> None:
        """Gives the parameter its gradient, or none when no row used it."""
        self.parameter.grad = self.grad if any(flags[i] for i in self.slots) else None


def _model_order(slots: list[str], names: Sequence[str] | None) -> list[str]:
    if names is None:
        return slots[::-1]
    order = [n for n in names if n in set(slots)]
    if len(order) != len(slots):
        missing = sorted(set(slots) - set(order))[0]
        raise HocketError(f"names lacks the parameter {missing!r}; pass the names of all of the model's parameters.")
    return order


def _pieces(
    layout: Layout, weights: list[Tensor], grads: list[Tensor], groups: list[int | None], granularity: str, shaped: set[int]
) -> list[_Piece]:
    pieces, first = [], 0
    for b, w, g in zip(layout.buckets, weights, grads, strict=True):
        own = groups[first : first + len(b.slots)]
        if granularity == "buckets" and len(set(own)) == 1 and own[0] is not None and own[0] not in shaped:
            pieces.append(_Piece(b.index, own[0], range(first, first + len(own)), True, nn.Parameter(w), g))
        else:
            pieces += _slot_pieces(b, w, g, first, own)
        first += len(b.slots)
    return pieces


def _slot_pieces(bucket: Bucket, weights: Tensor, grads: Tensor, first: int, groups: Sequence[int | None]) -> list[_Piece]:
    views = zip(bucket.stacked(weights), bucket.stacked(grads), groups, strict=True)
    return [
        _Piece(bucket.index, group, range(first + i, first + i + 1), False, nn.Parameter(w), g)
        for i, (w, g, group) in enumerate(views)
        if group is not None
    ]


def _row_pieces(layout: Layout, grads: list[Tensor], parameters: dict[str, nn.Parameter], row: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for b, storage in zip(layout.buckets, grads, strict=True):
        for s, g in zip(b.slots, b.views(storage, row), strict=True):
            pieces.append(_Piece(b.index, b.group, range(len(pieces), len(pieces) + 1), False, parameters[s.name], g))
    return pieces


def _stack(template: Optimizer, pieces: list[_Piece]) -> Optimizer:
    """An optimiser of the template's class and options over stacked parameters."""
    groups = []
    for i, group in enumerate(template.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        groups.append({**options, "params": [p.parameter for p in pieces if p.group == i]})
    known = inspect.signature(type(template).__init__).parameters
    made = type(template)(groups, **{k: v for k, v in template.defaults.items() if k in known})
    if isinstance(made, (LAMB, LARS, Muon)):
        made.rows = True
    if isinstance(made, OneBitAdam):
        made.momentum_period = template.momentum_period  # type: ignore[attr-defined]
    return made


def _follow(leader: Optimizer, optimizer: Optimizer) -> None:
    """Copies what a scheduler may have changed."""
    if optimizer is leader:
        return
    for own, group in zip(optimizer.param_groups, leader.param_groups, strict=True):
        own.update({k: v for k, v in group.items() if k != "params"})


def _on_rows(values: list[Any], key: str, like: nn.Parameter, stacked: bool) -> Any:
    """One kind of state of one or several parameters as that of a (stacked) parameter ``like``; counters stay single numbers."""
    if not isinstance(values[0], Tensor) or key in COUNTERS or values[0].numel() * len(values) == 1 < like.numel():
        return copy.deepcopy(values[0])
    flat = torch.cat([v.reshape(-1) for v in values]).to(like.device)
    return flat.expand(like.shape[0], -1).reshape(like.shape).clone() if stacked else flat.view(like.shape).clone()


def _cut(value: Any, shape: torch.Size, offset: int, size: int, slot: tuple[int, ...]) -> Any:
    """A bucket's state for one of its slots: the columns of a tensor, a copy of a counter."""
    if isinstance(value, Tensor) and value.shape == shape:
        return value[:, offset : offset + size].reshape(shape[0], *slot).clone()
    return value.clone() if isinstance(value, Tensor) else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
