"""Real processes over torch.distributed: Gloo or NCCL, one worker each or several.

On Gloo one thread per cluster launches its exchanges, strictly in the order of submission: collectives of one group that start in
another order on another process give wrong sums without an error. So each job has a cluster of its own (:meth:`for_job`), with
process groups that neither other jobs nor the user's own collectives use. On NCCL the calling thread launches exchanges, they
overlap on the device, and time stamps are CUDA events.

``exact=True`` gathers and sums in worker order instead of using the backend's ring: slower, and equal bit for bit to virtual
workers. (The ledger counts the ring's bytes then, too: it says what the strategy costs.)
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.base import Cluster, ServerReduction, Subgroups
from hocket.cluster.exchange_thread import ExchangeThread, Pending, explained, finished
from hocket.cluster.groups import Partition, ProcessGroups
from hocket.cluster.heartbeat import Heartbeat, boot_id
from hocket.cluster.ledger import CudaClock
from hocket.cluster.message import Message, framed, on_wire, ordered_mean, summed_bytes
from hocket.cluster.plain import all_gather_plain
from hocket.cluster.point_to_point import Incoming, Outgoing, PointToPoint
from hocket.cluster.relay import Relayed, sources
from hocket.errors import HocketError

_ROUNDS = 10
"""Round trips by which the offset between two clocks is measured."""


def split_workers(workers: int, processes: int) -> list[range]:
    """Which workers each process hosts: consecutive ones, as evenly as possible.

    >>> split_workers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    base, extra = divmod(workers, processes)
    starts = [r * base + min(r, extra) for r in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _close_at_exit(cluster: weakref.ref[ProcessCluster]) -> None:
    """A loop that ended early closes its connections before process 0 waits for the others (see :class:`Heartbeat`), so that they
    hear of it and end. After an exception the process exits at once. NCCL closes with all others alone."""
    found = cluster()
    if found is not None and found._thread is not None and not hasattr(sys, "last_value"):
        found.close()


class ProcessCluster(Cluster):
    """The workers of an initialised ``torch.distributed`` process group, or of one of its subgroups."""

    has_process_group = True
    _pending: Callable[..., Pending] = Pending

    def __init__(
        self,
        workers: int | None = None,
        device: torch.device | str = "cpu",
        exact: bool = False,
        host_size: int | None = None,
        liveness_timeout_s: float = 10.0,
        keys: Path | None = None,
        group: dist.ProcessGroup | None = None,
        parent: ProcessCluster | None = None,
        partition: Partition | None = None,
    ) -> None:
        """``keys``: see :class:`Cluster`. A cluster derived from ``parent`` has the processes of ``group`` (all, if it is None) and
        makes groups of its own for each part of ``partition``, of which this process's part is that of ``group``."""
        device, self.backend = torch.device(device), str(dist.get_backend())
        self._groups = ProcessGroups(group, partition, device if "nccl" in self.backend else torch.device("cpu"))
        self.rank, self.processes = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._whole = group is None
        self.scope = "" if self._whole else "-".join(map(str, self._ranks))
        size = workers or self.processes
        if size < self.processes:
            raise HocketError(f"{size} workers are too few for {self.processes} processes: start {size} processes or fewer.")
        self.hosting = split_workers(size, self.processes)
        super().__init__(size, self.hosting[self.rank], device, True, host_size)
        self.exact, self.keys, self._shares_heartbeat = exact, keys, parent is not None
        self._messages = PointToPoint(self.rank, self._ranks, self.hosting, self.backend, self.device)
        self._derived: weakref.WeakSet[ProcessCluster] = weakref.WeakSet()
        self._reductions: dict[int, ServerReduction] = {}
        self._thread = ExchangeThread() if "gloo" in self.backend and "nccl" not in self.backend else None
        if self.device.type == "cuda" and "nccl" in self.backend:
            self.ledger.clock = CudaClock()
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        if parent is not None and self._whole:
            self.ledger.clock.offset_s = parent.ledger.clock.offset_s
        else:
            self.ledger.clock.offset_s = clock_offset(self.rank, self._ranks, self.group, self._messages.device)
        own = (self.rank, self.processes, self.hosting, liveness_timeout_s)
        self._heartbeat: Heartbeat = parent._heartbeat if parent else Heartbeat(*own)
        self.liveness_timeout_s = self._heartbeat.liveness_timeout_s
        self._track = self._heartbeat.progress.track(getattr(self.group, "group_name", "world"), self._ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._groups.group

    def wait_for_all(self, what: str) -> None:
        self._heartbeat.wait_for_all(what, self._track.name, self._ranks)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        self._track.step = step

    def watched(self, axis: str, ranks: Sequence[int], work: Callable[[], object]) -> None:
        self._heartbeat.progress.track(f"{axis} {ranks}", ranks).wait(work, 0, f"the {axis} axis of the mesh")

    def late_exchanges(self) -> list[dict[str, Any]]:
        return list(self._heartbeat.late.reports)

    def for_job(self) -> ProcessCluster:
        return self._derive(None, [self._ranks], self.size, self.host_size)

    def subcluster(self, group: dist.ProcessGroup | None, partition: Partition, host_size: int | None = None) -> ProcessCluster:
        return self._derive(group, partition, None, host_size)

    def _derive(
        self, group: dist.ProcessGroup | None, partition: Partition, workers: int | None, host_size: int | None
    ) -> ProcessCluster:
        derived = ProcessCluster(
            workers, self.device, self.exact, host_size, keys=self.keys, group=group, parent=self, partition=partition
        )
        self._derived.add(derived)
        atexit.register(derived._at_exit)
        return derived

    def explain(self, error: BaseException) -> BaseException:
        return self._heartbeat.explain(error)

    def stop_heartbeat(self) -> None:
        self._heartbeat.stop()

    # --- order -----------------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], Any], name: str = "figures of all workers") -> Callable[[], Any]:
        number = self._track.launch()
        if self._thread is not None:
            ticket = self._thread.submit(work, self.explain)
        else:
            result = explained(work, self.explain)
            ticket = partial(explained, partial(finished, result), self.explain)
        return partial(self._track.wait, ticket, number, name)

    def _now(self, work: Callable[[], Any]) -> Any:
        """Run a small collective in order with all other exchanges; the result."""
        if self._thread is not None and self._thread.current:
            return work()
        return self.start(work)()

    # --- verbs -----------------------------------------------------------------------------------------------------------

    def lacks_servers(self, servers: int) -> bool:
        return servers not in self._reductions

    def attach_servers(self, servers: int, reduction: ServerReduction) -> None:
        self._reductions[servers] = reduction

    def reduce_on_servers(self, servers: int, rows: Tensor) -> Tensor:
        if servers not in self._reductions:
            return super().reduce_on_servers(servers, rows)
        own, theirs = summed_bytes(rows.shape[1] * rows.element_size(), self.size, servers)
        self.ledger.sent += own + servers * theirs // self.size
        return self._reductions[servers].mean(rows)

    def mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        return finished(self.mean_later(rows, subgroups))

    def mean_later(self, rows: Tensor, subgroups: Subgroups) -> Tensor | Pending:
        self._count_mean(rows, subgroups)
        group = self._group(subgroups)
        if self.exact or group is None:
            return self._gathered_mean(rows, subgroups)
        total = rows
        if self.rows > 1:
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
        work = dist.all_reduce(total, group=group, async_op=True)
        return self._pending(
            work, lambda: rows.copy_(total.div_(subgroups.size).expand_as(rows)) if self.rows > 1 else rows.div_(subgroups.size)
        )

    def _gathered_mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        groups, position = self.groups_here(subgroups)
        everything = self._all_gather(Message((rows,)), subgroups).parts[0].view(len(groups), subgroups.size, -1)
        means = torch.stack([ordered_mean(group) for group in everything])
        return rows.copy_(means[position.to(means.device)])

    def neighbor_exchange(self, message: Message, sources: Tensor) -> Message:
        self._count_messages(message, self._copies_heard(sources))
        return self._messages.exchange(self.group, message, sources)

    def all_to_all(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        if radix := self._radix(message, subgroups, False, usual_bytes):
            return self._relayed(message, subgroups).all_to_all(radix)
        self._count_messages(message, subgroups.others(self.workers))
        return self._messages.all_to_all(self.group, message, subgroups)

    def all_gather(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        if radix := self._radix(message, subgroups, True, usual_bytes):
            return self._relayed(message, subgroups).all_gather(radix)
        self._count_messages(message, subgroups.size - 1)
        return self._all_gather(message, subgroups)

    def _relayed(self, message: Message, subgroups: Subgroups) -> Relayed:
        def send(bundles: Message, heard: Tensor) -> Message:
            sizes = on_wire(bundles.payload_bytes(), bundles.lengths is not None)
            self._count_sent(sizes.view(-1, self.rows).t().reshape(-1), bundles.lengths is not None)
            return self._messages.exchange(self.group, bundles, heard)

        return Relayed(message, subgroups, self.workers, self._messages.device, send)

    def _all_gather(self, message: Message, subgroups: Subgroups) -> Message:
        groups, _ = self.groups_here(subgroups)
        own, owner = self.workers.start, self._messages.owner
        outgoing, incoming = [], []
        for i in self.workers:
            # A process receives each message once, whichever of its workers need it.
            mates = subgroups.members[subgroups.group_of[i]].tolist()
            outgoing += [Outgoing(i - own, i, self.hosting[r].start, 0) for r in sorted({owner[j] for j in mates})]
        for g in groups:
            incoming += [Incoming(j, own, 0, j - own) for j in subgroups.members[g].tolist()]
        return self._messages.route(self.group, message, outgoing, incoming)

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        return self._now(partial(self._combined, flags.to(self._messages.device, torch.uint8))).to(flags.device, torch.bool)

    def _combined(self, flags: Tensor) -> Tensor:
        """Flags combined over all workers, by messages to a few of them in turn; on NCCL by its own all-reduce."""
        if "nccl" in str(self.backend):
            self.ledger.sent += sum(len(trip.shifts) for trip in self._flag_trips) * framed(flags.shape[1])
            dist.all_reduce(flags := flags.amax(0), op=dist.ReduceOp.MAX, group=self.group)
            return flags
        for trip in self._flag_trips:
            heard = self.neighbor_exchange(Message((flags,)), sources(trip, self.world)).parts[0]
            flags = torch.maximum(flags, heard.view(-1, *flags.shape).amax(0))
        return flags[0]

    def all_gather_metrics(self, values: Tensor) -> Tensor:
        most = max(len(hosted) for hosted in self.hosting)
        padded = torch.zeros(most, *values.shape[1:], dtype=values.dtype)
        padded[: values.shape[0]] = values.cpu()
        padded = padded.to(self._messages.device)

        def gather() -> list[Tensor]:
            everyone = [torch.empty_like(padded) for _ in range(self.processes)]
            dist.all_gather(everyone, padded, group=self.group)
            return everyone

        return torch.cat([t[: len(h)] for t, h in zip(self._now(gather), self.hosting, strict=True)]).to(values.device)

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor | Pending:
        self._count_broadcast(rows, source)
        row = rows[source - self.workers.start if source in self.workers else 0]
        work = dist.broadcast(row, self._ranks[self._messages.owner[source]], group=self.group, async_op=True)
        return self._pending(work, lambda: rows.copy_(row.clone().expand_as(rows)) if self.rows > 1 else rows)

    def create_groups(self, subgroups: Subgroups) -> None:
        if subgroups.whole or self.rows > 1 or self.size != self.processes:
            return
        self._groups.create(subgroups.members.tolist(), int(subgroups.group_of[self.workers.start]))

    def release(self) -> None:
        if not self._shares_heartbeat:
            return
        atexit.unregister(self._at_exit)
        self._end_exchanges()
        if self._thread is None or not self._thread.working:
            self._groups.destroy()

    def close(self) -> None:
        for derived in list(self._derived):
            derived.close()
        self.release()
        if not self._shares_heartbeat:
            self._heartbeat.stop()
            self._end_exchanges()
        self._groups.forget()

    def _end_exchanges(self) -> None:
        for reduction in self._reductions.values():
            reduction.close()
        self._reductions.clear()
        if self._thread is not None:
            self._thread.close(self.liveness_timeout_s)
        self._heartbeat.progress.drop(self._track.name)

    def _group(self, subgroups: Subgroups) -> dist.ProcessGroup | None:
        """The process group of this process's subgroup; None where there is none, because a process hosts several workers."""
        if subgroups.whole:
            return self.group
        if self.rows > 1:
            return None
        return self._groups.find(subgroups.members[subgroups.group_of[self.workers.start]].tolist())


def clock_offset(rank: int, ranks: list[int], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """What to add to this process's monotonic clock to get process 0's, from round trips to it; 0 if both run on one kernel."""
    boots = all_gather_plain(boot_id(), group)
    offset = 0.0
    for peer in range(1, len(ranks)):
        if boots[peer] != boots[0]:
            offset = _measured(rank, peer, ranks, device, offset)
    return offset


def _measured(rank: int, peer: int, ranks: list[int], device: torch.device, own: float) -> float:
    """Process 0 and ``peer`` measure the offset between their clocks, from the shortest round trip; others keep ``own``."""
    best = (float("inf"), own)
    for _ in range(_ROUNDS):
        stamp = torch.zeros(1, dtype=torch.float64, device=device)
        if rank == 0:
            dist.recv(stamp, ranks[peer])
            stamp[0] = time.monotonic()
            dist.send(stamp, ranks[peer])
        elif rank == peer:
            start = time.monotonic()
            dist.send(stamp, ranks[0])
            dist.recv(stamp, ranks[0])
            end = time.monotonic()
            best = min(best, (end - start, float(stamp) - (start + end) / 2))
    return best[1] if rank == peer else own
