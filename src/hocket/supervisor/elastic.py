"""The launcher of an elastic run on this machine: it holds the rendezvous, starts workers, and starts another for one that died."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hocket.cluster.join import RendezvousInfo, without_launcher
from hocket.drivers.processes import ENDED, Role, Supervisor, how_ended, interruptible, say
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError, SettingError
from hocket.programs.elastic.rendezvous import Rendezvous
from hocket.programs.elastic.waits import HANG_TIMEOUT_S
from hocket.train.elastic import Elastic
from hocket.transport import Keys, Listener
from hocket.transport.address import is_loopback, parts_of

WORKER = "worker"
MAX_RESTARTS = 1000
LIVENESS_TIMEOUT_S = 5.0
_REFUSED = 2
"""The exit code of a worker that was given wrong settings: another one would end in the same way."""
_FAST_S, _FASTEST = 10.0, 3
"""A worker that ends within these seconds of its start, this many times in a row, is not started again."""
_GRACE_S = 6.0


def serve_rendezvous(
    elastic: Elastic,
    bind: str,
    job: bytes,
    keys: Keys | None,
    expected: int,
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> None:
    """A rendezvous alone, for workers that others start; until all have finished."""
    program = Rendezvous(elastic.least, elastic.most, expected, liveness_timeout_s, hang_timeout_s=hang_timeout_s)
    with Listener(bind, job, keys) as listener, interruptible():
        say(_how_found(listener.address, job))
        driver = SocketDriver(program, listener=listener)
        driver.begin(program.start)
        while not program.over or program.members:
            driver.poll(0.1)


def _how_found(address: str, job: bytes) -> str:
    host, port = parts_of(address)
    if host in ("0.0.0.0", "::"):  # all addresses of this machine: others know it by its name
        address = f"tcp://{socket.gethostname()}:{port}"
    found = " ".join(f"{name}={value}" for name, value in RendezvousInfo(address, job).environ.items())
    return f"workers find this rendezvous with {found}"


class ElasticRun:
    """Runs ``command`` as ``workers`` processes, of which the run needs at least ``elastic.least``."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        elastic: Elastic,
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        replace: bool = True,
        bind: str = "tcp://127.0.0.1:0",
        keys: Path | None = None,
        on_start: Callable[[int, int], None] = lambda number, pid: None,
        parts: int = 1,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        """``parts``: processes of a worker, where the model is split. ``replace``: start another worker for one that died.
        ``bind``: where workers of other machines find the rendezvous."""
        self.program = Rendezvous(elastic.least, elastic.most, workers, liveness_timeout_s, hang_timeout_s=hang_timeout_s)
        workers *= parts
        self.command, self.workers, self.replace, self.bind = list(command), workers, replace, bind
        self.keys = None if keys is None else Keys.read(keys)
        self.job, self.elastic, self.on_start = secrets.token_bytes(16), elastic, on_start
        self.supervisor = Supervisor([Role(WORKER, workers, self._start, _GRACE_S)], MAX_RESTARTS)
        self._ended: set[tuple[int, int]] = set()
        self._began: dict[int, float] = {}
        self._fast: dict[int, int] = {}
        self._address = ""

    def run(self, watch: Callable[[], None] = lambda: None) -> None:
        """Until all workers have ended; ``watch`` is called some times a second."""
        with interruptible(signal.SIGUSR1), self.supervisor, Listener(self.bind, self.job, self.keys) as listener:
            self._address = listener.address
            if not is_loopback(self._address):
                say(_how_found(self._address, self.job))
            driver = SocketDriver(self.program, listener=listener)
            driver.begin(self.program.start)
            self.supervisor.start(WORKER)
            try:
                self._serve(driver, watch)
            except KeyboardInterrupt:
                self._see_off(driver)
                watch()
                raise
            watch()
        if not self.program.over:
            raise SettingError(
                "No worker is left, and the run has not ended; see the workers' own output above, and start it again with "
                "<resume:True> where it has written a checkpoint."
            )

    def _serve(self, driver: SocketDriver, watch: Callable[[], None]) -> None:
        looked = 0.0
        while len(self.supervisor.ended(WORKER)) < self.workers or self._restarts():
            driver.poll(0.05)
            if time.monotonic() - looked > 0.1:
                looked = time.monotonic()
                self._look(driver)
                watch()

    def _see_off(self, driver: SocketDriver) -> None:
        """Let all workers leave, which need the rendezvous for it: with nobody to hand over to they write a checkpoint."""
        for process in self.supervisor.running(WORKER).values():
            process.terminate()
        end = time.monotonic() + _GRACE_S
        while self.supervisor.running(WORKER) and time.monotonic() < end:
            driver.poll(0.05)

    def uid(self, number: int) -> int:
        """The number by which the rendezvous knows the present process of a worker."""
        return number + self.workers * self.supervisor.incarnations[WORKER, number]

    def _start(self, number: int, incarnation: int) -> subprocess.Popen[bytes]:
        found = RendezvousInfo(self._address, self.job, number + self.workers * incarnation, self.workers)
        environ = {**without_launcher(os.environ), **found.environ}
        if is_loopback(self._address):
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.workers)))
        self._began[number] = time.monotonic()
        process = subprocess.Popen(self.command, env=environ)
        self.on_start(number, process.pid)
        return process

    def _look(self, driver: SocketDriver) -> None:
        for number, code in self.supervisor.ended(WORKER).items():
            uid = self.uid(number)
            if (number, uid) not in self._ended:
                self._ended.add((number, uid))
                driver.begin(self.program.member_lost, uid)
                self._judge(number, code)
            if self._restart(number, code):
                self.supervisor.restart(WORKER, number)

    def _judge(self, number: int, code: int) -> None:
        if code == 0 or self.program.over:
            return
        say(f"worker {number} {how_ended(code)}")
        fast = time.monotonic() - self._began[number] < _FAST_S and code > 0
        self._fast[number] = self._fast.get(number, 0) + 1 if fast else 0
        if code == _REFUSED or self._fast[number] >= _FASTEST:
            raise HocketError(
                f"Worker {number} {how_ended(code)}, and a new process would end the same way; see its own output above."
            )

    def _restart(self, number: int, code: int) -> bool:
        """Whether another process takes the place of one that ended; not of one that left when it was asked to."""
        return self.replace and not self.program.over and code not in (0, -signal.SIGTERM, ENDED)

    def _restarts(self) -> bool:
        return any(self._restart(number, code) for number, code in self.supervisor.ended(WORKER).items())
