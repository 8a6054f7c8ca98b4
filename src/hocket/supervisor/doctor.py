"""``hocket doctor``: look at this machine, or at all processes that a launcher has started, before a run.

Processes meet at a key-value store at the launcher's address, the one thing that must work; there each reports its facts, calls
every other process by TCP, and takes part in one mean over Gloo. Process 0 makes findings of it (:mod:`.diagnosis`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hocket.cluster.heartbeat import boot_id
from hocket.cluster.join import LaunchInfo
from hocket.cluster.store import LOOPBACK, connect, stay_on_loopback, store_on_loopback
from hocket.compression.kernels.build import compiler
from hocket.supervisor.diagnosis import FAIL, Facts, Finding, diagnose
from hocket.train.record import versions

_TRIPS = 5
_CALL_S = 3.0
_GIFADDR = 0x8915


def examine(place: LaunchInfo | None, environ: Mapping[str, str], out: Path | None, timeout_s: float) -> list[Finding]:
    """The findings: of this machine, or, on process 0 of several, of all; other processes get those that fail alone, or that they
    could not meet the others (subject ``rendezvous``)."""
    if place is None or place.processes == 1:
        return diagnose({0: gather(environ, 1, _folder(out, None))}, 1, {}, None)
    if place.one_host:
        stay_on_loopback()
    met = _Meeting.at(place, environ, timeout_s)
    if isinstance(met, Finding):
        return [met]
    with met as meeting:
        mark = f".hocket-doctor-{meeting.token}"
        folder = _folder(out, mark if place.rank == 0 else None)
        meeting.exchange("folder", True)  # the mark of process 0 is there
        if folder is not None:
            folder["shared"] = (Path(folder["path"]) / mark).exists()
        facts = meeting.exchange("facts", {**gather(environ, place.per_host, folder), "port": meeting.port})
        if out is not None and place.rank == 0:
            (out / mark).unlink(missing_ok=True)
        pairs = meeting.exchange("pairs", call_all(place.rank, facts, place.one_host))
        found = {rank: {int(called): answer for called, answer in row.items()} for rank, row in pairs.items()}
        whole = len(facts) == place.processes and not any(isinstance(a, str) for row in found.values() for a in row.values())
        errors = meeting.exchange("exchange", _mean(meeting.store, place, timeout_s) if whole else None)
        exchange = next((text for text in errors.values() if text), "") if whole else None
        return meeting.verdict(diagnose(facts, place.processes, found, exchange))


def gather(environ: Mapping[str, str], per_host: int, folder: Any = None) -> dict[str, Any]:
    """The facts of this process."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else ""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "versions": {name: value for name, value in versions().items() if name in ("hocket", "torch", "python")},
        "interface": interface(environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "gpus": gpus,
        "gpu": torch.cuda.get_device_name(0) if gpus else "",
        "nccl": nccl,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "per_host": per_host,
        "compiler": compiler() is not None,
        "ports": _ports(),
        "folder": folder,
    }


def interface(environ: Mapping[str, str]) -> dict[str, str]:
    """The network interface that Gloo uses: the one that GLOO_SOCKET_IFNAME names, else that of this host's name, else loopback."""
    addresses = {name: address for _, name in socket.if_nameindex() if (address := _address(name))}
    asked = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if asked and asked not in addresses:
        there = ", ".join(addresses) or "none"
        return {"name": asked, "address": "", "error": f"GLOO_SOCKET_IFNAME={asked}, but there are {there}"}
    if asked:
        return {"name": asked, "address": addresses[asked], "error": ""}
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        own = ""
    name = next((name for name, address in addresses.items() if address == own), "lo")
    return {"name": name, "address": own if name != "lo" else "127.0.0.1", "error": ""}


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _GIFADDR, request)[20:24])
    return None


