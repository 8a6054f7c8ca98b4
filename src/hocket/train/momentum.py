"""What is exchanged of an optimiser's state: the momentum under ``exchange=momentum``, moments under ``local(p, moments=…)``.

The state stays in the optimiser, which alone handles clipping, checkpoints and skipped steps.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from hocket.cluster.dtensor import local
from hocket.cluster.layout import Layout
from hocket.optim import OneBitAdam, moment_name
from hocket.programs.collective import CollectiveProgram
from hocket.programs.two_stage import TwoStageProgram
from hocket.train.checks import Factory
from hocket.train.optimizer_copy import OptimizerCopy
from hocket.train.runtimes.base import Binding


class StateRows(Protocol):
    """An optimiser's state as rows: of a job, or of stacked replicas (:class:`hocket.train.stacked.StackedOptimizer`)."""

    @property
    def first(self) -> Optimizer:
        """The optimiser of the first row."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """All of them; one, where it serves all rows."""

    def rows_of(self, bucket: int, name: str) -> Tensor:
        """One kind of state of a bucket, ``[rows, values]``, a copy; zeros where there is none yet."""

    def write_rows(self, bucket: int, name: str, rows: Tensor) -> None:
        """The inverse; what is not there yet stays so."""


class JobRows:
    """The state of one worker's own optimiser."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    @property
    def first(self) -> Optimizer:
        return self._binding.optimizer

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self._binding.optimizer]

    def rows_of(self, bucket: int, name: str) -> Tensor:
        rows = self._binding.layout.buckets[bucket].empty(1)
        for view, state in self._pairs(bucket, name, rows):
            view.copy_(state)
        return rows

    def write_rows(self, bucket: int, name: str, rows: Tensor) -> None:
        for view, state in self._pairs(bucket, name, rows):
            state.copy_(view)

    def _pairs(self, bucket: int, name: str, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        views, states = self._binding.layout.buckets[bucket].views(rows, 0), self._binding.optimizer.state
        own = [states.get(p, {}).get(name) for p in self._binding.params[bucket]]
        return [(view, local(state)) for view, state in zip(views, own, strict=True) if state is not None]


class MomentumRows:
    """Rows of gradients become rows of momentum once the optimiser's variance is fixed; it takes their mean for its own.

    After local steps it is the mean of each worker's momentum over them, weighed by the rates.
    """

    def __init__(self, rows: StateRows, layout: Layout) -> None:
        self._rows, self._layout = rows, layout

    @property
    def exchanges(self) -> bool:
        """Whether the next step exchanges anything."""
        return self._optimizer.sends != "nothing"

    def enter(self, bucket: int, gradients: Tensor) -> bool:
        """``β₁m + (1−β₁)g_i`` instead of ``g_i``, in place; False: until the variance is fixed gradients travel as they are."""
        optimizer, group = self._optimizer, self._layout.buckets[bucket].group
        if optimizer.sends == "gradients":
            return False
        gradients.lerp_(self._rows.rows_of(bucket, "exp_avg"), optimizer.param_groups[group]["betas"][0])
        if before := optimizer.summed_rates(group):
            now = optimizer.rate(group)
            gradients.mul_(now).add_(self._rows.rows_of(bucket, "sum")).div_(now + before)
        return True

    @property
    def _optimizer(self) -> OneBitAdam:
        optimizer = self._rows.first
        assert isinstance(optimizer, OneBitAdam)  # others are refused with the strategy
        return optimizer


class MomentRows:
    """The first and the second moments of an optimiser, which workers average rarely."""

    def __init__(self, rows: StateRows, layout: Layout) -> None:
        self._rows, self._layout = rows, layout

    def read(self, bucket: int, second: bool) -> Tensor | None:
        """The moments of a bucket; None where its optimiser has none of this kind."""
        name = self._name(bucket, second)
        return None if name is None else self._rows.rows_of(bucket, name)

    def write(self, bucket: int, second: bool, rows: Tensor) -> None:
        """The inverse."""
        name = self._name(bucket, second)
        assert name is not None
        self._rows.write_rows(bucket, name, rows)

    def _name(self, bucket: int, second: bool) -> str | None:
        return moment_name(self._rows.first, self._layout.buckets[bucket].group, second)


def give_state(program: CollectiveProgram, rows: StateRows, momentum: bool) -> None:
    """Let a program exchange the parts of this state that its strategy names; ``momentum``: instead of gradients."""
    program.momentum = MomentumRows(rows, program.layout) if momentum else None
    program.moments = MomentRows(rows, program.layout)
    if isinstance(program, TwoStageProgram):
        program.optimizer_state = OptimizerCopy(lambda: rows.optimizers)


def take_momentum(optimizer: Optimizer, period: int) -> Optimizer:
    """The optimiser, which takes every ``period``-th gradient for the mean momentum once its variance is fixed; 0: no more."""
    assert isinstance(optimizer, OneBitAdam)  # others are refused with the strategy
    optimizer.momentum_period = period
    return optimizer


def taking_momentum(factory: Factory, period: int) -> Factory:
    """A factory like ``factory``, whose optimisers are prepared by :func:`take_momentum`."""
    return lambda params: take_momentum(factory(params), period)
