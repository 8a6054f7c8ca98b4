"""The loop engine: one template module re-pointed to row after row, ordinary autograd, bit-equal to a process of its own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.layout import Layout
from hocket.errors import HocketError, is_number
from hocket.train.checks import SPARSE
from hocket.train.engines.base import Batches, Buffers, Loss, Rows


class LoopEngine:
    """One worker after another on one template module; bit-equal to plain training of each.

    While a gradient is computed the template's parameters and buffers are views of the row; afterwards it has its own back.
    Models that may draw random numbers (:func:`draws_numbers`) run each row under ``torch.manual_seed(keys[row])``, as a process of
    its own would. ``autocast`` is the dtype of mixed precision, ``accumulate`` cuts each batch into that many parts.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layout: Layout,
        *,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> None:
        if accumulate < 1:
            raise HocketError(f"accumulate must be at least 1, got {accumulate}.")
        self.model, self.loss, self.layout = model, loss, layout
        self.autocast, self.accumulate = autocast, accumulate
        self._random = random_modules(model)
        self._unknown = draws_numbers(model, loss) and not self._random
        self._drew = False
        self._parameters = _parameters(model, layout)
        self._bound: _Bound | None = None

    def gradients(
        self, weights: Rows, buffers: Buffers, inputs: Batches, targets: Batches, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Engine`."""
        bound = self._bind(weights, buffers, grads)
        seeds = keys.tolist() if self.is_seeded() else None
        losses: list[Tensor] = []
        missing: list[tuple[int, int]] = []
        with forked(seeds is not None, weights[0].device), bound.home(self._parameters):
            for row in range(bound.rows):
                if seeds is not None:
                    seed_generators(seeds[row], weights[0].device)
                bound.move_in(self._parameters, row)
                losses.append(self._backward(_straight(inputs[row]), _straight(targets[row])))
                missing += [(row, slot) for slot in bound.collect(self._parameters, row)]
            if seeds is not None and not self._drew:
                self._drew = have_moved(seeds[-1], weights[0].device)
        return torch.stack(losses), _used(bound.rows, len(self._parameters), missing)

    def is_seeded(self) -> bool:
        """Whether a row may draw random numbers."""
        return self._unknown or self.draws()

    def draws(self) -> bool:
        """Whether a row draws random numbers, as far as is known."""
        return self._drew or any(m.training for m in self._random)

    def _bind(self, weights: Rows, buffers: Buffers, grads: Rows) -> _Bound:
        """The views of all rows; made anew only when the storage has moved."""
        key = tuple((t.data_ptr(), t.shape[0]) for t in (*weights, *grads, *buffers.values()))
        if self._bound is None or self._bound.key != key:
            self._bound = _Bound(key, self.model, self.layout, weights, buffers, grads)
        return self._bound

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.accumulate == 1:
            loss = self._forward(inputs, targets)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=inputs.device)
        n = min(self.accumulate, len(inputs))
        for x, y in zip(inputs.tensor_split(n), targets.tensor_split(n), strict=True):
            loss = self._forward(x, y) * (len(x) / len(inputs))
            loss.backward()
            total = total + loss.detach()
        return total

    def _forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.autocast is None:
            return self.loss(self.model(inputs), targets)
        with torch.autocast(inputs.device.type, self.autocast):
            return self.loss(self.model(inputs), targets)


class _Bound:
    """The views of every row of one set of storages, and where the template keeps its buffers."""

    def __init__(
        self,
        key: tuple[tuple[int, int], ...],
        model: nn.Module,
        layout: Layout,
        weights: Rows,
        buffers: Buffers,
        grads: Rows,
    ) -> None:
        self.key, self.rows = key, weights[0].shape[0]
        # A product of small matrices rounds by the addresses of its operands: a row that does not start where a storage of its own
        # would is computed on a copy that does.
        aligned = [torch.empty_like(w[:1]) for w in weights]
        self._stored = [
            [(a[0], w[row]) for a, w in zip(aligned, weights, strict=True) if _crooked(w[row])] for row in range(self.rows)
        ]
        self.weights = [
            _views(layout, [a if _crooked(w[row]) else w[row : row + 1] for a, w in zip(aligned, weights, strict=True)], 0)
            for row in range(self.rows)
        ]
        self.grads = [_views(layout, grads, row) for row in range(self.rows)]
        places = _buffer_places(model)
        self.places = [(owner, name, full) for full in buffers for owner, name in places[full]]
        self.buffers = [[buffers[full][row] for _, _, full in self.places] for row in range(self.rows)]

    def move_in(self, parameters: list[nn.Parameter], row: int) -> None:
        """Points the template's parameters and buffers to one row."""
        for copied, stored in self._stored[row]:
            copied.copy_(stored)
        for p, view in zip(parameters, self.weights[row], strict=True):
            p.data = view
            p.grad = None
        for (owner, name, _), view in zip(self.places, self.buffers[row], strict=True):
            owner._buffers[name] = view

    def collect(self, parameters: list[nn.Parameter], row: int) -> list[int]:
        """Copies the gradients into their row; returns the slots that have none.

        Copying keeps the bits (adding to zeros turns -0.0 into 0.0) and costs no more than zeroing and accumulating in place.
        """
        found = [(view, p.grad) for view, p in zip(self.grads[row], parameters, strict=True) if p.grad is not None]
        if any(g.is_sparse for _, g in found):
            raise HocketError(SPARSE)
        if found:
            torch._foreach_copy_([view for view, _ in found], [g for _, g in found])
        missing = [slot for slot, p in enumerate(parameters) if p.grad is None]
        for slot in missing:
            self.grads[row][slot].zero_()
        return missing

    @contextlib.contextmanager
    def home(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Gives the template its own tensors back at the end."""
        own = [p.data for p in parameters]
        kept = [owner._buffers[name] for owner, name, _ in self.places]
        try:
            yield
        finally:
            for p, data in zip(parameters, own, strict=True):
                p.data = data
                p.grad = None
            for (owner, name, _), buffer in zip(self.places, kept, strict=True):
                owner._buffers[name] = buffer


def _crooked(row: Tensor) -> bool:
    """Whether a row on a CPU starts elsewhere than torch starts a storage, at a multiple of 64 bytes."""
    return row.device.type == "cpu" and row.data_ptr() % 64 != 0


def _straight(row: Tensor) -> Tensor:
    return row.clone() if _crooked(row) else row


def _views(layout: Layout, storages: Rows, row: int) -> list[Tensor]:
    return [view for bucket, storage in zip(layout.buckets, storages, strict=True) for view in bucket.views(storage, row)]


def _parameters(model: nn.Module, layout: Layout) -> list[nn.Parameter]:
    """The template's parameters in the layout's order."""
    named = dict(model.named_parameters())
    names = [s.name for b in layout.buckets for s in b.slots]
    unknown = [n for n in names if n not in named]
    if unknown:
        raise HocketError(f"the layout has a parameter {unknown[0]!r} that the model lacks; build the layout from this model.")
    return [named[n] for n in names]


def _buffer_places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Per buffer name all modules that hold it, under which attribute (one tensor may be registered twice)."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, b in module._buffers.items():
            if b is not None:
                holders.setdefault(id(b), []).append((module, name))
    return {full: holders[id(b)] for full, b in model.named_buffers()}


_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def random_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that draw random numbers while training."""

    def draws(m: nn.Module) -> bool:
        rate = getattr(m, "dropout", 0)
        numeric = is_number(rate) and rate > 0
        return numeric or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0) or isinstance(m, _DRAWING)

    return [m for m in model.modules() if draws(m)]


def draws_numbers(model: nn.Module, loss: Loss) -> bool:
    """Whether the model or the loss may draw random numbers: some module does, or runs code that is not known to draw none.

    >>> relu = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> draws_numbers(relu, nn.functional.cross_entropy), draws_numbers(relu, lambda out, y: out.sum())
    (False, True)
    """
    known = all(_is_known(type(m)) for m in model.modules()) and _is_known(loss if inspect.isroutine(loss) else type(loss))
    return not known or bool(random_modules(model))


def _is_known(code: Any) -> bool:
    """Whether code is torch's or Hocket's own, where :func:`random_modules` finds everything random."""
    return (getattr(code, "__module__", None) or "").startswith(("torch.nn.", "torch._C._nn", "hocket.models."))


@contextlib.contextmanager
def forked(seeded: bool, device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leaves the global generators as they were; in between they start at ``seed`` unless that is None."""
    if not seeded:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None:
            seed_generators(seed, device)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """What ``torch.manual_seed`` does to the generators of the CPU and of ``device``, in a hundredth of its time."""
    for generator in _generators(device):
        generator.manual_seed(seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def have_moved(seed: int, device: torch.device) -> bool:
    """Whether numbers were drawn since the generators were seeded with ``seed``, which they are again."""
    states = [g.get_state() for g in _generators(device)]
    seed_generators(seed, device)
    return any(not torch.equal(g.get_state(), state) for g, state in zip(_generators(device), states, strict=True))


def seeded_loss(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, key: Tensor, random: bool, autocast: torch.dtype | None
) -> Tensor:
    """The loss of one worker's mini-batch; a model that is ``random`` draws from its key, as in an engine."""
    with forked(random, x.device, int(key)), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        return loss(model(x), y)


def _used(rows: int, slots: int, missing: list[tuple[int, int]]) -> Tensor:
    used = torch.ones(rows, slots, dtype=torch.bool)
    for row, slot in missing:
        used[row, slot] = False
    return used
