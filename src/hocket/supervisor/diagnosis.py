"""What would go wrong on this machine or cluster, from facts that its processes have gathered: one finding per subject.

Facts are plain data of each process (:func:`hocket.supervisor.doctor.gather`), so every finding can be had without a cluster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, WARN, FAIL = "ok", "warn", "FAIL"
_CLOCK_S = 1.0
_FREE_BYTES, _SHM_BYTES = 1 << 30, 1 << 30
_FILES, _FILES_PER_PROCESS = 256, 8
"""Open files that a process needs: its own, and for the links to each of the others."""

Facts = Mapping[str, Any]
"""Of one process."""
Pairs = Mapping[int, Mapping[int, Any]]
"""By process, for each process that it has called: the seconds of a round trip and by how much its clock is ahead, or an error."""


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is ok, warn or FAIL; ``remedy`` says what to do."""

    level: str
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5}{self.subject}: {self.text}{f' → {self.remedy}' if self.remedy else ''}"


def diagnose(facts: Mapping[int, Facts], processes: int, pairs: Pairs, exchange: str | None) -> list[Finding]:
    """All findings. ``facts`` are those of the processes that connected, ``exchange`` is the error of a mean over Gloo, empty
    where it worked, None where none was tried."""
    found = [_present(facts, processes), _versions(facts), _files(facts, processes), _memory(facts), *_folder(facts)]
    found += [_devices(facts), _cores(facts), _compiler(facts), _ports(facts)]
    if processes > 1:
        found += [_interface(facts), _reachable(facts, pairs), _clocks(pairs), _exchange(exchange)]
    return found


def _present(facts: Mapping[int, Facts], processes: int) -> Finding:
    hosts = Counter(one["host"] for one in facts.values())
    missing = [rank for rank in range(processes) if rank not in facts]
    if missing:
        return Finding(
            FAIL, "processes", f"{_ranks(missing)} of {processes} did not come", "see their own output, and that all were started"
        )
    return Finding(OK, "processes", f"{processes} on {', '.join(f'{host} ({count})' for host, count in hosts.items())}")


def _versions(facts: Mapping[int, Facts]) -> Finding:
    for name in ("hocket", "torch", "python"):
        groups = _by(facts, lambda one, name=name: one["versions"][name])
        if len(groups) > 1:
            level = WARN if name == "python" else FAIL
            text = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())
            return Finding(level, "versions", f"{name} {text}", f"install the same {name} everywhere")
    own = next(iter(facts.values()))["versions"]
    return Finding(OK, "versions", f"hocket {own['hocket']}, torch {own['torch']}, Python {own['python']}")


def _files(facts: Mapping[int, Facts], processes: int) -> Finding:
    rank, limit = min(((rank, one["files"]) for rank, one in facts.items()), key=lambda pair: pair[1])
    need = _FILES + _FILES_PER_PROCESS * processes
    if limit < need:
        text = f"process {rank} may open {limit}, {processes} processes need some {need}"
        return Finding(WARN, "open files", text, f"ulimit -n {need}")
    return Finding(OK, "open files", f"{limit} allowed, some {need} needed")


def _memory(facts: Mapping[int, Facts]) -> Finding:
    rank, free = min(((rank, one["shm_bytes"]) for rank, one in facts.items()), key=lambda pair: pair[1])
    if free < _SHM_BYTES:
        text = f"{_size(free)} free in /dev/shm on {facts[rank]['host']}: DataLoader workers and NCCL may fail with a bus error"
        return Finding(WARN, "shared memory", text, "enlarge it (docker: --shm-size=8g), or use num_workers=0")
    return Finding(OK, "shared memory", f"{_size(free)} free in /dev/shm")


def _folder(facts: Mapping[int, Facts]) -> Iterable[Finding]:
    """The output folder: process 0 writes the run there, every process its checkpoints."""
    folders = {rank: one["folder"] for rank, one in facts.items() if one.get("folder")}
    if not folders:
        return
    path, bad = next(iter(folders.values()))["path"], {rank: one["error"] for rank, one in folders.items() if one["error"]}
    if bad:
        text = f"{_ranks(bad)} cannot write to {path} ({next(iter(bad.values()))})"
        yield Finding(FAIL, "output folder", text, "choose another folder with --out")
        return
    apart = [rank for rank, one in folders.items() if not one["shared"]]
    free = min(one["free_bytes"] for one in folders.values())
    if free < _FREE_BYTES:
        yield Finding(WARN, "output folder", f"{_size(free)} free in {path}", "make room, or choose another folder with --out")
    elif apart:
        text = f"{path} is not the same folder on {_ranks(apart)} as on process 0"
        yield Finding(WARN, "output folder", text, "use a shared one: a run resumes only where each machine finds its checkpoints")
    else:
        yield Finding(OK, "output folder", f"{path} is writable{' and shared' if len(folders) > 1 else ''}, {_size(free)} free")


def _devices(facts: Mapping[int, Facts]) -> Finding:
    if not any(one["gpus"] for one in facts.values()):
        lacking = [rank for rank, one in facts.items() if not one["gloo"]]
        if lacking:
            return Finding(FAIL, "devices", f"torch has no Gloo on {_ranks(lacking)}", "install a build of torch with distributed")
        return Finding(OK, "devices", "no GPU: CPU and Gloo")
    for rank, one in facts.items():
        if not one["gpus"]:
            text = f"process {rank} on {one['host']} sees no GPU, others do"
            return Finding(FAIL, "devices", text, "look at nvidia-smi there, or use device='cpu'")
        if one["gpus"] < one["per_host"]:
            text = f"{one['per_host']} processes on {one['host']} share {one['gpus']} GPU, so Gloo is used instead of NCCL"
            return Finding(WARN, "devices", text, "start one process per GPU")
        if not one["nccl"]:
            text = f"torch has no NCCL on process {rank}"
            return Finding(FAIL, "devices", text, "install a CUDA build of torch, or use backend='gloo'")
    own = facts[min(facts)]
    return Finding(OK, "devices", f"{own['gpus']} × {own['gpu']} per host, NCCL {own['nccl']}")


