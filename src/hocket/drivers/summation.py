"""Summation servers (``role=sum``; BytePS, Jiang 2020): a mean of all workers over ``n`` spare machines and the workers' own.

A row is cut among ``N + n`` summation servers, one in every worker's process and one in every spare one, in the shares that load
all links equally (:func:`shares`), and every share into pieces. A worker sends each piece to its server; a server that has a piece
from all workers adds them up in worker order and sends the mean back to all. Pieces of one share follow each other, so that
pushing and fetching go on at the same time, in both directions of every link.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import zmq
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.heartbeat import boot_id
from hocket.drivers.start import Child, address_of, end_child, own_address
from hocket.errors import HocketError, WorkerLost
from hocket.strategy import Strategy
from hocket.transport import Caller, Envelope, Keys, Kind, Listener

PIECE_BYTES = 1 << 16
WINDOW = 10
"""Pieces that a worker has on their way: enough to keep both directions busy, few enough not to flood a link."""
LIVENESS_TIMEOUT_S = 1800.0
"""As long as collectives wait for a worker that lives but does not come; one that is lost is noticed by its heartbeat."""
SILENCE_S = 10.0
"""A server that gives no sign of life for so long, while nothing else comes, is lost; workers watch each other (``Heartbeat``)."""
_BEAT_S = 1.0
_QUEUE = 1 << 14
"""Messages that may wait for a link: more than any row has pieces."""
_TICK_S = 0.2
_JOB_BYTES = 16
_LINGER_S = 5.0


def shares(size: int, workers: int, servers: int) -> list[range]:
    """Which values each server adds up, workers' own first: ``(N−n)/d`` of all, then the servers' ``2(N−1)/d``.

    >>> [len(r) for r in shares(1800, 4, 2)], [len(r) for r in shares(10, 2, 0)]
    ([180, 180, 180, 180, 540, 540], [5, 5])
    """
    d = workers**2 + servers * workers - 2 * servers
    parts = [workers - servers] * workers + [2 * (workers - 1)] * servers
    ends, total = [0], 0
    for part in parts:
        total += part
        ends.append(size * total // d)
    return [range(a, b) for a, b in pairwise(ends)]


class SummationServer:
    """Adds up pieces from ``workers`` workers; :meth:`turn` handles one message."""

    def __init__(self, listener: Listener, workers: int) -> None:
        self.listener, self.workers, self.over = listener, workers, False
        self._pieces: dict[tuple[int, int], dict[int, tuple[bytes, Tensor]]] = {}
        self._unsent: list[tuple[bytes, Envelope]] = []

    def turn(self, timeout_s: float = _TICK_S) -> None:
        """Take one piece, if one comes in time."""
        self._unsent = [(peer, envelope) for peer, envelope in self._unsent if not self.listener.send(peer, envelope)]
        found = self.listener.receive(0.001 if self._unsent else timeout_s)
        if found is None:
            return
        peer, envelope = found
        if envelope.kind is Kind.GOODBYE:
            self.over = True
        if envelope.kind is Kind.BEAT:
            self.listener.send(peer, Envelope(Kind.ANSWER))
        if envelope.kind is not Kind.PUSH or not 0 <= envelope.sender < self.workers or len(envelope.tensors) != 1:
            return
        if len(self._pieces) >= _QUEUE:
            return  # nobody has so many on their way
        key = (envelope.number, envelope.step)
        held = self._pieces.setdefault(key, {})
        held[envelope.sender] = (peer, envelope.tensors[0])
        if len(held) == self.workers:
            self._answer(*key, self._pieces.pop(key))

    def _answer(self, number: int, piece: int, held: dict[int, tuple[bytes, Tensor]]) -> None:
        total = held[0][1].clone()
        for worker in range(1, self.workers):
            other = held[worker][1]
            if other.shape != total.shape or other.dtype != total.dtype:
                return  # another model: whoever waits for this piece says so in time
            total += other
        total /= self.workers
        for peer, _ in held.values():
            envelope = Envelope(Kind.REPLY, number=number, step=piece, tensors=(total,))
            if not self.listener.send(peer, envelope):
                self._unsent.append((peer, envelope))


def _bind(cluster: Cluster) -> str:
    """Where summation servers listen: on loopback where all processes share a machine, else where the others reach this one."""
    host = torch.tensor([list(hashlib.sha256(boot_id().encode()).digest())], dtype=torch.uint8)
    everyone = cluster.all_gather_metrics(host)
    if bool((everyone == everyone[0]).all()):
        return "127.0.0.1"
    if cluster.keys is None:
        raise HocketError(
            "Servers that sum talk between machines here, and want keys: make them with `hocket keys FILE`, init(keys=FILE)."
        )
    return own_address()


class SummationClient:
    """One worker's side of it: called with its row, it makes it the mean of all, in place."""

    def __init__(
        self,
        worker: int,
        workers: int,
        callers: list[Caller],
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        children: Sequence[Child] = (),
        silence_s: float = SILENCE_S,
    ) -> None:
        """``children``: servers that this process has started, and looks after."""
        self.worker, self.workers, self.callers, self.liveness_timeout_s = worker, workers, callers, liveness_timeout_s
        self._children = children
        self._signs = _Signs(callers[workers:], silence_s)
        self._number = 0
        self._poller = zmq.Poller()
        for caller in callers:
            self._poller.register(caller.socket, zmq.POLLIN)

    def __call__(self, rows: Tensor) -> Tensor:
        flat = rows[0] if rows.device.type == "cpu" else rows[0].cpu()
        self._number += 1
        places = [_pieces(part, flat.element_size()) for part in shares(len(flat), self.workers, len(self.callers) - self.workers)]
        order = self._order(places)
        self._signs.begin()
        sent = got = 0
        deadline = time.monotonic() + self.liveness_timeout_s
        while got < len(order):
            while sent < min(len(order), got + WINDOW) and self._push(flat, *order[sent], places):
                sent += 1
            came = self._collect(flat, places)
            got += came
            if came:
                deadline = time.monotonic() + self.liveness_timeout_s
                continue
            for child in self._children:
                if child.poll() is not None:
                    raise WorkerLost(
                        f"A server that sums, started by worker {self.worker}, ended with exit code {child.returncode}."
                    )
            self._signs.want()
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"A summation server has not answered for {self.liveness_timeout_s:g} s; a worker or a server is lost."
                )
        if flat.data_ptr() != rows.data_ptr():
            rows[0].copy_(flat)
        return rows

    def _order(self, places: list[list[range]]) -> list[tuple[int, int]]:
        """All pieces, as ``(server, piece)``: every server gets its share at the same pace, so that no link is idle before another.

        Every worker begins with another server.
        """
        count = len(places)
        pieces = [(owner, k) for owner in range(count) for k in range(len(places[owner]))]
        return sorted(pieces, key=lambda p: ((p[1] + 0.5) / len(places[p[0]]), (p[0] - self.worker) % count))

    def _push(self, flat: Tensor, owner: int, k: int, places: list[list[range]]) -> bool:
        place = places[owner][k]
        values = flat[place.start : place.stop]
        return self.callers[owner].send(Envelope(Kind.PUSH, sender=self.worker, step=k, number=self._number, tensors=(values,)), 0)

    def _collect(self, flat: Tensor, places: list[list[range]]) -> int:
        """Take what has been answered; how many pieces that was."""
        ready = {socket for socket, _ in self._poller.poll(int(1000 * _TICK_S))}
        came = 0
        for owner, caller in enumerate(self.callers):
            while caller.socket in ready and (answer := caller.receive(0)) is not None:
                self._signs.heard(caller)
                if answer.kind is Kind.REPLY and answer.number == self._number and 0 <= answer.step < len(places[owner]):
                    place = places[owner][answer.step]
                    flat[place.start : place.stop] = answer.tensors[0]
                    came += 1
        return came

    def dismiss(self) -> None:
        """End the spare servers."""
        for caller in self.callers[self.workers :]:
            caller.send(Envelope(Kind.GOODBYE, sender=self.worker), _LINGER_S)

    def close(self) -> None:
        """Close the links."""
        for caller in self.callers:
            caller.close()