def _ports() -> dict[str, Any]:
    """How many ports the system has for connections, and the error where it gives none."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low, high = map(int, path.read_text().split()) if path.exists() else (49152, 65535)
    try:
        with socket.socket() as sock:
            sock.bind((LOOPBACK, 0))
            sock.listen(1)
        return {"range": high - low + 1, "error": ""}
    except OSError as error:
        return {"range": high - low + 1, "error": str(error)}


def _folder(out: Path | None, mark: str | None) -> dict[str, Any] | None:
    """Whether the output folder can be written; process 0 leaves a mark there, by which the others know that it is the same."""
    if out is None:
        return None
    found: dict[str, Any] = {"path": str(out.absolute()), "free_bytes": 0, "shared": True, "error": ""}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            found["free_bytes"] = shutil.disk_usage(out).free
        if mark is not None:
            (out / mark).touch()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


# --- several processes -------------------------------------------------------------------------------------------------------


class _Meeting:
    """The processes of a job at their store; each listens at ``port`` and tells its time to whoever calls."""

    def __init__(self, place: LaunchInfo, store: Any, token: str, timeout_s: float) -> None:
        self.place, self.store, self.token, self.timeout_s = place, store, token, timeout_s
        self._here = set(range(place.processes))
        self._listener = socket.create_server((LOOPBACK if place.one_host else "", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name="hocket-doctor", daemon=True).start()

    @classmethod
    def at(cls, place: LaunchInfo, environ: Mapping[str, str], timeout_s: float) -> _Meeting | Finding:
        """The meeting at the launcher's address; a sentence on what is wrong where there is none."""
        kept = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        hosts = place.rank == 0 and not kept
        where, limit = f"{place.address}:{place.port}", timedelta(seconds=timeout_s)
        text = f"process {place.rank} on {socket.gethostname()} cannot reach process 0 at {where}"
        lost = Finding(FAIL, "rendezvous", text, "check MASTER_ADDR, MASTER_PORT and the firewall, and that process 0 was started")
        late = threading.Timer(timeout_s + 5, _give_up, (lost,))  # another service answers there, and torch would wait without end
        late.daemon = True
        late.start()
        try:
            store: dist.Store
            if place.one_host and not kept:
                store = store_on_loopback(place.port, timeout_s) if hosts else connect(LOOPBACK, place.port, timeout_s)
            else:
                store = dist.TCPStore(place.address, place.port, None, hosts, limit, wait_for_workers=False, multi_tenant=True)
        except (RuntimeError, ValueError, OSError) as error:
            if hosts and ("address already in use" in str(error).lower() or "EADDRINUSE" in str(error)):
                return Finding(FAIL, "rendezvous", f"port {place.port} of {place.address} is taken", "choose another MASTER_PORT")
            return lost
        finally:
            late.cancel()
        token = f"{place.port}-{environ.get('TORCHELASTIC_RUN_ID', '')}"[:64].replace("/", "_")
        return cls(place, dist.PrefixStore("hocket/doctor", store), token, timeout_s)

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        """Process 0, which hosts the store, goes last."""
        with contextlib.suppress(RuntimeError):
            self.tell("left", True)
            if self.place.rank == 0:
                self.all("left")
        self._listener.close()

    def tell(self, what: str, value: Any) -> None:
        self.store.set(f"{what}/{self.place.rank}", json.dumps(value))

    def all(self, what: str) -> dict[int, Any]:
        """The values of the processes that reported in time; the others are not waited for again."""
        deadline, missing = time.monotonic() + self.timeout_s, sorted(self._here)
        while missing and time.monotonic() < deadline:
            time.sleep(0.01)
            missing = [rank for rank in missing if not self.store.check([f"{what}/{rank}"])]
        self._here -= set(missing)
        return {rank: json.loads(self.store.get(f"{what}/{rank}")) for rank in sorted(self._here)}

    def exchange(self, what: str, value: Any) -> dict[int, Any]:
        self.tell(what, value)
        return self.all(what)

    def verdict(self, findings: list[Finding]) -> list[Finding]:
        """Process 0's findings; the others receive those that fail."""
        if self.place.rank == 0:
            self.tell("verdict", [list(vars(finding).values()) for finding in findings if finding.level == FAIL])
            return findings
        self.store.wait(["verdict/0"], timedelta(seconds=self.timeout_s + _CALL_S))
        return [Finding(*fields) for fields in json.loads(self.store.get("verdict/0"))]

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(_CALL_S)
                    while caller.recv(1):
                        caller.sendall(struct.pack("d", time.time()))


def _give_up(finding: Finding) -> None:
    print(finding, flush=True)
    os._exit(1)


def call_all(rank: int, facts: Mapping[int, Facts], here: bool = False) -> dict[int, Any]:
    """Call every other process: the shortest round trip and by how much its clock is ahead, or why it cannot be reached.

    ``here``: all are on this machine, and listen on loopback.
    """
    others = [other for other in facts if other != rank]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return dict(zip(others, pool.map(lambda other: _call(facts[other], here), others), strict=True))


def _call(facts: Facts, here: bool) -> Any:
    try:
        with socket.create_connection(
            (LOOPBACK if here else facts["interface"]["address"], facts["port"]), timeout=_CALL_S
        ) as sock:
            trips = []
            for _ in range(_TRIPS):
                begun = time.time()
                sock.sendall(b"?")
                (theirs,) = struct.unpack("d", sock.recv(8, socket.MSG_WAITALL))
                trips.append((time.time() - begun, theirs - (begun + time.time()) / 2))
            return min(trips)
    except (OSError, struct.error) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _mean(store: Any, place: LaunchInfo, timeout_s: float) -> str:
    """A mean over Gloo, as a run makes it; returns the error, if there is one."""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", store),
            rank=place.rank,
            world_size=place.processes,
            timeout=timedelta(seconds=timeout_s),
        )
        values = torch.full((1 << 16,), float(place.rank))
        dist.all_reduce(values)
        right = bool((values == place.processes * (place.processes - 1) / 2).all())
        dist.destroy_process_group()
        return "" if right else "the sum is wrong"
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
