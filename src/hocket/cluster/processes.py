"""Real processes over torch.distributed: Gloo or NCCL, one worker each or several.

On Gloo one thread of our own launches everything, strictly in the order of submission: collectives that start in another order
on another process give silently wrong sums. Messages are raw bytes between pairs; one of variable size is announced by a small one
(so that receivers know its size). On NCCL the calling thread launches, work overlaps on the device, and time stamps are CUDA
events.

``exact=True`` gathers and sums in worker order instead of the backend's ring: slower, and equal bit for bit to virtual workers.
(The ledger counts the ring's bytes then, too: it says what the strategy costs.)
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.base import Cluster, Subgroups
from hocket.cluster.heartbeat import Heartbeat, boot_id
from hocket.cluster.ledger import CudaClock
from hocket.cluster.message import PIECE_BYTES, Message, ordered_mean, ring_bytes, summed_bytes
from hocket.errors import HocketError, WorkerLost

_MAX_TAG = 2**30


def split_workers(workers: int, processes: int) -> list[range]:
    """Which workers each process hosts: consecutive ones, as evenly as possible.

    >>> split_workers(5, 2)
    [range(0, 3), range(3, 5)]
    """
    base, extra = divmod(workers, processes)
    starts = [r * base + min(r, extra) for r in range(processes + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


class ProcessCluster(Cluster):
    """The workers of an initialised ``torch.distributed`` process group, or of one of its subgroups."""

    def __init__(
        self,
        workers: int | None = None,
        device: torch.device | str = "cpu",
        exact: bool = False,
        host_size: int | None = None,
        liveness_timeout_s: float = 10.0,
        group: dist.ProcessGroup | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """``group``: some of the processes, who then share the whole job's ``heartbeat``."""
        self._some = group
        self.rank, self.processes = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._whole = group is None
        size = workers or self.processes
        if size < self.processes:
            raise HocketError(
                f"{size} workers on {self.processes} processes leave some without work: start {size} processes or fewer."
            )
        self.hosting = split_workers(size, self.processes)
        super().__init__(size, self.hosting[self.rank], torch.device(device), timed=True)
        self.exact = exact
        self.backend = str(dist.get_backend())
        self._owner = [r for r, hosted in enumerate(self.hosting) for _ in hosted]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._sequence = 0
        self.summing: dict[int, Callable[[Tensor], Tensor]] = {}
        """Means over so many machines that only sum, where the job has some."""
        self.keys: Path | None = None
        """The file with the job's keys, for messages between machines."""
        self.endings: list[Callable[[], None]] = []
        """What is to be done when the cluster is left."""
        self._host_size = host_size or size
        self._threaded = "gloo" in self.backend and "nccl" not in self.backend
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], _Ticket] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._working = False
        _CLUSTERS.add(self)
        if self.device.type == "cuda" and "nccl" in self.backend:
            self.ledger.clock = CudaClock()
        self.ledger.clock.offset_s = self._clock_offset()
        self.heartbeat = heartbeat or Heartbeat(self.rank, self.processes, self.hosting, liveness_timeout_s)
        self._shares_heartbeat = heartbeat is not None

    @property
    def host_size(self) -> int:
        return self._host_size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes' group; the whole job's is asked for anew each time, since nobody may keep it beyond its end."""
        return dist.group.WORLD if self._some is None else self._some

    @property
    def scope(self) -> str:
        """Tells the subgroups of a job apart; empty for the whole."""
        return "" if self._whole else "-".join(map(str, self._ranks))

    # --- order -----------------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        if not self._threaded:
            result = self._guarded(work)
            return lambda: self._guarded(result.wait) if isinstance(result, _Pending) else result
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hocket-exchange", daemon=True)
            self._thread.start()
        ticket = _Ticket(self)
        self._queue.put((work, ticket))
        return ticket

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, ticket = item
            self._working = True
            try:
                ticket.result = work()
            except BaseException as error:
                ticket.error = error
            self._working = False
            ticket.done.set()

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run a collective; a broken connection becomes a sentence that names the worker."""
        try:
            return work()
        except (HocketError, WorkerLost):
            raise
        except RuntimeError as error:
            raise self.heartbeat.explain(error) from error

    def _now(self, work: Callable[[], Any]) -> Any:
        """Small agreements go through the same queue, in order with everything else."""
        if threading.current_thread() is self._thread:
            return work()
        return self.start(work)()

    # --- verbs -----------------------------------------------------------------------------------------------------------

    def reduce_on_servers(self, servers: int, rows: Tensor) -> Tensor:
        if servers not in self.summing:
            return super().reduce_on_servers(servers, rows)
        own, theirs = summed_bytes(rows.shape[1] * rows.element_size(), self.size, servers)
        self.ledger.sent += own + servers * theirs // self.size
        return self.summing[servers](rows)

    def mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        pending = self.mean_later(rows, subgroups)
        return rows if pending is None else pending.wait()

    def mean_later(self, rows: Tensor, subgroups: Subgroups) -> _Pending | None:
        """Start a mean; the backend's own all-reduce runs on, anything else has ended on return (then ``None``)."""
        self._count_mean(rows, subgroups)
        group = self._group(subgroups)
        if self.exact or group is None:
            self._gathered_mean(rows, subgroups)
            return None
        total = rows
        if self.rows > 1:
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
        work = dist.all_reduce(total, group=group, async_op=True)
        return _Pending(
            work, lambda: rows.copy_(total.div_(subgroups.size).expand_as(rows)) if self.rows > 1 else rows.div_(subgroups.size)
        )

    def _gathered_mean(self, rows: Tensor, subgroups: Subgroups) -> None:
        groups, position = self.groups_here(subgroups)
        everything = self._all_gather(Message((rows,)), subgroups).parts[0].view(len(groups), subgroups.size, -1)
        means = torch.stack([ordered_mean(group) for group in everything])
        rows.copy_(means[position.to(means.device)])

    def neighbor_exchange(self, message: Message, sources: Tensor) -> Message:
        self._count_messages(message, self._copies_heard(sources))
        wanted = [(int(sources[slot, i]), i, slot) for slot in range(sources.shape[0]) for i in self.workers]
        offered = [
            (i, j, slot)
            for slot in range(sources.shape[0])
            for j in range(self.size)
            if (i := int(sources[slot, j])) in self.workers
        ]
        own = self.workers.start
        return self._route(
            message,
            [(i - own, i, j, s) for i, j, s in offered],
            [(i, j, s, (i if i >= 0 else j) - own) for i, j, s in wanted],
        )

    def all_to_all(self, message: Message, subgroups: Subgroups) -> Message:
        self._count_messages(message, self._to_others(subgroups))
        offered, wanted, own = [], [], self.workers.start
        for i in self.workers:
            mates = subgroups.members[subgroups.group_of[i]].tolist()
            place = int(subgroups.place_of[i])
            offered += [((i - own) * subgroups.size + k, i, j, 0) for k, j in enumerate(mates)]
            wanted += [(j, i, 0, (j - own) * subgroups.size + place) for j in mates]
        return self._route(message, offered, wanted)

    def all_gather(self, message: Message, subgroups: Subgroups) -> Message:
        self._count_messages(message, subgroups.size - 1)
        return self._all_gather(message, subgroups)

    def _all_gather(self, message: Message, subgroups: Subgroups) -> Message:
        groups, _ = self.groups_here(subgroups)
        own = self.workers.start
        offered, wanted = [], []
        for i in self.workers:
            # A process gets each message once, whoever of its workers it is for.
            mates = subgroups.members[subgroups.group_of[i]].tolist()
            offered += [(i - own, i, self.hosting[r].start, 0) for r in sorted({self._owner[j] for j in mates})]
        for g in groups:
            wanted += [(j, own, 0, j - own) for j in subgroups.members[g].tolist()]
        return self._route(message, offered, wanted)

    def all_reduce_any(self, flags: Tensor) -> Tensor:
        self.ledger.sent += ring_bytes(flags.shape[1], self.size)
        mine = flags.any(0).to(self._wire_device, torch.uint8)

        def agree() -> Tensor:
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
            return mine

        return self._now(agree).to(flags.device, torch.bool)

    def all_gather_metrics(self, values: Tensor) -> Tensor:
        most = max(len(hosted) for hosted in self.hosting)
        padded = torch.zeros(most, *values.shape[1:], dtype=values.dtype)
        padded[: values.shape[0]] = values.cpu()
        padded = padded.to(self._wire_device)

        def gather() -> list[Tensor]:
            everyone = [torch.empty_like(padded) for _ in range(self.processes)]
            dist.all_gather(everyone, padded, group=self.group)
            return everyone

        return torch.cat([t[: len(h)] for t, h in zip(self._now(gather), self.hosting, strict=True)]).to(values.device)

    def broadcast(self, rows: Tensor, source: int = 0) -> Any:
        self._count_broadcast(rows, source)
        owner = self._owner[source]
        row = rows[source - self.workers.start if source in self.workers else 0]
        work = dist.broadcast(row, self._ranks[owner], group=self.group, async_op=True)
        return _Pending(work, lambda: rows.copy_(row.clone().expand_as(rows)) if self.rows > 1 else rows)

    def create_groups(self, subgroups: Subgroups) -> None:
        if subgroups.whole or self.rows > 1 or self.size != self.processes:
            return
        for members in subgroups.members.tolist():
            if tuple(members) not in self._groups and (self._whole or self.rank in members):
                ranks = [self._ranks[r] for r in members]
                make = partial(dist.new_group, ranks, use_local_synchronization=not self._whole)
                self._groups[tuple(members)] = self._now(make)

    def close(self) -> None:
        if not self._shares_heartbeat:
            self.heartbeat.stop()
        for end in self.endings:
            end()
        self.endings.clear()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(
                timeout=self.heartbeat.liveness_timeout_s
            )  # what is still under way needs the others; they may be gone
            self._thread = None
        self._groups.clear()  # or they would outlive destroy_process_group
        self._some = None

    # --- messages --------------------------------------------------------------------------------------------------------

    @property
    def _wire_device(self) -> torch.device:
        return self.device if "nccl" in self.backend else torch.device("cpu")

    def _route(
        self,
        message: Message,
        offered: list[tuple[int, int, int, int]],
        wanted: list[tuple[int, int, int, int]],
    ) -> Message:
        """Send rows to others and gather what is wanted, in order.

        ``offered``: (row of ``message``, from worker, to worker, slot); ``wanted``: (from worker, to worker, slot, row of
        ``message`` if it is ours).
        """
        remote = sorted((w for w in wanted if w[0] >= 0 and w[0] not in self.workers), key=lambda w: w[:3])
        sizes = self._sizes(message, offered, wanted, remote)
        self._sequence += 1
        device = message.parts[0].device
        distances: dict[int, list[dist.P2POp]] = {}
        packed: dict[int, Tensor] = {}
        for row, source, target, slot in sorted(offered, key=lambda o: o[1:]):
            if target in self.workers:
                continue
            if row not in packed:
                packed[row] = message.pack(row).to(self._wire_device)
            to = self._owner[target]
            operation = self._p2p(dist.isend, packed[row], to, self._tag(source, target, slot))
            distances.setdefault((to - self.rank) % self.processes, []).append(operation)
        blobs = torch.empty(len(remote), max(sizes, default=0), dtype=torch.uint8, device=self._wire_device)
        for k, (source, target, slot, _) in enumerate(remote):
            by = self._owner[source]
            operation = self._p2p(dist.irecv, blobs[k, : sizes[k]], by, self._tag(source, target, slot))
            distances.setdefault((self.rank - by) % self.processes, []).append(operation)
        self._perform(distances, max([*sizes, *(p.numel() for p in packed.values())], default=0))
        place = {w[:3]: k for k, w in enumerate(remote)}
        kept = [place[w[:3]] if w[:3] in place else len(remote) + w[3] for w in wanted]
        if not remote:
            return message.select(torch.tensor([w[3] for w in wanted], dtype=torch.int64))
        received = message.unpack(blobs.to(device))
        if not any(w[:3] not in place for w in wanted) and kept == list(range(len(remote))):
            return received
        return _stack(received, message).select(torch.tensor(kept, dtype=torch.int64))

    def _perform(self, distances: dict[int, list[dist.P2POp]], largest_bytes: int) -> None:
        """Send and receive. Small messages go all at once; large ones on Gloo distance by distance and in pieces.

        Several that meet at one receiver crowd each other out, and Gloo sends a whole message to a peer before it receives that
        peer's own (docs/decisions/11).
        """
        if "gloo" in self.backend and largest_bytes > PIECE_BYTES:
            rounds = [_pieces(distances[d]) for d in sorted(distances)]
        else:
            rounds = [[o for operations in distances.values() for o in operations]]
        for operations in rounds:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def _p2p(self, how: Callable[..., Any], tensor: Tensor, process: int, tag: int) -> dist.P2POp:
        return dist.P2POp(how, tensor, self._ranks[process], self.group, tag)

    def _tag(self, source: int, target: int, slot: int) -> int:
        return ((self._sequence * self.size + slot) * self.size * self.size + source * self.size + target) % _MAX_TAG

    def _sizes(
        self, message: Message, offered: list[tuple[int, int, int, int]], wanted: list[tuple[int, int, int, int]], remote: list[Any]
    ) -> list[int]:
        """How many bytes each remote row will take; where that varies, senders say so in a small message beforehand."""
        if message.lengths is None:
            return [message.fixed_bytes] * len(remote)
        own = message.payload_bytes().to("cpu", torch.int32).unsqueeze(1)
        told = self._route(Message((own,)), offered, wanted).parts[0].flatten().tolist()
        by_route = {w[:3]: size for w, size in zip(wanted, told, strict=True)}
        return [by_route[w[:3]] for w in remote]

    def _group(self, subgroups: Subgroups) -> dist.ProcessGroup | None:
        if subgroups.whole:
            return self.group
        return (
            self._groups.get(tuple(subgroups.members[subgroups.group_of[self.workers.start]].tolist())) if self.rows == 1 else None
        )

    def _clock_offset(self) -> float:
        """What to add to this process's monotonic clock to get process 0's: nothing on one kernel, else the best of some pings."""
        boots: list[str] = [""] * self.processes
        dist.all_gather_object(boots, boot_id(), group=self.group)
        offset = 0.0
        for peer in range(1, self.processes):
            if boots[peer] != boots[0]:
                offset = _ping(self.rank, peer, self._ranks, self._wire_device, offset)
        return offset


