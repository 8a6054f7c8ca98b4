"""Join the job that a launcher started: torchrun, mpirun or Slurm; without a launcher, one process alone.

Launchers announce ranks in environment variables of their own; this is the one module of the library that reads them.
"""

import importlib
import ipaddress
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.cluster.base import Cluster
from hocket.cluster.elastic import ElasticCluster
from hocket.cluster.launchers import LAUNCHERS, announced
from hocket.cluster.processes import ProcessCluster
from hocket.cluster.store import (
    LOOPBACK,
    StoreTunnel,
    address_towards,
    bracketed,
    connect,
    connect_through,
    serve_through,
    stay_on_loopback,
    store_on_loopback,
)
from hocket.cluster.virtual import VirtualCluster
from hocket.errors import HocketError

RENDEZVOUS, RENDEZVOUS_JOB, RENDEZVOUS_MEMBER = "HOCKET_RENDEZVOUS", "HOCKET_JOB", "HOCKET_MEMBER"
_TUNNEL = "hocket/tunnel"
"""In a store that torchrun keeps: where the tunnel to the job's own store is."""
_REACH_S = 2.0
RENDEZVOUS_HERE = "HOCKET_MEMBERS_HERE"


@dataclass(frozen=True)
class LaunchInfo:
    """The rank of this process and the size of the job, as the launcher announced them."""

    launcher: str
    rank: int
    processes: int
    local_rank: int
    per_host: int
    address: str
    port: int
    job: str = ""
    """Which of the launcher's jobs this is, where the port follows from it."""
    one_host: bool = True
    """Whether all processes are on this machine."""
    keeps_store: bool = False
    """Whether the launcher keeps the job's store itself, at ``address`` (torchrun does)."""
    attempt: str = "0"
    """How often the launcher has started the processes again."""
    closed_network: bool = False
    """Whether whoever started the job says that strangers cannot reach its network."""


def find_launcher(environ: Mapping[str, str]) -> LaunchInfo | None:
    """What the launcher of this process announced; None if there is none.

    >>> find_launcher({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rank
    1
    """
    said = announced(environ)
    if said is None:
        return None
    address, port = environ.get("MASTER_ADDR") or _first_host(environ), environ.get("MASTER_PORT")
    job = "" if port else _job(environ, said.launcher, LAUNCHERS[said.launcher][0])
    nodes = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) if said.launcher == "Slurm" else None
    if 0 < said.per_host < said.size and "MASTER_ADDR" not in environ and _stays_here(address) and nodes != "1":
        raise HocketError(
            f"{said}, {said.per_host} of them on this machine, but their address is {address}, which no other machine reaches; "
            "set MASTER_ADDR to the first machine's name or address for all of them."
        )
    if said.launcher == "MPICH" and 0 < said.per_host < said.size and not port:
        raise HocketError(
            f"{said}, on several machines, and MPICH gives its jobs no name; set MASTER_PORT, the same for all of them."
        )
    return LaunchInfo(
        said.launcher,
        said.rank,
        said.size,
        said.local_rank,
        said.per_host or said.size,
        address,
        int(port or _port(job)),
        job,
        said.per_host == said.size or nodes == "1" or _stays_here(address),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        environ.get("HOCKET_CLOSED_NETWORK", "") not in ("", "0"),
    )


@dataclass(frozen=True)
class RendezvousInfo:
    """Where the rendezvous of an elastic run is, the run's id, the number by which its launcher knows this process, and how many
    processes the launcher keeps on this machine (0: nobody says)."""

    address: str
    job: bytes
    member: int | None = None
    here: int = 0

    @property
    def environ(self) -> dict[str, str]:
        """What :func:`find_rendezvous` reads."""
        found = {RENDEZVOUS: self.address, RENDEZVOUS_JOB: self.job.hex()}
        return found if self.member is None else {**found, RENDEZVOUS_MEMBER: str(self.member), RENDEZVOUS_HERE: str(self.here)}


