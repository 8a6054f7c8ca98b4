"""The cluster as strategies see it: collectives on rows.

Strategy code sees ``rows`` — tensors ``[workers hosted here, values]`` — and reaches other workers only through these verbs. A real
process hosts one row (or several), a virtual cluster hosts all of them; the code of a strategy is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hocket.cluster.agreement import Agreement
from hocket.cluster.clock import Clock
from hocket.cluster.ending import Ending
from hocket.cluster.exchange_thread import finished
from hocket.cluster.flags import with_flags, without_flags
from hocket.cluster.ledger import CudaClock, Ledger, Span
from hocket.cluster.message import Message, fixed_on_wire, framed, on_wire, ring_bytes, there
from hocket.cluster.relay import Trip, gather_trips, radix_for
from hocket.cluster.subgroups import Subgroups
from hocket.errors import HocketError


class Exchange:
    """One exchange of one step: work is submitted bucket by bucket, in bucket order, and awaited as a whole."""

    def __init__(self, cluster: Cluster, long: bool = False) -> None:
        """``long``: workers make whole steps before they wait for it, so the time at which it ends is noted."""
        self._cluster = cluster
        self._long = long and cluster.ledger.timed and not isinstance(cluster.ledger.clock, CudaClock)
        self._ended: Any = None
        self._tickets: list[Callable[[], Any]] = []
        self._first: Any = None
        self._last: Any = None

    def submit(self, work: Callable[[], Any], produced: float = 1.0, name: str = "flags") -> None:
        """Start ``work`` (it may call any collective); it runs after everything submitted before it. ``name`` says what it is.

        Virtual workers with a clock launch it when their backward pass has ``produced`` this share of the gradients.
        """
        if self._cluster.on_submit is not None:
            self._cluster.on_submit(name)
        if self._cluster.clock is not None:
            self._cluster.clock.launch(produced)
        self._last = self._cluster.ledger.clock.stamp()
        if not self._tickets:
            self._first = self._last
        self._tickets.append(self._cluster.start(partial(self._to_its_end, work) if self._long else work, name))

    def _to_its_end(self, work: Callable[[], Any]) -> Any:
        result = finished(work())
        self._ended = self._cluster.ledger.clock.stamp()
        return result

    def wait(self) -> list[Any]:
        """Block until all submitted work has ended; the results in the order of submission."""
        ledger = self._cluster.ledger
        blocked = ledger.clock.stamp()
        results = [ticket() for ticket in self._tickets]
        end = ledger.clock.stamp() if self._ended is None else self._ended
        ledger.record(Span(self._first, self._last, blocked, end) if ledger.timed and self._tickets else None)
        return results

    def seal(self) -> None:
        """Nothing more will be submitted."""


class ServerReduction(Protocol):
    """Servers that sum the rows of all workers (``server(n, role=sum)``); a job attaches one to its cluster."""

    @property
    def mean(self) -> Callable[[Tensor], Tensor]:
        """Makes each of the rows that it is called with the mean over all workers, in place."""

    def close(self) -> None:
        """Close the connections and end the servers that this process started."""


class Cluster(ABC):
    """The workers and their collectives. Only clusters write the ledger."""

    clock: Clock | None = None
    """The virtual time of virtual workers on a described cluster."""
    on_submit: Callable[[str], None] | None = None
    """Called with the name of whatever is submitted to an exchange (:mod:`hocket.train.audit`)."""
    rank: int = 0
    """The number of this process among those of the cluster."""
    processes: int = 1
    """How many processes host the workers."""
    has_process_group: bool = False
    """Whether the workers are in processes of a ``torch.distributed`` group."""
    backend: str | None = None
    """The backend of the process group: gloo or nccl."""
    exact: bool = False
    """Whether means sum in worker order instead of the backend's."""
    keys: Path | None = None
    """The file with the keys that protect messages between machines."""
    scope: str = ""
    """A name that tells the subclusters of a job apart; empty for the whole job."""
    liveness_timeout_s: float = 10.0
    """A process silent for so many seconds is lost."""
    waiting_flags: Tensor | None = None
    """Flags ``[rows here, k]`` that travel inside the next :meth:`all_gather_flagged`; :attr:`agreed_flags` are those of all."""
    agreed_flags: Tensor | None = None
    elastic: bool = False
    """Whether the others go on when a worker is lost, so that whoever exchanges keeps what an exchange began with."""
    acknowledges: bool = False  # whether nobody completes any exchange before all others have their results

    @property
    def process(self) -> int:  # among all of the job
        return self.rank

    def __init__(self, size: int, workers: range, device: torch.device, timed: bool, host_size: int | None = None) -> None:
        self.size, self.workers, self.device = size, workers, device
        self.host_size = host_size or size
        """Workers per host, if the cluster knows it (hierarchical topologies use it by default)."""
        self.world = Subgroups.world(size)
        none = torch.zeros(len(workers), dtype=torch.int64)
        self.ledger = Ledger(none, none.to(device, copy=True), timed)

    @property
    def rows(self) -> int:
        """How many workers are hosted here."""
        return len(self.workers)

    @property
    def group(self) -> ProcessGroup | None:
        return None

    def for_job(self) -> Cluster:
        """The same workers with process groups, an order of exchanges and a ledger for one job alone; this cluster where there is
        no process group. All processes must call it."""
        return self

    def subcluster(self, group: ProcessGroup | None, partition: Sequence[Sequence[int]], host_size: int | None = None) -> Cluster:
        """The same for the processes of ``group``, one part of the ``partition`` of all."""
        return self

    def explain(self, error: BaseException) -> BaseException:
        """The error of a broken connection as one that names the lost worker, as far as the cluster can tell."""
        return error

    def stop_heartbeat(self) -> None:  # noqa: B027
        """From now on processes neither watch each other nor end together: the workers are asynchronous."""

    def agreement(self) -> Agreement:
        """Texts that the processes exchange beside all else; all processes must call it."""
        return Agreement(self.rank, self.processes)

    def wait_for_all(self, what: str) -> None:  # noqa: B027
        """Wait until all processes have come to ``what``, such as ``job.averaged()``; say so where one does not come."""

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, neither bytes nor time count: evaluation and checkpoints are not training."""
        ledger = self.ledger
        sent, varying = ledger.sent.clone(), ledger.sent_varying.clone()
        counting, running = ledger.counting, ledger.running
        time = None if self.clock is None else self.clock.state_dict()
        ledger.pause()
        ledger.counting = False
        try:
            yield
        finally:
            ledger.sent.copy_(sent)
            ledger.sent_varying.copy_(varying)
            ledger.counting = counting
            if self.clock is not None and time is not None:
                self.clock.load_state_dict(time)
            if running:
                ledger.resume()

    def exchange(self, long: bool = False, ending: Ending = Ending.ACKNOWLEDGED) -> Exchange:
        return Exchange(self, long)

    def complete(self, exchange: Exchange, repeat: Callable[[], Exchange], rows: Sequence[Tensor] = ()) -> list[Any]:
        """Wait for all of ``exchange``; the results in the order of submission. Where workers may be lost meanwhile, the others
        ``repeat`` it, or the results are written into the ``rows`` that were submitted."""
        return exchange.wait()

    def end_step(self, step: int) -> None:
        """The workers hosted here have done ``step`` steps."""
        self.ledger.end_step()

    def watched(self, axis: str, ranks: Sequence[int], work: Callable[[], object]) -> None:
        """Call ``work``, which waits for other processes along an axis of a mesh, outside of the order of exchanges."""
        work()

    def late_exchanges(self) -> list[dict[str, Any]]:
        """The latest exchanges that took far longer than those before, and whom they waited for (:mod:`hocket.cluster.late`)."""
        return []

    # --- verbs -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, work: Callable[[], Any], name: str = "figures of all workers") -> Callable[[], Any]:
        """Run ``work`` in order with all other work; returns a function that waits for its result. ``name`` says what it is."""

    @abstractmethod
    def mean(self, rows: Tensor, subgroups: Subgroups) -> Tensor:
        """Every row becomes the mean over its group (in place)."""

    def mean_later(self, rows: Tensor, subgroups: Subgroups) -> Any:
        """The same; it may go on in the background: the rows, or an object whose ``wait()`` returns them."""
        return self.mean(rows, subgroups)

    def lacks_servers(self, servers: int) -> bool:
        """Whether :meth:`reduce_on_servers` needs ``servers`` servers that were not attached yet."""
        return False

    def attach_servers(self, servers: int, reduction: ServerReduction) -> None:
        """Use ``reduction`` for means on ``servers`` servers; :meth:`close` closes it."""
        raise HocketError(f"server({servers}, role=sum) needs workers in processes of their own; use allreduce.")

    def reduce_on_servers(self, servers: int, rows: Tensor) -> Tensor:
        """The mean over all workers, summed on ``servers`` spare machines and on the workers' own (in place)."""
        raise HocketError(f"server({servers}, role=sum) needs summation servers, and this job has none; use allreduce.")

    @abstractmethod
    def neighbor_exchange(self, message: Message, sources: Tensor) -> Message:
        """Receive one message from each source: worker ``j`` receives from ``sources[slot, j]`` (−1: from no worker).

        Returns rows in slot-major order, ``[slots · rows here]``; where a worker receives nothing the row is its own message.
        """

    @abstractmethod
    def all_to_all(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        """All-to-all inside each group: row ``(i, k)`` of ``[rows here · group size]`` goes to the group's k-th member.

        Returns rows ``(i, k)``: the message to worker ``i`` from its group's k-th member. Small messages go by way of others
        (:mod:`hocket.cluster.relay`); where their size varies, ``usual_bytes``, the same on all workers, says what is small.
        """

    @abstractmethod
    def all_gather(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        """All-gather inside each group; rows ``(g, k)`` for the groups that have members here (see :meth:`groups_here`).

        ``usual_bytes``: see :meth:`all_to_all`."""

    def all_gather_flagged(self, message: Message, subgroups: Subgroups, usual_bytes: int | None = None) -> Message:
        """An all-gather that takes :attr:`waiting_flags` along, where it is one of all workers."""
        flags = self.waiting_flags
        if flags is None or not subgroups.whole:
            return self.all_gather(message, subgroups, usual_bytes)
        self.waiting_flags = None
        got = self.all_gather(with_flags(message, there(flags, message.parts[0])), subgroups, usual_bytes)
        found, self.agreed_flags = without_flags(got, flags.shape[1])
        return found

    @abstractmethod
    def all_reduce_any(self, flags: Tensor) -> Tensor:
        """Bool flags ``[rows here, k]`` combined over all workers: ``[k]``."""

    @abstractmethod
    def all_gather_metrics(self, values: Tensor) -> Tensor:
        """Values ``[rows here, …]`` of all workers in worker order; for figures, not for training data (uncounted)."""

    @abstractmethod
    def broadcast(self, rows: Tensor, source: int = 0) -> Any:
        """Every row becomes worker ``source``'s, in place; it may go on in the background: see :meth:`mean_later`."""

    def synchronize(self, rows: Tensor) -> None:
        """Make every row equal to worker 0's before the training starts (in place; waits, and neither bytes nor time count)."""
        with self.uncounted():
            self.start(lambda: self.broadcast(rows))()

    def create_groups(self, subgroups: Subgroups) -> None:  # noqa: B027 - clusters without set-up cost need not override
        """Called by every process in the same order before the subgroups are first used."""

    def release(self) -> None:  # noqa: B027
        """The job is over: :meth:`close` what :meth:`for_job` or :meth:`subcluster` made; nothing where others use this cluster."""

    def close(self) -> None:  # noqa: B027
        """End the cluster's threads, connections and attached servers."""

    # --- shared by implementations ---------------------------------------------------------------------------------------

    def groups_here(self, subgroups: Subgroups) -> tuple[list[int], Tensor]:
        """The groups that have members here and, for each row, the position of its group in that list."""
        groups, position = subgroups.groups_of(self.workers)
        return groups.tolist(), position

    def code(self, methods: Sequence[str], values: int) -> None:  # noqa: B027 - real workers take the time themselves
        """Workers encode ``values`` values, and decode what they hear; ``methods`` are the names of the code."""

    def apply(self, methods: Sequence[str], values: int) -> None:  # noqa: B027
        """Workers copy ``values`` weights or gradients for an exchange, in line with their computing."""

    def _count_mean(self, rows: Tensor, subgroups: Subgroups) -> None:
        self.ledger.sent += ring_bytes(rows.shape[1] * rows.element_size(), subgroups.size)

    def _count_broadcast(self, rows: Tensor, source: int) -> None:
        if source in self.workers:
            self.ledger.sent[source - self.workers.start] += (self.size - 1) * framed(rows.shape[1] * rows.element_size())

    def _count_messages(self, message: Message, copies: Tensor | int) -> Tensor:
        """Count ``copies`` of each row's message as sent by its worker; returns the bytes of one copy."""
        if message.lengths is None:
            size = fixed_on_wire(message.fixed_bytes)
            self.ledger.sent += size * (copies if isinstance(copies, int) else copies.view(self.rows, -1).sum(1))
            return torch.full((message.rows,), size)
        sizes = on_wire(message.payload_bytes(), message.lengths is not None)
        self._count_sent(sizes * (there(copies, sizes) if isinstance(copies, Tensor) else copies), message.lengths is not None)
        return sizes

    def _count_sent(self, sizes: Tensor, varying: bool) -> None:
        """Count messages of ``sizes`` bytes, those of each worker one after another."""
        sent = self.ledger.sent_varying if varying else self.ledger.sent
        sent += there(sizes.view(self.rows, -1).sum(1), sent)

    @property
    def _flag_trips(self) -> tuple[Trip, ...]:
        """By which messages flags alone are combined: each says all that its sender has heard."""
        return gather_trips(self.size, radix_for(self.size, 0, True))

    def _radix(self, message: Message, subgroups: Subgroups, gather: bool, usual_bytes: int | None) -> int | None:
        """By which radix messages go by way of others; None: directly."""
        usual_bytes = message.fixed_bytes if message.lengths is None else usual_bytes
        if usual_bytes is None or subgroups.size < 3:
            return None
        radix = radix_for(subgroups.size, usual_bytes, gather, message.lengths is not None)
        return None if radix == subgroups.size else radix

    def _copies_heard(self, sources: Tensor) -> Tensor:
        """How many workers receive from each worker hosted here, by the table ``sources``."""
        heard = sources[sources >= 0]
        counts = torch.bincount(heard, minlength=self.size)
        return counts[self.workers.start : self.workers.stop]
