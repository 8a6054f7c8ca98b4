"""Gradient engines: the gradients of all workers hosted here, each at its own weights, on its own mini-batch.

Weights and gradients are rows: one contiguous tensor ``[rows, values]`` per bucket of the layout. For worker i an engine computes

    grads[b][i] = d loss(model_i(inputs[i]), targets[i]) / d weights[b][i]

``LoopEngine`` re-points one template module to row after row and runs ordinary autograd, so its results are bit-equal to those of
a process of its own. ``VmapEngine`` computes all rows at once with ``torch.func.vmap``, compiled into one forward and one backward
graph; it equals the loop within rounding. On a CPU the loop wins, on CUDA the compiled vmap, by a factor of ten and more.

Workers with their own weights turn every convolution into a grouped one, which cuDNN does slowly, its gradients above all. For
stride 1 ``VmapEngine`` therefore uses Triton kernels of its own (implicit matrix products, one group per worker), at the precision
that ``torch.backends.cudnn.allow_tf32`` asks for; their plain torch reference is what runs without Triton.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from hocket.cluster.layout import Layout
from hocket.errors import HocketError

triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None

Loss = Callable[[Any, Tensor], Tensor]
Batches = Tensor | Sequence[Tensor]  # [rows, batch, ...], or one batch per row
Rows = list[Tensor]  # one tensor [rows, values] per bucket
Buffers = dict[str, Tensor]  # one tensor [rows, ...] per name


class Engine(Protocol):
    """Computes the gradients of every row."""

    def gradients(
        self, weights: Rows, buffers: Buffers, inputs: Batches, targets: Batches, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fills ``grads`` and updates ``buffers`` in place; returns the losses ``[rows]`` and the used slots ``[rows, slots]``.

        ``inputs`` and ``targets`` are tensors ``[rows, batch, ...]``, or lists with one batch per row when their sizes differ.
        ``keys`` holds one seed per row, for dropout. A slot that a row did not use (its gradient is None) is filled with zeros;
        slots are counted through the buckets in the layout's order. Losses stay on the device, ``used`` is on the CPU.
        """
        ...


def choose(
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    rows: int,
    device: torch.device | str,
    name: str = "auto",
    *,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
) -> LoopEngine | VmapEngine:
    """The engine for ``device``: the loop on a CPU, compiled vmap on CUDA, unless ``name`` says ``"loop"`` or ``"vmap"``."""
    if name not in ("auto", "loop", "vmap"):
        raise HocketError(f"there is no gradient engine {name!r}; use 'auto', 'loop' or 'vmap'.")
    cuda = torch.device(device).type == "cuda"
    if name == "loop" or (name == "auto" and not (cuda and rows > 1)):
        return LoopEngine(model, loss, layout, autocast=autocast, accumulate=accumulate)
    obstacle = _obstacle(model)
    if obstacle is None:
        return VmapEngine(
            model, loss, layout, rows, compile=cuda, autocast=autocast, accumulate=accumulate, fall_back=name == "auto"
        )
    if name == "vmap":
        raise HocketError(f"the vmap engine cannot run a model with {obstacle}; use engine='loop' or 'auto'.")
    warnings.warn(f"the model has {obstacle}, which vmap cannot do: its workers are computed one after another.", stacklevel=2)
    return LoopEngine(model, loss, layout, autocast=autocast, accumulate=accumulate)


def stack_buffers(model: nn.Module, rows: int) -> Buffers:
    """The model's buffers (BatchNorm statistics and the like), one copy per row: ``{name: [rows, ...]}``."""
    return {name: b.detach().expand(rows, *b.shape).clone() for name, b in model.named_buffers()}


