"""Servers as child processes: each prints its address, and ends when its input closes or the process that started it ends."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from hocket.cluster.join import store_host
from hocket.cluster.store import LOOPBACK, address_towards
from hocket.drivers.machines import start_here
from hocket.errors import HocketError
from hocket.programs.server.wire import job_id

ENDS_WITH = "HOCKET_ENDS_WITH"
"""The environment variable with the id of the process that started this one; this one ends with it."""
JOB = "HOCKET_JOB"
"""The environment variable with the id of a job: other users can read a process's arguments, but not its environment."""
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5

# --- for the process that starts one -----------------------------------------------------------------------------------------


Start = Callable[[Sequence[str], Mapping[str, str]], Any]
"""Starts ``python ARGUMENTS`` with variables beside those of its machine, as :func:`~hocket.drivers.machines.start_here` does."""


def start_server(module: str, job: bytes, *flags: str, start: Start = start_here, **options: Any) -> Any:
    """``python -m module``; :func:`address_of` tells where it listens. It ends when its input closes, so keep the handle.

    Options are named as in Python, and left out where they are None.
    """
    given = [part for name, value in options.items() if value is not None for part in (f"--{name.replace('_', '-')}", str(value))]
    return start(["-m", module, *flags, *given], {JOB: job.hex()})


def start_shard(
    place: int, job: bytes, bind: str, keys: Path | None, liveness_timeout_s: float, stays: bool = False, **others: Any
) -> Any:
    """Shard ``place`` of a job; ``others`` are options of :mod:`hocket.drivers.shard_process`, which has their defaults."""
    options = {"place": place, "bind": bind, "keys": keys, "liveness_timeout": liveness_timeout_s, **others}
    return start_server("hocket.drivers.shard_process", job, "--child", *["--stay"] * stays, **options)


def address_of(child: subprocess.Popen[str]) -> str:
    """The address at which a child listens; waits until it does."""
    assert child.stdout is not None
    line = child.stdout.readline()
    silent = "A server ended before it listened (exit code {}); its own output says why."
    announced = json.loads(line) if line else {"error": silent.format(child.wait())}
    if "error" in announced:
        raise HocketError(announced["error"])
    return str(announced["address"])


# --- for a server's own process ----------------------------------------------------------------------------------------------


def begin_child(ends_with_parent: bool = True) -> None:
    """Set up a server process: one thread, and Ctrl-C is ignored, since the process that started it handles it."""
    if ends_with_parent:  # elsewhere than on Linux the closed pipe has to do
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets signal ``number`` when the one that started it ends, also where that one is killed.

    Linux sends it; elsewhere, and where that process has ended already, a thread watches the one that ``ENDS_WITH`` names.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent := os.environ.pop(ENDS_WITH, None):
        threading.Thread(target=_end_with, args=(int(parent), number), name="hocket-parent", daemon=True).start()


def _end_with(process: int, number: int) -> None:
    try:
        select.select([os.pidfd_open(process)], [], [])  # readable once it has ended
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or not allowed
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(process, 0)
                time.sleep(_LOOK_S)
    os.kill(os.getpid(), number)


def given_job(default: bytes | None = None) -> bytes:
    """The id of the job that this process was given in its environment, which its own children do not inherit."""
    text = os.environ.pop(JOB, None)
    if text is None and default is None:
        raise HocketError(f"The job has no id: set {JOB} to 32 hexadecimal digits, the same for all its processes.")
    return job_id(text) if text is not None else default or b""


def announce(**fields: Any) -> None:
    """Print one line of JSON for the process that started this one: the address, or an error."""
    print(json.dumps(fields), flush=True)


def input_closed() -> bool:
    """Whether whoever started this process has closed its input."""
    descriptor = sys.stdin.fileno()
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable) and not os.read(descriptor, 1)


# --- where servers listen ----------------------------------------------------------------------------------------------------


def own_address() -> str:
    """This machine's address on the way to where the job's store is kept."""
    return address_towards(urlsplit(f"tcp://{store_host()}").hostname or LOOPBACK)
