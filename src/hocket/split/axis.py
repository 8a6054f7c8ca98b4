"""One axis of a mesh: the processes along it, their exchanges, and the bytes and seconds of these.

Everything that tensor or pipeline parallelism sends goes through an axis, so all bytes are counted. Bytes are those
of the wire, as in the ledger of the data axis: payload, packet headers and frames. Seconds are those in which this process waited.

Exchanges as autograd functions:

========== ==================== =======================
function   forward              backward
========== ==================== =======================
copied     the same tensor      the sum over the axis
summed     the sum over it      the same gradient
gathered   all slices, joined   this process's own slice
========== ==================== =======================

Every process computes the same loss from what was summed or gathered, so these gradients are already whole and need no sum. Where
a whole tensor enters split layers, each process has the gradient of its own paths alone: there ``copied`` adds them up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hocket.cluster.base import Cluster
from hocket.cluster.message import framed, ring_bytes
from hocket.cluster.plain import all_gather_plain


@dataclass
class CommStats:
    """The bytes and seconds of this process's exchanges along an axis since the last :meth:`take`."""

    bytes_sent: int = 0
    exchanges: int = 0
    seconds: float = 0.0

    def take(self) -> CommStats:
        """The figures so far; counting restarts from zero."""
        taken = replace(self)
        self.bytes_sent, self.exchanges, self.seconds = 0, 0, 0.0
        return taken


@dataclass(eq=False, repr=False)
class Axis:
    """The processes that differ from this one in one coordinate alone."""

    name: str
    ranks: tuple[int, ...] = (0,)
    """Those of the whole job, in order of the coordinate."""
    place: int = 0
    """This process's own coordinate."""
    group: dist.ProcessGroup | None = None
    cluster: Cluster | None = None
    """The whole job's; it names the lost worker where a connection breaks."""
    comm_stats: CommStats = field(default_factory=CommStats)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Axis({self.name}, {self.place} of {self.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """A copy of a model still exchanges over the same axis."""
        return self

    # --- all together ------------------------------------------------------------------------------------------------------

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over the axis, in place; the same bits on all processes."""
        if self.size == 1 or values.is_meta:
            return values
        self._count(ring_bytes(values.numel() * values.element_size(), self.size))
        self._blocked(lambda: dist.all_reduce(values, group=self.group))
        return values

    def all_gather(self, values: Tensor, dim: int = -1) -> Tensor:
        """The ``values`` of all processes, concatenated along ``dim`` in the order of the axis."""
        if self.size == 1 or values.is_meta:
            return torch.cat([values] * self.size, dim) if self.size > 1 else values
        values = values.contiguous()
        self._count((self.size - 1) * framed(values.numel() * values.element_size()))
        everyone = [torch.empty_like(values) for _ in self.ranks]
        self._blocked(lambda: dist.all_gather(everyone, values, group=self.group))
        return torch.cat(everyone, dim)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Every process's tensors become the first process's."""
        if self.size == 1 or not tensors:
            return
        for kind in dict.fromkeys(t.dtype for t in tensors):
            some = [t for t in tensors if t.dtype == kind]
            flat = torch.cat([t.flatten() for t in some])
            values = self.all_reduce(flat if self.place == 0 else flat.zero_()).split([t.numel() for t in some])
            for tensor, value in zip(some, values, strict=True):
                tensor.copy_(value.view_as(tensor))

    def gather_plain(self, own: Any) -> list[Any]:
        """Plain data of all processes, in the order of the axis."""
        return all_gather_plain(own, self.group) if self.size > 1 else [own]

    # --- one to one --------------------------------------------------------------------------------------------------------

    def send(self, values: Tensor, to: int, tag: int = 0) -> Any:
        """Start sending to the process at coordinate ``to``; ``values`` must not change until ``wait()`` of the result."""
        self._count(framed(values.numel() * values.element_size()))
        return dist.isend(values.to(wire()), self.ranks[to], group=self.group, tag=tag)

    def receive(self, into: Tensor, source: int, tag: int = 0) -> Any:
        """Start receiving from the process at coordinate ``source``; returns the work to wait for."""
        there = wire()
        buffer = into if there == into.device else torch.empty_like(into, device=there)
        work = dist.irecv(buffer, self.ranks[source], group=self.group, tag=tag)
        return work if buffer is into else Received(work, buffer, into)

    def wait(self, work: Any) -> None:
        """Wait for a send or receive; the time counts."""
        self._blocked(work.wait)

    # --- accounts ----------------------------------------------------------------------------------------------------------

    def _count(self, sent: int) -> None:
        self.comm_stats.bytes_sent += sent
        self.comm_stats.exchanges += 1

    def _blocked(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            self._wait_for(work)
        except RuntimeError as error:
            raise (error if self.cluster is None else self.cluster.explain(error)) from error
        self.comm_stats.seconds += time.perf_counter() - start

    def _wait_for(self, work: Callable[[], object]) -> None:
        if self.cluster is None:
            work()
        else:
            self.cluster.watched(self.name, self.ranks, work)


@dataclass
class Received:
    """A message received into a buffer and copied to its destination."""

    work: Any
    buffer: Tensor
    into: Tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.work.wait(timeout)
        self.into.copy_(self.buffer)


def wire() -> torch.device:
    """The device from which a tensor can be sent to one process: the CPU for Gloo, the GPU for NCCL."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")


# --- autograd functions ------------------------------------------------------------------------------------------------------


def copied(x: Tensor, axis: Axis) -> Tensor:
    """A whole tensor that enters split layers."""
    return x if axis.size == 1 else _Copied.apply(x, axis)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over all processes."""
    return x if axis.size == 1 else _Summed.apply(x, axis)


def gathered(x: Tensor, axis: Axis, dim: int = -1, widths: Sequence[int] | None = None) -> Tensor:
    """The concatenation of all processes' slices along ``dim``; ``widths`` says how wide each is where they differ."""
    return x if axis.size == 1 else _Gathered.apply(x, axis, dim % x.dim(), widths)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(_own(grad)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(_own(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, widths: Sequence[int] | None) -> Tensor:
        widths = widths or [x.shape[dim]] * axis.size
        ctx.dim, ctx.start, ctx.width = dim, sum(widths[: axis.place]), x.shape[dim]
        widest = max(widths)
        if min(widths) == widest:
            return axis.all_gather(x, dim)
        padding = [0, 0] * (x.dim() - 1 - dim) + [0, widest - x.shape[dim]]
        everyone = axis.all_gather(F.pad(x, padding), dim)
        return torch.cat([everyone.narrow(dim, k * widest, width) for k, width in enumerate(widths)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.width), None, None, None


def _own(values: Tensor) -> Tensor:
    """A copy that may be overwritten: sums are computed in place, and the caller may still use the input."""
    return values.clone(memory_format=torch.contiguous_format)
