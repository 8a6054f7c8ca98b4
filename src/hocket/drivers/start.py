"""Servers as child processes: one tells its address, and ends when whoever started it does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from hocket.errors import HocketError
from hocket.programs.server.wire import LIVENESS_TIMEOUT_S, SNAPSHOT_S

Child = subprocess.Popen[str]


def start_shard(
    place: int,
    job: bytes,
    bind: str = "tcp://127.0.0.1:0",
    keys: Path | None = None,
    liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
    snapshots: Path | None = None,
    snapshot_s: float = SNAPSHOT_S,
    most_bytes: int = 1 << 28,
    stays: bool = False,
    record: Path | None = None,
) -> Child:
    """Shard ``place`` of a job; :func:`address_of` tells where it listens. It ends when its input closes, so keep the handle."""
    command = [sys.executable, "-m", "hocket.drivers.shard_process", "--child", "--place", str(place), "--job", job.hex()]
    command += [
        "--bind",
        bind,
        "--liveness-timeout",
        str(liveness_timeout_s),
        "--snapshot",
        str(snapshot_s),
        "--most-bytes",
        str(most_bytes),
    ]
    for option, value in (("--keys", keys), ("--snapshots", snapshots), ("--record", record)):
        if value is not None:
            command += [option, str(value)]
    if stays:
        command.append("--stay")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def address_of(child: Child) -> str:
    """Where a child listens; waits until it does."""
    assert child.stdout is not None
    line = child.stdout.readline()
    silent = "A server ended before it listened (exit code {}); its own output says why."
    told = json.loads(line) if line else {"error": silent.format(child.wait())}
    if "error" in told:
        raise HocketError(told["error"])
    return str(told["address"])


def end_child(child: Child, timeout_s: float = 5.0) -> None:
    """End a child: by closing its input, by force if that does not help."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


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
