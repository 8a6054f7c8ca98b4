"""Throughput of Hocket's links against plain ZeroMQ sockets with the same options, in the same run.

    python benchmarks/messages.py                 # two processes over loopback
    python benchmarks/messages.py --rate 1gbit    # two hosts of a lab (see netlab.py), with keys: the share of the link

One process listens, the other calls. *push*: the caller sends messages until all have arrived. *fetch*: it asks for messages, four
requests ahead, until it has them all. Both ways of sending take turns within each round (A B A B …), so that drift of the machine
hits them alike; figures are medians over rounds, ratios are taken within a round. Both send as many frames per message, have the
same window and copy nothing but small frames; only the tensors' bytes count. Links that leave a machine need keys, so those of the
lab are encrypted; the plain sockets never are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
from netlab import Lab, bits_per_second

from hocket.transport import Caller, Envelope, Keys, Kind, Listener, pack
from hocket.transport.link_socket import set_options

JOB = b"benchmark messag"
SIZES = (64_000, 256_000, 1_000_000, 4_000_000, 16_000_000)
MOST_BYTES = 1 << 25
HIGH_WATER = 16
AHEAD = 4
SMALL = [bytes(len(frame)) for frame in pack(Envelope(Kind.FETCH), JOB)]
"""Frames as small as a link's header and metadata: plain sockets send as many frames as links do."""
WAIT_S = 60.0