class LoopEngine:
    """One worker after another on one template module; bit-equal to plain training of each.

    While a gradient is computed the template's parameters and buffers are views of the row; afterwards it has its own back.
    Models with active dropout run each row under ``torch.manual_seed(keys[row])``, as a process of its own would; ``seeded``
    forces that on or off. ``autocast`` is the dtype of mixed precision, ``accumulate`` cuts each batch into that many parts.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layout: Layout,
        *,
        seeded: bool | None = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
    ) -> None:
        if accumulate < 1:
            raise HocketError(f"accumulate must be at least 1, got {accumulate}.")
        self.model, self.loss, self.layout = model, loss, layout
        self.autocast, self.accumulate = autocast, accumulate
        self._random = _random_modules(model)
        self._seeded = seeded
        self._parameters = _parameters(model, layout)
        self._bound: _Bound | None = None

    def gradients(
        self, weights: Rows, buffers: Buffers, inputs: Batches, targets: Batches, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Engine`."""
        bound = self._bind(weights, buffers, grads)
        seeds = keys.tolist() if self._is_seeded() else None
        losses: list[Tensor] = []
        missing: list[tuple[int, int]] = []
        with _forked(seeds is not None, weights[0].device), bound.home(self._parameters):
            for row in range(bound.rows):
                if seeds is not None:
                    torch.manual_seed(seeds[row])
                bound.move_in(self._parameters, row)
                losses.append(self._backward(inputs[row], targets[row]))
                missing += [(row, slot) for slot in bound.collect(self._parameters, row)]
        return torch.stack(losses), _used(bound.rows, len(self._parameters), missing)

    def _is_seeded(self) -> bool:
        return any(m.training for m in self._random) if self._seeded is None else self._seeded

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