def find_rendezvous(environ: Mapping[str, str]) -> RendezvousInfo | None:
    """The rendezvous that this process is to join; None where the run is not elastic.

    >>> find_rendezvous({"HOCKET_RENDEZVOUS": "tcp://10.0.0.1:7000", "HOCKET_JOB": "5d41402abc4b2a76b9719d911017c592"}).address
    'tcp://10.0.0.1:7000'
    """
    if not environ.get(RENDEZVOUS):
        return None
    member = environ.get(RENDEZVOUS_MEMBER)
    job = environ.get(RENDEZVOUS_JOB, "")
    if not re.fullmatch("[0-9a-fA-F]{32}", job):
        raise HocketError(
            f"{RENDEZVOUS_JOB}={job}: a worker of an elastic run needs the run's id, 32 hexadecimal digits; `hocket rendezvous` "
            "prints it, or takes it from its own environment."
        )
    return RendezvousInfo(
        environ[RENDEZVOUS], bytes.fromhex(job), None if member is None else int(member), int(environ.get(RENDEZVOUS_HERE) or 0)
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the launcher's variables: for a process that starts workers itself.

    >>> without_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "HOME": "/root"})
    {'HOME': '/root'}
    """
    announced = {name for names in LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environ.items() if name not in announced}


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of a Slurm allocation (``node[03-07,9]`` → ``node03``), or this one."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return "127.0.0.1"
    head = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    return (head.group(1) + (head.group(2) or "")) if head else nodes


def _job(environ: Mapping[str, str], launcher: str, rank: str) -> str:
    """The same on all processes of a job, another for another job, also for one of the same allocation or the same user."""
    if job := environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid"):
        return job
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_STEP_ID', environ.get('SLURM_STEPID', ''))}"
    return f"{launcher} {_launcher_process(rank, os.getpid())}" if launcher == "MPICH" else "0"  # it gives its jobs no names


def _launcher_process(rank: str, process: int) -> int:
    """The nearest ancestor of a process that was not given a ``rank``: all processes of a job on one machine share it."""
    own = process
    try:
        while True:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if f"\0{rank}=".encode() not in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
                return process
    except OSError:  # another user's, which is no wrapper of ours; or not Linux
        return os.getppid() if process == own else process


def _port(job: str) -> int:
    """The same port on all processes of a job, another for another job."""
    return 20000 + sum(ord(c) * 31**k for k, c in enumerate(job)) % 12000  # below those that the system hands out


def _stays_here(host: str) -> bool:
    """Whether every machine takes this for itself. A machine's own name may mean loopback there and the machine elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def join(
    backend: str | None = None,
    device: torch.device | str | None = None,
    workers: int | None = None,
    exact: bool = False,
    timeout_s: float = 1800.0,
    liveness_timeout_s: float = 10.0,
    keys: Path | None = None,
    tunnel: StoreTunnel | None = None,
) -> Cluster:
    """The cluster this process belongs to; without a launcher: one worker, or ``workers`` virtual ones.

    ``keys`` are for links of messages between machines, ``tunnel``, which the same keys open, for the store.
    """
    if (found := find_rendezvous(os.environ)) is not None:
        if backend not in (None, "gloo"):
            raise HocketError(f"backend={backend!r}: an elastic run forms its groups on Gloo, also on GPUs; leave backend out.")
        return ElasticCluster(elastic_device(device, found, os.environ), exact, keys)
    place = find_launcher(os.environ)
    if not dist.is_initialized():
        if place is None or place.processes == 1:
            alone = device or ("cuda" if torch.cuda.is_available() else "cpu")
            return VirtualCluster(workers or 1, alone, timed=(workers or 1) == 1)
        # NCCL needs a GPU for every process.
        on_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
        nccl = on_cuda and place.per_host <= torch.cuda.device_count()
        _start_group(place, backend or ("nccl" if nccl else "gloo"), timeout_s, tunnel)
    device = torch.device(device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", (place.local_rank if place else dist.get_rank()) % max(torch.cuda.device_count(), 1))
        torch.cuda.set_device(device)
    per_host = place.per_host if place is not None and dist.get_world_size() % place.per_host == 0 else None
    if per_host is not None and workers is not None:
        per_host = per_host * workers // dist.get_world_size() if workers % dist.get_world_size() == 0 else None
    return ProcessCluster(workers, device, exact, per_host, liveness_timeout_s, keys)


def elastic_device(device: torch.device | str | None, found: RendezvousInfo, environ: Mapping[str, str]) -> torch.device:
    """The device of a worker of an elastic run, whose tensors travel by way of the CPU: a GPU, if this machine has one for each of
    its processes as far as anybody says how many there are; of several GPUs each process has another one."""
    said, gpus = announced(environ), torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = found.here if said is None else said.per_host
    if device is None:
        device = "cuda" if 0 < max(here, 1) <= gpus else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        number = (found.member or 0) % max(here, 1) if said is None else said.local_rank
        device = torch.device("cuda", number % max(gpus, 1))
        torch.cuda.set_device(device)
    return device


def store_host() -> str:
    """The machine that keeps the job's store, as others reach it."""
    store: object = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", LOOPBACK))
    return os.environ.get("MASTER_ADDR", host) if host == LOOPBACK else host


def launcher_store(place: LaunchInfo, timeout_s: float = 1800.0, tunnel: StoreTunnel | None = None) -> dist.Store:
    """The store by which the processes of a launcher's job find each other, without a process group."""
    with _joining(place, timeout_s, "through the store"):
        return _open_store(place, timeout_s, tunnel)


def _start_group(place: LaunchInfo, backend: str, timeout_s: float, tunnel: StoreTunnel | None) -> None:
    with _joining(place, timeout_s, f"by {backend}"):
        store = _open_store(place, timeout_s, tunnel)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.processes, timeout=timeout)