def _cores(facts: Mapping[int, Facts]) -> Finding:
    for one in facts.values():
        threads = one["threads"] * one["per_host"]
        if threads > one["cores"]:
            text = f"{one['per_host']} processes of {one['threads']} threads on {one['cores']} cores of {one['host']}"
            return Finding(WARN, "cores", text, f"OMP_NUM_THREADS={max(one['cores'] // one['per_host'], 1)}")
    own = facts[min(facts)]
    return Finding(OK, "cores", f"{own['cores']} cores, {own['per_host']} processes of {own['threads']} threads per host")


def _compiler(facts: Mapping[int, Facts]) -> Finding:
    lacking = [rank for rank, one in facts.items() if not one["compiler"] and not one["gpus"]]
    if lacking:
        text = f"no C++ compiler on {_ranks(lacking)}: codes such as qsgd and topk take several times as long on a CPU"
        return Finding(WARN, "compiler", text, "install g++ or clang++, or name one in CXX, if you use codes")
    return Finding(OK, "compiler", "codes are compiled when they first run on a CPU")


def _ports(facts: Mapping[int, Facts]) -> Finding:
    for rank, one in facts.items():
        if one["ports"]["error"]:
            return Finding(FAIL, "ports", f"process {rank} cannot listen ({one['ports']['error']})", "look at limits and firewalls")
    few = min(one["ports"]["range"] for one in facts.values())
    if few < 1000:
        return Finding(WARN, "ports", f"{few} ports are handed out", "widen net.ipv4.ip_local_port_range")
    return Finding(OK, "ports", f"{few} are handed out by the system")


def _interface(facts: Mapping[int, Facts]) -> Finding:
    several = len({one["boot"] for one in facts.values()}) > 1
    for rank, one in facts.items():
        link = one["interface"]
        named = "set GLOO_SOCKET_IFNAME to the interface of the cluster's network"
        if link["error"]:
            return Finding(FAIL, "interface", f"process {rank} on {one['host']}: {link['error']}", named)
        if several and link["address"].startswith("127."):
            text = f"Gloo on {one['host']} takes {link['address']} ({link['name']}), which other machines cannot reach"
            return Finding(FAIL, "interface", text, named)
    shown = dict.fromkeys(f"{one['interface']['name']} ({one['interface']['address']})" for one in facts.values())
    return Finding(OK, "interface", f"Gloo uses {', '.join(list(shown)[:8])}{' …' if len(shown) > 8 else ''}")


def _reachable(facts: Mapping[int, Facts], pairs: Pairs) -> Finding:
    failed = [(one, other, answer) for one, row in pairs.items() for other, answer in row.items() if isinstance(answer, str)]
    untold = [rank for rank in facts if rank not in pairs]
    if failed:
        caller, called, error = failed[0]
        more = f", and {len(failed) - 1} more pairs" if len(failed) > 1 else ""
        names = {
            rank: f"process {rank} ({facts[rank]['host']}, {facts[rank]['interface']['address']})" for rank in (caller, called)
        }
        text = f"{names[caller]} cannot reach {names[called]}: {error}{more}"
        return Finding(FAIL, "reachability", text, "open all ports between them, or choose the interface with GLOO_SOCKET_IFNAME")
    if untold:
        return Finding(FAIL, "reachability", f"{_ranks(untold)} did not report in time", "see their own output")
    trips = [answer[0] for row in pairs.values() for answer in row.values()]
    slowest = f", slowest round trip {max(trips) * 1e3:.2f} ms" if trips else ""
    return Finding(OK, "reachability", f"all {len(trips)} pairs{slowest}")


def _clocks(pairs: Pairs) -> Finding:
    ahead = {rank: answer[1] for rank, answer in pairs.get(0, {}).items() if not isinstance(answer, str)}
    if not ahead:
        return Finding(WARN, "clocks", "not compared", "mend what fails above")
    rank = max(ahead, key=lambda one: abs(ahead[one]))
    if abs(ahead[rank]) > _CLOCK_S:
        text = f"that of process {rank} is {ahead[rank]:+.1f} s from process 0's"
        return Finding(WARN, "clocks", text, "synchronise them (chrony, NTP): logs and files carry wrong times")
    return Finding(OK, "clocks", f"within {max(abs(s) for s in ahead.values()) * 1e3:.1f} ms of process 0's")


def _exchange(error: str | None) -> Finding:
    if error is None:
        return Finding(WARN, "exchange", "not tried", "mend what fails above")
    if error:
        return Finding(FAIL, "exchange", f"a mean over Gloo failed ({error})", "see the lines above, and `GLOO_SOCKET_IFNAME`")
    return Finding(OK, "exchange", "a mean of all processes over Gloo is right")


def _by(facts: Mapping[int, Facts], key: Any) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for rank, one in facts.items():
        groups[key(one)].append(rank)
    return groups


def _ranks(ranks: Iterable[int]) -> str:
    """Process numbers as a few words.

    >>> _ranks([3]), _ranks([0, 2]), _ranks(range(9))
    ('process 3', 'processes 0, 2', 'processes 0, 1, 2, 3, 4 and 4 more')
    """
    found: Sequence[int] = sorted(ranks)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"process{'es' if len(found) > 1 else ''} {', '.join(map(str, found[:5]))}{more}"


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"
