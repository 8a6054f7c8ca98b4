"""Processes of a supervised run on the machines of a launcher's job: each of its processes is an agent, the first one supervises.

The supervisor and the agents talk through the store by which the processes of the job find each other: orders to an agent are
numbered keys, and so are the lines that a process prints. An agent whose counter stands still is taken for dead, and its processes
with it. An agent ends when the supervisor tells it to, or when the store is gone. A process that can write into the store must not
be able to start programs: orders name one of two modules, and are signed with a secret that only the processes of the job have:
between machines it is made of the job's keys, on one machine it is a file of the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hocket.cluster.store import address_towards
from hocket.drivers.machines import LOST, Agent, Location, Machines, RemoteProcess
from hocket.drivers.start import JOB
from hocket.errors import HocketError, WorkerLost

_WAIT_S = 0.1
_BEAT_S = 1.0
SILENCE_S = 20.0
"""An agent that has been silent for these seconds counts as ended."""
_END = "end"
MODULES = ("hocket.supervisor.worker_process", "hocket.drivers.shard_process")
"""What an agent starts."""
_VARIABLES = {"OMP_NUM_THREADS", JOB}
_ORDERS = ("start", "write", "close_input", "signal")
_PREFIX, _SECRET_BYTES = "hocket-", 32
_LEAVE_S = 10.0


class StoreAgent:
    """The agent of process ``rank``; ``towards`` is the machine of the supervisor."""

    def __init__(self, store: dist.Store, rank: int, towards: str, secret: bytes) -> None:
        self._store, self._rank, self._secret = store, rank, secret
        self.agent = Agent(address_towards(towards))
        self._reported: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._beat, self._next = 0.0, 0
        place = self.agent.place
        store.set(f"place/{rank}", json.dumps([place.network, place.address, place.folder]))

    def serve(self) -> None:
        """Carry out orders until the supervisor ends the run; no process is left behind."""
        over = False
        try:
            while not over:
                over = self.turn(_WAIT_S)
        except (RuntimeError, dist.DistError):
            raise WorkerLost("The first process of the job has ended; see its own output.") from None
        finally:
            self.agent.shutdown()
        self._store.set(f"over/{self._rank}", "")  # the first process keeps the store until all have read that the run is over

    def turn(self, wait_s: float) -> bool:
        """Report output and exit codes, and carry out new orders; returns whether the supervisor has ended the run."""
        self._tell_news()
        key = f"order/{self._rank}/{self._next}"
        if not self._store.check([key]):
            time.sleep(wait_s)
            return False
        signature, _, order = self._store.get(key).decode(errors="replace").partition(" ")
        if not hmac.compare_digest(signature.encode(), _signature(self._secret, key, order).encode()):
            raise HocketError(
                f"Process {self._rank} received a command that the first process has not signed; block the store's port for other "
                "users."
            )
        self._store.delete_key(key)
        self._next += 1
        return self._carry_out(*json.loads(order))

    def _carry_out(self, what: str, *arguments: Any) -> bool:
        if what == "start" and arguments[1][:1] + arguments[1][1:2] not in [["-m", module] for module in MODULES]:
            raise HocketError(
                f"Process {self._rank} received the command to start {arguments[1][:2]}, which is no process of a "
                "run; install the same hocket on all machines."
            )
        if what == "start" and not set(arguments[2]) <= _VARIABLES:
            raise HocketError(
                f"Process {self._rank} received the command to set "
                f"{', '.join(sorted(set(arguments[2]) - _VARIABLES))}, which no process of a run needs; install the same hocket "
                "on all machines."
            )
        if what not in (_END, *_ORDERS):
            raise HocketError(f"Process {self._rank} received the unknown command {what}; install the same hocket on all machines.")
        if what != _END:
            getattr(self.agent, what)(*arguments)
        return what == _END

    def _tell_news(self) -> None:
        for name in self.agent.names():
            if name in self._ended:
                continue
            code, lines = self.agent.look(name)
            for number in range(self._reported[name], len(lines)):
                self._store.set(f"line/{name}/{number}", lines[number])
            self._reported[name] = len(lines)
            if code is not None:
                self._ended.add(name)
                self._store.set(f"ended/{name}", str(code))
        if time.monotonic() - self._beat > _BEAT_S:
            self._beat = time.monotonic()
            self._store.add(f"beat/{self._rank}", 1)


class StoreMachines(Machines):
    """The places of all processes of a launcher's job, as its first process sees them."""

    def __init__(self, store: dist.Store, processes: int, own: Agent, secret: bytes) -> None:
        self._store, self._own, self._secret = store, own, secret
        self._orders: Counter[int] = Counter()
        self._names = itertools.count()
        self._beats: dict[int, tuple[int, float, float]] = {}
        places = [own.place if rank == 0 else _place(store, rank) for rank in range(processes)]
        super().__init__(places)

    def start(self, place: int, arguments: Sequence[str], environ: Mapping[str, str]) -> RemoteProcess:
        name = f"{place}-{next(self._names)}"
        process = OwnProcess(self._own, name) if place == 0 else StoreProcess(self, self._store, place, name)
        process.tell("start", list(arguments), dict(environ))
        return process

    def order(self, place: int, what: str, *arguments: Any) -> None:
        key, text = f"order/{place}/{self._orders[place]}", json.dumps([what, *arguments])
        self._store.set(key, f"{_signature(self._secret, key, text)} {text}")
        self._orders[place] += 1

    def lives(self, place: int) -> bool:
        """Whether the agent of that place has raised its counter lately."""
        count, changed, looked = self._beats.get(place, (-1, time.monotonic(), 0.0))
        now = time.monotonic()
        if now - looked > _BEAT_S:
            found = self._store.add(f"beat/{place}", 0)
            changed = now if found != count or now - looked > SILENCE_S else changed  # this process may have been stopped itself
            self._beats[place] = (found, changed, now)
        return now - changed < SILENCE_S

    def close(self) -> None:
        """Tell all agents that the run is over."""
        self._own.shutdown()
        others = [place for place in range(1, len(self.places)) if self.lives(place)]
        with contextlib.suppress(RuntimeError, dist.DistError):
            for place in others:
                self.order(place, _END)
            deadline = time.monotonic() + _LEAVE_S
            while time.monotonic() < deadline and not all(self._store.check([f"over/{place}"]) for place in others):
                time.sleep(_WAIT_S)


