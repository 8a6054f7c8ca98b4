"""Whom workers talk to: a frozen spec, and the channel it becomes on a cluster.

A channel mixes rows linearly, ``x_i ← Σ_j K_ij x_j``: plainly (``mean``), coded (``coded``), or as what training exchanges:
gradients through a compressor with its error feedback, weights so that workers still reach consensus under compression.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.compression.base import Codec, Compressor, Context, Mixed, State
from hocket.compression.feedback import mean_with_feedback, with_residual


@dataclass(frozen=True)
class Topology(ABC):
    """Base of all topologies."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    one_mean: ClassVar[bool] = False
    """Whether an exchange is one mean over all workers, which the backend's all-reduce computes."""
    peer_to_peer: ClassVar[bool] = False
    """Whether each worker talks to a few partners, and no worker to all."""

    @property
    def uniform(self) -> bool:
        """Whether all workers receive the same mean."""
        return False

    @property
    def partner_rule(self) -> str:
        """Peer to peer: the name of the rule by which a worker finds its partners."""
        return ""

    @property
    def asynchronous_only(self) -> bool:
        """Whether it is for asynchronous workers alone."""
        return False

    @property
    def pairs_workers(self) -> bool:
        """Peer to peer: whether asynchronous workers can exchange two by two."""
        return False

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers: shards with an optimiser, in processes of their own."""
        return False

    @property
    def sums_on_servers(self) -> bool:
        """Whether servers compute the mean and the workers keep the optimiser."""
        return False

    @property
    def has_server_settings(self) -> bool:
        """Whether servers have settings of their own: an optimiser, a factor on the learning rate, a dtype of fetches."""
        return False

    def num_shards(self, workers: int) -> int:
        """The number of shards of the parameters where workers send messages; without servers every worker hosts one."""
        return workers

    @property
    def lr_factor(self) -> float:
        """With servers: the factor on the worker's learning rate."""
        return 1.0

    @property
    def server_optimizer(self) -> str | None:
        """With servers: the optimiser of the shards, if it is not the worker's."""
        return None

    @property
    def fetch_dtype(self) -> str:
        """With servers: the dtype in which weights travel to the workers."""
        return "fp32"

    def for_workers(self, workers: int, host_size: int) -> Topology:
        """The topology for so many workers, where their number changes: this one, if it fits."""
        return self

    @abstractmethod
    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        """This topology among the members of each group of ``subgroups``."""

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        """Why this topology cannot carry ``compressor`` (exchanging weights or gradients), or None."""
        return None


class Channel(ABC):
    """A topology bound to the subgroups of a cluster."""

    uniform: bool = False

    def __init__(self, cluster: Cluster, subgroups: Subgroups) -> None:
        self.cluster, self.subgroups = cluster, subgroups
        cluster.create_groups(subgroups)

    @abstractmethod
    def mean(self, rows: Tensor, context: Context) -> Tensor:
        """Plain mixing (may work in place)."""

    @abstractmethod
    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        """Mixing of coded rows; a worker's own value enters as the others decode it."""

    def mean_later(self, rows: Tensor, context: Context) -> Any:
        """Plain mixing, in place, which may go on in the background: the rows, or an object whose ``wait()`` returns them."""
        mixed = self.mean(rows, context)
        return rows if mixed is rows else rows.copy_(mixed)

    def price(self, compressor: Compressor, rows: Tensor) -> None:
        """Tell the cluster that workers encode these rows, decode what they hear and mix it."""
        if self.cluster.clock is not None and (methods := self.methods(compressor)):
            self.cluster.code(methods, rows.shape[1])

    def methods(self, compressor: Compressor) -> list[str]:
        """The names of a worker's own part of an exchange in a table of costs, from the exact to the general."""
        return compressor.methods if compressor.compresses else []

    def gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        """Mix gradients through a compressor, with its error feedback."""
        self.price(compressor, rows)
        mixed, _, state = mean_with_feedback(compressor, rows, self, state, context)
        return mixed, state

    def whole_gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> Tensor:
        """Mix gradients, and all that error feedback has held back of earlier ones, without compression."""
        return self.mean(with_residual(rows, state.get("error"), compressor.feedback_decay), context)

    @abstractmethod
    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        """Mix weights through a compressor."""

    def init_state(self, compressor: Compressor, rows: Tensor) -> State:
        """The state before the first exchange of weights, when ``rows`` are equal on all workers."""
        return {}

    def regrouped(self, compressor: Compressor, state: State, before: Channel, size: int) -> State:
        """What a worker keeps of its state of compressed rows of ``size`` values when its channel was another one before, with
        other workers. Sums over all workers are kept where a worker can do so alone."""
        return before.without_slices(compressor, state, size, self.subgroups.size)

    def without_slices(self, compressor: Compressor, state: State, size: int, workers: int) -> State:
        """The state without what belongs to a worker's place among the others of this channel, for one of ``workers`` workers."""
        return state

    def rebase(self, state: State, rows: Tensor, own: bool = False) -> State:
        """The state after all workers have the same ``rows``: displacements are measured from these. ``own``: nobody will write
        into them, so that no copy is needed."""
        return state

    # --- other workers -------------------------------------------------------------------------------------------------------

    def residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> dict[str, Tensor]:
        """What ``state`` holds back of gradients, by name, as rows ``[rows, size]`` whose mean the mean of all workers lacks."""
        return {name: state[name] for name in compressor.sums if name in state}

    def weight_residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> Tensor | None:
        """The same of exchanged weights."""
        return None

    def with_residuals(self, residuals: dict[str, Tensor]) -> State:
        """The inverse of :meth:`residuals`, where they are equal on all workers."""
        return dict(residuals)


def narrowed(rows: Tensor) -> Tensor:
    """Rows as codes take them: in float32. What codes add to (weights, public copies) may be float64."""
    return rows.to(torch.float32)


def without_shapes(context: Context) -> Context:
    """The context of rows that are not whole buckets."""
    return replace(context, shapes=None)
