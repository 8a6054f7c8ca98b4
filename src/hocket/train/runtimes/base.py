"""The protocol between a job and what carries out its exchanges.

A job has the hooks on model and optimiser. It makes a :class:`Binding`, calls :meth:`Runtime.join` with it, and then, per step:

1. where ``mixes_gradients``: ``gradient_ready(bucket, rows)`` for every bucket in order, ``flags_ready(flags)``, then
   ``gradients_done()``; the gradients of all workers are mixed, in place, when it returns;
2. ``before_update(gradients)``, with this step's gradients as rows of their own where ``takes_gradients``;
3. the optimiser's update, if ``steps_locally`` (read after ``before_update``);
4. ``after_update()``.

Weights are written into ``Binding.weights`` by these calls, ``join``, ``averaged`` and ``finish``, and at no other time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import is_distributed, local
from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.split.sharded import ShardedState
from hocket.strategy import Strategy
from hocket.train.ledger_view import JobLedger
from hocket.train.watch import Where

if TYPE_CHECKING:
    from hocket.data.elastic_stream import SampleStream
    from hocket.programs.collective import CollectiveProgram
    from hocket.programs.two_stage import TwoStageProgram
    from hocket.train.elastic import Stateful

T = TypeVar("T")


@dataclass
class Binding:
    """What a job trains, as its runtime sees it."""

    given_model: nn.Module | ref[nn.Module]
    given_optimizer: torch.optim.Optimizer | ref[torch.optim.Optimizer]
    strategy: Strategy
    layout: Layout
    params: list[list[nn.Parameter]] = field(default_factory=list)
    """The parameters of each bucket; none where the parameters do not lie in rows."""
    weights: list[Tensor] = field(default_factory=list)
    """Rows ``[1, values]`` per bucket; the parameters are views of them, or distributed (FSDP2) and copied (:attr:`copied`)."""
    accumulate: int = 1
    nonfinite: str = "raise"
    check: bool | str = True
    seed: int = 0
    weight: float = 1.0
    """This worker's share of the next exchange: its samples × N / all samples."""
    samples: float = 1.0
    """Of all workers in the next exchange, where the loop says so."""
    backwards: int = 0
    """Backward passes since the last step, where they are counted."""

    @property
    def model(self) -> nn.Module:
        return _alive(self.given_model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return _alive(self.given_optimizer)

    def release(self) -> None:
        """The job has ended: model and optimiser live as long as somebody else needs them."""
        self.given_model, self.given_optimizer = ref(self.model), ref(self.optimizer)
        self.params, self.weights = [], []
        for name in ("_homes", "copied"):
            self.__dict__.pop(name, None)

    @cached_property
    def _homes(self) -> tuple[list[nn.Parameter], list[Tensor], list[int]]:
        views = [view for b, rows in zip(self.layout.buckets, self.weights, strict=True) for view in b.views(rows, 0)]
        return [p for own in self.params for p in own], views, [view.data_ptr() for view in views]

    @cached_property
    def copied(self) -> bool:
        """Whether PyTorch keeps the memory of the parameters, so that rows are copies of what this process holds of them."""
        return any(is_distributed(p) for own in self.params for p in own)

    @torch.no_grad()
    def publish(self) -> None:
        """The parameters become what their rows are, where these are copies."""
        if self.copied:
            params, views, _ = self._homes
            torch._foreach_copy_([local(p.data) for p in params], views)

    @torch.no_grad()
    def reclaim(self) -> None:
        """Parameters whose ``data`` the loop has replaced (``p.data = p.data.clamp(…)``) are views of their rows again, with the
        new values. Rows that are copies become what the parameters are."""
        if not self.params:
            return
        params, views, addresses = self._homes
        if self.copied:
            torch._foreach_copy_(views, [local(p.data) for p in params])
            return
        if [p.data_ptr() for p in params] == addresses:
            return
        names = [slot.name for b in self.layout.buckets for slot in b.slots]
        for name, p, view in zip(names, params, views, strict=True):
            if (p.dtype, p.shape, p.device) != (view.dtype, view.shape, view.device):
                raise HocketError(
                    f"Parameter {name} is {_kind(p)} now, but was {_kind(view)} when the job began, so it cannot be exchanged; "
                    "convert the model before hocket.parallelize(…), or call job.detach() and parallelize again."
                )
            if p.data_ptr() != view.data_ptr():
                view.copy_(p.data)
                p.data = view

    @property
    def buffers(self) -> list[Tensor]:
        """The floating-point buffers."""
        return [b for b in self.model.buffers() if b.is_floating_point()]

    @property
    def flat_buffers(self) -> Tensor | None:
        """The same as one flat float32 tensor; None where there are none."""
        buffers = self.buffers
        return torch.cat([b.detach().flatten().float() for b in buffers]) if buffers else None

    def set_buffers(self, flat: Tensor | None) -> None:
        """Write :attr:`flat_buffers` back; None changes nothing."""
        if flat is None:
            return
        buffers = self.buffers
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.data.copy_(part.view(buffer.shape))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What is written into weights and buffers inside is undone at the end."""
        tensors = [*self.weights, *self.buffers]
        kept = [t.clone() for t in tensors]
        try:
            yield
        finally:
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.data.copy_(old)


def _alive(held: T | ref[T]) -> T:
    found = held() if isinstance(held, ref) else held
    if found is None:
        raise HocketError("The job has ended, and its model or optimiser was freed; keep the model that job.finish() returns.")
    return found


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


class FixedWorkers:
    """What a runtime has whose workers do not come and go."""

    zero: int = 0
    stream: SampleStream | None = None
    began: tuple[int, int] | None = None
    program: CollectiveProgram | TwoStageProgram | None = None

    cluster: Cluster

    @property
    def process(self) -> int:
        return self.cluster.rank

    @property
    def processes(self) -> int:
        return self.cluster.processes

    def figures(self) -> dict[str, Any]:
        return {}

    def share(self, name: str, one: Stateful) -> None:
        pass


class Runtime(Protocol):
    """Carries out the exchanges of one job."""

    @property
    def zero(self) -> int:
        """1: each worker keeps a part of the optimiser's state (ZeRO-1)."""

    @property
    def stream(self) -> SampleStream | None:
        """Which samples this worker computes, where workers come and go."""

    @property
    def began(self) -> tuple[int, int] | None:
        """This worker's place and the number of workers, where an elastic run began with this worker."""

    @property
    def program(self) -> CollectiveProgram | TwoStageProgram | None:
        """The strategy's program, where workers make collective exchanges."""

    def figures(self) -> dict[str, Any]:
        """Figures beside those of the ledger."""

    def share(self, name: str, one: Stateful) -> None:
        """Workers that join an elastic run get this state, too."""

    @property
    def cluster(self) -> Cluster:
        """Where workers agree on the model before they start."""

    @property
    def process(self) -> int:
        """The number of this process in the whole job, by which its state is named."""

    @property
    def processes(self) -> int:
        """How many processes the whole job has."""

    @property
    def synchronous(self) -> bool:
        """Whether all workers make every step together; then all must have the same options."""

    @property
    def in_rows(self) -> bool:
        """Whether parameters lie in rows."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange with."""

    @property
    def takes_gradients(self) -> bool:
        """Whether :meth:`before_update` needs the gradients."""

    @property
    def mixes_gradients(self) -> bool:
        """Whether the step under way exchanges gradients during the backward pass."""

    @property
    def weighs_gradients(self) -> bool:
        """Whether gradients of this step count by the worker's number of samples."""

    @property
    def linear(self) -> bool:
        """Whether gradients that are mixed twice are as those that are mixed once."""

    @property
    def keeps_residuals(self) -> bool:
        """Whether mixed gradients may hold residuals of earlier ones, also of a parameter that no worker used."""

    @property
    def steps_locally(self) -> bool:
        """Whether the worker's own optimiser makes the step under way."""

    @property
    def step(self) -> int:
        """Steps done."""

    @property
    def where(self) -> Where:
        """Whose gradients are looked at, and where bad ones are counted."""

    @property
    def sharded(self) -> ShardedState | None:
        """The optimiser's state, where each worker has a part of it."""

    @property
    def ledger(self) -> JobLedger:
        """The figures of this job."""

    def terms(self) -> list[str]:
        """What all workers must agree on beyond the strategy."""

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        """Refuse what this runtime cannot do, in one sentence."""

    def join(self, binding: Binding) -> None:
        """Begin."""

    def hooked(self) -> None:
        """The job's hooks are on the optimiser; time counts from here."""

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        """The gradients of one bucket are complete; called in bucket order."""

    def flags_ready(self, flags: list[bool]) -> None:
        """Flags to be combined with those of other workers, as the last part of the exchange of gradients."""

    def gradients_done(self) -> list[bool]:
        """Wait until all gradients are mixed; the flags that any worker has set, where flags were given."""

    def discard_gradients(self) -> None:
        """The loop has discarded the gradients mixed since the last step: they leave nothing behind."""

    def any_worker(self, flag: bool) -> bool:
        """Whether any worker has set the flag (a collective)."""

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        """The optimiser is about to step."""

    def after_update(self) -> None:
        """The optimiser has stepped."""

    def drain(self) -> None:
        """Wait for what is under way."""

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The mean model for a while."""

    def finish(self) -> nn.Module:
        """End with the mean model, the same on all workers."""

    def leave(self) -> None:
        """Stop exchanging."""

    def full_state(self) -> dict[str, Any] | None:
        """Model and optimiser as if nothing had been sharded, on worker 0; None elsewhere."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