def _pieces(part: range, itemsize: int) -> list[range]:
    step = max(1, PIECE_BYTES // itemsize)
    return [range(a, min(a + step, part.stop)) for a in range(part.start, part.stop, step)]


class _Signs:
    """Signs of life of servers, asked for once a second while nothing else comes; time that we did not look does not count."""

    def __init__(self, servers: list[Caller], silence_s: float) -> None:
        self.servers, self.silence_s = servers, silence_s
        self.begin()

    def begin(self) -> None:
        self._looked, self._asked = time.monotonic(), 0.0
        self._quiet = {server.address: 0.0 for server in self.servers}

    def heard(self, server: Caller) -> None:
        if server.address in self._quiet:
            self._quiet[server.address] = 0.0

    def want(self) -> None:
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, _BEAT_S), now
        for address in self._quiet:
            self._quiet[address] += gap
            if self._quiet[address] > self.silence_s:
                raise WorkerLost(f"The server at {address}, which sums, has given no sign of life for {self.silence_s:g} s.")
        if now - self._asked >= _BEAT_S:
            self._asked = now
            for server in self.servers:
                server.send(Envelope(Kind.BEAT), 0)


class Summation:
    """What one process needs: its own server in a thread, spare ones as children of the first processes, and its links."""

    def __init__(
        self,
        cluster: Cluster,
        servers: int,
        bind: str = "127.0.0.1",
        keys: Path | None = None,
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        spare: Sequence[str] | None = None,
        job: bytes | None = None,
    ) -> None:
        """``spare`` names servers that run already, on machines of their own, and ``job`` the id that they were given."""
        if cluster.rows != 1:
            raise HocketError("Servers that sum serve one worker per process; leave --processes out.")
        self._children: list[Child] = []
        self._stop = threading.Event()
        worker = cluster.workers.start
        # Worker 0 chooses the id of the job.
        name = torch.tensor([list(os.urandom(_JOB_BYTES))], dtype=torch.uint8)
        job = bytes(cluster.all_gather_metrics(name)[0].tolist()) if job is None else job
        found = Keys.read(keys) if keys is not None else None
        self._listener = Listener(f"tcp://{bind}:0", job, found, high_water=_QUEUE)
        self._server = SummationServer(self._listener, cluster.size)
        own = [self._listener.address]
        if spare is None and worker < servers:
            child = start_summation_server(job, cluster.size, bind, keys)
            self._children.append(child)
            own.append(address_of(child))
        text = json.dumps(own).encode()
        told = torch.zeros(1, 512, dtype=torch.uint8)
        told[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in cluster.all_gather_metrics(told)]
        addresses = [a[0] for a in everyone] + list([a[1] for a in everyone if len(a) > 1] if spare is None else spare)
        callers = [Caller(address, job, found, high_water=_QUEUE) for address in addresses]
        silence_s = cluster.liveness_timeout_s if cluster.has_process_group else SILENCE_S
        self.mean = SummationClient(worker, cluster.size, callers, liveness_timeout_s, self._children, silence_s)
        self._thread = threading.Thread(target=self._sum, name="hocket-summation", daemon=True)
        self._thread.start()

    def reduce_mean(self, rows: Tensor) -> Tensor:
        """The rows, each replaced by the mean over all workers (in place)."""
        return self.mean(rows)

    def _sum(self) -> None:
        while not self._stop.is_set():
            self._server.turn()

    def close(self) -> None:
        """End the thread and the children."""
        self._stop.set()
        self._thread.join(5)
        self.mean.close()
        self._listener.close(_LINGER_S)  # others may still be waiting for what it has sent
        for child in self._children:
            end_child(child)


