"""The processes that hold the parts of one replica of a split model, in an elastic run.

Their connections are groups of their own, apart from torch's default group: when another replica is lost, passes under way go on.
They are made anew when the replica is: one of its processes was lost, and another one takes its place.

A process that waits for another of its replica may have to form the next generation at the same time, because the other one waits
for that. So a thread forms it meanwhile (:meth:`Replica.waiting`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hocket.cluster.exchange_thread import ExchangeThread
from hocket.cluster.live_groups import STANDS, LiveGroups, abort_group
from hocket.errors import WorkerLost


class ReplicaLost(WorkerLost):
    """Another process of this one's replica was lost, so the pass under way cannot be completed."""


class Replica:
    """The replica of the process that holds ``part``, one of ``shape``: stages, and parts of each stage."""

    def __init__(self, shape: tuple[int, int], part: int) -> None:
        self.shape, self.part = shape, part
        self.connected = 0
        """The generation in which its processes were connected; 0: they are not."""
        self.abandoned: Callable[[], bool] = lambda: False
        """Whether there is a generation to be formed at once."""
        self.regroup: Callable[[], None] = lambda: None
        """Forms it."""
        self.watched: Callable[[str, Sequence[int], Callable[[], object]], None] = _unwatched
        """Calls what waits for others along an axis."""
        self._groups: dict[str, Any] = {}
        self._live = LiveGroups()
        self._waiter = ExchangeThread(self._live.result)
        self._waits = self._failed = self._closed = False
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def parts(self) -> int:
        return self.shape[0] * self.shape[1]

    def place(self, name: str) -> int:
        """The coordinate along ``pipeline`` or ``tensor``."""
        return self.part // self.shape[1] if name == "pipeline" else self.part % self.shape[1]

    def size(self, name: str) -> int:
        return self.shape[name == "tensor"]

    def group(self, name: str) -> Any:
        """The processes along ``pipeline`` or ``tensor``."""
        if name not in self._groups:
            raise ReplicaLost(
                "This process has no connection to the other processes of its replica; start it again, and it joins them."
            )
        return self._groups[name]

    # --- connections ---------------------------------------------------------------------------------------------------------

    def connect(self, number: int, store: dist.Store, timeout_s: float) -> None:
        """Connect the processes of the replica anew, in generation ``number``."""
        self.disconnect()
        if self._live.given_up:
            self._waiter.close(0.0)
            self._waiter = ExchangeThread(self._live.result)
        self._live.begin(number)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="hocket-replica", daemon=True)
            self._thread.start()
        for name, other in (("pipeline", "tensor"), ("tensor", "pipeline")):
            if self.size(name) > 1:
                line = dist.PrefixStore(f"{name} {self.place(other)}", store)
                group = dist.ProcessGroupGloo(line, self.place(name), self.size(name), timedelta(seconds=timeout_s))
                group._set_default_timeout(STANDS)
                self._groups[name] = group
        self.connected = number

    def disconnect(self) -> None:
        self.abort()
        self._groups.clear()
        self.connected, self._failed = 0, False

    def abort(self) -> None:
        """Make everything fail that is under way between its processes; from any thread."""
        self._live.abort()
        for name, group in list(self._groups.items()):
            abort_group(group, self.place(name), self.size(name))

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self.disconnect()
        self._waiter.close(0.0)

    def ended(self, work: Callable[[], object]) -> None:
        """Call ``work``, which waits for other processes; RuntimeError where it was aborted and does not end."""
        self._waiter.submit(work, _same)()

    def most(self, value: int) -> int:
        """The largest ``value`` of all its processes."""
        told = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        for group in self._groups.values():
            self.ended(group.allreduce([told], options).wait)
        return int(told)

    # --- while others are waited for -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this process waits for others of its replica; the next generation is formed meanwhile, if there is one."""
        self._waits = True
        if self.abandoned():
            self._wake.set()
        try:
            yield
        except RuntimeError as error:
            raise ReplicaLost(
                "Another process of this replica has ended or does not answer; start this one again, and it joins the others."
            ) from error
        finally:
            with self._lock:  # not while the generation is being formed
                self._waits = False
        if self._failed:
            raise ReplicaLost(
                "This replica did not answer in time, and the others went on without it; start it again to join them."
            )

    def wake(self) -> None:
        """There is a generation to be formed; from any thread."""
        self._wake.set()

    def _serve(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                if self._waits and not self._closed and self.abandoned():
                    try:
                        self.regroup()
                    except BaseException:  # the thread that waits begins anew
                        self._failed = True
                        self.abort()


def _same(error: BaseException) -> BaseException:
    return error


def _unwatched(axis: str, ranks: Sequence[int], work: Callable[[], object]) -> None:
    work()
