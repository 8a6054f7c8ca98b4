"""Servers as child processes: one tells its address, and ends when its input closes or whoever started it does."""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from hocket.errors import HocketError

# --- for the process that starts one -----------------------------------------------------------------------------------------


def start_server(module: str, *flags: str, **options: Any) -> subprocess.Popen[str]:
    """``python -m module``; :func:`address_of` tells where it listens. It ends when its input closes, so keep the handle.

    Options are named as in Python, and left out where they are None.
    """
    given = [part for name, value in options.items() if value is not None for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def start_shard(
    place: int, job: bytes, bind: str, keys: Path | None, liveness_timeout_s: float, stays: bool = False, **others: Any
) -> subprocess.Popen[str]:
    """Shard ``place`` of a job; ``others`` are options of :mod:`hocket.drivers.shard_process`, which has their defaults."""
    options = {"place": place, "job": job.hex(), "bind": bind, "keys": keys, "liveness_timeout": liveness_timeout_s, **others}
    return start_server("hocket.drivers.shard_process", "--child", *["--stay"] * stays, **options)


def address_of(child: subprocess.Popen[str]) -> str:
    """Where a child listens; waits until it does."""
    assert child.stdout is not None
    line = child.stdout.readline()
    silent = "A server ended before it listened (exit code {}); its own output says why."
    told = json.loads(line) if line else {"error": silent.format(child.wait())}
    if "error" in told:
        raise HocketError(told["error"])
    return str(told["address"])


# --- for a server's own process ----------------------------------------------------------------------------------------------


def begin_child(ends_with_parent: bool = True) -> None:
    """Set up a process that only serves: one thread; Ctrl-C is for whoever started it."""
    if ends_with_parent:  # Linux: also where that one is killed; elsewhere the closed pipe has to do
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def announce(**told: Any) -> None:
    """Tell whoever started this process the address, or an error: one line of JSON on standard output."""
    print(json.dumps(told), flush=True)


def input_closed() -> bool:
    """Whether whoever started this process has closed its input."""
    descriptor = sys.stdin.fileno()
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable) and not os.read(descriptor, 1)


# --- where servers listen ----------------------------------------------------------------------------------------------------


def own_address() -> str:
    """This machine's address on the way to where the job's store is kept."""
    found = urlsplit(f"tcp://{_store_host()}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((found.hostname or "127.0.0.1", 9))
        except OSError as error:
            raise HocketError(f"There is no way to {found.hostname} ({error.strerror}); check MASTER_ADDR.") from None
        return str(probe.getsockname()[0])


def _store_host() -> str:
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "127.0.0.1"))