class HocketServer:
    """The listening end of a link."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._end = Listener(address, JOB, keys, MOST_BYTES, HIGH_WATER)
        self.address = self._end.address

    def push(self, size: int, count: int) -> None:
        peer = b""
        for _ in range(count):
            peer, _ = _some(self._end.receive(WAIT_S))
        self._end.send(peer, Envelope(Kind.ANSWER))

    def fetch(self, size: int, count: int) -> None:
        tensor = torch.ones(size // 4)
        for _ in range(count):
            peer, request = _some(self._end.receive(WAIT_S))
            assert self._end.send(peer, Envelope(Kind.REPLY, number=request.number, tensors=(tensor,)))

    def close(self) -> None:
        self._end.close()


class HocketClient:
    """The calling end of a link."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._end = Caller(address, JOB, keys, None, MOST_BYTES, HIGH_WATER)

    def push(self, size: int, count: int) -> None:
        tensor = torch.ones(size // 4)
        for number in range(count):
            assert self._end.send(Envelope(Kind.PUSH, number=number, tensors=(tensor,)), WAIT_S)
        _some(self._end.receive(WAIT_S))

    def fetch(self, size: int, count: int) -> None:
        for number in range(count + AHEAD):
            if number < count:
                assert self._end.send(Envelope(Kind.FETCH, number=number), WAIT_S)
            if number >= AHEAD:
                assert _some(self._end.receive(WAIT_S)).tensors[0].numel() == size // 4

    def close(self) -> None:
        self._end.close()


class _Raw:
    """A plain socket with a link's options."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        set_options(self._socket, MOST_BYTES, HIGH_WATER, False)

    def close(self) -> None:
        self._socket.close(1000)
        self._context.term()


class RawServer(_Raw):
    def __init__(self, address: str, _: Keys | None) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def push(self, size: int, count: int) -> None:
        frames: list[Any] = []
        for _ in range(count):
            frames = self._socket.recv_multipart(copy=False)
        self._socket.send_multipart([frames[0].bytes, b"done"])

    def fetch(self, size: int, count: int) -> None:
        body = torch.ones(size // 4).numpy().data
        for _ in range(count):
            peer, *_ = self._socket.recv_multipart(copy=False)
            self._socket.send_multipart([peer, *SMALL, body], copy=False)


class RawClient(_Raw):
    def __init__(self, address: str, _: Keys | None) -> None:
        super().__init__(zmq.DEALER)
        self._socket.connect(address)

    def push(self, size: int, count: int) -> None:
        body = torch.ones(size // 4).numpy().data
        for _ in range(count):
            self._socket.send_multipart([*SMALL, body], copy=False)
        self._socket.recv_multipart()

    def fetch(self, size: int, count: int) -> None:
        for number in range(count + AHEAD):
            if number < count:
                self._socket.send_multipart(SMALL)
            if number >= AHEAD:
                assert len(self._socket.recv_multipart(copy=False)[-1]) == size


SERVERS: dict[str, Callable[[str, Keys | None], Any]] = {"hocket": HocketServer, "zmq": RawServer}
CLIENTS: dict[str, Callable[[str, Keys | None], Any]] = {"hocket": HocketClient, "zmq": RawClient}


def _some(found: Any) -> Any:
    assert found is not None, f"nothing arrived in {WAIT_S:g} s"
    return found


def serve(host: str, folder: Path) -> None:
    """The listening process: does what the other orders, one block at a time."""
    keys = _keys(folder)
    ends = {way: make(f"tcp://{host}:0", keys) for way, make in SERVERS.items()}
    with zmq.Context() as context, context.socket(zmq.REP) as orders:
        orders.bind(f"tcp://{host}:0")
        addresses = {"orders": orders.getsockopt_string(zmq.LAST_ENDPOINT), **{way: end.address for way, end in ends.items()}}
        (folder / "draft").write_text(json.dumps(addresses))
        (folder / "draft").rename(folder / "addresses")
        while (order := json.loads(orders.recv())) is not None:
            orders.send(b"ready")
            way, what, size, count = order
            getattr(ends[way], what)(size, count)
        orders.send(b"over")
    for end in ends.values():
        end.close()


def call(folder: Path, sizes: Sequence[int], rounds: int, block_bytes: int) -> None:
    """The calling process: takes the times and writes them."""
    deadline = time.monotonic() + WAIT_S
    while not (folder / "addresses").exists():
        assert time.monotonic() < deadline, "the other process does not listen"
        time.sleep(0.01)
    addresses = json.loads((folder / "addresses").read_text())
    ends = {way: make(addresses[way], _keys(folder)) for way, make in CLIENTS.items()}
    seconds: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.REQ) as orders:
        orders.connect(addresses["orders"])

        def block(way: str, what: str, size: int, count: int) -> float:
            orders.send(json.dumps([way, what, size, count]).encode())
            orders.recv()
            start = time.perf_counter()
            getattr(ends[way], what)(size, count)
            return time.perf_counter() - start

        for what in ("push", "fetch"):
            for size in sizes:
                count = max(4, block_bytes // size)
                for way in ends:
                    block(way, what, size, max(2, count // 4))  # warm up
                for turn in range(rounds):
                    for way in ends:
                        mb_per_s = size * count / block(way, what, size, count) / 1e6
                        seconds.append({"what": what, "size": size, "way": way, "round": turn, "mb_per_s": mb_per_s})
        orders.send(b"null")
        orders.recv()
    for end in ends.values():
        end.close()
    (folder / "result").write_text(json.dumps(seconds))


def _keys(folder: Path) -> Keys | None:
    return Keys.read(folder / "keys") if (folder / "keys").exists() else None


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both processes, on this machine or on two hosts of a lab, and what they measured."""
    me = [sys.executable, str(Path(__file__).resolve())]
    sizes = [str(size) for size in options.sizes]
    with tempfile.TemporaryDirectory() as folder:
        if options.keys or options.rate:
            Keys.make().write(Path(folder) / "keys")
        calling = [*me, "--folder", folder, "--rounds", str(options.rounds), "--block-mb", str(options.block_mb), "--sizes", *sizes]
        if options.rate:
            with Lab(2, options.rate) as lab:
                done = lab.run([[*me, "--folder", folder, "--serve", lab.addresses[0]], calling], timeout_s=options.timeout_s)
        else:
            processes = [subprocess.Popen(c) for c in ([*me, "--folder", folder, "--serve", "127.0.0.1"], calling)]
            try:
                for process in reversed(processes):  # if the caller fails, the listener waits for ever
                    if process.wait(options.timeout_s):
                        break
            finally:
                for process in processes:
                    if process.poll() is None:
                        process.kill()
            done = [subprocess.CompletedProcess(p.args, p.wait(), "", "") for p in processes]
        if failed := [d for d in done if d.returncode]:
            raise RuntimeError(f"a process failed: {failed[0].stderr[-1500:]}")
        return json.loads((Path(folder) / "result").read_text())


def rates_of(measured: Sequence[dict[str, Any]], what: str, size: int, way: str) -> list[float]:
    """MB/s of each round; of a push and a fetch, as a step of a worker has them: the bytes of both in the time of both."""
    if what == "push + fetch":
        both = zip(*(rates_of(measured, each, size, way) for each in ("push", "fetch")), strict=True)
        return [2 / (1 / push + 1 / fetch) for push, fetch in both]
    return [m["mb_per_s"] for m in measured if (m["what"], m["size"], m["way"]) == (what, size, way)]


def show(measured: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("", "message", "hocket MB/s", "zmq MB/s", "hocket / zmq", box=SIMPLE_HEAD)
    if options.rate:
        table.add_column("share of the link")
    for column in table.columns[1:]:
        column.justify = "right"
    for what in ("push", "fetch", "push + fetch"):
        for size in options.sizes:
            rates = {way: rates_of(measured, what, size, way) for way in SERVERS}
            ours, theirs = (statistics.median(rates[way]) for way in ("hocket", "zmq"))
            ratio = statistics.median(a / b for a, b in zip(rates["hocket"], rates["zmq"], strict=True))
            cells = [what, f"{size / 1000:,.0f} kB", f"{ours:,.0f}", f"{theirs:,.0f}", f"{ratio:.2f}"]
            if bits := bits_per_second(options.rate):
                cells.append(f"{ours * 8e6 / bits:.3f}")
            table.add_row(*cells)
    where = f"two hosts, {options.rate} each way, with keys" if options.rate else f"loopback{', with keys' if options.keys else ''}"
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(f"{where}; medians of {options.rounds} rounds; {os.cpu_count()} cores, ZeroMQ {zmq.zmq_version()}")
    console.print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Throughput of Hocket's links against plain ZeroMQ sockets.")
    parser.add_argument("--rate", help="between two hosts of a lab, such as 1gbit (default: two processes over loopback)")
    parser.add_argument(
        "--keys", action="store_true", help="encrypt Hocket's links over loopback too (the plain sockets never are)"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="BYTES", help="multiples of 4")
    parser.add_argument("--rounds", type=int, default=7, help="blocks per way and size (default 7)")
    parser.add_argument("--block-mb", type=int, help="megabytes per block (default 400, in a lab 200)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="seconds for the whole run at most (default 1800)")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.block_mb = options.block_mb or (200 if options.rate else 400)
    if wrong := [size for size in options.sizes if size < 4 or size % 4 or size > MOST_BYTES // 2]:
        parser.error(f"--sizes: multiples of 4 up to {MOST_BYTES // 2}, got {wrong[0]}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def main() -> None:
    """The command."""
    options = parse()
    torch.set_num_threads(1)
    if options.serve:
        return serve(options.serve, options.folder)
    if options.folder:
        return call(options.folder, options.sizes, options.rounds, options.block_mb * 1_000_000)
    try:
        show(measure(options), options)
    except (RuntimeError, ValueError, TimeoutError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"messages: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