class VmapEngine:
    """All workers at once: ``vmap`` of the loss over the flat rows, ordinary autograd around it, compiled on CUDA.

    Rounds with batches of different sizes go to the loop. ``chunk`` computes that many rows at a time, which bounds memory.
    Dropout differs from row to row and step to step, is repeatable for the same keys, but does not equal the loop's.
    With ``fall_back`` a model that vmap cannot do is noted once and computed by the loop; otherwise it is refused.
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
        graph: bool = True,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise HocketError(f"chunk must be at least 1 row, got {chunk}.")
        self.loop = LoopEngine(model, loss, layout, autocast=autocast, accumulate=accumulate)
        self.loss, self.layout, self.rows, self.chunk = loss, layout, rows, chunk or rows
        self.autocast, self.accumulate, self.fall_back = autocast, accumulate, fall_back
        self._model = model if autocast else _with_row_convolutions(model)
        losses = vmap(self._loss_of_one, randomness="different")
        self._losses = torch.compile(losses, dynamic=False) if compile else losses
        self._graph = graph and compile
        self._captured: dict[tuple[Any, ...], _Captured | None] = {}
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

    def _first(
        self, weights: list[Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, grads: Rows, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first round: finds the unused slots with one eager backward, and learns whether vmap can do this model."""
        before = {name: b.clone() for name, b in buffers.items()}
        alone = {name: b[:1].clone() for name, b in buffers.items()}
        scratch = [torch.empty_like(g[:1]) for g in grads]
        _, used = self.loop.gradients([w[:1] for w in weights], alone, x[:1], y[:1], scratch, keys[:1])
        try:
            losses = self._all(weights, buffers, x, y, grads, keys)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, NotImplementedError) as error:
            self._refuse(error)
            for name, b in buffers.items():
                b.copy_(before[name])
            return self.loop.gradients(weights, buffers, x, y, grads, keys)
        self._used = used.expand(len(x), -1)
        return losses, self._used

    def _refuse(self, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not self.fall_back:
            raise HocketError(f"vmap cannot compute this model ({reason}); use engine='loop' or 'auto'.") from error
        warnings.warn(f"vmap cannot compute this model ({reason}): its workers are computed one after another.", stacklevel=4)
        self._refused = True

    def _all(self, weights: list[Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, grads: Rows, keys: Tensor) -> Tensor:
        if self.loop._is_seeded():
            with _forked(True, weights[0].device):
                torch.manual_seed(int(keys[0]))
                return self._chunks(weights, buffers, x, y, grads)
        if self._graph and x.is_cuda:
            return self._replay(weights, buffers, x, y, grads)
        return self._chunks(weights, buffers, x, y, grads)

    def _replay(self, weights: Rows, buffers: Buffers, x: Tensor, y: Tensor, grads: Rows) -> Tensor:
        """The same as one CUDA graph: a few workers are otherwise bound by the CPU that launches their kernels.

        The first round of a shape runs plainly (it compiles), the second is recorded, and then replayed while the storage stays.
        """
        pointers = tuple(t.data_ptr() for t in (*weights, *grads, *buffers.values()))
        training = tuple(m.training for m in self.loop.model.modules())
        key = (x.shape, x.dtype, y.shape, y.dtype, pointers, training)
        if key not in self._captured:
            if len(self._captured) == _GRAPHS:
                self._captured.clear()
            self._captured[key] = None
            return self._chunks(weights, buffers, x, y, grads)
        captured = self._captured[key]
        if captured is None:
            try:
                captured = self._captured[key] = _Captured(lambda a, b: self._chunks(weights, buffers, a, b, grads), x, y)
            except RuntimeError:  # the model waits for the device somewhere: it runs as it is
                self._graph = False
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
            losses = self._losses(leaves, own, xi, yi)
            scale = torch.full_like(losses, xi.shape[1] / x.shape[1])
            for g, new in zip(grads, torch.autograd.grad(losses, leaves, scale, allow_unused=True), strict=True):
                _put(g[part], new, first=i == 0)
            losses = losses.detach() * scale if n > 1 else losses.detach()
            total = losses if total is None else total + losses
        assert total is not None
        return total

    def _loss_of_one(self, flats: Rows, buffers: Buffers, x: Tensor, y: Tensor) -> Tensor:
        values = dict(buffers)
        for bucket, flat in zip(self.layout.buckets, flats, strict=True):
            # One split, not one slice per slot: its backward is a single concatenation.
            pieces = flat.split([s.size for s in bucket.slots])
            values.update({s.name: piece.view(s.shape) for s, piece in zip(bucket.slots, pieces, strict=True)})
        if self.autocast is None:
            return self.loss(functional_call(self._model, values, (x,)), y)
        with torch.autocast(x.device.type, self.autocast):
            return self.loss(functional_call(self._model, values, (x,)), y)


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
        self.weights = [_views(layout, weights, row) for row in range(self.rows)]
        self.grads = [_views(layout, grads, row) for row in range(self.rows)]
        places = _buffer_places(model)
        self.places = [(owner, name, full) for full in buffers for owner, name in places[full]]
        self.buffers = [[buffers[full][row] for _, _, full in self.places] for row in range(self.rows)]

    def move_in(self, parameters: list[nn.Parameter], row: int) -> None:
        """Points the template's parameters and buffers to one row."""
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


def _random_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that draw random numbers while training."""

    def draws(m: nn.Module) -> bool:
        rate = getattr(m, "dropout", 0)
        numeric = isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0
        return numeric or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0) or isinstance(m, nn.RReLU)

    return [m for m in model.modules() if draws(m)]


@contextlib.contextmanager
def _forked(seeded: bool, device: torch.device) -> Iterator[None]:
    """Leaves the global generators as they were."""
    if not seeded:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _used(rows: int, slots: int, missing: list[tuple[int, int]]) -> Tensor:
    used = torch.ones(rows, slots, dtype=torch.bool)
    for row, slot in missing:
        used[row, slot] = False
    return used


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


def _obstacle(model: nn.Module) -> str | None:
    """What in the model is known not to work under vmap."""
    for m in model.modules():
        if isinstance(m, nn.RNNBase):
            return f"a {type(m).__name__} layer"
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats and m.momentum is None:
            return f"a {type(m).__name__} layer with momentum=None"
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse:
            return "sparse gradients"
    return None


# Convolutions with one set of weights per row. All tensors are logically [rows, ...]; results lie channels-last.


class _RowConv2d(nn.Conv2d):
    """A convolution that, under vmap with per-row weights, runs as one kernel over all rows."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _conv2d(input, weight, bias, _padding(self))


def _with_row_convolutions(model: nn.Module) -> nn.Module:
    """A copy of the module tree with the same tensors, whose plain stride-1 convolutions are ``_RowConv2d``."""
    if not any(_eligible(m) for m in model.modules()):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    try:
        twin = copy.deepcopy(model, {id(t): t for t in tensors})
    except Exception:  # a module that cannot be copied is used as it is
        return model
    for m in twin.modules():
        if _eligible(m):
            m.__class__ = _RowConv2d
    return twin


def _eligible(m: nn.Module) -> bool:
    if type(m) is not nn.Conv2d or m.groups != 1 or m.stride != (1, 1) or m.dilation != (1, 1) or m.padding_mode != "zeros":
        return False
    fits = m.padding != "same" or all(k % 2 for k in m.kernel_size)
    return (
        triton is not None
        and m.weight.is_cuda
        and m.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and fits
        and all(p < k for p, k in zip(_padding(m), m.kernel_size, strict=True))
    )


def _padding(m: nn.Conv2d) -> list[int]:
    if isinstance(m.padding, str):
        return [0, 0] if m.padding == "valid" else [k // 2 for k in m.kernel_size]
    return list(m.padding)


def _conv2d_plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    return F.conv2d(x, weight, bias, padding=list(padding))


def _rows_conv2d_any(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """``[R,B,C,H,W]`` with weights ``[R,O,C,KH,KW]`` to ``[R,B,O,OH,OW]``: Triton on CUDA, else the torch reference."""
    if x.is_cuda and triton is not None:
        return _launch_forward(x, weight, bias, padding)
    pairs = enumerate(zip(x, weight, strict=True))
    y = torch.stack([F.conv2d(a, w, None if bias is None else bias[i], padding=list(padding)) for i, (a, w) in pairs])
    return _channels_last(y)


def _rows_conv2d_fake(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    rows, batch, _, height, width = x.shape
    _, out, _, kh, kw = weight.shape
    shape = (rows, batch, height + 2 * padding[0] - kh + 1, width + 2 * padding[1] - kw + 1, out)
    return x.new_empty(shape).permute(0, 1, 4, 2, 3)


def _rows_weight_any(dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The gradients of the weights ``[R,O,C,KH,KW]`` and of the bias ``[R,O]``."""
    if x.is_cuda and triton is not None:
        return _launch_weight(dy, x, kernel, padding)
    shape = (dy.shape[2], x.shape[2], *kernel)
    pairs = zip(x, dy, strict=True)
    dw = torch.stack([conv2d_weight(a, shape, d, padding=list(padding)) for a, d in pairs])
    return dw.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3), dy.sum((1, 3, 4))


def _rows_weight_fake(dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows, out, channels = dy.shape[0], dy.shape[2], x.shape[2]
    return x.new_empty(rows, out, *kernel, channels).permute(0, 1, 4, 2, 3), x.new_empty(rows, out)


_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor"
_conv2d = torch.library.custom_op("hocket::conv2d", _conv2d_plain, mutates_args=(), schema=_SCHEMA)
_conv2d.register_fake(_conv2d_plain)
_rows_conv2d = torch.library.custom_op("hocket::rows_conv2d", _rows_conv2d_any, mutates_args=(), schema=_SCHEMA)
_rows_conv2d.register_fake(_rows_conv2d_fake)
_rows_weight = torch.library.custom_op(
    "hocket::rows_conv2d_weight",
    _rows_weight_any,
    mutates_args=(),
    schema="(Tensor dy, Tensor x, int[] kernel, int[] padding) -> (Tensor, Tensor)",
)
_rows_weight.register_fake(_rows_weight_fake)


@_conv2d.register_vmap
def _conv2d_vmap(
    info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]
) -> tuple[Tensor, int]:
    """Rows with their own weights go to the row kernel; rows that share frozen weights are one larger batch."""
    rows = info.batch_size
    x = x.expand(rows, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    if dims[1] is None and (bias is None or dims[2] is None):
        return _conv2d_plain(x.flatten(0, 1), weight, bias, padding).unflatten(0, (rows, -1)), 0
    weight = weight.expand(rows, *weight.shape) if dims[1] is None else weight.movedim(dims[1], 0)
    if bias is not None:
        bias = bias.expand(rows, *bias.shape) if dims[2] is None else bias.movedim(dims[2], 0)
    return _rows_conv2d(x, weight, bias, padding), 0


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.padding = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
    """dx is the convolution of dy with the flipped, transposed weights."""
    x, weight = ctx.saved_tensors
    kernel = list(weight.shape[3:])
    dx = None
    if ctx.needs_input_grad[0]:
        around = [k - 1 - p for k, p in zip(kernel, ctx.padding, strict=True)]
        dx = _rows_conv2d(dy, weight.flip(3, 4).transpose(1, 2), None, around)
    dw, db = _rows_weight(dy, x, kernel, ctx.padding)
    return dx, dw, db if ctx.has_bias else None, None


_rows_conv2d.register_autograd(_backward, setup_context=_save)


def _channels_last(t: Tensor) -> Tensor:
    """The same values, with the channels innermost in memory."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _precision(x: Tensor) -> dict[str, Any]:
    """TF32 where torch's own convolutions would use it."""
    single = x.dtype == torch.float32
    tf32 = single and torch.backends.cudnn.allow_tf32
    return {"PRECISION": "tf32" if tf32 or not single else "ieee", "ROUND": tf32}


def _sizes(x: Tensor, y: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> dict[str, Any]:
    """The compile-time sizes of a convolution from ``x`` to ``y``."""
    (c, h, w), (out, oh, ow) = x.shape[2:], y.shape[2:]
    return {
        "C": c,
        "H": h,
        "W": w,
        "OUT": out,
        "OH": oh,
        "OW": ow,
        "KH": kernel[0],
        "KW": kernel[1],
        "PH": padding[0],
        "PW": padding[1],
    }


def _forward_tiles(out: int, depth: int) -> dict[str, int]:
    """Tile sizes measured on an H200; two warps, because four make Triton use Hopper's wgmma, which gains nothing here."""
    tile = {"BN": min(64, max(16, triton.next_power_of_2(out))), "BK": 32}
    return tile | ({"BM": 128, "num_warps": 4, "num_stages": 1} if depth <= 32 else {"BM": 64, "num_warps": 2, "num_stages": 3})


def _weight_tiles(out: int, depth: int) -> dict[str, int]:
    """Likewise; with four warps the transposed operand would make wgmma three times slower."""
    high, wide = min(64, max(16, triton.next_power_of_2(out))), min(128, max(16, triton.next_power_of_2(depth)))
    return {"BM": 32, "BN": high, "BK": wide, "num_warps": 1 if high * wide <= 1024 else 2, "num_stages": 3}


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    rows, batch, channels = x.shape[:3]
    out, (kh, kw) = weight.shape[1], weight.shape[3:]
    y = _rows_conv2d_fake(x, weight, bias, padding)
    packed = weight.permute(0, 1, 3, 4, 2).contiguous()  # [R, O, KH, KW, C]: a tile's depth is contiguous
    values = batch * y.shape[3] * y.shape[4]
    tiles = _forward_tiles(out, kh * kw * channels)
    grid = (triton.cdiv(values, tiles["BM"]), triton.cdiv(out, tiles["BN"]), rows)
    options = _sizes(x, y, (kh, kw), padding) | _precision(x) | tiles | {"HAS_BIAS": bias is not None}
    bias = packed if bias is None else bias
    _forward_kernel[grid](x, packed, bias, y, *x.stride(), bias.stride(0), bias.stride(1), values, **options)
    return y


def _launch_weight(dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows, batch, channels = x.shape[:3]
    out, (kh, kw) = dy.shape[2], kernel
    dy = _channels_last(dy)
    depth, values = kh * kw * channels, batch * dy.shape[3] * dy.shape[4]
    tiles = _weight_tiles(out, depth)
    across = triton.cdiv(out, tiles["BN"]) * triton.cdiv(depth, tiles["BK"])
    splits = max(1, min(_PROGRAMS // (rows * across), values // (16 * tiles["BM"])))
    share = triton.cdiv(triton.cdiv(values, splits), tiles["BM"]) * tiles["BM"]
    splits = triton.cdiv(values, share)
    dw = torch.empty(splits, rows, out, depth, dtype=torch.float32, device=x.device)
    db = torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    options = _sizes(x, dy, kernel, padding) | _precision(x) | tiles
    _weight_kernel[splits, across, rows](dy, x, dw, db, *x.stride(), values, share, **options)
    dw, db = (dw[0], db[0]) if splits == 1 else (dw.sum(0), db.sum(0))
    return dw.to(x.dtype).view(rows, out, kh, kw, channels).permute(0, 1, 4, 2, 3), db.to(x.dtype)


_PROGRAMS = 132 * 8  # about eight programs for each of a large GPU's multiprocessors keep it busy


if triton is not None:

    @triton.jit
    def _operand(t, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rounds to nearest TF32; the tensor cores alone would cut the low bits off."""
        if ROUND:
            t = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1)
        return t

    @triton.jit
    def _forward_kernel(  # type: ignore[no-untyped-def]
        x, w, bias, y, sxr, sxb, sxc, sxh, sxw, sbr, sbo, values,
        C: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
        HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """y[pixels, out] = patches[pixels, depth] @ w[out, depth].T + bias, for one row per program_id(2)."""
        row = tl.program_id(2).to(tl.int64)
        depth: tl.constexpr = KH * KW * C
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        oh, ow, b = (m // OW) % OH - PH, m % OW - PW, m // (OW * OH)
        start = x + row * sxr + b * sxb + oh * sxh + ow * sxw
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, depth, BK):
            k = k0 + tl.arange(0, BK)
            c, kh, kw = k % C, (k // C) // KW, (k // C) % KW
            ih, iw = oh[:, None] + kh[None, :], ow[:, None] + kw[None, :]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < values)[:, None] & (k < depth)[None, :]
            patch = tl.load(start[:, None] + (kh * sxh + kw * sxw + c * sxc)[None, :], mask=inside, other=0.0)
            weights = tl.load(
                w + row * (OUT * depth) + o[None, :] * depth + k[:, None], mask=(k < depth)[:, None] & (o < OUT)[None, :], other=0.0
            )
            acc = tl.dot(_operand(patch, ROUND), _operand(weights, ROUND), acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + row * sbr + o * sbo, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
        tl.store(y + row * values * OUT + m[:, None] * OUT + o[None, :], acc, mask=(m < values)[:, None] & (o < OUT)[None, :])

    @triton.jit
    def _weight_kernel(  # type: ignore[no-untyped-def]
        dy, x, dw, db, sxr, sxb, sxc, sxh, sxw, values, share,
        C: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
        PRECISION: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """dw[out, depth] = dy[pixels, out].T @ patches[pixels, depth], over one share of the pixels of one row."""
        part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
        depth: tl.constexpr = KH * KW * C
        across: tl.constexpr = (depth + BK - 1) // BK
        ko = tl.program_id(1) % across
        o = (tl.program_id(1) // across) * BN + tl.arange(0, BN)
        k = ko * BK + tl.arange(0, BK)
        c, kh, kw = k % C, (k // C) // KW, (k // C) % KW
        shift = kh * sxh + kw * sxw + c * sxc
        acc = tl.zeros((BN, BK), dtype=tl.float32)
        total = tl.zeros((BN,), dtype=tl.float32)
        for m0 in range(part * share, tl.minimum(part * share + share, values), BM):
            m = m0 + tl.arange(0, BM)
            oh, ow, b = (m // OW) % OH - PH, m % OW - PW, m // (OW * OH)
            ih, iw = oh[:, None] + kh[None, :], ow[:, None] + kw[None, :]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < values)[:, None] & (k < depth)[None, :]
            start = x + row * sxr + b * sxb + oh * sxh + ow * sxw
            patch = tl.load(start[:, None] + shift[None, :], mask=inside, other=0.0)
            here = (m < values)[:, None] & (o < OUT)[None, :]
            d = tl.load(dy + row * values * OUT + m[:, None] * OUT + o[None, :], mask=here, other=0.0)
            acc = tl.dot(tl.trans(_operand(d, ROUND)), _operand(patch, ROUND), acc, input_precision=PRECISION)
            total += tl.sum(d.to(tl.float32), 0)
        at = (part * tl.num_programs(2) + row) * OUT + o
        tl.store(dw + at[:, None] * depth + k[None, :], acc, mask=(o < OUT)[:, None] & (k < depth)[None, :])
        if ko == 0:
            tl.store(db + at, total, mask=o < OUT)
