"""Where the processes of a supervised run are started: on this machine, or by agents on several.

A *place* is where one worker runs; several places may be on one machine. Shards are spread over machines first. Processes on one
machine talk on loopback; across machines they listen on the address that reaches the first one, and want keys.

An :class:`Agent` starts processes on its machine for a supervisor elsewhere. How the two talk is not its concern: through the store
of a launcher's job (:mod:`hocket.drivers.store_agents`), or as an actor of Ray (:mod:`hocket.drivers.ray_cluster`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.cluster.heartbeat import boot_id
from hocket.cluster.join import without_launcher
from hocket.cluster.store import bracketed

ANY_PORT = "tcp://127.0.0.1:0"
LOST = -int(signal.SIGKILL)
"""The exit code of a process whose agent is gone: it has ended with it."""
_LOOK_S = 0.1
_GRACE_S = 1.0


@dataclass(frozen=True)
class Location:
    """Where one worker runs, as its agent describes it."""

    network: str
    """Equal for places that reach each other on loopback."""
    address: str
    """Of its machine, as the others reach it."""
    folder: str
    """For what processes there keep, removed at the end; empty: the supervisor's own."""


def own_network() -> str:
    """An id that two processes share if and only if they reach each other on loopback: of the kernel and its network namespace."""
    network = ""
    with contextlib.suppress(OSError):  # not Linux
        network = os.readlink("/proc/self/ns/net")
    return f"{boot_id()} {network}"


class Machines(ABC):
    """Places on one machine or several; the first one is that of the supervisor, if it has one."""

    assigns_gpus = False
    """Whether a process sees only the GPU that is its own."""

    def __init__(self, places: Sequence[Location]) -> None:
        self.places = list(places)

    @property
    def count(self) -> int:
        """How many machines there are."""
        return len({place.network for place in self.places})

    @property
    def several(self) -> bool:
        """Whether processes must reach each other across machines."""
        return self.count > 1

    def of_worker(self, worker: int, workers: int) -> int:
        """The place of a worker.

        >>> [Fixed(["a", "a", "b"]).of_worker(w, 6) for w in range(6)]
        [0, 0, 1, 1, 2, 2]
        """
        return worker * len(self.places) // workers

    def of_shard(self, shard: int) -> int:
        """The place of a shard: machines take turns.

        >>> [Fixed(["a", "a", "b", "b"]).of_shard(s) for s in range(5)]
        [0, 2, 1, 3, 0]
        """
        machines: dict[str, list[int]] = {}
        for number, place in enumerate(self.places):
            machines.setdefault(place.network, []).append(number)
        here = list(machines.values())[shard % len(machines)]
        return here[shard // len(machines) % len(here)]

    def bind(self, place: int) -> str:
        """Where a process of this place listens."""
        return f"tcp://{bracketed(self.places[place].address)}:0" if self.several else ANY_PORT

    def bind_here(self) -> str:
        """Where the supervisor listens."""
        return self.bind(0)

    @abstractmethod
    def start(self, place: int, arguments: Sequence[str], environ: Mapping[str, str]) -> Any:
        """``python ARGUMENTS`` there, with pipes for its input and output and ``environ`` beside its machine's own variables:
        an object with the methods of ``subprocess.Popen``."""


class Fixed(Machines):
    """Machines of these names, for examples."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([Location(name, name, "") for name in names])

    def start(self, place: int, arguments: Sequence[str], environ: Mapping[str, str]) -> Any:
        raise NotImplementedError


def start_here(arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """``python ARGUMENTS`` as a child of this process."""
    given = {**without_launcher(os.environ), **environ}
    return subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given)


class Agent:
    """Starts and ends processes by name; ``look`` returns a process's output and exit code."""

    def __init__(self, address: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hocket-")
        self.place = Location(own_network(), address, self._folder.name)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lines: dict[str, list[str]] = {}
        self._readers: dict[str, threading.Thread] = {}
        self._ended: dict[str, float] = {}

    def start(self, name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        process = self._processes[name] = start_here(arguments, environ)
        self._lines[name] = []
        self._readers[name] = threading.Thread(target=self._read, args=(name, process), daemon=True)
        self._readers[name].start()

    def write(self, name: str, text: str) -> None:
        pipe = self._processes[name].stdin
        with contextlib.suppress(BrokenPipeError, ValueError):
            assert pipe is not None
            pipe.write(text)
            pipe.flush()

    def close_input(self, name: str) -> None:
        pipe = self._processes[name].stdin
        with contextlib.suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def look(self, name: str) -> tuple[int | None, list[str]]:
        """The exit code, once the process has ended and all its output was read, and the lines so far. An unknown name belongs to
        a process of an earlier agent."""
        if name not in self._processes:
            return LOST, []
        code = self._processes[name].poll()
        if code is not None and self._readers[name].is_alive():
            since = self._ended.setdefault(name, time.monotonic())
            code = code if time.monotonic() - since > _GRACE_S else None
        return code, list(self._lines[name])

    def names(self) -> list[str]:
        return list(self._processes)

    def shutdown(self) -> None:
        """End all processes at once, and remove the folder."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        self._folder.cleanup()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines[name].append(line)


class RemoteProcess(ABC):
    """A process that an agent has started, with the methods of ``subprocess.Popen`` that supervisors use."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.stdin, self.stdout = RemoteInput(self), RemoteOutput(self)
        self.lines: list[str] = []
        self._looked = 0.0

    @abstractmethod
    def tell(self, what: str, *arguments: Any) -> None:
        """Call a method of the agent for this process, without waiting for a result."""

    @abstractmethod
    def look(self) -> tuple[int | None, list[str]] | None:
        """The latest result of :meth:`Agent.look`; None before the first one."""

    def poll(self) -> int | None:
        now = time.monotonic()
        if self.returncode is None and now - self._looked >= _LOOK_S:
            self._looked = now
            if (found := self.look()) is not None:
                self.returncode, self.lines = found
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a process on another machine", timeout or 0.0)
            time.sleep(_LOOK_S / 2)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            self.tell("signal", int(number))


class RemoteInput:
    """Writes to the input of a process."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process, self._closed = process, False

    def write(self, text: str) -> None:
        self._process.tell("write", text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        if not self._closed and self._process.returncode is None:
            self._process.tell("close_input")
        self._closed = True


class RemoteOutput:
    """Reads the output of a process."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process, self._read = process, 0

    def readline(self) -> str:
        while len(self._process.lines) <= self._read:
            if self._process.poll() is not None and len(self._process.lines) <= self._read:
                return ""
            time.sleep(_LOOK_S / 2)
        self._read += 1
        return self._process.lines[self._read - 1]

    def __iter__(self) -> Iterator[str]:
        while line := self.readline():
            yield line

    def close(self) -> None:
        """There is nothing to close."""


class ThisMachine(Machines):
    """All on this machine, as children of this process, in a folder of the supervisor's."""

    def __init__(self) -> None:
        super().__init__([Location(own_network(), "127.0.0.1", "")])

    def start(self, place: int, arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        return start_here(arguments, environ)
