"""Means summed on spare processes and on the workers' own equal those of virtual workers, and leave nobody behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.cluster.message import ring_bytes, summed_bytes
from hocket.drivers.sockets import SocketDriver
from hocket.drivers.start import address_of
from hocket.drivers.summation import SummationClient, start_summation_server
from hocket.errors import WorkerLost
from hocket.programs.summation import QUEUE, SummationServer, shares
from hocket.transport import Caller, Listener
from process.equality import WORKERS
from process.launch import Nursery
from process.summing import CASES, virtual

JOB = bytes(range(16))


@pytest.mark.process
@pytest.mark.timeout(200)
def test_servers_that_sum_equal_virtual_workers_bit_for_bit(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.summing:real", WORKERS, tmp_path)
    assert group.wait(150, together=True) == [0] * WORKERS, group.said()
    results, expected = group.results(), virtual()
    for case in CASES:
        for part in ("weights", "mean", "sent"):
            found = torch.cat([r[case.name][part] for r in results])
            assert torch.equal(found, expected[case.name][part]), (case.name, part)
    assert all(float(r["large"]["right"]) == 1 for r in results)


class Proxy:
    """Carries connections to a listener until it resets them all."""

    def __init__(self, address: str) -> None:
        self._to, self._pairs = urlsplit(address), list[socket.socket]()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        for one in self._pairs:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what is under way is lost
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._pairs.clear()

    def close(self) -> None:
        self._door.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection((self._to.hostname, self._to.port))
                self._pairs += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)


@pytest.mark.timeout(100)
def test_connections_that_are_reset_change_no_bit_of_a_mean() -> None:
    workers, size, rounds, over = 2, 400_000, 6, threading.Event()
    listeners = [Listener("tcp://127.0.0.1:0", JOB, high_water=QUEUE) for _ in range(workers)]
    servers = [SocketDriver(SummationServer(workers), listener=listener) for listener in listeners]
    proxies = [Proxy(listener.address) for listener in listeners]
    wrong: list[int] = []

    def work(worker: int) -> None:
        mean = SummationClient(worker, workers, [Caller(proxy.address, JOB, high_water=QUEUE) for proxy in proxies])
        for step in range(rounds):
            row = torch.arange(float(size)).view(1, -1) * (1 + worker + step)
            if not torch.equal(mean(row), torch.arange(float(size)).view(1, -1) * (1.5 + step)):
                wrong.append(step)
        mean.close()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    threads += [threading.Thread(target=server.serve, args=(over.is_set,)) for server in servers]
    for thread in threads:
        thread.start()
    for proxy in (*proxies, *proxies):
        threads[0].join(0.1)
        proxy.reset()
    for thread in threads[:workers]:
        thread.join(80)
        assert not thread.is_alive(), "it waits for what was lost"
    over.set()
    for thread, server, proxy in zip(threads[workers:], servers, proxies, strict=True):
        thread.join()
        server.close()
        proxy.close()
    assert wrong == []


@pytest.mark.timeout(60)
def test_a_server_that_sums_and_dies_is_noticed_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", "exit(3)"], text=True) as child, Listener("tcp://127.0.0.1:0", JOB) as nobody:
        child.wait()
        mean = SummationClient(1, 2, [Caller(nobody.address, JOB) for _ in range(3)], children=[child])
        with pytest.raises(WorkerLost, match="that worker 1 started ended with exit code 3"):
            mean(torch.ones(1, 100))
        mean.close()


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_server_that_is_stopped_is_noticed_and_one_that_only_waits_is_not() -> None:
    child = start_summation_server(JOB, 2)
    address = address_of(child)
    try:
        callers = [Caller(address, JOB) for _ in range(3)]
        with pytest.raises(WorkerLost, match=r"A summation server has not answered for 2 s"):  # the other worker never comes
            SummationClient(0, 2, callers, liveness_timeout_s=2.0, silence_s=1.5)(torch.ones(1, 100))
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=f"at {address} has not answered for 1.5 s"):
            SummationClient(0, 2, callers, silence_s=1.5)(torch.ones(1, 100))
        for caller in callers:
            caller.close(0)
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.communicate()


@given(st.integers(0, 10_000), st.integers(2, 12), st.data())
def test_shares_cover_all_values_and_load_all_links_equally(size: int, workers: int, data: st.DataObject) -> None:
    servers = data.draw(st.integers(0, workers))
    parts = shares(size, workers, servers)
    assert [i for part in parts for i in part] == list(range(size))
    own, spare = [len(p) for p in parts[:workers]], [len(p) for p in parts[workers:]]
    for worker, share in enumerate(own):  # what it pushes to others, and what it answers to others
        load = (size - share) + (workers - 1) * own[worker]
        assert load == pytest.approx(2 * workers * (workers - 1) * size / _d(workers, servers), abs=2 * workers)
    for share in spare:
        assert workers * share == pytest.approx(2 * workers * (workers - 1) * size / _d(workers, servers), abs=2 * workers)


def _d(workers: int, servers: int) -> int:
    return workers**2 + servers * workers - 2 * servers


@pytest.mark.parametrize("servers, gain", [(0, 1.0), (2, 1.25), (4, 1.5)])
def test_four_workers_gain_what_theory_says(servers: int, gain: float) -> None:
    own, theirs = summed_bytes(10**8, 4, servers)
    assert ring_bytes(10**8, 4) / own == pytest.approx(gain, rel=1e-3)
    assert theirs == pytest.approx(own, rel=1e-3)
