"""SIGTERM and SIGUSR1 to a process of a run whose workers do not come and go: all of its processes end with the same step, write a
checkpoint, and leave.

Processes agree on the step apart from all exchanges, so that no step is slower. A thread of each is woken by a signal, also while a
collective keeps the main thread from running Python, or sees in the job's store that another process was. It tells the others the
step that is under way here; the main thread begins no other one before all have told theirs. The last of these steps is the one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.cluster.base import Cluster
from hocket.drivers.processes import ENDED, say
from hocket.train.checkpoints import Checkpoints
from hocket.train.loop import Progress, Training, Watch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S, _AGREE_S, _MOST_S = 0.5, 10.0, 30.0
"""How often a thread looks whether another process leaves; how long it waits for all to tell their step, and, while steps are under
way, for its end."""
_JOIN_S = 2.0
"""How long the thread is waited for, which may wait for a store that is gone."""
_NAME = "leave"


class Leaving:
    """Whether and after which step all processes of ``cluster`` leave; all must make it together, in their main threads."""

    def __init__(self, cluster: Cluster) -> None:
        self.after: int | None = None
        """The step, once all know it."""
        self._agreement = cluster.agreement()
        self._lock, self._known, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._step, self._announced = 0, False
        self.stepping = True
        """Whether a step is under way; else the model is evaluated, or a checkpoint is written."""
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._before = {number: signal.signal(number, lambda *_: None) or signal.SIG_DFL for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="hocket-leaving", daemon=True)

    def start(self, step: int) -> None:
        """``step`` are done."""
        self._step = step
        self._thread.start()

    def stop(self) -> None:
        """The step has been agreed, or training has ended: end the thread."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        self.stop()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._wakes.close()
        self._woken.close()

    def ends_with(self, step: int) -> bool:
        """Whether all leave now that ``step`` are done."""
        with self._lock:
            self._step = step
            if not self._announced:
                return False
        self._known.wait()
        return step == self.after

    # --- the thread ------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._signalled() and not self._agreement.announced(_NAME):
            if self._over.is_set():
                return
        self._agreement.announce(_NAME)
        with self._lock:
            self._announced, under_way = True, self._step + 1
        answers = self._agreement.gather(f"{_NAME} after", str(under_way), _AGREE_S)
        steps = [int(step) for step in answers if step is not None]
        if len(steps) < len(answers):
            return self._give_up("other processes have not reported their step")
        self.after = max(steps)
        self._known.set()
        waited = 0.0
        while not self._over.wait(_LOOK_S):
            waited += _LOOK_S * self.stepping
            if waited >= _MOST_S:
                return self._give_up("the step has not ended in time")

    def _give_up(self, why: str) -> None:
        if not self._over.is_set():
            say(f"{why}: this process ends without a checkpoint")
            os._exit(ENDED)

    def _signalled(self) -> bool:
        readable, _, _ = select.select([self._woken], [], [], _LOOK_S)
        return bool(readable) and any(number in SIGNALS for number in self._woken.recv(64))


@contextmanager
def leaving(
    training: Any, cluster: Cluster, kept: Checkpoints, save: Callable[[int], None], wanted: bool
) -> Iterator[tuple[Callable[[Watch], Watch], Callable[[], None]]]:
    """Two functions: one that makes of what is called after every step what also leaves there, where all do, and one to be called
    after every epoch. ``save`` writes a checkpoint so many rounds into an epoch. Neither does anything unless ``wanted``."""
    main = threading.current_thread() is threading.main_thread()
    if not wanted or not main or cluster.elastic or not isinstance(training, Training):
        yield (lambda watch: watch), (lambda: None)
        return
    found, ends, taken = Leaving(cluster), False, 0

    def watching(watch: Watch) -> Watch:
        nonlocal taken
        taken = training.taken
        found.start(training.step)

        def watched(progress: Progress) -> None:
            nonlocal ends, taken
            watch(progress)
            taken += 1
            found.stepping = taken < len(training.batches.partition) and training.step < training.steps
            if found.ends_with(training.step):
                found.stop()  # evaluating and writing may take long
                ends = not found.stepping
                if not ends:
                    leave()

        return watched

    def leave() -> None:
        if taken:
            save(taken)
        kept.wait()
        none = torch.zeros(cluster.rows, 1, dtype=torch.bool, device=cluster.device)
        cluster.all_reduce_any(none)  # wait for all: process 0 may keep the store
        if cluster.process == 0 and (newest := kept.newest()) is not None:
            say(f"all workers leave; {newest.title} is written, and --resume goes on from it")
        raise SystemExit(0)

    def after_epoch() -> None:
        nonlocal taken
        taken = 0
        if ends and not training.over:
            leave()
        found.stepping = not training.over

    try:
        yield watching, after_epoch
    finally:
        found.close()
