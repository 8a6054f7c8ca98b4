"""Summation servers (:mod:`hocket.programs.summation`) on sockets: ``python -m hocket.drivers.summation`` is a spare one."""

import argparse
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.heartbeat import boot_id
from hocket.drivers.processes import Role, Supervisor
from hocket.drivers.sockets import SocketDriver
from hocket.drivers.start import address_of, announce, begin_child, given_job, input_closed, own_address, start_server
from hocket.errors import HocketError, SettingError, WorkerLost
from hocket.programs.summation import LIVENESS_TIMEOUT_S, QUEUE, SILENCE_S, SummationServer, SummationWorker
from hocket.strategy import Strategy
from hocket.transport import Caller, Keys, Listener

_JOB_BYTES = 16
_LINGER_S = 5.0
_SUM = "summation server"


def _bind(cluster: Cluster) -> str:
    """Where summation servers listen: on loopback where all processes share a machine, else where the others reach this one."""
    host = torch.tensor([list(hashlib.sha256(boot_id().encode()).digest())], dtype=torch.uint8)
    everyone = cluster.all_gather_metrics(host)
    if bool((everyone == everyone[0]).all()):
        return "127.0.0.1"
    if cluster.keys is None:
        raise HocketError(
            "Summation servers send messages between machines here and need keys: make them with `hocket keys FILE` and give them "
            "to hocket.init(keys=FILE)."
        )
    return own_address()


class SummationClient(SocketDriver):
    """One worker's client of the servers: a call replaces the worker's row, in place, by the mean over all workers."""

    program: SummationWorker

    def __init__(
        self,
        worker: int,
        workers: int,
        callers: Sequence[Caller],
        liveness_timeout_s: float = LIVENESS_TIMEOUT_S,
        children: Sequence[subprocess.Popen[str]] = (),
        silence_s: float = SILENCE_S,
    ) -> None:
        """``children``: servers that this process has started, and looks after."""
        program = SummationWorker(worker, workers, len(callers), liveness_timeout_s, silence_s)
        super().__init__(program, callers=dict(enumerate(callers)))
        self._children = children

    def __call__(self, rows: Tensor) -> Tensor:
        flat = rows[0] if rows.device.type == "cpu" else rows[0].cpu()
        self.begin(self.program.mean, flat)
        while not self.wait(lambda: not self.program.busy, 1.0):
            for child in self._children:
                if child.poll() is not None:
                    raise WorkerLost(
                        f"The summation server that worker {self.program.worker} started ended with exit code {child.returncode}; "
                        "see its own output."
                    )
        if flat.data_ptr() != rows.data_ptr():
            rows[0].copy_(flat)
        return rows


class Summation:
    """What one process holds: a server in a thread, a spare one as a child of the first processes, and links to all servers."""

    def __init__(
        self,
        cluster: Cluster,
        servers: int,
        bind: str = "127.0.0.1",
        keys: Path | None = None,
        spare: Sequence[str] | None = None,
        job: bytes | None = None,
    ) -> None:
        """``spare`` names servers that run already, on machines of their own, and ``job`` the id that they were given."""
        if cluster.rows != 1:
            raise SettingError("Summation servers need one worker per process; leave <processes> out.")
        self._stop = threading.Event()
        worker = cluster.workers.start
        # Worker 0 chooses the id of the job.
        name = torch.tensor([list(os.urandom(_JOB_BYTES))], dtype=torch.uint8)
        job = bytes(cluster.all_gather_metrics(name)[0].tolist()) if job is None else job
        found = Keys.read(keys) if keys is not None else None
        listener = Listener(f"tcp://{bind}:0", job, found, high_water=QUEUE)
        self._server = SocketDriver(SummationServer(cluster.size), listener=listener)
        own = [listener.address]
        count = int(spare is None and worker < servers)
        self._children = Supervisor(
            [Role(_SUM, count, lambda *_: start_summation_server(job, cluster.size, bind, keys), ends_with_input=True)]
        )
        self._children.start(_SUM)
        children = [self._children.process(_SUM, number) for number in range(count)]
        own += map(address_of, children)
        text = json.dumps(own).encode()
        padded = torch.zeros(1, 512, dtype=torch.uint8)
        padded[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in cluster.all_gather_metrics(padded)]
        addresses = [a[0] for a in everyone] + list([a[1] for a in everyone if len(a) > 1] if spare is None else spare)
        callers = [Caller(address, job, found, high_water=QUEUE) for address in addresses]
        silence_s = cluster.liveness_timeout_s if cluster.has_process_group else SILENCE_S
        self.mean = SummationClient(worker, cluster.size, callers, children=children, silence_s=silence_s)
        self._thread = threading.Thread(target=self._server.serve, args=(self._stop.is_set,), name="hocket-summation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and the children."""
        self._stop.set()
        self._thread.join(5)
        self.mean.close()
        self._server.close(_LINGER_S)  # others may still be waiting for what it has sent
        self._children.shutdown()


def serve_sums(strategy: Strategy, cluster: Cluster) -> None:
    """Give ``cluster`` the servers that ``strategy`` sums on, where it has some; all processes call it together."""
    topology = strategy.topology
    if not topology.sums_on_servers or cluster.size == 1:
        return
    servers = topology.num_shards(cluster.size)
    if cluster.lacks_servers(servers):
        cluster.attach_servers(servers, Summation(cluster, servers, _bind(cluster), cluster.keys))


def start_summation_server(job: bytes, workers: int, bind: str = "127.0.0.1", keys: Path | None = None) -> subprocess.Popen[str]:
    return start_server("hocket.drivers.summation", job, workers=workers, bind=bind, keys=keys)


def main(arguments: list[str] | None = None) -> None:
    """A spare machine that sums, until its input closes; HOCKET_JOB in the environment is the id of the job."""
    parser = argparse.ArgumentParser(prog="python -m hocket.drivers.summation", description="A spare machine that only sums.")
    parser.add_argument("--workers", required=True, type=int)
    parser.add_argument("--bind", default="127.0.0.1", help="address to listen on; one that other machines reach needs --keys")
    parser.add_argument("--port", default=0, type=int)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--stay", action="store_true", help="end when a worker says goodbye, not when standard input is closed")
    given = parser.parse_args(arguments)
    begin_child()
    keys = Keys.read(given.keys) if given.keys is not None else None
    with Listener(f"tcp://{given.bind}:{given.port}", given_job(), keys, high_water=QUEUE) as listener:
        announce(address=listener.address)
        SocketDriver(SummationServer(given.workers), listener=listener).serve(lambda: not given.stay and input_closed())


if __name__ == "__main__":
    main()
