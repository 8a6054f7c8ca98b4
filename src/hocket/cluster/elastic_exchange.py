"""Exchanges of an elastic cluster, which a loss may interrupt.

Members are one exchange apart at most, and after a loss all take the result of an exchange that one of them has completed
(:class:`~hocket.cluster.ending.Ending`, ``programs/elastic/generation.py``). Every exchange has a small message from each member to
each, the *acknowledgement*: flags, the latest start of the exchange, for the ledger, and the number of the latest generation that
anybody has heard of. So all learn after the same exchange that members will join or leave at the end of the step. Where every
member waits for its result until all have theirs, the acknowledgement comes after the result; where the result is the same for all,
it travels at the same time, and whoever completes the next exchange knows that all have completed this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.base import Exchange
from hocket.cluster.ending import Ending
from hocket.cluster.exchange_thread import Pending
from hocket.cluster.ledger import Span
from hocket.cluster.message import framed, ring_bytes

if TYPE_CHECKING:
    from hocket.cluster.elastic import ElasticCluster

_HEAD_BYTES = 16
"""Of an acknowledgement: two float64 values; then one byte per flag."""


class Kept(NamedTuple):
    """The result of the last exchange that was completed, where all members receive the same: sums over ``workers`` workers."""

    sums: list[Tensor]
    workers: int

    def means(self) -> list[Tensor]:
        return [total / self.workers for total in self.sums]


class _Launched(NamedTuple):
    """A part of an exchange that is under way; whoever takes its result waits for it later."""

    pending: Pending


def tell_flags(cluster: ElasticCluster, donor: int) -> None:
    """Every member learns the flags of the last exchange from one that has completed it."""
    size = torch.tensor([cluster.flags.numel()])
    cluster.start(lambda: dist.broadcast(size, donor))()
    told = torch.zeros(int(size), dtype=torch.uint8)
    if cluster.rank == donor:
        told.copy_(cluster.flags)
    cluster.start(lambda: dist.broadcast(told, donor))()
    cluster.flags = told.to(cluster.device, torch.bool)


class ElasticExchange(Exchange):
    """An exchange that ends with an acknowledgement, or after which one follows."""

    _cluster: ElasticCluster
    _sealed = _flagged = _failed = False

    def __init__(self, cluster: ElasticCluster, long: bool = False, ending: Ending = Ending.ACKNOWLEDGED) -> None:
        super().__init__(cluster, long)
        self.ending, self.start_s, self.latest_start_s = ending, 0.0, 0.0
        self._names: list[str] = []
        self.sums: list[Tensor] = []
        self.flags: Tensor | None = None
        """Those on which the workers that hold one part have agreed."""
        self.acknowledgement: Pending | None = None
        self.held = ending is Ending.OWN
        """Whether this member can take the exchange as completed, if others have."""
        self.unmixed = False

    def submit(self, work: Callable[[], Any], produced: float = 1.0, name: str = "flags") -> None:
        """Flags, which come last, are agreed on in the acknowledgement itself."""
        self._flagged = self._sealed = name == "flags"
        self._names.append(name)
        self.start_s = self.latest_start_s = self._cluster.ledger.clock.seconds(self._cluster.ledger.clock.stamp())
        super().submit(partial(self._launch, work), produced, name)

    def _launch(self, work: Callable[[], Any]) -> Any:
        """In the thread of the cluster."""
        self._cluster.current = self
        try:
            result = work()
        except BaseException:
            self._failed = True
            raise
        finally:
            if self._cluster.current is self:  # this thread may have been left behind
                self._cluster.current = None
        return _Launched(result) if self.ending is Ending.SHARED and isinstance(result, Pending) else result

    def seal(self) -> None:
        if not self._sealed:
            self._sealed = True
            self._tickets.append(self._cluster.start(partial(self._launch, partial(self.acknowledge, torch.zeros(1, 0)))))

    # --- in the thread of the cluster ------------------------------------------------------------------------------------------

    def mean(self, rows: Tensor) -> Pending:
        """The mean over all members; rows are not written to before it is awaited, and the sum is kept for those that lack it."""
        cluster = self._cluster
        cluster._count_mean(rows, cluster.world)
        like = (rows.shape, rows.dtype, rows.device)
        place = next((k for k, one in enumerate(cluster.spare) if (one.shape, one.dtype, one.device) == like), None)
        total = torch.empty_like(rows) if place is None else cluster.spare.pop(place)
        self.sums.append(total.copy_(rows))
        workers = cluster.size
        work = dist.all_reduce(total, group=cluster.group, async_op=True)
        return cluster._pending(work, lambda: torch.div(total, workers, out=rows))

    def acknowledge(self, flags: Tensor) -> Any:
        """Tell all members that this one has the result, and learn that they have it; ``flags`` ``[1, k]`` of all combined.

        Where the result is the same for all, this travels beside it. Where each has its own, nobody waits for it now.
        """
        cluster = self._cluster
        if self._failed:
            raise RuntimeError("A part of this exchange failed, so this member does not acknowledge it.")
        if self.ending is Ending.OWN and (before := cluster._unconfirmed) is not None:
            before.block()  # members are one exchange apart at most
        if self.ending is not Ending.SHARED:
            for pending in cluster.open:
                pending.block()
        cluster.open.clear()
        if flags.numel() and cluster.parts > 1:  # flags are of one part, acknowledgements of all
            self._agree_on(flags)
        self.held = self.ending is not Ending.SHARED
        head = torch.tensor([float(cluster.latest_generation()), self.start_s], dtype=torch.float64)
        told, everybody = head.view(torch.uint8), cluster.everybody
        if flags.numel() and self.flags is None:
            told = torch.cat([told, flags.any(0).to("cpu", torch.uint8)])
        cluster.ledger.sent += (everybody - 1) * framed(told.numel())
        heard = told.repeat(everybody)
        if everybody == 1:
            return self._heard(heard.view(1, -1), flags.device)
        work = dist.all_to_all_single(heard, told.repeat(everybody), async_op=True)
        pending = cluster._pending(work, partial(self._heard, heard.view(everybody, -1), flags.device))
        if self.ending is not Ending.OWN:
            return pending
        self.acknowledgement = pending
        return None

    def _agree_on(self, flags: Tensor) -> None:
        agreed = flags.any(0).to("cpu", torch.uint8)
        self._cluster.ledger.sent += ring_bytes(agreed.numel(), self._cluster.size)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._cluster.group)
        self.flags = agreed.to(flags.device, torch.bool)

    # --- in the thread that trains ---------------------------------------------------------------------------------------------

    def _heard(self, table: Tensor, device: torch.device) -> Tensor:
        """What all have told; the flags."""
        latest, self.latest_start_s = table[:, :_HEAD_BYTES].reshape(-1).view(torch.float64).view(-1, 2).amax(0).tolist()
        self._cluster.change |= latest > self._cluster.generation
        flags = table[:, _HEAD_BYTES:].amax(0).to(device, torch.bool) if table.shape[1] > _HEAD_BYTES else self._cluster.flags[:0]
        flags = flags if self.flags is None else self.flags
        self._cluster.flags = flags if flags.numel() else self._cluster.flags
        return flags

    def wait(self) -> list[Any]:
        self.seal()
        ledger = self._cluster.ledger
        blocked = ledger.clock.stamp()
        results = [ticket() for ticket in self._tickets]
        for part, name in zip(results, [*self._names, "the acknowledgement"], strict=False):
            if isinstance(part, _Launched):
                self._cluster.wait_for_members(part.pending.block, name)
        # All is there: from here on rows are written to.
        results = [part.pending.wait() if isinstance(part, _Launched) else part for part in results]
        end = ledger.clock.stamp() if self._ended is None else self._ended
        span = Span(self._first, self._last, blocked, end, self.latest_start_s) if ledger.timed and self._names else None
        ledger.record(span)
        return results if self._flagged else results[:-1]

    def settle(self, rows: Sequence[Tensor]) -> list[Any]:
        """Wait until nothing of it is under way any more; the results, if it turns out to count. Those that are the same for all
        are then to be written into ``rows``."""
        results = []
        for ticket in self._tickets:
            with contextlib.suppress(Exception):
                part = ticket()
                if isinstance(part, _Launched):
                    part.pending.block()
                results.append(part)
        if self.acknowledgement is not None:
            with contextlib.suppress(RuntimeError):
                self.acknowledgement.block()
        parts = len(self._tickets) - 1
        self.unmixed = self.ending is Ending.OWN and len(results) < parts
        return list(rows) if self.ending is Ending.SHARED or self.unmixed else results[:parts]

    def told(self, results: list[Any], kept: Kept | None) -> list[Any]:
        """The ``results`` of :meth:`settle` of an exchange that others have completed, who have told flags and what is ``kept``."""
        if self.ending is Ending.SHARED:
            assert kept is not None
            for rows, mean in zip(results, kept.means(), strict=True):
                rows.copy_(mean)
        return [*results, *[self._cluster.flags if self.flags is None else self.flags] * self._flagged]
