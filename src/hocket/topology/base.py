"""Whom workers talk to: a frozen spec, and the channel it becomes on a cluster.

A channel mixes rows linearly, ``x_i ← Σ_j K_ij x_j``: plainly (``mean``), coded (``coded``), or as what training exchanges:
gradients through a compressor with its feedback, weights in the way that keeps compression and consensus together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.compression.base import Codec, Compressor, Context, Heard, State
from hocket.compression.feedback import mean_with_feedback
from hocket.compression.none import NoCompression


@dataclass(frozen=True)
class Topology(ABC):
    """Base of all topologies."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    @property
    def uniform(self) -> bool:
        """Whether everybody hears the same."""
        return False

    peer_to_peer: ClassVar[bool] = False
    """Whether each worker talks to a few others, and nobody to all."""

    @property
    def partner_rule(self) -> str:
        """Between peers: by which rule a worker finds its partners."""
        return ""

    @property
    def has_servers(self) -> bool:
        """Whether there are parameter servers: shards with an optimiser, on machines of their own."""
        return False

    @property
    def sums_on_servers(self) -> bool:
        """Whether servers compute the mean and the workers keep the optimiser."""
        return False

    def num_shards(self, workers: int) -> int:
        """Over how many shards the parameters lie where workers send messages; without servers every worker hosts one."""
        return workers

    @property
    def lr_factor(self) -> float:
        """On a server: the factor on the worker's learning rate."""
        return 1.0

    @property
    def server_optimizer(self) -> str | None:
        """On a server: the optimiser of the shards, if it is not the worker's own."""
        return None

    @property
    def fetch_dtype(self) -> str:
        """On a server: how precisely weights travel to the workers."""
        return "fp32"

    @abstractmethod
    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        """This topology among the members of each group of ``subgroups``."""

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        """Why this topology cannot carry ``compressor`` (exchanging weights or gradients), or None."""
        return None


class Channel(ABC):
    """A topology bound to a cluster and a subgroups."""

    uniform: bool = False

    def __init__(self, cluster: Cluster, subgroups: Subgroups) -> None:
        self.cluster, self.subgroups = cluster, subgroups
        cluster.create_groups(subgroups)

    @abstractmethod
    def mean(self, rows: Tensor, context: Context) -> Tensor:
        """Plain mixing (may work in place)."""

    @abstractmethod
    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context) -> Heard:
        """Mixing of coded rows; a worker's own value counts as it was sent."""

    def mean_later(self, rows: Tensor, context: Context) -> Any:
        """Plain mixing of ``rows``, in place, that may go on in the background: the rows, or something to wait for."""
        mixed = self.mean(rows, context)
        return rows if mixed is rows else rows.copy_(mixed)

    def gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        """Mix gradients through a compressor, with its error feedback."""
        heard, _, state = mean_with_feedback(compressor, rows, self, state, context)
        return heard, state

    @abstractmethod
    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        """Mix weights through a compressor."""

    def init_state(self, compressor: Compressor, rows: Tensor) -> State:
        """What to remember before the first exchange of weights; ``rows`` are equal on all workers then."""
        return {}

    def rebase(self, state: State, rows: Tensor) -> State:
        """All workers now stand at the same ``rows``: measure displacements from there."""
        return state


def plain(compressor: Compressor) -> bool:
    """Whether nothing is compressed."""
    return isinstance(compressor, NoCompression)


def slice_keys(keys: Tensor, slices: int) -> Tensor:
    """One key per (row, slice), flattened."""
    from hocket.noise import bits

    return bits(keys, slices).to(torch.int64).flatten()


def without_shapes(context: Context) -> Context:
    """The context of rows that are not whole buckets."""
    return replace(context, shapes=None)
