"""A Python program as a fork of a process that has imported PyTorch, in place of a new interpreter that imports it again.

:func:`begin` gives the process that calls it a *fork server*, a child that was forked before there was a thread. From then on what
it starts with ``subprocess.Popen`` or ``multiprocessing`` as ``python …`` is a fork of that server; all else (its parent, signals,
files, exit code) is as it would be, but for its command line; the last name of a module is the name of its process. To be a child
of the process that asked, the fork is made by one that ends at once: an orphan goes to the nearest ancestor that takes orphans, and
that is the process that asked. Linux only, as ``prctl`` is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

NAME = "fork-server"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST = 200
"""Above all descriptors that a program is started with."""
_LEAVES = ("hocket.drivers.shard_process", "hocket.drivers.summation", "hocket.supervisor.worker_process")
"""What starts no process."""
_prctl = ctypes.CDLL(None).prctl


def begin() -> Callable[[], Any] | None:
    """Start this process's fork server; returns a program only in a fork of it, to be run at the top level."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return serve(theirs)
    theirs.close()
    start_by(ours)
    return None


def start_by(server: socket.socket) -> Callable[[], None]:
    """Have what this process starts as ``python …`` started by the server, until the function that is returned is called."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    lock, execute, spawn = threading.Lock(), subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def ask(files: list[int], numbers: list[int], **request: Any) -> int:
        request |= {"numbers": numbers, "ignored": [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_IGN]}
        with lock:
            socket.send_fds(server, [json.dumps(request).encode()], files)
            return int(server.recv(16))

    def execute_child(*arguments: Any) -> None:
        given = signature.bind(*arguments).arguments
        process, command = given["self"], list(map(os.fspath, given["args"]))
        if command[0] != sys.executable:
            execute(*arguments)
            return
        files = [given[name] if given[name] != -1 else number for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        passed = list(given["pass_fds"])
        process.pid = ask(
            [*files, *passed],
            [0, 1, 2, *passed],
            command=command[1:],
            cwd=os.fspath(given["cwd"] or os.getcwd()),
            environ=dict(given["env"] if given["env"] is not None else os.environ),
            session=given["start_new_session"],
            group=given["process_group"],
        )
        process._child_created = True
        process._close_pipe_fds(*(given[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))

    def spawn_with(path: str, arguments: list[Any], passed: list[int]) -> int:
        if os.fsdecode(path) != sys.executable:
            return int(spawn(path, arguments, passed))
        numbers = [0, 1, 2, *map(int, passed)]
        command = [os.fsdecode(a) for a in arguments[1:]]
        return ask(numbers, numbers, command=command, cwd=os.getcwd(), environ=dict(os.environ), session=False, group=-1)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn_with  # type: ignore[attr-defined]

    def undo() -> None:
        subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds = execute, spawn  # type: ignore[attr-defined]
        _prctl(36, 0)

    return undo


def serve(asked: socket.socket) -> Callable[[], Any]:
    """Fork when asked; returns only in a fork. It ends with the process that it serves."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _prctl(15, NAME.encode())  # PR_SET_NAME
    for number in _SIGNALS:  # those for the group are not for this one
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in sorted(map(int, os.listdir("/proc/self/fd"))):  # whoever waits for the end of a pipe, or for a lock, waits for none
        if file <= 2:
            os.dup2(nothing, file)
        elif file != asked.fileno():
            with contextlib.suppress(OSError):
                os.close(file)
    while True:
        text, files, _, _ = socket.recv_fds(asked, 1 << 20, 64)
        if not text:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if (pid := os.fork()) == 0:
                for each in (read, write):
                    os.close(each)
                asked.close()
                while os.getppid() == between:
                    time.sleep(0.0005)
                return _become(json.loads(text), files)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(write)
        pid = int(os.read(read, 16))
        os.waitpid(between, 0)  # from now on the fork is a child of the process that asked
        asked.send(str(pid).encode())
        for each in (read, *files):
            os.close(each)


def _become(request: dict[str, Any], files: list[int]) -> Callable[[], Any]:
    """Become the program that was asked for."""
    _prctl(15, _name(request["command"]).encode())
    for k, file in enumerate(files):
        os.dup2(file, _FIRST + k)
        os.close(file)
    for k, number in enumerate(request["numbers"]):
        os.dup2(_FIRST + k, number)
        os.close(_FIRST + k)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    for number in _SIGNALS:
        usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None  # it may be another one
    os.chdir(request["cwd"])
    return (None if request["command"][1] in _LEAVES else begin()) or program(request["command"])


def _name(command: list[str]) -> str:
    return command[1].rpartition(".")[2] if command[0] == "-m" else "python"


def program(command: list[str]) -> Callable[[], Any]:
    """What ``python command…`` runs."""
    while command[0] in ("-u", "-B", "-s", "-E", "-I"):
        command = command[1:]
    first, *rest = command
    if first == "-m":
        module = importlib.import_module(rest[0])
        sys.argv = [str(module.__file__), *rest[1:]]
        sys.path.insert(0, os.getcwd())
        return lambda: sys.exit(module.main())
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        return lambda: exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    sys.argv = command
    sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
    return lambda: runpy.run_path(first, run_name="__main__")


def leave(run: Callable[[], Any]) -> None:
    """Run a program and end as the interpreter does: with threads, exit handlers and what was written, and its exit code.

    What is left out is that it takes itself apart, for then every page of what all share is copied: longer than most programs take.
    Where the environment has ``WHOLE_END``, nothing is left out.
    """
    try:
        run()
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    if "WHOLE_END" in os.environ:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code)