def _place(store: dist.Store, rank: int) -> Location:
    try:
        entry = store.get(f"place/{rank}")
    except (RuntimeError, dist.DistError):
        raise HocketError(f"Process {rank} of the job has not reported its address; see its own output.") from None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(entry)
        if isinstance(found, list) and len(found) == len(fields(Location)) and all(isinstance(field, str) for field in found):
            return Location(*found)
    raise HocketError(f"The store's entry for the address of process {rank} is damaged; block the store's port for other users.")


class OwnProcess(RemoteProcess):
    """A process of the supervisor's own agent."""

    def __init__(self, agent: Agent, name: str) -> None:
        super().__init__()
        self._agent, self._name = agent, name

    def tell(self, what: str, *arguments: Any) -> None:
        getattr(self._agent, what)(self._name, *arguments)

    def look(self) -> tuple[int | None, list[str]]:
        return self._agent.look(self._name)


class StoreProcess(RemoteProcess):
    """A process of an agent elsewhere."""

    def __init__(self, machines: StoreMachines, store: dist.Store, place: int, name: str) -> None:
        super().__init__()
        self._machines, self._store, self._place, self._name = machines, store, place, name
        self._known: list[str] = []

    def tell(self, what: str, *arguments: Any) -> None:
        self._machines.order(self._place, what, self._name, *arguments)

    def look(self) -> tuple[int | None, list[str]]:
        ended = self._store.check([f"ended/{self._name}"])  # before the lines, which were told before it
        while self._store.check([line := f"line/{self._name}/{len(self._known)}"]):
            self._known.append(self._store.get(line).decode(errors="replace"))
        if ended:
            return self._code(), self._known
        return None if self._machines.lives(self._place) else LOST, self._known

    def _code(self) -> int:
        code = self._store.get(f"ended/{self._name}")
        with contextlib.suppress(ValueError):
            return int(code)
        raise HocketError(
            f"The store's entry for the exit code of process {self._name} is damaged; block the store's port for other users."
        )


def _signature(secret: bytes, key: str, order: str) -> str:
    return hmac.new(secret, f"{key} {order}".encode(), hashlib.sha256).hexdigest()


def _read_secret(path: Path) -> bytes:
    """The store, into which others may write, names the file: only one as the first process makes it counts."""
    secret, private = b"", False
    if path.parent == Path(tempfile.gettempdir()) and path.name.startswith(_PREFIX):
        with contextlib.suppress(OSError, ValueError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
            with os.fdopen(handle, "rb") as file:
                found, secret = os.fstat(handle), file.read(_SECRET_BYTES + 1)
                private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if not (private and len(secret) == _SECRET_BYTES):
        raise HocketError(f"{path} is not the secret file of a job of this user; block the store's port for other users.")
    return secret


@contextlib.contextmanager
def job_secret(store: dist.Store, rank: int, keys: Path | None) -> Iterator[bytes]:
    """The same for all processes of a job, and unknown to others: of its keys, or from a file that only this user can read."""
    if keys is not None:
        yield hashlib.sha256(b"orders" + keys.read_bytes()).digest()
    elif rank > 0:
        yield _read_secret(Path(store.get("secret").decode(errors="replace")))
    else:
        handle, name = tempfile.mkstemp(prefix=_PREFIX)
        with os.fdopen(handle, "wb") as file:
            file.write(secret := secrets.token_bytes(_SECRET_BYTES))
        store.set("secret", name)
        try:
            yield secret
        finally:
            os.unlink(name)


def job_store(store: dist.Store, attempt: str) -> dist.Store:
    """Keys of supervised runs in the store of a job, apart from those of earlier starts of its processes."""
    prefixed = dist.PrefixStore(f"hocket/supervised/{attempt}", store)
    prefixed.set_timeout(timedelta(seconds=300))
    return prefixed
