"""Real processes whose number changes: a process group per generation of members, on Gloo.

torch's groups do not survive a lost member, so every generation has a default group of its own. Gloo has no call that aborts a
collective, but a receive that runs into its timeout closes all connections of its group, so that whatever is under way there fails:
that is :meth:`ElasticCluster.abort`.

An exchange counts once every member has its result. So each ends with a small all-reduce, the *acknowledgement*; a member that
waits for it holds its result, and takes it if any other member has gone on (``programs/elastic/generation.py``). It also carries
the latest start of the exchange, for the ledger, and the number of the latest generation that anybody has heard of: all learn after
the same exchange that members will join or leave at the end of the step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.agreement import Agreement
from hocket.cluster.base import Cluster, Exchange, Subgroups
from hocket.cluster.exchange_thread import ExchangeThread, Pending
from hocket.cluster.groups import Partition, ProcessGroups
from hocket.cluster.ledger import Span
from hocket.cluster.message import ring_bytes
from hocket.cluster.point_to_point import PointToPoint
from hocket.cluster.processes import ProcessCluster, split_workers
from hocket.cluster.progress import Progress
from hocket.errors import HocketError

_ABORT = timedelta(milliseconds=1)
_ABORT_TAG = 2**30 + 1
"""Above all tags of messages."""


class ElasticExchange(Exchange):
    """An exchange that ends with an acknowledgement."""

    _cluster: ElasticCluster
    _sealed = _flagged = False

    def submit(self, work: Callable[[], Any], produced: float = 1.0, name: str = "flags") -> None:
        """Flags, which come last, are agreed on in the acknowledgement itself."""
        self._flagged = self._sealed = name == "flags"
        self._cluster.start_s = self._cluster.ledger.clock.seconds(self._cluster.ledger.clock.stamp())
        super().submit(work, produced, name)

    def seal(self) -> None:
        if not self._sealed:
            self._sealed = True
            nothing = torch.zeros(1, 0, dtype=torch.bool)
            self._tickets.append(self._cluster.start(lambda: self._cluster.acknowledge(nothing)))

    def wait(self) -> list[Any]:
        self.seal()
        ledger = self._cluster.ledger
        blocked = ledger.clock.stamp()
        results = [ticket() for ticket in self._tickets]
        results, latest = results if self._flagged else results[:-1], self._cluster.latest_start_s
        end = ledger.clock.stamp() if self._ended is None else self._ended
        ledger.record(Span(self._first, self._last, blocked, end, latest))
        return results

    def settle(self) -> list[Any]:
        """Wait until nothing of it is under way any more; the results, where the exchange is held."""
        results = []
        for ticket in self._tickets:
            with contextlib.suppress(Exception):
                results.append(ticket())
        # Flags are told by a member that has completed the exchange.
        return [*results[: len(self._tickets) - 1], *[self._cluster.flags] * self._flagged]


class ElasticCluster(ProcessCluster):
    """The members of the latest generation that :meth:`form` was called with; this process alone before the first."""

    elastic = True

    def __init__(self, device: torch.device | str = "cpu", exact: bool = False, keys: Path | None = None) -> None:
        Cluster.__init__(self, 1, range(1), torch.device(device), True)
        self.backend, self.exact, self.keys = "gloo", exact, keys
        self.generation, self.done, self.held, self.change = 0, 0, False, False
        self.latest_generation: Callable[[], int] = lambda: self.generation
        """The number of the latest generation that this process has heard of."""
        self.abandoned: Callable[[], bool] = lambda: False
        """Whether what this process has under way with others cannot be completed."""
        self.drain: Callable[[], None] = lambda: None
        """Waits for the exchange in flight, if there is one: members complete exchanges in the same order."""
        self.on_change: Callable[[BaseException | None], bool] | None = None
        """Called when an exchange has failed: forms the next generation; whether the exchange that failed counts."""
        self.flags = torch.zeros(0, dtype=torch.bool)
        """Those that all members agreed on in the last exchange that had any."""
        self.start_s = self.latest_start_s = 0.0
        self._track = Progress().track("elastic", [0])
        self._thread: ExchangeThread | None = ExchangeThread()
        self._open: list[Pending] = []
        self._lock = threading.Lock()
        self._live: list[dist.ProcessGroup] = []
        self._store: dist.Store | None = None
        self._reductions, self._derived, self._shares_heartbeat = {}, set(), False  # type: ignore[assignment]

    # --- generations ---------------------------------------------------------------------------------------------------------

    def form(self, number: int, store: dist.Store, rank: int, size: int, timeout_s: float, host_size: int | None = None) -> None:
        """Be process ``rank`` of the ``size`` ones of generation ``number``, which find each other by ``store``."""
        self.dissolve()
        self._thread, self._store = ExchangeThread(), store
        options: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout_s)}
        dist.init_process_group("gloo", store=store, **options)
        self._groups = _Groups(self._keep)
        self._keep(dist.group.WORLD)
        self.rank, self.processes, self._ranks = rank, size, list(range(size))
        self.size, self.workers, self.hosting = size, range(rank, rank + 1), split_workers(size, size)
        self.host_size, self.world = host_size if host_size and size % host_size == 0 else size, Subgroups.world(size)
        self._messages = PointToPoint(rank, self._ranks, self.hosting, "gloo", self.device)
        with self._lock:
            self.generation, self.change = number, False

    def dissolve(self) -> None:
        """Leave the group; nothing may be under way in it."""
        self.abort()
        with self._lock:
            self._live.clear()
        self._open.clear()
        if self._thread is not None:
            self._thread.close(self.liveness_timeout_s)
            self._thread = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self, before: int | None = None) -> None:
        """Make everything fail that is under way in the group (of a generation ``before`` the given one); from any thread."""
        with self._lock:
            for group in self._live if before is None or self.generation < before else ():
                with contextlib.suppress(RuntimeError):  # it says that its time is up, or that connections are closed already
                    other = (group.rank() + 1) % max(group.size(), 2)
                    group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(_ABORT)

    def _keep(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            with self._lock:
                self._live.append(group)

    # --- exchanges -----------------------------------------------------------------------------------------------------------

    def exchange(self, long: bool = False) -> Exchange:
        return ElasticExchange(self, long)

    def complete(self, exchange: Exchange, repeat: Callable[[], Exchange]) -> list[Any]:
        while True:
            self.held = False
            try:
                if self.abandoned():
                    self.abort()
                results = exchange.wait()
                self.done, self.held = self.done + 1, False
                return results
            except RuntimeError as error:
                assert isinstance(exchange, ElasticExchange)
                self.abort()
                held = exchange.settle()
                if self.on_change is None:
                    raise
                if self.on_change(error):
                    return held
                exchange = repeat()

    def acknowledge(self, flags: Tensor) -> Tensor:
        """Tell all members that this one has the result of the exchange, and learn that they have it; ``flags`` of all combined."""
        for pending in self._open:
            pending.block()
        self._open.clear()
        self.held = True
        head = torch.tensor([float(self.latest_generation()), self.start_s], dtype=torch.float64)
        told = torch.cat([head, flags.any(0).to("cpu", torch.float64)])
        self.ledger.sent += ring_bytes(8 * told.numel(), self.size)
        if self.size > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        self.change |= told[0].item() > self.generation
        self.latest_start_s, combined = float(told[1]), told[2:].to(flags.device, torch.bool)
        self.flags = combined if combined.numel() else self.flags
        return combined

    def transact(self, work: Callable[[], Any], *rows: Tensor) -> Any:
        """The result of a collective, as an exchange of its own; ``rows`` are what it changes in place."""
        self.drain()
        kept = [row.clone() for row in rows]

        def begin() -> Exchange:
            for row, before in zip(rows, kept, strict=True):
                row.copy_(before)
            exchange = self.exchange()
            exchange.submit(work, name="figures")
            return exchange

        counting, self.ledger.counting = self.ledger.counting, False  # it is not one of the training
        try:
            (result,) = self.complete(begin(), begin)
        finally:
            self.ledger.counting = counting
        return result

    # --- verbs ---------------------------------------------------------------------------------------------------------------

    @property
    def formed(self) -> bool:
        """Whether there is a group."""
        return self.generation > 0

    def mean_later(self, rows: Tensor, subgroups: Subgroups) -> Tensor | Pending:
        result = super().mean_later(rows, subgroups)
        if isinstance(result, Pending):
            self._open.append(result)
        return result

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        if self._inside:  # the last part of an exchange
            return self.acknowledge(flags)
        return self.transact(partial(super().all_reduce_any, flags)) if self.formed else flags.any(0)

    def wait_here(self) -> None:
        """Wait until all members have come here; no exchange is under way."""
        self.start(lambda: super(ElasticCluster, self).all_reduce_any(torch.zeros(1, 1, dtype=torch.bool)))()

    def tell_flags(self, donor: int) -> None:
        """Every member learns the flags of the last exchange from one that has completed it."""
        size = torch.tensor([self.flags.numel()])
        self.start(lambda: dist.broadcast(size, donor))()
        told = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == donor:
            told.copy_(self.flags)
        self.start(lambda: dist.broadcast(told, donor))()
        self.flags = told.to(self.device, torch.bool)

    def all_gather_metrics(self, values: Tensor) -> Tensor:
        if self._inside:
            return super().all_gather_metrics(values)
        return self.transact(partial(super().all_gather_metrics, values)) if self.formed else values

    def synchronize(self, rows: Tensor) -> None:
        """Newcomers get weights when they join, not here."""

    @property
    def _inside(self) -> bool:
        return self._thread is not None and self._thread.current

    # --- as one job ------------------------------------------------------------------------------------------------------------

    def for_job(self) -> ElasticCluster:
        return self

    def subcluster(self, group: dist.ProcessGroup | None, partition: Partition, host_size: int | None = None) -> ProcessCluster:
        raise HocketError("An elastic run trains whole replicas, one per process; leave the mesh out, or start without elastic.")

    def wait_for_all(self, what: str) -> None:
        """Exchanges wait for all members, and are repeated by those that are left."""

    def agreement(self) -> Agreement:
        return Agreement(0, 1)  # a worker that joins has its state from the others, so nothing is saved together

    def late_exchanges(self) -> list[dict[str, Any]]:
        return []  # who does not come in time is lost, and the others go on

    def explain(self, error: BaseException) -> BaseException:
        return error

    def stop_heartbeat(self) -> None:
        """The members' own beats go on."""

    def release(self) -> None:
        """The group ends with :meth:`close`."""

    def close(self) -> None:
        self.dissolve()


class _Groups(ProcessGroups):
    """Groups that can be aborted."""

    def __init__(self, track: Callable[[dist.ProcessGroup | None], None]) -> None:
        super().__init__(None, None, torch.device("cpu"))
        self._track = track

    def _new(self, parts: Partition) -> dist.ProcessGroup | None:
        made = super()._new(parts)
        self._track(made)
        return made
