"""When workers talk: a schedule that can be printed and tested.

A synchronisation says, for each step ``t`` = 1, 2, …, at which moment of the step an exchange happens, if any:

- ``GRADIENTS``: after the backward pass the optimiser receives ``Σ_j K_ij g_j`` instead of ``g_i``;
- ``BEFORE``: ``w_t = Σ_j K_ij w_{t−1,j} + u_i``; the mix uses the weights from before this step's gradient, so it
  travels while the gradient is computed;
- ``AFTER``: the update first, then the mix of the updated weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from hocket.compression.base import Compressor
from hocket.errors import HocketError, is_number, is_whole, nearest
from hocket.topology.base import Topology


class Moment(Enum):
    """At which moment of a step workers exchange."""

    NEVER = "never"
    GRADIENTS = "gradients"
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class ServerAction:
    """What a worker does after a gradient, with servers; the gradient is always added to the sum that it pushes next."""

    push: bool = True
    fetch: bool = True
    local: bool = False
    """Update its own weights with this gradient."""


@dataclass(frozen=True)
class Sync(ABC):
    """Base of all synchronisations."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    only_weights: ClassVar[bool] = False
    """Whether it can exchange weights only."""
    default_weights: ClassVar[bool] = True
    """Whether weights are exchanged where the strategy names nothing (gossip always defaults to weights)."""
    default_topology: ClassVar[str] = "allreduce"
    """The name of the topology of a strategy that names none."""
    asynchronous: ClassVar[bool] = False
    """Whether a worker steps without waiting for all others; it is then a program that sends messages."""
    static_partition: ClassVar[bool] = True
    """Whether every worker has its own part of an epoch; otherwise a worker that is ready takes the next mini-batch."""
    keeps_replicas_equal: ClassVar[bool] = False
    """Whether replicas are equal after every step if all workers receive the same mean of gradients."""
    predicts: ClassVar[bool] = False
    """Whether every second update only predicts the weights, and is taken back (:mod:`hocket.programs.two_stage`)."""
    accumulates_momentum: ClassVar[bool] = False
    """Whether ``exchange=momentum`` may exchange the momentum of ``period`` steps."""
    pushes_gradients: ClassVar[bool] = False
    """With servers: whether workers push gradients and the servers run the optimiser."""
    averages_weights: ClassVar[bool] = False
    """With servers: whether the workers run the optimisers and the servers average weights."""

    @property
    def max_staleness(self) -> float:
        """With servers: how many steps a worker may be ahead of the slowest."""
        return 0.0

    @property
    def overlaps(self) -> bool:
        """With servers: whether fetched weights travel while the next gradient is computed."""
        return False

    @property
    def warm_steps(self) -> int:
        """With servers: how many first steps worker 0 makes alone."""
        return 0

    @property
    def delay_compensation(self) -> tuple[str, float]:
        """With servers: the method that compensates for the staleness of a gradient, and its strength λ."""
        return "none", 0.0

    @property
    def outer_optimizer(self) -> dict[str, float] | None:
        """With servers: the settings of the outer optimiser there, where workers push displacements; None: they push gradients."""
        return None

    @property
    def outer_settings(self) -> tuple[float, float] | None:
        """Rate and momentum of the outer optimiser, its fields ``lr`` and ``momentum``; None where there is none."""
        return None

    @property
    def push_quorum(self) -> int:
        """With servers and workers that do not wait for each other: how many workers' pushes make one update."""
        return 1

    @property
    def push_average(self) -> tuple[bool, bool, float]:
        """How the pushes of a quorum are averaged: whether by their steps, whether their directions; and for how many seconds it
        waits for more of them."""
        return False, False, 0.0

    def meets(self, steps: int, seconds: float) -> bool:
        """With ``averages_weights``: whether a worker calls the others, so long after the last mean; at ``period`` it must."""
        return False

    def batches_ahead(self, steps: int) -> int:
        """With ``averages_weights``: how many mini-batches a worker takes with a mean, given the steps it made since the last."""
        return 1

    @property
    def outer_step(self) -> Sync | None:
        """With ``averages_weights``: the synchronisation whose ``factors`` and ``apply`` make the new weights; None: the mean,
        weighted by steps."""
        return None

    def server_action(self, step: int) -> ServerAction:
        """With servers: what a worker does after its ``step``-th gradient (from 1)."""
        return ServerAction()

    @property
    def period(self) -> int:
        """Steps between exchanges."""
        return 1

    def expected_period(self, step_s: float) -> int:
        """The expected steps between exchanges where they depend on the seconds of a step."""
        return self.period

    @property
    def residual_stays(self) -> bool:
        """Whether error feedback leaves the residual of exchanged weights in them, not in the compressor's state."""
        return False

    def averages_moments(self, step: int, second: bool) -> bool:
        """Whether workers average the first (or the ``second``) moments of their optimisers after ``step``."""
        return False

    @abstractmethod
    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        """When in step ``step`` (from 1) workers exchange ``weights`` (or gradients).

        ``uniform``: whether the topology gives all workers the same mean.
        """

    def rebases(self, step: int) -> bool:
        """Whether all replicas have the same weights after ``step``; displacements are measured from these weights on."""
        return False

    # --- weights that are exchanged after an update (Moment.AFTER) -----------------------------------------------------------

    @property
    def parts(self) -> int:
        """Of so many parts of the model each exchange carries one, in turn."""
        return 1

    def part(self, step: int) -> int:
        """Which part the exchange after ``step`` carries."""
        return 0

    @property
    def delay(self) -> int:
        """How many steps workers make before they take the result of an exchange."""
        return 0

    def init_state(self, rows: Tensor) -> dict[str, Tensor]:
        """The state of a bucket before the first step."""
        return {}

    def regrouped(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state when the number of workers has changed."""
        return state

    def outgoing(self, rows: Tensor, state: dict[str, Tensor]) -> Tensor:
        """What is sent of a worker's weights: a copy, since the worker goes on meanwhile."""
        return rows.clone()

    @property
    def sends_weights(self) -> bool:
        """Whether what is sent are the worker's weights as they are."""
        return False

    @property
    def weighs_displacements(self) -> bool:
        """Whether :meth:`factors` scale the displacements before their mean."""
        return False

    def factors(self, norms: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Factors on the displacements of all workers, given their ``norms`` ``[rows, workers]``, and the new state."""
        return torch.ones_like(norms), state

    def apply(self, mixed: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The new weights, given the mixed weights (where there is an outer optimiser, after its step), and the new state."""
        return mixed, state

    def merge(
        self, common: Tensor, rows: Tensor, sent: Tensor, state: dict[str, Tensor], workers: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """With a delay: the weights to go on with, given the ``common`` ones, the worker's own, and its own when it sent."""
        return common + (rows - sent), state

    def refusal(self, topology: Topology, compressor: Compressor, exchange: str | None, weights: bool) -> str | None:
        """Why this synchronisation does not go with the rest of the strategy and what to use instead, or None.

        ``exchange`` is what the strategy names (None: nothing), ``weights`` whether weights are exchanged in the end.
        """
        if reason := self._topology_refusal(topology, compressor, exchange):
            return reason
        if self.only_weights and exchange == "gradients":
            return f"{self.name} exchanges weights by definition; leave exchange=gradients out, or use local({self.period})"
        if self.residual_stays and not (weights and topology.uniform and compressor.residual_stays):
            return (
                "residual=weights needs weights that are exchanged under allreduce with a compression that has error feedback, "
                "such as topk; leave it out"
            )
        return None

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        """Why this synchronisation does not go with ``topology``, or None; here for workers that step together."""
        if topology.asynchronous_only:
            return f"{topology.partner_rule} is for asynchronous workers; use async + gossip(pushsum), or gossip(exponential)"
        return self._server_refusal(exchange) if topology.has_servers else None

    def _server_refusal(self, exchange: str | None) -> str | None:
        """Why this synchronisation does not go with servers that run the optimiser, or None."""
        if not self.pushes_gradients:
            p = self.period
            return f"a parameter server takes the gradients of every step; for local steps use downpour(push={p}, fetch={p})"
        return "workers push gradients and fetch weights; leave exchange=weights out" if exchange == "weights" else None


@dataclass(frozen=True)
class Asynchronous(Sync):
    """Base of the synchronisations under which workers do not step together."""

    default_weights: ClassVar[bool] = False
    default_topology: ClassVar[str] = "server"
    asynchronous: ClassVar[bool] = True
    static_partition: ClassVar[bool] = False
    pushes_gradients: ClassVar[bool] = True

    @property
    def max_staleness(self) -> float:
        return math.inf

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.GRADIENTS if self.server_action(step).push else Moment.NEVER

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        if topology.sums_on_servers:
            return f"servers with role=sum wait for all workers, and {self.name} does not wait; leave role=sum out, or use bulk"
        if not topology.has_servers:
            return (
                f"{topology.name} needs workers that step together, and under {self.name} they do not; "
                f"use {self._asynchronous_topologies()}"
            )
        return self._server_refusal(exchange)

    def _asynchronous_topologies(self) -> str:
        """Strategies of this synchronisation that work, for an error."""
        return f"{self.name} + server"


@dataclass(frozen=True)
class Meeting(Asynchronous):
    """Base of the synchronisations under which workers step independently, and now and then all average their weights."""

    default_weights: ClassVar[bool] = True
    only_weights: ClassVar[bool] = True
    default_topology: ClassVar[str] = "allreduce"
    pushes_gradients: ClassVar[bool] = False
    averages_weights: ClassVar[bool] = True

    def batches_ahead(self, steps: int) -> int:
        return self.period

    def server_action(self, step: int) -> ServerAction:
        return ServerAction(push=False, fetch=False, local=True)

    def moment(self, step: int, weights: bool, uniform: bool = True) -> Moment:
        return Moment.AFTER if step % self.period == 0 else Moment.NEVER

    def _topology_refusal(self, topology: Topology, compressor: Compressor, exchange: str | None) -> str | None:
        if topology.sums_on_servers:
            return super()._topology_refusal(topology, compressor, exchange)
        if topology.has_server_settings:
            return (
                f"under {self.name} the workers run the optimisers, so servers have no setting but shards; write server(shards=n)"
            )
        if not (topology.one_mean or topology.has_servers):
            return f"{self.name} averages the weights of all workers at once; use allreduce or server"
        if compressor.compresses:
            return f"{self.name} averages whole weights, each after another number of steps; leave the compression out"
        return None


COMPENSATIONS = {"none": 0.0, "rate": 0.0, "taylor": 0.04, "adaptive": 2.0}
"""Methods that compensate for the staleness of a gradient, with the default strength λ of each."""


def compensation(kind: object, strength: object, name: str) -> None:
    """Refuse an unknown compensation, and a strength where there is none."""
    if kind not in COMPENSATIONS:
        hint = nearest(str(kind), COMPENSATIONS) or "."
        raise HocketError(f"{name}(compensation={kind!r}): unknown{hint} Use one of {', '.join(COMPENSATIONS)}.")
    if strength is None:
        return
    if kind in ("none", "rate"):
        raise HocketError(f"{name}(strength={strength!r}): only the compensations taylor and adaptive have a strength.")
    number(strength, name, "strength", 0, math.inf)


def whole(value: object, name: str, argument: str, least: int = 1) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if not is_whole(value, least):
        raise HocketError(f"{name}({argument}={value!r}): {argument} must be a whole number of at least {least}.")


def number(value: object, name: str, argument: str, low: float, high: float) -> None:
    """Refuse anything but a number in [low, high)."""
    if not is_number(value) or not low <= value < high:
        raise HocketError(f"{name}({argument}={value!r}): {argument} must be a number in [{low:g}, {high:g}).")