def serve_sums(strategy: Strategy, cluster: Cluster) -> None:
    """Give ``cluster`` the servers that ``strategy`` sums on, where it has some; all processes call it together."""
    topology = strategy.topology
    if not topology.sums_on_servers or cluster.size == 1:
        return
    servers = topology.num_shards(cluster.size)
    if cluster.lacks_servers(servers):
        cluster.attach_servers(servers, Summation(cluster, servers, _bind(cluster), cluster.keys))


def start_summation_server(job: bytes, workers: int, bind: str = "127.0.0.1", keys: Path | None = None) -> Child:
    """A spare process that sums; it ends when its input closes."""
    command = [sys.executable, "-m", "hocket.drivers.summation", "--job", job.hex(), "--workers", str(workers), "--bind", bind]
    if keys is not None:
        command += ["--keys", str(keys)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main(arguments: list[str] | None = None) -> None:
    """``python -m hocket.drivers.summation``: a spare machine that sums, until its input closes."""
    parser = argparse.ArgumentParser(prog="python -m hocket.drivers.summation", description="A spare machine that only sums.")
    parser.add_argument("--job", required=True, help="the job's id, 32 hexadecimal digits")
    parser.add_argument("--workers", required=True, type=int)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on; beyond this machine it wants --keys")
    parser.add_argument("--port", default=0, type=int)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--stay", action="store_true", help="end when a worker says so, not when the input closes")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: and if that one is killed
    torch.set_num_threads(1)
    keys = Keys.read(given.keys) if given.keys is not None else None
    with Listener(f"tcp://{given.bind}:{given.port}", bytes.fromhex(given.job), keys, high_water=_QUEUE) as listener:
        print(json.dumps({"address": listener.address}), flush=True)
        over = threading.Event()
        server = SummationServer(listener, given.workers)
        if not given.stay:
            threading.Thread(target=_until_closed, args=(over.set,), daemon=True).start()
        while not over.is_set() and not (given.stay and server.over):
            server.turn()


def _until_closed(then: Callable[[], None]) -> None:
    sys.stdin.read()
    then()


if __name__ == "__main__":
    main()
