"""Real processes whose number changes: a process group per generation of members, on Gloo.

torch's groups do not survive a lost member, so every generation has a default group of its own; what is under way in one that is
over is made to fail (:mod:`hocket.cluster.live_groups`).

What becomes of an exchange that is interrupted: :mod:`hocket.cluster.elastic_exchange`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from hocket.cluster.agreement import Agreement
from hocket.cluster.base import Cluster, Exchange, Subgroups
from hocket.cluster.elastic_exchange import ElasticExchange, Kept
from hocket.cluster.ending import Ending
from hocket.cluster.exchange_thread import ExchangeThread, Pending
from hocket.cluster.groups import Partition, ProcessGroups
from hocket.cluster.live_groups import STANDS, LiveGroups
from hocket.cluster.member_progress import MemberProgress
from hocket.cluster.point_to_point import PointToPoint
from hocket.cluster.processes import ProcessCluster, split_workers
from hocket.cluster.replica import Replica
from hocket.errors import HocketError


class ElasticCluster(ProcessCluster):
    """The members of the latest generation that :meth:`form` was called with; this process alone before the first."""

    elastic = True

    def __init__(self, device: torch.device | str = "cpu", exact: bool = False, keys: Path | None = None) -> None:
        Cluster.__init__(self, 1, range(1), torch.device(device), True)
        self.backend, self.exact, self.keys = "gloo", exact, keys
        self.live = LiveGroups()
        self._pending = self.live.pending
        self.done, self.held, self.change = 0, False, False
        self.everybody = 1
        """Processes of all replicas."""
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
        self.current: ElasticExchange | None = None
        """The exchange whose parts the thread launches."""
        self.of_figures = False
        """Whether the exchange under way is none of the training."""
        self.kept: Kept | None = None
        self.unmixed = 0
        """Exchanges whose result did not come, so that this worker went on with its own weights."""
        self.replica: Replica | None = None
        """The processes that hold the parts of this worker's model, where it is split; workers are then replicas."""
        self.spare: list[Tensor] = []
        """Memory for the next result."""
        self.open: list[Pending] = []
        """What was launched and not awaited."""
        self._unconfirmed: Pending | None = None
        self.progress = MemberProgress()
        self._track = self.progress.exchanges
        self._thread: ExchangeThread | None = ExchangeThread(self.live.result)
        self._store: dist.Store | None = None  # torch keeps only what it has in C++, and its methods are Python's
        self._reductions, self._derived, self._shares_heartbeat = {}, set(), False  # type: ignore[assignment]

    # --- generations ---------------------------------------------------------------------------------------------------------

    def form(self, number: int, store: dist.Store, rank: int, size: int, timeout_s: float, host_size: int | None = None) -> None:
        """Be process ``rank`` of the ``size`` ones of generation ``number``, which find each other by ``store`` and connect in
        ``timeout_s``. Where replicas have several processes, each exchanges with those that hold the same part."""
        self.dissolve()
        self._thread, self._store, timeout = ExchangeThread(self.live.result), store, timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self.live.begin(number)
        self.change, parts = False, self.parts
        self.live.add(dist.group.WORLD)
        self._groups = _Groups(self.live.add, None if parts == 1 else [range(k, size, parts) for k in range(parts)], timeout)
        self._ranks, self.everybody = list(range(rank % parts, size, parts)), size
        rank, size = rank // parts, size // parts
        self.rank, self.processes = rank, size
        self.size, self.workers, self.hosting = size, range(rank, rank + 1), split_workers(size, size)
        self.host_size, self.world = host_size or size, Subgroups.world(size)
        self._messages = PointToPoint(rank, self._ranks, self.hosting, "gloo", self.device)
        self._messages.timeout = STANDS

    def dissolve(self) -> None:
        """Leave the group; nothing may be under way in it."""
        self.abort()
        if self._unconfirmed is not None:
            with contextlib.suppress(RuntimeError):
                self._unconfirmed.block()
            self._unconfirmed = None
        self.live.clear()
        self.open.clear()
        if self._thread is not None:
            self._thread.close(0.0 if self.live.given_up else self.liveness_timeout_s)
            self._thread = None
        if dist.is_initialized():
            dist.destroy_process_group()
        distributed_c10d._world.group_count = 0  # names of groups are in the store's keys, and a group that failed has counted

    def abort(self, before: int | None = None) -> None:
        """Make everything fail that is under way in the group (of a generation ``before`` the given one); from any thread."""
        self.live.abort(before)

    def wait_for_members(self, work: Callable[[], Any], what: str) -> None:
        """Call ``work``, which waits until all members have launched what this one has."""
        self._track.wait(work, self._track.number, what)

    @property
    def generation(self) -> int:
        """The number of the latest generation that was formed, or begun to be."""
        return self.live.generation

    @property
    def parts(self) -> int:
        """Processes of a replica."""
        return 1 if self.replica is None else self.replica.parts

    @property
    def process(self) -> int:
        return self.rank * self.parts + (0 if self.replica is None else self.replica.part)

    # --- exchanges -----------------------------------------------------------------------------------------------------------

    def exchange(self, long: bool = False, ending: Ending = Ending.ACKNOWLEDGED) -> Exchange:
        return ElasticExchange(self, long, Ending.ACKNOWLEDGED if self.acknowledges else ending)

    def complete(self, exchange: Exchange, repeat: Callable[[], Exchange], rows: Sequence[Tensor] = ()) -> list[Any]:
        while True:
            assert isinstance(exchange, ElasticExchange)
            exchange.seal()
            try:
                if self.abandoned():
                    self.abort()
                self._confirm()
                results = exchange.wait()
                self._complete(exchange)
                return results
            except RuntimeError as error:
                self.abort()
                results = exchange.settle(rows)
                self.held = exchange.held
                if self.on_change is None:
                    raise
                if self.on_change(error):
                    self.unmixed += exchange.unmixed
                    return exchange.told(results, self.kept)
                exchange = repeat()

    def _complete(self, exchange: ElasticExchange) -> None:
        self.done, self.held = self.done + 1, False
        self._unconfirmed = exchange.acknowledgement
        if self.kept is not None:
            self.spare = self.kept.sums  # whoever has completed this exchange knows that all have the result before it
        self.kept = Kept(exchange.sums, self.size) if exchange.ending is Ending.SHARED else None

    def result(self) -> list[Tensor]:
        """Of the last exchange, for members that lack it."""
        assert self.kept is not None
        return self.kept.means()

    def _confirm(self) -> None:
        """Wait until all members have the results of the last exchange, where that has not been awaited."""
        if self._unconfirmed is not None:
            self.wait_for_members(self._unconfirmed.wait, "the acknowledgement of the last exchange")
            self._unconfirmed = None

    def assemble(self) -> bool:
        """Wait until all members have completed the exchanges so far; False: it failed."""
        try:
            self._confirm()
            self.wait_here()
            return True
        except RuntimeError:
            self.abort()
            return False

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

        counting, self.ledger.counting, self.of_figures = self.ledger.counting, False, True
        try:
            (result,) = self.complete(begin(), begin)
        finally:
            self.ledger.counting, self.of_figures = counting, False
        return result

    # --- verbs ---------------------------------------------------------------------------------------------------------------

    @property
    def formed(self) -> bool:
        """Whether there is a group."""
        return self.generation > 0

    def mean_later(self, rows: Tensor, subgroups: Subgroups) -> Tensor | Pending:
        if self.current is not None and self.current.ending is Ending.SHARED:
            return self.current.mean(rows)
        result = super().mean_later(rows, subgroups)
        if isinstance(result, Pending):
            self.open.append(result)
        return result

    def all_reduce_any(self, flags: Tensor) -> Any:
        if self._inside and self.current is not None:  # the last part of an exchange
            return self.current.acknowledge(flags)
        return self.transact(partial(super().all_reduce_any, flags)) if self.formed else flags.any(0)

    def wait_here(self) -> None:
        """Wait until all members have come here; no exchange is under way."""
        self.start(lambda: dist.all_reduce(torch.zeros(1)), "all members")()

    def gather_everybody(self, own: list[float]) -> Tensor:
        """What each process tells of itself, in the order of their ranks; no exchange is under way."""
        everyone = [torch.zeros(len(own), dtype=torch.float64) for _ in range(self.everybody)]
        self.start(lambda: dist.all_gather(everyone, torch.tensor(own, dtype=torch.float64)))()
        return torch.stack(everyone)

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
        return Agreement(0, 1)  # processes come and go: whoever saves together meets in a folder that all share

    def late_exchanges(self) -> list[dict[str, Any]]:
        return self.progress.reports()

    def watched(self, axis: str, ranks: Sequence[int], work: Callable[[], object]) -> None:
        self.progress.track(axis, ranks).wait(work, 0, f"the {axis} axis of the mesh")

    def explain(self, error: BaseException) -> BaseException:
        return error

    def stop_heartbeat(self) -> None:
        """The members' own beats go on."""

    def release(self) -> None:
        """The group ends with :meth:`close`."""

    def close(self) -> None:
        self.dissolve()
        if self.replica is not None:
            self.replica.close()


class _Groups(ProcessGroups):
    """Groups that can be aborted."""

    def __init__(self, track: Callable[[dist.ProcessGroup | None], None], parts: Partition | None, timeout: timedelta) -> None:
        self._track, self._timeout = track, timeout
        super().__init__(None, parts, torch.device("cpu"))

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _new(self, parts: Partition) -> dist.ProcessGroup | None:
        made = super()._new(parts)
        self._track(made)
        return made
