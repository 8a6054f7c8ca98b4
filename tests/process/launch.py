"""Groups of real worker processes for tests: started together, watched, and never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from process import forks

TESTS = Path(__file__).parents[1]
PATHS = [str(TESTS.parent / "src"), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
ENVIRON["CUDA_VISIBLE_DEVICES"] = ""  # tests of CUDA say which device they want; all others compare bits, or share no GPU
Hocket = Callable[..., subprocess.CompletedProcess[str]]
"""What the fixture ``hocket`` is: runs the command with arguments to its end."""
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    ENVIRON.pop(name, None)


_reserved: list[IO[str]] = []


def free_port() -> int:
    """A port for a server that is started later: below those that the system hands out, and locked against other tests."""
    for port in range(20000 + os.getpid() % 8000, 32000):
        lock = open(Path(tempfile.gettempdir(), f"hocket-port-{port}"), "w")  # noqa: SIM115 - held as long as this process lives
        with contextlib.suppress(OSError), socket.socket() as s:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            s.bind(("127.0.0.1", port))
            _reserved.append(lock)
            return port
        lock.close()
    raise AssertionError("no free port below 32000")


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether a condition comes true before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def left_behind(leaders: list[int]) -> list[int]:
    """Processes that still run in the sessions of ``leaders``; zombies do not count, nor do the tests' fork servers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
            state, _, _, session = rest.split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) in leaders and state != "Z" and not name.endswith(f"({forks.NAME}"):
            found.append(int(entry.name))
    return found


def offspring(pid: int, module: str) -> list[psutil.Process]:
    """The children of a process that run a module, oldest first."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in child.cmdline() or child.name() == module.rpartition(".")[2]:
                found.append(child)
    return sorted(found, key=lambda c: c.pid)


class Group:
    """Worker processes that run one function each."""

    def __init__(self, nursery: Nursery, folder: Path, pids: list[int]) -> None:
        self.nursery, self.folder, self.pids = nursery, folder, pids
        self.codes: list[int | None] = [None] * len(pids)

    def poll(self) -> list[int | None]:
        """The exit codes so far."""
        running = [k for k, code in enumerate(self.codes) if code is None]
        if running:
            for k, code in zip(running, self.nursery.ask({"do": "poll", "pids": [self.pids[k] for k in running]}), strict=True):
                self.codes[k] = code
        return self.codes

    def wait(self, timeout_s: float, together: bool = False) -> list[int]:
        """Block until all have ended; ``together`` ends everybody as soon as one fails. Nobody is left behind."""

        def over() -> bool:
            codes = self.poll()
            return None not in codes or (together and any(codes))

        ended = eventually(over, timeout_s)
        running = [pid for pid, code in zip(self.pids, self.codes, strict=True) if code is None]
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: None not in self.poll())
        assert ended, f"after {timeout_s} s {running} of {self.pids} still ran:\n{self.said()}"
        assert not left_behind(self.pids)
        return [code for code in self.codes if code is not None]

    def said(self, rank: int | None = None) -> str:
        """What a worker (or everybody) wrote to stderr and stdout."""
        files = sorted(self.folder.glob("*.err" if rank is None else f"{rank}.err"))
        return "".join(f"--- {f.stem}\n{f.read_text()}{f.with_suffix('.out').read_text()}" for f in files)

    def results(self) -> list[Any]:
        """What the workers saved as ``{rank}.pt``."""
        return [torch.load(self.folder / f"{rank}.pt") for rank in range(len(self.pids))]


class Command:
    """``hocket`` in a session of its own, with the face of a ``Popen``."""

    def __init__(self, group: Group, arguments: list[str]) -> None:
        self.group, self.arguments, self.pid = group, arguments, group.pids[0]

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self.group.poll()[0]

    def said(self) -> str:
        """What it has written to stderr so far."""
        path = self.group.folder / "0.err"
        return path.read_text() if path.exists() else ""

    def ended(self, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
        """Block until it has ended; nobody of its session is left behind."""
        if not eventually(lambda: self.poll() is not None, timeout_s):
            os.killpg(self.pid, signal.SIGKILL)
            assert eventually(lambda: self.poll() is not None)
            raise AssertionError(f"after {timeout_s} s {self.arguments} still ran:\n{self.group.said()}")
        assert eventually(lambda: not left_behind([self.pid]), 20), self.said()
        code, output = self.poll(), (self.group.folder / "0.out").read_text()
        assert code is not None
        return subprocess.CompletedProcess(self.arguments, code, output, self.said())


class Nursery:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program, file = str(Path(__file__).with_name("nursery.py")), theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, program, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRON,
            pass_fds=(file,),
        )
        theirs.close()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, function: str, processes: int, folder: Path, environ: dict[str, str] | None = None, **arguments: Any) -> Group:
        """Start ``function`` (``module:name``) on that many processes, with torchrun's variables in their environment."""
        port = str(free_port())
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environ or {})}
        environs = [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(processes)]
        return self._start(function, folder, environs, arguments)

    def command(
        self, arguments: list[str], folder: Path, cwd: Path, environ: dict[str, str] | None = None, program: str = "main"
    ) -> Command:
        """Start ``hocket`` (or ``python``, which ``program`` says) as from a shell, but without importing PyTorch again."""
        environs = [{"COLUMNS": "120", **(environ or {})}]
        group = self._start(f"process.command:{program}", folder, environs, {"arguments": arguments, "cwd": str(cwd)})
        return Command(group, arguments)

    def _start(self, function: str, folder: Path, environs: list[dict[str, str]], arguments: dict[str, Any]) -> Group:
        folder.mkdir(parents=True, exist_ok=True)
        request = {"do": "start", "function": function, "folder": str(folder), "arguments": arguments, "environ": environs}
        return Group(self, folder, self.ask(request))

    def close(self) -> None:
        self.socket.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=30) == 0


def run_script(arguments: list[str], cwd: Path, timeout_s: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a program in a session of its own; its exit code and output. Nothing of that session is left behind."""
    with subprocess.Popen(
        arguments,
        cwd=cwd,
        env={**ENVIRON, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert not left_behind([process.pid]), output
    return process.returncode, output
