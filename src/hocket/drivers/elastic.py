"""A member of an elastic run on sockets: its link to the rendezvous, and the store of a generation as torch knows stores."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.progress import Progress
from hocket.drivers.processes import ENDED, say
from hocket.drivers.threaded import ThreadedDriver
from hocket.errors import HocketError
from hocket.programs.base import Effects
from hocket.programs.elastic.generation import Generation
from hocket.programs.elastic.member import RENDEZVOUS, Abandon, Member
from hocket.transport import Caller, Keys

_REDIAL_S = 3.0
_LEAVE_S, _SAVE_S, _LOOK_S, _LINGER_S = 4.0, 0.8, 0.05, 0.2


class MemberDriver(ThreadedDriver):
    """The link of one member to the rendezvous at ``address``; beats go on in a thread of its own."""

    program: Member

    def __init__(
        self, address: str, job: bytes, keys: Keys | None = None, uid: int | None = None, part: int = 0, parts: int = 1
    ) -> None:
        """``uid``: the number that whoever started this process knows it by. ``part``, of ``parts``: see :class:`Member`."""
        program = Member(secrets.randbits(30) + 2**30 if uid is None else uid, part=part, parts=parts)
        program.host = host_name()
        super().__init__(program, callers={RENDEZVOUS: Caller(address, job, keys, redial_s=_REDIAL_S)})
        self.on_abandon: Callable[[Generation], None] = lambda _: None
        """Called, in the thread, when what is under way with others cannot be completed."""
        self.is_saving = False

    def watch(self, progress: Progress) -> None:
        """Tell the others where this process stands."""
        self.program.standing = lambda: {**progress.describe(), "pid": os.getpid()}

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """This worker writes a checkpoint before it leaves: it may take somewhat longer."""
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False

    def carry_out(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Abandon):
                self.on_abandon(effect.generation)
        super().carry_out(effects)


class GenerationStore(dist.Store):
    """What members of generation ``number`` tell each other when they build their process group; it fails once the generation is
    over, so nobody waits for a member that is lost, or when a value does not come within ``within_s`` seconds."""

    def __init__(self, driver: MemberDriver, number: int, within_s: float) -> None:
        super().__init__()
        self._driver, self._number, self._within_s = driver, number, within_s

    def meet(self, members: Sequence[int]) -> None:
        """Wait until all ``members`` have come, however long that takes: the rendezvous finds those that are lost."""
        program = self._driver.program
        self._call(program.put, f"here {program.uid}", torch.zeros(1, dtype=torch.uint8))
        self._call(program.get, [f"here {uid}" for uid in members])

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._call(self._driver.program.put, key, torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def get(self, key: str) -> bytes:
        return bytes(self._call(self._driver.program.get, [key], within_s=self._within_s)[0].tolist())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._call(self._driver.program.get, list(keys), within_s=self._within_s)

    def add(self, key: str, value: int) -> int:
        return int(self._call(self._driver.program.put, key, torch.tensor([value]), adds=True)[0])

    def _call(self, method: Callable[..., Effects], *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        self._driver.call(method, self._number, *arguments, **named)
        values = self._driver.program.values
        if values is None:
            raise RuntimeError(f"Generation {self._number} is over, or one of its members has not come.")
        return values


def host_name() -> str:
    """Equal on workers of one machine."""
    return socket.gethostname()


def leave_on_signals(driver: MemberDriver) -> None:
    """SIGTERM and SIGUSR1, as schedulers send them before they take a machine: hand over at the end of the step, and leave.

    Where the next exchange is more than four seconds away, leave in the middle of a step: what was done since the last is lost.
    What is saved before has five seconds; after that the exit code is ``ENDED``.
    """

    def late() -> None:
        time.sleep(_LEAVE_S)
        end = time.monotonic() + _SAVE_S
        while driver.is_saving and time.monotonic() < end:
            time.sleep(_LOOK_S)
        code = ENDED * driver.is_saving
        if code:
            say(f"what is saved before leaving was not written in {_LEAVE_S + _SAVE_S:g} s: it is not whole, and this process ends")
        with contextlib.suppress(HocketError, RuntimeError, OSError):  # OSError: the driver is closed already
            driver.begin(driver.program.say_goodbye, 0)
            time.sleep(_LINGER_S)
        os._exit(code)

    def leave(number: int, frame: FrameType | None) -> None:
        if not driver.program.leaving:
            driver.begin(driver.program.leave)
            threading.Thread(target=late, name="hocket-leave", daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, leave)
