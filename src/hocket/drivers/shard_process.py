"""A shard as a process of its own: ``python -m hocket.drivers.shard_process``.

How it answers each message is described in :mod:`hocket.programs.server.shard_server`.
"""

import argparse
import copy
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hocket.drivers.record import Recorder
from hocket.drivers.snapshots import Snapshots
from hocket.drivers.sockets import SocketDriver
from hocket.drivers.start import JOB, announce, begin_child, given_job, input_closed
from hocket.errors import HocketError
from hocket.files import unlike
from hocket.programs.server.shard_server import ShardServer
from hocket.programs.server.wire import DEFAULT_JOB, LIVENESS_TIMEOUT_S, SNAPSHOT_S
from hocket.transport import Keys, Listener


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve; the address, or an error, is one line of JSON on standard output."""
    given = _parser().parse_args(arguments)
    begin_child(ends_with_parent=given.child)
    try:
        if given.place < 0 or given.liveness_timeout <= 0:
            raise HocketError(
                f"--place {given.place} --liveness-timeout {given.liveness_timeout:g}: shards count from 0, the liveness timeout "
                "is above 0 seconds."
            )
        if given.child and given.snapshots is not None and not given.snapshots.is_dir():  # do not make it again
            raise HocketError(f"The folder {given.snapshots} is gone, and so is the process that started this shard.")
        keys = None if given.keys is None else Keys.read(given.keys)
        snapshots = None if given.snapshots is None or given.snapshot <= 0 else Snapshots(given.snapshots, given.place)
        with Listener(given.bind, given_job(DEFAULT_JOB), keys, given.most_bytes) as listener:
            server = ShardServer(given.place, given.liveness_timeout, 0.0 if snapshots is None else given.snapshot, given.stay)
            driver = start_serving(server, listener, snapshots, Recorder(given.record))
            announce(address=listener.address, version=None if server.shard is None else server.shard.version)
            stopped: list[int] = []
            if given.record is not None:  # the end of a recording is written, too
                signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
            driver.serve(lambda: bool(stopped) or (given.child and input_closed()))
            driver.close()
    except HocketError as error:
        announce(error=str(error))
        sys.exit(2)


def start_serving(
    server: ShardServer, listener: Listener, snapshots: Snapshots | None = None, recorder: Recorder | None = None
) -> SocketDriver:
    """A driver whose shard has started, from its last snapshot if there is one; call its ``serve``."""
    driver = SocketDriver(server, listener=listener, snapshots=snapshots, recorder=recorder)
    state, now = None if snapshots is None else snapshots.load(partial(check_snapshot, server)), driver.clock()
    times = {"liveness_timeout_s": server.liveness_timeout_s, "snapshot_s": server.snapshot_s, "stays": server.stays}
    driver.recorder.start(shard=server.place, restored=state is not None, now=now, **times)
    driver.carry_out(server.start(now, state))
    return driver


def check_snapshot(server: ShardServer, state: dict[str, Any]) -> None:
    """Refuse a snapshot of another structure: a temporary server loads it, and must then have the same state."""
    # Not a copy of the server: its driver, which has threads and sockets, would be copied with it.
    tried = ShardServer(server.place, server.liveness_timeout_s, server.snapshot_s, server.stays)
    tried.start(0.0, copy.deepcopy(state))
    found = tried.state_dict()
    if (place := unlike(found, state) or unlike(state, found)) is not None:
        raise ValueError(f"its structure differs at '{place}'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hocket.drivers.shard_process",
        description="One shard of a parameter server.",
        epilog=f"{JOB} in the environment is the id of the job: 32 hexadecimal digits, the same for all its processes.",
    )
    parser.add_argument("--place", type=int, default=0, help="which shard of the job this is, from 0")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0", help="where to listen; beyond this machine only with --keys")
    parser.add_argument("--keys", type=Path, help="a file made by `hocket keys`")
    parser.add_argument(
        "--liveness-timeout", type=float, default=LIVENESS_TIMEOUT_S, help="seconds of silence after which a worker is given up"
    )
    parser.add_argument("--snapshots", type=Path, help="a folder for snapshots")
    parser.add_argument("--snapshot", type=float, default=SNAPSHOT_S, help="seconds between snapshots; 0 for none")
    parser.add_argument("--most-bytes", type=int, default=1 << 28, help="the largest message")
    parser.add_argument("--stay", action="store_true", help="do not end when all workers have left")
    parser.add_argument("--child", action="store_true", help="end when standard input is closed, or the parent dies")
    parser.add_argument("--record", type=Path, help="a file for the events of this shard, to replay the run")
    return parser


if __name__ == "__main__":
    main()