_CLUSTERS: weakref.WeakSet[ProcessCluster] = weakref.WeakSet()


@atexit.register
def _end_at_once() -> None:
    """After an exception, do not take the interpreter down around a thread that is inside Gloo: it would abort the process."""
    if hasattr(sys, "last_value") and any(cluster._working for cluster in _CLUSTERS):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _pieces(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The same in pieces, taken in turn from each; pieces with one tag arrive in the order they were sent."""
    cut = [
        [dist.P2POp(o.op, piece, o.peer, o.group, o.tag) for piece in o.tensor.split(PIECE_BYTES // o.tensor.element_size())]
        for o in operations
    ]
    return [piece for turn in zip_longest(*cut) for piece in turn if piece is not None]


class _Pending:
    """A collective under way in the backend's own threads or streams."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        self._work.wait()
        return self._finish()


class _Ticket:
    """Waits for work that the exchange thread runs; raises here what went wrong there."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._cluster = cluster

    def __call__(self) -> Any:
        self.done.wait()
        return self._cluster._guarded(self._finish)

    def _finish(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result.wait() if isinstance(self.result, _Pending) else self.result


def _stack(first: Message, second: Message) -> Message:
    """The rows of both messages, padded to the wider capacity."""
    parts = []
    for a, b in zip(first.parts, second.parts, strict=True):
        width = max(a.shape[1], b.shape[1])
        parts.append(torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in (a, b)]))
    lengths = None
    if first.lengths is not None and second.lengths is not None:
        lengths = torch.cat([first.lengths, second.lengths])
    return Message(tuple(parts), lengths)


def _ping(rank: int, peer: int, ranks: list[int], device: torch.device, own: float, rounds: int = 10) -> float:
    """Process 0 and ``peer`` measure the offset between their clocks; the round trip that was shortest counts."""
    import time

    best = (float("inf"), own)
    for _ in range(rounds):
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
