"""Half an hour of faults: workers and shards are killed, stopped and cut off at random; does a run hang, lose count, or grow?

    python benchmarks/soak.py --minutes 30 --seed 0
    python benchmarks/soak.py --minutes 3 --seed 0 --only "async + server(2)" --json OUT.json

Each strategy trains on the embedded digits with 6 workers, every process on a host of its own: a network namespace (see netlab.py;
Linux, root). Every 10 seconds a process chosen by the seed

- is killed (kill -9),
- is stopped, for 2 seconds or for 12 (SIGSTOP),
- is cut off, for 2 seconds or for 12: the switch drops all its packets in silence,
- or has all its connections reset (`ss -K` in its namespace).

12 seconds count as lost, and a shard or worker that died is replaced. A run that makes no epoch for a minute hangs. After the last
fault it goes on until 15 seconds have gone by without a loss, and an epoch has ended since then.

*Every loss counted*: whoever was killed (in an elastic run also: away for 12 seconds) while it took part must have been told lost,
and nobody else (``missed`` and ``unexplained`` are 0); in an elastic run the metrics must count what the rendezvous told
(``told_lost`` and ``counted_lost``), with servers they count mini-batches. *Accuracy*: the mean of the last tenth of all epochs,
beside that of a run without faults. *Memory*: what every process has for itself (USS), of the oldest ones at the age of one minute
and at the end, and of all together as medians in the second and the last quarter of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from netlab import INTERFACE, Lab

ELASTIC, SERVERS = "local(8) + topk(0.05) | qsgd(4)", "async + server(2)"
STRATEGIES = (ELASTIC, SERVERS)
EVERY_S, HANG_S, CALM_S, WORKERS, SHARDS = 10.0, 60.0, 15.0, 6, 2
LAUNCHER = WORKERS + SHARDS
"""Its host, which is never cut off."""
FAULTS = (("kill", 0.0), ("stop", 2.0), ("stop", 12.0), ("cut", 2.0), ("cut", 12.0), ("reset", 0.0))
SURE_S = 12.0
"""Away for so long, a process is lost for sure."""
STARTS_S, APART_S = 20.0, 30.0
"""A process younger than that may not have joined; one that met with such a fault before may still be away."""
YOUNG_S = 60.0
_LOST = re.compile(r"(worker|shard) (\d+) (?:is lost;|died and is back|.*another takes its place)")
SETTINGS = {"data": "digits", "model": "mlp", "lr": 0.05, "batch_size": 4}
_NEW_NETWORK = 0x40000000

# --- the launcher, on a host of its own ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Processes that this thread starts are on the host of that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        for target in (there, here):
            if libc.setns(target.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
            if target is there:
                try:
                    yield
                except BaseException:
                    libc.setns(here.fileno(), _NEW_NETWORK)
                    raise


def launch(strategy: str, folder: Path, epochs: int, namespaces: list[str], addresses: list[str]) -> None:
    """Start the run, each of its processes in its own namespace."""
    from hocket.cli.main import main as hocket_command  # noqa: F401 - what workers import is compiled here once
    from hocket.drivers.processes import interruptible
    from hocket.errors import HocketError

    try:
        with interruptible():
            (_launch_elastic if strategy == ELASTIC else _launch_servers)(strategy, folder, epochs, namespaces, addresses)
    except KeyboardInterrupt:
        pass
    except HocketError as error:
        print(f"soak: {error}", flush=True)
        sys.exit(3)


def _launch_elastic(strategy: str, folder: Path, epochs: int, namespaces: list[str], addresses: list[str]) -> None:
    from hocket.supervisor.elastic import ElasticRun
    from hocket.train.elastic import Elastic

    class OnHosts(ElasticRun):
        def _start(self, number: int, incarnation: int) -> subprocess.Popen[bytes]:
            with inside(namespaces[number]):
                return super()._start(number, incarnation)

    keys, given = folder / "job.keys", [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "hocket.cli.main", "train", f"--strategy={strategy}", f"--workers={WORKERS}", *given]
    command += [f"--epochs={epochs}", "--no-checkpoints", f"--out={folder / 'run'}", f"--elastic=2:{WORKERS}", f"--keys={keys}"]
    OnHosts(command, WORKERS, Elastic(2, WORKERS), bind=f"tcp://{addresses[LAUNCHER]}:0", keys=keys).run()


def _launch_servers(strategy: str, folder: Path, epochs: int, namespaces: list[str], addresses: list[str]) -> None:
    import torch

    from hocket.supervisor import FaultPolicy
    from hocket.supervisor.servers import ServerRun
    from hocket.train.settings import RunSettings

    class OnHosts(ServerRun):
        def _start_worker(self, worker: int, incarnation: int) -> subprocess.Popen[str]:
            with inside(namespaces[worker]):
                return super()._start_worker(worker, incarnation)

        def _start_shard(self, place: int, incarnation: int) -> subprocess.Popen[str]:
            with inside(namespaces[WORKERS + place]):
                return super()._start_shard(place, incarnation)

        def _bind(self, place: int) -> str:
            return f"tcp://{addresses[WORKERS + place]}:0"

    settings = RunSettings.of(strategy=strategy, workers=WORKERS, epochs=epochs, **SETTINGS)
    policy = FaultPolicy(liveness_timeout_s=5.0, snapshot_s=2.0, replace=True, keys=folder / "job.keys")
    OnHosts(settings, torch.device("cpu"), None, folder / "run", policy).train()


# --- whoever disturbs it -------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """One fault."""

    kind: str
    seconds: float
    host: int
    pid: int
    at: float
    age_s: float

    @property
    def name(self) -> str:
        return self.kind if not self.seconds else f"{self.kind} {self.seconds:g} s"

    @property
    def sure(self) -> bool:
        return self.kind == "kill" or self.seconds >= SURE_S


class Disturber:
    """Makes faults, and undoes them in time."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.rng, self.faults = lab, random.Random(seed), list[Fault]()
        self._undo: list[tuple[float, Fault]] = []

    def disturb(self, processes: dict[int, psutil.Process]) -> Fault:
        (kind, seconds), host, now = self.rng.choice(FAULTS), self.rng.choice(sorted(processes)), time.time()
        victim = processes[host]
        fault = Fault(kind, seconds, host, victim.pid, now, now - victim.create_time())
        self.faults.append(fault)
        with contextlib.suppress(ProcessLookupError):
            if kind in ("kill", "stop"):
                os.kill(victim.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "cut":
            self.lab.plug(host, False)
        if kind == "reset":
            command = ["ip", "netns", "exec", self.lab.namespace(host), "ss", "-K", "-t", "state", "connected"]
            subprocess.run(command, capture_output=True)
        if seconds:
            self._undo.append((now + seconds, fault))
        return fault

    def undo(self, until: float) -> None:
        for entry in [one for one in self._undo if one[0] <= until]:
            self._undo.remove(entry)
            fault = entry[1]
            if fault.kind == "cut":
                self.lab.plug(fault.host, True)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fault.pid, signal.SIGCONT)


