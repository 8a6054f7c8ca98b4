"""Laws of the lab of namespaces: hosts reach each other at the rate asked, counters tell the truth, nothing is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hocket.transport import Keys
from process.launch import ENVIRON

FILE = Path(__file__).parents[2] / "benchmarks" / "netlab.py"
SPEC = importlib.util.spec_from_file_location("netlab", FILE)
assert SPEC is not None
assert SPEC.loader is not None
netlab = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(netlab)

REASON = netlab.missing()
needs_lab = pytest.mark.skipif(REASON is not None, reason=REASON or "")
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

LAB_PROCESS = f"""
import sys
sys.path.insert(0, {str(FILE.parent)!r})
from netlab import Lab
with Lab(hosts=2, rate="1gbit") as lab:
    print(lab.name, flush=True)
    lab.run([["sleep", "3600"]] * 2, timeout_s=3600)
"""


def namespaces(name: str) -> list[str]:
    """What of a lab `ip netns` still knows."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{name}-")]


def pids(namespace: str) -> list[int]:
    """The processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in listed.split()]


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has collected yet does not."""
    return netlab._started(pid) is not None


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether a condition comes true before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def lab_process() -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """Another process with a lab of two hosts, its lab's name, and the pids of the two sleepers that run in it."""
    process = subprocess.Popen([sys.executable, "-c", LAB_PROCESS], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        hosts = [f"{name}-host{host}" for host in range(2)]
        assert eventually(lambda: all(len(pids(host)) == 1 for host in hosts))
        yield process, name, [pids(host)[0] for host in hosts]
    finally:
        process.kill()
        process.communicate()
        netlab.clean()


@needs_lab
@pytest.mark.root
@pytest.mark.parametrize("rate", [None, "1gbit"])
def test_hosts_reach_each_other_and_counters_count_what_was_sent(rate: str | None) -> None:
    """Host 0 sends to host 1: its sent bytes and the other's received bytes grow by the amount, within 5 %."""
    with netlab.Lab(hosts=2, rate=rate) as lab:
        before = lab.counters()
        assert netlab.throughput(lab, seconds=0.5) > 0
        after = lab.counters()
    amount = 2**30 if rate is None else netlab.bits_per_second(rate) // 16
    assert after[0][0] - before[0][0] == pytest.approx(amount, rel=0.05)
    assert after[1][1] - before[1][1] == pytest.approx(amount, rel=0.05)


@needs_lab
@pytest.mark.root
def test_links_keep_the_rate_asked_also_after_a_change() -> None:
    """TCP gets 90 to 100 % of the rate: headers take about 4.5 %."""
    with netlab.Lab(hosts=2, rate="50mbit") as lab:
        assert 45e6 < netlab.throughput(lab, seconds=1) < 50e6
        lab.set_rate("200mbit")
        assert 180e6 < netlab.throughput(lab, seconds=1) < 200e6
        lab.set_rate(None)
        assert netlab.throughput(lab) > 400e6


@needs_lab
@pytest.mark.root
def test_each_command_runs_on_its_host() -> None:
    """Command i sees host i's address, rank and variables; output and exit code come back in order."""
    script = 'ip -brief -4 address show eth0; echo "$RANK of $WORLD_SIZE, $GLOO_SOCKET_IFNAME, $OMP_NUM_THREADS, $MINE"; exit $RANK'
    with netlab.Lab(hosts=3) as lab:
        results = lab.run([["sh", "-c", script]] * 3, {"MINE": "yes"})
        addresses = lab.addresses
    assert [result.returncode for result in results] == [0, 1, 2]
    for host, result in enumerate(results):
        assert f"{addresses[host]}/24" in result.stdout
        assert f"{host} of 3, eth0, 1, yes" in result.stdout


@needs_lab
@pytest.mark.root
def test_nothing_remains_after_the_context() -> None:
    """Neither namespaces nor files nor signal handlers, whether the block ends or raises."""
    with netlab.Lab(hosts=2) as lab:
        assert len(namespaces(lab.name)) == 3
    assert netlab._stop not in [signal.getsignal(number) for number in netlab.STOP_SIGNALS]
    assert namespaces(lab.name) == []
    with pytest.raises(ZeroDivisionError), netlab.Lab(hosts=2) as other:
        _ = 1 / 0
    assert namespaces(other.name) == []
    assert not any(Path(netlab.tempfile.gettempdir()).glob(f"{netlab.PREFIX}-{os.getpid()}-*"))


@needs_lab
@pytest.mark.root
def test_timeout_kills_whole_process_groups() -> None:
    """A command's own children die with it."""
    with netlab.Lab(hosts=2) as lab:
        with pytest.raises(TimeoutError, match="did not end within 1 s and was killed; its last words: hello"):
            lab.run([["sh", "-c", "echo hello >&2; sleep 3600 & sleep 3600"]] * 2, timeout_s=1)
        assert eventually(lambda: pids(lab.namespace(0)) == pids(lab.namespace(1)) == [])


@needs_lab
@pytest.mark.root
def test_background_children_end_with_their_command() -> None:
    """Also when the command itself ended well."""
    with netlab.Lab(hosts=1) as lab:
        (result,) = lab.run([["sh", "-c", "sleep 3600 & true"]])
        assert result.returncode == 0
        assert eventually(lambda: pids(lab.namespace(0)) == [])


@needs_lab
@pytest.mark.root
def test_one_failure_ends_the_others() -> None:
    """The survivors get their grace, then they are killed."""
    with netlab.Lab(hosts=2) as lab:
        failed, waiting = lab.run([["false"], ["sleep", "3600"]], grace_s=0.1)
    assert (failed.returncode, waiting.returncode) == (1, -signal.SIGKILL)


@needs_lab
@pytest.mark.root
def test_next_lab_removes_what_a_killed_one_left(lab_process: tuple[subprocess.Popen[str], str, list[int]]) -> None:
    """SIGKILL leaves namespaces and processes; entering another lab removes both, and leaves a living lab alone."""
    process, name, sleepers = lab_process
    with netlab.Lab(hosts=1):
        assert len(namespaces(name)) == 3
    process.kill()
    process.wait(timeout=30)
    assert len(namespaces(name)) == 3
    assert all(alive(pid) for pid in sleepers)
    with netlab.Lab(hosts=1):
        assert namespaces(name) == []
    assert eventually(lambda: not any(alive(pid) for pid in sleepers))
    assert not any(Path(netlab.tempfile.gettempdir()).glob(f"{name}-*"))


@needs_lab
@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_nothing(lab_process: tuple[subprocess.Popen[str], str, list[int]], number: signal.Signals) -> None:
    """The lab's process ends, and its namespaces and processes with it."""
    process, name, sleepers = lab_process
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    assert namespaces(name) == []
    assert eventually(lambda: not any(alive(pid) for pid in sleepers))
    assert not any(Path(netlab.tempfile.gettempdir()).glob(f"{name}-*"))


@needs_lab
@pytest.mark.root
def test_workers_without_servers_train_between_hosts_and_want_keys(tmp_path: Path) -> None:
    """They find each other through the store of torch.distributed, and meet on the hosts' own addresses."""
    Keys.make().write(tmp_path / "keys")
    environ = {"PYTHONPATH": ENVIRON["PYTHONPATH"], "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def commands(keys: str) -> list[list[str]]:
        return [[sys.executable, "-c", f"from process.paired import between_hosts; between_hosts({keys!r})"]] * 3

    with netlab.Lab(hosts=3) as lab:
        refused = lab.run(commands(""), environ, timeout_s=100)
        assert all("make keys with `hocket keys FILE`" in result.stderr for result in refused)
        before = lab.counters()
        ended = lab.run(commands(str(tmp_path / "keys")), environ, timeout_s=100)
        sent = sum(after[0] - first[0] for first, after in zip(before, lab.counters(), strict=True))
        addresses = lab.addresses
    assert [result.returncode for result in ended] == [0, 0, 0], [result.stderr[-2000:] for result in ended]
    told = [json.loads(result.stdout.splitlines()[-1]) for result in ended]
    for worker, found in enumerate(told):
        assert found["worker"] == worker
        assert [door.partition("://")[2].rpartition(":")[0] for door in found["doors"]] == addresses
        assert found["losses"][-1] < found["losses"][0]
        assert found["here"] == [0, 1, 2]
        assert found["end"] == told[0]["end"], "all come to the same mean"
        assert not found["refused"]
    ledger = told[0]["ledger"]
    assert sum(ledger["staleness"].values()) == sum(found["steps"] for found in told)
    assert ledger["exchanges"] > 0
    assert sent > ledger["bytes_sent"], "the ledger counts what went over the hosts' links, less headers"


@pytest.mark.parametrize("rate", ["fast", "100", "0mbit", "100 mbit", "-1gbit"])
def test_bad_rates_meet_one_sentence(rate: str) -> None:
    """Refused when the lab is described, before anything is built."""
    with pytest.raises(ValueError, match=r"a rate is a positive number .* such as 100mbit; got"):
        netlab.Lab(hosts=2, rate=rate)


def test_a_machine_without_root_or_tools_meets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing thing is named, with what to do."""
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs root"), netlab.Lab(hosts=2):
        pass
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab.shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="install the package iproute2"), netlab.Lab(hosts=2):
        pass