@contextmanager
def _joining(place: LaunchInfo, timeout_s: float, how: str) -> Iterator[None]:
    """The variables that torch reads; what goes wrong becomes one sentence."""
    os.environ.setdefault("MASTER_ADDR", place.address)
    os.environ.setdefault("MASTER_PORT", str(place.port))
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.processes))
    # Its functions take the default group at import as a default argument; imported later, they would keep the group alive.
    importlib.import_module("torch.distributed.nn.functional")
    late = threading.Timer(timeout_s + 5, _give_up, (place, timeout_s))
    late.daemon = True
    late.start()
    try:
        yield
    except HocketError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            port = os.environ["MASTER_PORT"]
            raise HocketError(f"Port {port} on {os.environ['MASTER_ADDR']} is taken; choose another with MASTER_PORT.") from None
        raise HocketError(_not_joined(place, f"{how} ({text})")) from None
    finally:
        late.cancel()


def _open_store(place: LaunchInfo, timeout_s: float, tunnel: StoreTunnel | None) -> dist.Store:
    if place.one_host:
        stay_on_loopback()
        tunnel = None
    elif tunnel is None and not place.closed_network:
        raise HocketError(
            f"The {place.processes} processes of this job are on several machines, and anyone who reaches {place.address} could "
            "take part: make keys with `hocket keys FILE` and give them to all with hocket.init(keys=FILE), or set "
            "HOCKET_CLOSED_NETWORK=1 where strangers cannot reach this network."
        )
    if place.keeps_store:
        kept = connect(place.address, place.port, timeout_s)
        if tunnel is not None:
            return _tunnelled(place, timeout_s, tunnel, kept)
        # The launcher keeps its store when it starts the processes again; those of one launcher know which start this is.
        return dist.PrefixStore(f"hocket/attempt/{place.attempt}", kept) if place.per_host == place.processes else kept
    if tunnel is not None:
        store = _tunnelled(place, timeout_s, tunnel)
    elif place.one_host:
        store = store_on_loopback(place.port, timeout_s) if place.rank == 0 else connect(LOOPBACK, place.port, timeout_s)
    else:
        timeout, first = timedelta(seconds=timeout_s), place.rank == 0
        store = dist.TCPStore(place.address, place.port, place.processes, first, timeout, multi_tenant=True)
    if place.rank == 0:
        store.set("hocket/job", place.job)
    elif (other := store.get("hocket/job").decode()) != place.job:
        raise HocketError(
            f"Port {place.port} on {place.address} is that of another job ({other}); choose another with MASTER_PORT."
        )
    return store


def _tunnelled(place: LaunchInfo, timeout_s: float, tunnel: StoreTunnel, kept: dist.Store | None = None) -> dist.TCPStore:
    """The store of this job behind a tunnel; ``kept``, which is open to all, only tells where that is."""
    if place.rank == 0:
        host = place.address if kept is None else address_towards(place.address)
        store, address = serve_through(tunnel, host, 0 if kept is not None else place.port, timeout_s)
        if kept is not None:
            kept.set(_TUNNEL, address)
        return store
    if kept is None:
        return connect_through(tunnel, f"tcp://{bracketed(place.address)}:{place.port}", timeout_s)
    return connect_through(tunnel, _exit_of(tunnel, kept, timeout_s), timeout_s)


def _exit_of(tunnel: StoreTunnel, kept: dist.Store, timeout_s: float) -> str:
    """Where the tunnel is. Where processes were started again, ``kept`` may still tell where the one before was: launchers on
    several machines count starts differently, so nothing in its name could tell the two apart."""
    deadline = time.monotonic() + timeout_s
    while True:
        address = kept.get(_TUNNEL).decode(errors="replace")
        if tunnel.reaches(address, _REACH_S) or time.monotonic() > deadline:
            return address


def _give_up(place: LaunchInfo, timeout_s: float) -> None:
    """Exit: another service answers at the address, and torch would wait without end."""
    print(f"hocket: {_not_joined(place, f'in {timeout_s:g} s')}", file=sys.stderr, flush=True)
    os._exit(1)


def _not_joined(place: LaunchInfo, how: str) -> str:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"Process {place.rank} of {place.processes} could not join the others at {where} {how}; "
        "check that all processes were started and can reach that address."
    )
