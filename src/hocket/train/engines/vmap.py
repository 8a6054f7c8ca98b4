"""The vmap engine: all rows at once with ``torch.func.vmap``, compiled into one forward and one backward graph on CUDA.

It equals the loop within rounding. Workers with their own weights turn every convolution into a grouped one, which cuDNN does
slowly; see :mod:`hocket.train.engines.convolution` for what runs instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.train.engines.attention import row_attention
from hocket.train.engines.base import Batches, Buffers, Loss, Rows
from hocket.train.engines.compiling import report_compiling
from hocket.train.engines.loop import LoopEngine, forked
from hocket.train.engines.recurrent import has_row_recurrence
from hocket.train.engines.twin import row_twin

SPARSE_GRADIENTS = "sparse gradients"


class VmapEngine:
    """All workers at once: ``vmap`` of the loss over the flat rows, ordinary autograd around it, compiled on CUDA.

    Rounds with batches of different sizes go to the loop. ``chunk`` computes that many rows at a time, which bounds memory; where
    memory is short in the first round, it is halved until there is enough, and then activations are recomputed. ``recompute``: the
    compiled backward pass computes most activations again instead of keeping them. Random numbers (dropout, ``torch.randn_like``)
    differ from row to row and step to step, are repeatable for the same keys, but do not equal the loop's. What cannot be compiled
    runs as it is, with a warning. A model that vmap cannot compute is, with ``fall_back``, computed by the loop after a warning;
    otherwise it is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layout: Layout,
        rows: int,
        compile: bool = True,
        *,
        chunk: int | None = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        fall_back: bool = False,
        recompute: bool = False,
    ) -> None:
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise HocketError(f"chunk must be a whole number of at least 1 row, got {chunk}.")
        self.loop = LoopEngine(model, loss, layout, autocast=autocast, accumulate=accumulate)
        self.loss, self.layout, self.rows, self.chunk = loss, layout, rows, min(chunk or rows, rows)
        self.autocast, self.accumulate, self.fall_back, self.recompute = autocast, accumulate, fall_back, recompute
        self._graph = compile
        twin = row_twin(model, autocast)
        ways = [(twin, compile), (model, compile), (twin, False), (model, False)]
        self._ways = [way for i, way in enumerate(ways) if way not in ways[:i]]
        self._take(*self._ways.pop(0))
        self._used: Tensor | None = None
        self._refused = False

    def gradients(
        self, weights: Rows, buffers: Buffers, inputs: Batches, targets: Batches, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Engine`."""
        for theirs, own in zip(self.loop.model.modules(), self._model.modules(), strict=True):
            own.training = theirs.training
        x, y = _stack(inputs), _stack(targets)
        if self._refused or x is None or y is None:
            return self.loop.gradients(weights, buffers, inputs, targets, grads, keys)
        if self._used is None:
            return self._first(weights, buffers, x, y, grads, keys)
        return self._all(weights, buffers, x, y, grads, keys), self._used

    def _take(self, model: nn.Module, compile: bool) -> None:
        """Use this module tree from now on."""
        self._model, self._compile = model, compile
        self._captured: dict[tuple[Any, ...], _Captured | None] = {}
        losses = vmap(self._loss_of_one, randomness="different")
        # Whole or not at all: what dynamo cannot read it would otherwise run uncompiled, without a word.
        self._losses = torch.compile(losses, dynamic=False, fullgraph=True) if compile else losses

    def _first(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The first round: finds the unused slots with one eager backward, and how vmap can compute this model."""
        before = {name: b.clone() for name, b in buffers.items()}
        alone = {name: b[:1].clone() for name, b in buffers.items()}
        scratch = [torch.empty_like(g[:1]) for g in grads]
        _, used = self.loop.gradients([w[:1] for w in weights], alone, x[:1], y[:1], scratch, keys[:1])
        failure: Exception | None = None
        while True:
            try:
                with report_compiling(self._compile):
                    losses = self._all(weights, buffers, x, y, grads, keys)
                break
            except torch.OutOfMemoryError:
                if not self._shrink():
                    raise
            except (RuntimeError, TypeError, NotImplementedError) as error:
                failure = failure or error
                if self._ways:
                    self._take(*self._ways.pop(0))
                else:
                    self._refuse(failure, len(x))
            for name, b in buffers.items():
                b.copy_(before[name])
            if self._refused:
                return self.loop.gradients(weights, buffers, x, y, grads, keys)
        if failure is not None:
            self._note(failure)
        self._used = used.expand(len(x), -1)
        return losses, self._used

    def _shrink(self) -> bool:
        """Use less memory and more time from now on; returns whether that is possible."""
        if self.chunk > 1:
            self.chunk = smaller_chunk(self.rows, self.chunk)
            done = f"{self.chunk} of {self.rows} workers are computed at a time"
        elif self._compile and not self.recompute:
            self.recompute, done = True, "activations are computed again in the backward pass"
            self._captured.clear()
        else:
            return False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(f"The device's memory is too small for all workers at once: {done}, which takes longer.", stacklevel=5)
        return True

    def _refuse(self, error: Exception, rows: int) -> None:
        if not self.fall_back:
            text = f"vmap cannot compute this model ({_reason(error)}); use engine='loop' or 'auto'."
            raise HocketError(text) from error
        warnings.warn(
            f"vmap cannot compute this model ({_reason(error)}): its workers are computed one after another, so that a step takes "
            f"{rows} times as long as that of one worker.",
            stacklevel=4,
        )
        self._refused = True

    def _note(self, error: Exception) -> None:
        """Warn that the engine continues in a slower way."""
        how = "with PyTorch's own layers, whose convolutions are slow for many workers"
        if self._graph and not self._compile:
            how = "uncompiled, which launches every operation by itself and takes a multiple of the time and of the memory"
        warnings.warn(f"The workers of this model are computed {how} ({_reason(error)}).", stacklevel=4)

    def _all(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows, keys: Tensor) -> Tensor:
        if self._graph and x.is_cuda and not self.loop.draws():  # a recorded graph draws the same numbers again
            return self._replay(weights, buffers, x, y, grads)
        seeded = self.loop.is_seeded()
        with forked(seeded, weights[0].device, int(keys[0]) if seeded else None):
            return self._chunks(weights, buffers, x, y, grads)

    def _replay(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows) -> Tensor:
        """The same as one CUDA graph: a few workers are otherwise bound by the CPU that launches their kernels.

        The first round of a shape runs plainly (it compiles), the second is recorded, and then replayed while the storage stays.
        """
        pointers = tuple(t.data_ptr() for t in (*weights, *grads, *buffers.values()))
        training = tuple(m.training for m in self.loop.model.modules())
        key = (x.shape, x.dtype, y.shape, y.dtype, pointers, training)
        if key not in self._captured:
            # Other storage is that of another training, which is over: its graphs would only take room.
            if len(self._captured) == _GRAPHS or any(other[4] != pointers for other in self._captured):
                self._captured.clear()
            self._captured[key] = None
            return self._chunks(weights, buffers, x, y, grads)
        captured = self._captured[key]
        if captured is None:
            try:
                captured = self._captured[key] = _Captured(lambda a, b: self._chunks(weights, buffers, a, b, grads), x, y)
            except RuntimeError as error:  # the model synchronises with the device, or memory is short: run without a graph
                self._graph = False
                how = "every kernel of a step is launched by itself, which takes longer where there are few workers"
                warnings.warn(f"No CUDA graph of this model can be recorded ({_reason(error)}): {how}.", stacklevel=5)
                return self._chunks(weights, buffers, x, y, grads)
        return captured(x, y)

    def _chunks(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows) -> Tensor:
        parts = [slice(i, i + self.chunk) for i in range(0, len(x), self.chunk)]
        losses = [self._some(weights, buffers, x, y, grads, part) for part in parts]
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _some(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows, part: slice) -> Tensor:
        """The rows of one chunk, in ``accumulate`` micro-batches."""
        leaves = [w[part].detach().requires_grad_() for w in weights]
        own = {name: b[part] for name, b in buffers.items()}
        total = None
        n = min(self.accumulate, x.shape[1])
        for i, (xi, yi) in enumerate(zip(x[part].tensor_split(n, 1), y[part].tensor_split(n, 1), strict=True)):
            with row_attention(), _compiling(self.recompute) if self._compile else nullcontext():
                losses = self._losses(leaves, own, xi, yi)
            scale = torch.full_like(losses, xi.shape[1] / x.shape[1])
            for g, new in zip(grads, torch.autograd.grad(losses, leaves, scale, allow_unused=True), strict=True):
                _put(g[part], new, first=i == 0)
            losses = losses.detach() * scale if n > 1 else losses.detach()
            total = losses if total is None else total + losses
        assert total is not None
        return total

    def _loss_of_one(self, flats: Rows, buffers: Buffers, x: Tensor, y: Tensor) -> Tensor:
        assert self.recompute in (False, True)  # read here, so that torch compiles anew for each
        values = dict(buffers)
        for bucket, flat in zip(self.layout.buckets, flats, strict=True):
            # One split, not one slice per slot: its backward is a single concatenation.
            pieces = flat.split([s.size for s in bucket.slots])
            values.update({s.name: piece.view(s.shape) for s, piece in zip(bucket.slots, pieces, strict=True)})
        if self.autocast is None:
            return self.loss(functional_call(self._model, values, (x,)), y)
        with torch.autocast(x.device.type, self.autocast):
            output = functional_call(self._model, values, (x,))
            return self.loss(tree_map(_single, output), y)  # as autocast has losses, but not under vmap


_GRAPHS = 4  # shapes and storages recorded at a time; each keeps its activations


class _Captured:
    """A recorded CUDA graph with the places of its inputs and of its losses."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.graph = x.clone(), y.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.losses = function(self.x, self.y)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.losses.clone()


@contextmanager
def _compiling(recompute: bool) -> Iterator[None]:
    """All engines share one code object: torch would refuse to compile after a few shapes of it."""
    limits = torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000)
    with limits, torch._functorch.config.patch(activation_memory_budget=_KEPT if recompute else 1.0):
        yield


_KEPT = 0.2  # of the activations' memory, where they are computed again


def smaller_chunk(rows: int, chunk: int) -> int:
    """About half as many rows at a time; equal chunks where that can be, since each size is compiled by itself.

    >>> [smaller_chunk(60, 60), smaller_chunk(60, 20), smaller_chunk(7, 7), smaller_chunk(7, 2)]
    [30, 10, 3, 1]
    """
    half = chunk // 2
    return next((n for n in range(half, half // 2, -1) if rows % n == 0), half)


def _single(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if low else value


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".") if lines else type(error).__name__


def _stack(batches: Batches) -> Tensor | None:
    """One tensor ``[rows, batch, ...]``, or None when the batches differ in shape."""
    if isinstance(batches, Tensor):
        return batches
    return torch.stack(list(batches)) if len({b.shape for b in batches}) == 1 else None


def _put(storage: Tensor, new: Tensor | None, first: bool) -> None:
    if first:
        storage.zero_() if new is None else storage.copy_(new)
    elif new is not None:
        storage.add_(new)


def obstacle(model: nn.Module) -> str | None:
    """The part of the model that is known not to work under vmap."""
    for m in model.modules():
        if isinstance(m, nn.RNNBase) and not has_row_recurrence(m):
            return f"a {type(m).__name__} layer of a class of its own or with projections"
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse:
            return SPARSE_GRADIENTS
    return None
