"""A shard as a process of its own: ``python -m hocket.drivers.shard_process``.

What it answers to which message is in :mod:`hocket.programs.server.shard_server`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hocket.drivers.record import Recorder
from hocket.drivers.snapshots import Snapshots
from hocket.drivers.sockets import SocketDriver
from hocket.errors import HocketError
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import DEFAULT_JOB, LIVENESS_TIMEOUT_S, SNAPSHOT_S, job_id
from hocket.transport import Keys, Listener


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve; the address, or an error, is one line of JSON on standard output."""
    given = _parser().parse_args(arguments)
    if given.child:
        _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one hears it, and ends this one
    torch.set_num_threads(1)
    try:
        if given.place < 0 or given.liveness_timeout <= 0:
            raise HocketError(
                f"--place {given.place} --liveness-timeout {given.liveness_timeout:g}: shards count from 0, the liveness timeout "
                "is above 0 seconds."
            )
        keys = None if given.keys is None else Keys.read(given.keys)
        snapshots = None if given.snapshots is None or given.snapshot <= 0 else Snapshots(given.snapshots, given.place)
        with Listener(given.bind, DEFAULT_JOB if given.job is None else job_id(given.job), keys, given.most_bytes) as listener:
            server = ShardServer(given.place, given.liveness_timeout, 0.0 if snapshots is None else given.snapshot, given.stay)
            driver = start_serving(server, listener, snapshots, None if given.record is None else Recorder(given.record))
            version = None if server.shard is None else server.shard.version
            print(json.dumps({"address": listener.address, "version": version}), flush=True)
            stopped: list[int] = []
            if given.record is not None:  # the end of a recording is written, too
                signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
            driver.serve(lambda: bool(stopped) or (given.child and _closed(sys.stdin.fileno())))
            driver.close()
    except HocketError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)


def start_serving(
    server: ShardServer, listener: Listener, snapshots: Snapshots | None = None, recorder: Recorder | None = None
) -> SocketDriver:
    """A driver whose shard has started, from its last snapshot if there is one; call its ``serve``."""
    driver = SocketDriver(server, listener=listener, snapshots=snapshots, recorder=recorder)
    state, now = None if snapshots is None else snapshots.load(), driver.clock()
    if recorder is not None:
        times = {"liveness_timeout_s": server.liveness_timeout_s, "snapshot_s": server.snapshot_s, "stays": server.stays}
        recorder.start(shard=server.place, restored=state is not None, now=now, **times)
    driver.carry_out(server.start(now, state))
    return driver


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hocket.drivers.shard_process", description="One shard of a parameter server.")
    parser.add_argument("--place", type=int, default=0, help="which shard of the job this is, from 0")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0", help="where to listen; beyond this machine only with --keys")
    parser.add_argument("--job", help="the id of the job: 32 hexadecimal digits, the same for all its processes")
    parser.add_argument("--keys", type=Path, help="a file made by `hocket keys`")
    parser.add_argument(
        "--liveness-timeout", type=float, default=LIVENESS_TIMEOUT_S, help="seconds of silence after which a worker is given up"
    )
    parser.add_argument("--snapshots", type=Path, help="a folder for snapshots")
    parser.add_argument("--snapshot", type=float, default=SNAPSHOT_S, help="seconds between snapshots; 0 for none")
    parser.add_argument("--most-bytes", type=int, default=1 << 28, help="the largest message")
    parser.add_argument("--stay", action="store_true", help="do not end when all workers have left")
    parser.add_argument("--child", action="store_true", help="end when standard input is closed, or the parent dies")
    parser.add_argument("--record", type=Path, help="a file for all that happens to this shard, to replay the run")
    return parser


def _closed(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable) and not os.read(descriptor, 1)


def _die_with_parent() -> None:
    """Linux ends us when the thread that started us ends; elsewhere the closed pipe has to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
