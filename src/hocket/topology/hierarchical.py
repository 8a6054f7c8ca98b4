"""Hierarchical: one topology inside a host, another between hosts.

First the inner mixing inside each host of ``size`` workers, uncompressed, because links there are fast. Then, at every ``every``-th
exchange, the outer mixing between hosts, with the strategy's compression, because links there are slow: each of a host's workers
exchanges one slice of 1/size with its counterparts, and the slices are gathered inside. (Where the inner topology is gossip,
workers of a host differ, so each exchanges its whole row.) The mixing matrix is ``K_outer ⊗ K_inner``. ``every > 1`` means local
steps between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.message import Message, there
from hocket.compression.base import Codec, Compressor, Context, Mixed, State
from hocket.compression.none import NoCompression
from hocket.errors import HocketError, is_whole
from hocket.topology.allreduce import AllReduce
from hocket.topology.base import Channel, Topology, without_shapes
from hocket.topology.gossip import Gossip


@dataclass(frozen=True)
class Hierarchical(Topology):
    """``hierarchical(inner, outer, size=workers per host, every=1)``."""

    inner: Topology = field(default_factory=AllReduce)
    outer: Topology = field(default_factory=AllReduce)
    size: int | None = None
    every: int = 1
    name: ClassVar[str] = "hierarchical"
    paper: ClassVar[str] = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020"

    def __post_init__(self) -> None:
        for part, which in ((self.inner, "inner"), (self.outer, "outer")):
            if not isinstance(part, (AllReduce, Gossip)):
                raise HocketError(
                    f"hierarchical({which}={getattr(part, 'name', part)}): it must be allreduce or a gossip, for example "
                    "hierarchical(allreduce, gossip)."
                )
        for value, which in ((self.size, "size"), (self.every, "every")):
            if value is not None and not is_whole(value):
                raise HocketError(f"hierarchical({which}={value!r}): {which} must be a whole number of at least 1.")

    @property
    def uniform(self) -> bool:
        return self.inner.uniform and self.outer.uniform and self.every == 1

    def for_workers(self, workers: int, host_size: int) -> Topology:
        """While workers do not fill whole hosts, all exchange as hosts do. Each ``host_size`` workers in a row are on one host."""
        size = self.size or host_size
        fits = workers % size == 0 and (host_size % size == 0 or size % host_size == 0)
        return self if fits else self.outer.for_workers(workers, host_size)

    def bind(self, cluster: Cluster, subgroups: Subgroups, seed: int) -> Channel:
        size = self.size or cluster.host_size
        if subgroups.size % size:
            raise HocketError(
                f"hierarchical(size={size}): {subgroups.size} workers do not divide into hosts of {size}; choose a divisor as size."
            )
        return HierarchicalChannel(self, cluster, seed, size)

    def refusal(self, compressor: Compressor, weights: bool) -> str | None:
        if not weights and self.every > 1:
            return (
                f"hosts that exchange gradients at every {self.every}th exchange alone drift apart, for their weights never meet; "
                "use exchange=weights, or every=1"
            )
        held = compressor.uses_error_feedback or not compressor.contracts
        if weights and held and compressor.compresses and self.outer.uniform and not self.inner.uniform:
            return (
                "gossip inside hosts adds the compression's residual or overshoot to the weights again at each exchange; "
                "use hierarchical(allreduce, …), exchange=gradients, or a compression without feedback such as cast(bf16)"
            )
        return self.outer.refusal(compressor, weights)


class HierarchicalChannel(Channel):
    """Inner channels inside hosts and outer channels between them."""

    def __init__(self, spec: Hierarchical, cluster: Cluster, seed: int, size: int) -> None:
        super().__init__(cluster, cluster.world)
        self.uniform = spec.uniform
        self.spec, self.size = spec, size
        self.hosts = Subgroups.blocks(cluster.size, size)
        self.inner = spec.inner.bind(cluster, self.hosts, seed)
        self.outer = spec.outer.bind(cluster, Subgroups.across(cluster.size, size), seed)
        self.sliced = spec.inner.uniform and size > 1

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        mixed, _ = self._through(NoCompression(), rows, {}, context, weights=False)
        return mixed

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        raise AssertionError("hierarchical channels compress on the outer links only; call gradients() or weights()")

    def gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        return self._through(compressor, rows, state, context, weights=False)

    def whole_gradients(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> Tensor:
        mixed = self.inner.mean(rows, context) if self.size > 1 else rows
        if self.outer.subgroups.size == 1:
            return mixed
        return self._gather(self.outer.whole_gradients(compressor, self._slice(mixed), state, context), rows)

    def weights(self, compressor: Compressor, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        return self._through(compressor, rows, state, context, weights=True)

    def init_state(self, compressor: Compressor, rows: Tensor) -> State:
        return {} if not compressor.compresses else self.outer.init_state(compressor, self._slice(rows))

    def regrouped(self, compressor: Compressor, state: State, before: Channel, size: int) -> State:
        return {}  # a worker's slice may be another one now

    def without_slices(self, compressor: Compressor, state: State, size: int, workers: int) -> State:
        return {}

    def rebase(self, state: State, rows: Tensor, own: bool = False) -> State:
        return self.outer.rebase(state, self._slice(rows))

    def residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> dict[str, Tensor]:
        found = self.outer.residuals(compressor, state, self._width(size), self._outer_context(context))
        return {name: self._in_place(part, size) for name, part in found.items()}

    def weight_residuals(self, compressor: Compressor, state: State, size: int, context: Context) -> Tensor | None:
        part = self.outer.weight_residuals(compressor, state, self._width(size), self._outer_context(context))
        return None if part is None else self._in_place(part, size)

    def with_residuals(self, residuals: dict[str, Tensor]) -> State:
        return {name: self._slice(rows) for name, rows in residuals.items()}

    def _in_place(self, part: Tensor, size: int) -> Tensor:
        """Slices as rows; a slice counts for all workers of its host."""
        if not self.sliced:
            return part
        cells = part.new_zeros(part.shape[0], self.size, part.shape[1])
        place = there(self.hosts.place_of[self.cluster.workers.start : self.cluster.workers.stop], part)
        cells[torch.arange(part.shape[0], device=part.device), place] = part * self.size
        return cells.flatten(1)[:, :size]

    def _through(self, compressor: Compressor, rows: Tensor, state: State, context: Context, weights: bool) -> tuple[Tensor, State]:
        mixed = self.inner.mean(rows, context) if self.size > 1 else rows
        if self.outer.subgroups.size == 1 or (context.exchange + 1) % self.spec.every:
            return mixed, state
        outer = replace(self._outer_context(context), exchange=context.exchange // self.spec.every)
        exchange = self.outer.weights if weights else self.outer.gradients
        part, state = exchange(compressor, self._slice(mixed), state, outer)
        return self._gather(part, rows), state

    def _outer_context(self, context: Context) -> Context:
        return without_shapes(context) if self.sliced else context

    def _width(self, size: int) -> int:
        """The number of values that a worker exchanges with other hosts."""
        return -(-size // self.size) if self.sliced else size

    def _slice(self, rows: Tensor) -> Tensor:
        """Each worker's slice of its row."""
        if not self.sliced:
            return rows
        width = self._width(rows.shape[1])
        cells = pad(rows, (0, width * self.size - rows.shape[1])).view(rows.shape[0], self.size, width)
        place = there(self.hosts.place_of[self.cluster.workers.start : self.cluster.workers.stop], rows)
        return cells.gather(1, place.view(-1, 1, 1).expand(-1, 1, width)).squeeze(1)

    def _gather(self, part: Tensor, rows: Tensor) -> Tensor:
        """The slices of a host put together again."""
        if not self.sliced:
            return part
        _, position = self.cluster.groups_here(self.hosts)
        whole = self.cluster.all_gather(Message((part.contiguous(),)), self.hosts).parts[0].view(-1, self.size * part.shape[1])
        return whole[:, : rows.shape[1]][there(position, rows)]
