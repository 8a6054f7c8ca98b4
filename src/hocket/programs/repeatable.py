"""The exchange under way of a collective program, which may have to be repeated: with fewer workers, after one was lost.

State is returned by exchanges, not changed in them, so what an exchange began with is a few references, and its rows: a copy of
them where the exchange may change some before all results are there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hocket.cluster.base import Cluster, Exchange
from hocket.cluster.ending import Ending
from hocket.cluster.layout import Layout
from hocket.compression.base import Context, State
from hocket.strategy import Strategy
from hocket.topology import AllReduce
from hocket.topology.base import Channel


@dataclass
class Undo:
    """The state at the beginning of an exchange, to which a repetition returns."""

    long: bool
    ending: Ending
    states: list[list[State]]
    """Of gradients, of weights, and the outer one."""
    works: list[tuple[Callable[[], Any], str, Tensor | None, Tensor | None]] = field(default_factory=list)
    """What was submitted, its name, the rows that it changes, and what they were before: a copy, or they themselves."""

    @property
    def rows(self) -> list[Tensor]:
        return [rows for _, _, rows, _ in self.works if rows is not None]


class Regrouped(NamedTuple):
    """The state of a program for a new group of workers."""

    channel: Channel
    gradient_state: list[State]
    weight_state: list[State]
    outer_state: list[State]


class RepeatableExchange:
    """What a collective program has under way; on a cluster that is elastic, all that it takes to begin it again."""

    strategy: Strategy
    layout: Layout
    cluster: Cluster
    channel: Channel
    seed: int
    alone: bool
    step: int
    exchanges: int
    gradient_state: list[State]
    weight_state: list[State]
    outer_state: list[State]
    _workers: Tensor
    _shapes: list[tuple[tuple[int, ...], ...]]
    momentum: Any
    samples: float = 1.0
    """Of all workers in the step now under way, as far as the owner of the rows says so: what its gradients count."""
    _plain: bool
    _exchange: Exchange | None = None
    _in_flight = False
    _undo: Undo | None = None
    _last: tuple[Callable[[], Any], Tensor, str] | None = None
    """What waits for flags: the mixing of the last bucket, its rows and its name."""
    _produced: list[float]

    def context(self, bucket: int, when: tuple[int, int] | None = None) -> Context:
        """``when``: the step and the number of the exchange, by which topologies choose partners (by default the present ones)."""
        step, exchange = when or (self.step, self.exchanges)
        where = (self.seed, step, exchange, bucket, self._workers, self.cluster.size, self._shapes[bucket])
        return Context(*where, residual_stays=self.strategy.sync.residual_stays)

    @property
    def _is_mean(self) -> bool:
        """Whether what is exchanged is averaged over all workers as it is."""
        return self._plain and self.channel.uniform and self.momentum is None

    def _mix_plain(self, bucket: int, rows: Tensor) -> Any:
        return self.channel.mean_later(rows, self.context(bucket))

    def _begin(self, long: bool = False, weights: bool = False) -> None:
        ending = self._ending(weights) if self.cluster.elastic and not long else Ending.ACKNOWLEDGED
        self._exchange = self.cluster.exchange(long, ending)
        if self.cluster.elastic:
            self._undo = Undo(long, ending, [list(self.gradient_state), list(self.weight_state), list(self.outer_state)])

    def _ending(self, weights: bool) -> Ending:
        """Codecs have state on both sides, so workers must agree whether an exchange counts before they continue."""
        sync, topology = self.strategy.sync, self.strategy.topology
        if not self._plain or self.strategy.exchanged == "momentum" or self.cluster.exact or sync.weighs_displacements:
            return Ending.ACKNOWLEDGED
        if self.cluster.acknowledges:
            return Ending.ACKNOWLEDGED
        if topology.one_mean:
            return Ending.SHARED
        return Ending.OWN if weights and topology.peer_to_peer and sync.period == 1 else Ending.ACKNOWLEDGED

    def _submit(self, work: Callable[[], Any], rows: Tensor | None = None, name: str = "flags", produced: float = 1.0) -> None:
        """Add to the exchange under way; ``rows`` are what the work changes in place."""
        assert self._exchange is not None
        if self._undo is not None:
            copied = rows is not None and self._undo.ending is Ending.ACKNOWLEDGED
            self._undo.works.append((work, name, rows, rows.clone() if rows is not None and copied else rows))
        self._exchange.submit(work, produced, name)

    def _offer(self, bucket: int, work: Callable[[], Any], rows: Tensor, name: str) -> None:
        """Submit the mixing of a bucket's gradients; that of the last one waits for flags, which travel inside its messages."""
        if bucket < len(self.layout.buckets) - 1 or self.cluster.elastic:  # there flags are part of the acknowledgement
            self._submit(work, rows, name, self._produced[bucket])
        else:
            self._last = work, rows, name

    def _submit_last(self, flags: Tensor | None = None) -> None:
        """Submit what waits for flags."""
        if self._last is not None:
            (work, rows, name), self._last = self._last, None
            self._submit(work if flags is None else partial(self._with_flags, work, flags), rows, name)

    def flags_ready(self, flags: Tensor) -> None:
        """Bool flags ``[rows, k]`` to be combined over all workers, as the last part of the exchange of gradients."""
        self._submit_last(flags)
        self._submit(partial(self._agreed, flags))

    def _with_flags(self, work: Callable[[], Any], flags: Tensor) -> Any:
        """Do ``work``; its last all-gather among all workers, if it has one, takes the flags along."""
        self.cluster.waiting_flags, self.cluster.agreed_flags = flags, None
        try:
            return work()
        finally:
            self.cluster.waiting_flags = None

    def _agreed(self, flags: Tensor) -> Any:
        """The flags of all workers, which other messages may have brought."""
        agreed, self.cluster.agreed_flags = self.cluster.agreed_flags, None
        return self.cluster.all_reduce_any(flags) if agreed is None else agreed.to(flags.device)

    def _complete(self) -> list[Any]:
        assert self._exchange is not None
        results = self.cluster.complete(self._exchange, self._repeat, self._undo.rows if self._undo is not None else ())
        self._exchange = self._undo = None
        self.exchanges += 1
        return results

    def _repeat(self) -> Exchange:
        """Begin the exchange under way again."""
        assert self._undo is not None
        undo, self._exchange = self._undo, self.cluster.exchange(self._undo.long, self._undo.ending)
        undo.states = [list(self.gradient_state), list(self.weight_state), list(self.outer_state)]
        for work, name, rows, kept in undo.works:
            if rows is not None and kept is not None and kept is not rows:
                rows.copy_(kept)
            self._exchange.submit(work, name=name)
        return self._exchange

    def regrouped(self, counts: bool, weights: list[Tensor]) -> Regrouped:
        """How to go on with the workers that the cluster has now; nothing has changed before :meth:`adopt`. All must call it.

        ``counts``: the exchange under way counts; otherwise it will be repeated.
        """
        cluster, compression = self.cluster, self.strategy.compression
        topology = AllReduce() if cluster.size == 1 else self.strategy.topology.for_workers(cluster.size, cluster.host_size)
        channel, before = topology.bind(cluster, cluster.world, self.seed), self.channel
        present = [self.gradient_state, self.weight_state, self.outer_state]
        gradients, in_weights, outer = present if counts or self._undo is None else self._undo.states
        sizes = [bucket.size for bucket in self.layout.buckets]
        gradients = [channel.regrouped(compression, state, before, n) for state, n in zip(gradients, sizes, strict=True)]
        outer = [self.strategy.sync.regrouped(state) for state in outer]
        if compression.compresses and self.strategy.weights:
            in_weights = [self._common(channel, before, state, w) for state, w in zip(in_weights, weights, strict=True)]
        return Regrouped(channel, gradients, in_weights, outer)

    def _common(self, channel: Channel, before: Channel, state: State, weights: Tensor) -> State:
        """The reference of encoded weights, which must be equal on all workers."""
        if channel.uniform and before.uniform and "reference" in state and state["reference"].shape == wide(weights).shape:
            inner = channel.regrouped(self.strategy.compression, state.get("inner", {}), before, weights.shape[1])
            return {**state, "inner": inner}
        rows, cluster = weights.clone(), self.cluster
        cluster.start(lambda: cluster.mean(rows, cluster.world))()
        return channel.init_state(self.strategy.compression, wide(rows))

    def adopt(self, found: Regrouped, scale: float = 1.0) -> None:
        """Go on as :meth:`regrouped` says; gradients under way count ``scale`` times what they did."""
        self.channel, self.gradient_state, self.weight_state, self.outer_state = found
        self.alone = self.cluster.size == 1
        self._workers = torch.arange(self.cluster.workers.start, self.cluster.workers.stop)
        if self._undo is not None and scale != 1.0 and not self._in_flight:
            for *_, kept in self._undo.works:
                if kept is not None:
                    kept.mul_(scale)

    def abandon(self) -> None:
        """Drop the exchange under way: this worker takes another one's state."""
        self._exchange = self._undo = None
        self._in_flight = False


def real(rows: Tensor) -> Tensor:
    """Complex values as pairs of real ones (no copy): codes and sums know real ones alone."""
    return torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows


def wide(rows: Tensor) -> Tensor:
    """Weights as channels with compression take them: float32, or float64 where they are."""
    rows = real(rows)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