class Memory:
    """What processes have for themselves, in MB, by process and by time."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        self.sums: list[float] = []

    def sample(self, processes: dict[int, psutil.Process], launcher: psutil.Process) -> None:
        found = {}
        for host, process in {**processes, LAUNCHER: launcher}.items():
            with contextlib.suppress(psutil.Error):
                role = "launcher" if host == LAUNCHER else "shard" if host >= WORKERS else "worker"
                age = time.time() - process.create_time()
                found[host] = process.memory_full_info().uss / 1e6
                self.samples[role, process.pid].append((age, found[host]))
        if len(found) == len(processes) + 1 and min(time.time() - p.create_time() for p in processes.values()) > 5:
            self.sums.append(sum(found.values()))

    def told(self) -> dict[str, Any]:
        growth: dict[str, list[dict[str, float]]] = defaultdict(list)
        for (role, _), own in self.samples.items():
            old = [pair for pair in own if pair[0] > YOUNG_S]
            if len(old) > 1:
                entry = {"from_s": old[0][0], "to_s": old[-1][0], "from_mb": old[0][1], "to_mb": old[-1][1]}
                growth[role].append({name: round(value, 1) for name, value in entry.items()})
        longest = {role: sorted(own, key=lambda e: e["from_s"] - e["to_s"])[:3] for role, own in growth.items()}
        quarter = max(1, len(self.sums) // 4)
        quarters = [statistics.median(part) for part in (self.sums[quarter : 2 * quarter] or self.sums, self.sums[-quarter:])]
        return {"sum_mb_second_and_last_quarter": [round(mb) for mb in quarters] if self.sums else [], "oldest": longest}


def processes_of(launcher: psutil.Process, lab: Lab) -> dict[int, psutil.Process]:
    """The processes of the run by host."""
    hosts = {os.stat(f"/run/netns/{lab.namespace(host)}").st_ino: host for host in range(LAUNCHER)}
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in launcher.children():
            with contextlib.suppress(psutil.Error, OSError):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[hosts[os.stat(f"/proc/{child.pid}/ns/net").st_ino]] = child
    return found


def soak(strategy: str, minutes: float, seed: int | None, keep: Path | None) -> dict[str, Any]:
    """One run of one strategy; without a seed, undisturbed."""
    with tempfile.TemporaryDirectory() as name, Lab(LAUNCHER + 1) as lab:
        folder, metrics = Path(name), Path(name, "run", "metrics.jsonl")
        log = open(folder / "log", "w")  # noqa: SIM115 - as long as the folder
        subprocess.run([sys.executable, "-m", "hocket.cli.main", "keys", str(folder / "job.keys")], check=True, stdout=log)
        hosts = [lab.namespace(host) for host in range(LAUNCHER + 1)]
        given = [strategy, str(folder), str(10**6), json.dumps(hosts), json.dumps(lab.addresses)]
        command = ["ip", "netns", "exec", hosts[LAUNCHER], sys.executable, __file__, "--launch", *given]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stderr=log, stdout=log, env=environ)
        launcher, disturber, memory = psutil.Process(process.pid), Disturber(lab, seed or 0), Memory()
        try:
            longest, hung = _watch(process, launcher, lab, metrics, None if seed is None else disturber, memory, minutes)
            if seed is not None and not hung:
                disturber.undo(float("inf"))
                hung = not _settled(process, folder / "log", metrics) and process.poll() is None
            told, said = _lines(metrics), (folder / "log").read_text().splitlines()
        finally:
            disturber.undo(float("inf"))
            ended = process.poll()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            log.close()
            if keep is not None:
                keep.write_text((folder / "log").read_text())
    last = [line["accuracy"] for line in told if line["accuracy"] is not None][-max(1, len(told) // 10) :]
    result = {
        "strategy": strategy,
        "seed": seed,
        "minutes": minutes,
        "epochs": len(told),
        "longest_s": round(longest, 1),
        "hung": hung,
    }
    result |= {"accuracy": statistics.mean(last), "ended_early": ended, "memory": memory.told()}
    if seed is not None:
        result |= {"faults": dict(sorted(Counter(fault.name for fault in disturber.faults).items()))}
        result |= account(strategy, disturber.faults, said, sum(line.get("lost", 0) for line in told))
    return {**result, "said": said[-5:] if ended is not None or hung else []}


def _watch(
    process: subprocess.Popen[bytes],
    launcher: psutil.Process,
    lab: Lab,
    metrics: Path,
    disturber: Disturber | None,
    memory: Memory,
    minutes: float,
) -> tuple[float, bool]:
    """See the run through: the longest time without an epoch, and whether it hung."""
    deadline = time.monotonic() + 120
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if not metrics.exists():
        raise SystemExit("soak: the run has made no epoch within two minutes.")
    begun = seen = time.monotonic()
    lines, longest, due, looked = 0, 0.0, begun + EVERY_S, begun
    while time.monotonic() - begun < 60 * minutes and process.poll() is None and time.monotonic() - seen < HANG_S:
        time.sleep(0.2)
        now = time.monotonic()
        if disturber is not None:
            disturber.undo(time.time())
        if (found := metrics.stat().st_size) != lines:
            lines, longest, seen = found, max(longest, now - seen), now
        if now >= looked + 5:
            looked = now
            memory.sample(processes_of(launcher, lab), launcher)
        if now >= due and disturber is not None and (there := processes_of(launcher, lab)):
            due = now + EVERY_S
            fault = disturber.disturb(there)
            print(
                f"{now - begun:7.1f} s  {fault.name:10} host {fault.host}, {os.path.getsize(metrics)} bytes",
                file=sys.stderr,
                flush=True,
            )
    return longest, time.monotonic() - seen >= HANG_S


def _lines(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def _settled(process: subprocess.Popen[bytes], log: Path, metrics: Path) -> bool:
    """Wait until nobody has been lost for a while, and the last line of metrics was written after that."""
    lost, since, epochs, deadline = -1, 0.0, 0, time.monotonic() + 2 * HANG_S
    while process.poll() is None and (now := time.monotonic()) < deadline:
        if (found := len(_LOST.findall(log.read_text()))) != lost:
            lost, since = found, now
        if now - since < CALM_S:
            epochs = len(_lines(metrics))
        elif len(_lines(metrics)) > epochs + 1:  # the one that ended next may have been summed up before
            return True
        time.sleep(0.5)
    return False


def account(strategy: str, faults: list[Fault], said: list[str], counted: int) -> dict[str, Any]:
    """Faults and losses side by side, by host: ``missed`` losses were told too seldom, ``unexplained`` ones had no fault."""
    told: Counter[int] = Counter()
    for line in said:
        if found := _LOST.search(line):
            told[int(found[2]) % WORKERS + WORKERS * (found[1] == "shard")] += 1
    missed = unexplained = 0
    for host in range(LAUNCHER):
        own, last, sure = [fault for fault in faults if fault.host == host], -math.inf, 0
        for fault in own:
            if fault.kind == "kill" or (fault.sure and strategy == ELASTIC):
                sure += fault.at - last > APART_S and fault.age_s > STARTS_S
                last = fault.at
        missed += max(0, sure - told[host])
        unexplained += max(0, told[host] - len(own))
    return {"told_lost": sum(told.values()), "counted_lost": counted, "missed": missed, "unexplained": unexplained}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each strategy (default 30)")
    parser.add_argument("--calm", type=float, default=2.0, help="minutes of the run without faults (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=STRATEGIES)
    parser.add_argument("--log", type=Path, help="keep what the run said here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launch", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.launch is not None:
        strategy, folder, epochs, namespaces, addresses = given.launch
        launch(strategy, Path(folder), int(epochs), json.loads(namespaces), json.loads(addresses))
        return
    results, failed = [], False
    for strategy in STRATEGIES if given.only is None else [given.only]:
        found = soak(strategy, given.minutes, given.seed, given.log)
        if given.calm > 0:
            calm = soak(strategy, given.calm, None, None)
            found |= {"undisturbed": calm["accuracy"], "undisturbed_epochs": calm["epochs"]}
            failed |= found["accuracy"] < calm["accuracy"] - 0.01
        failed |= found["hung"] or found["ended_early"] is not None or found["missed"] > 0 or found["unexplained"] > 0
        failed |= strategy == ELASTIC and found["told_lost"] != found["counted_lost"]
        results.append(found)
        print(json.dumps(found, indent=1), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
