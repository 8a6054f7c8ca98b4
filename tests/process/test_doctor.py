"""``hocket doctor`` on real processes: a healthy cluster has no failure, and planted faults are named with what to do."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from process.launch import Hocket, Nursery, free_port
from process.test_netlab import needs_lab, netlab

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
LIMIT_S = 60.0


def findings(folder: Path) -> dict[str, dict[str, Any]]:
    return {found["subject"]: found for found in json.loads((folder / "0.out").read_text())}


def test_two_healthy_processes(nursery: Nursery, tmp_path: Path) -> None:
    out = tmp_path / "run"
    group = nursery.start("process.doctors:examined", 2, tmp_path, arguments=["--json", "--out", str(out)])
    assert group.wait(LIMIT_S) == [0, 0], group.said()
    found = findings(tmp_path)
    assert not [one for one in found.values() if one["level"] == "FAIL"]
    assert found["reachability"]["text"].startswith("all 2 pairs, slowest round trip")
    assert found["exchange"]["text"] == "a mean of all processes over Gloo is right"
    assert "writable and shared" in found["output folder"]["text"]
    assert (tmp_path / "1.out").read_text() == "", "one process says it for all"
    assert not list(out.iterdir()), "no mark is left behind"


def test_another_version_on_one_process(nursery: Nursery, tmp_path: Path) -> None:
    group = nursery.start("process.doctors:examined", 2, tmp_path, arguments=["--json"], fault="version")
    assert group.wait(LIMIT_S) == [1, 1], group.said()
    found = findings(tmp_path)["versions"]
    assert found["level"] == "FAIL"
    assert "1.0 on process 1" in found["text"]
    assert found["remedy"] == "install the same torch everywhere"


def test_a_port_that_is_taken(nursery: Nursery, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as other:
        environ = {"MASTER_PORT": str(other.getsockname()[1])}
        group = nursery.start("process.doctors:examined", 2, tmp_path, environ, arguments=["--timeout", "2"])
        assert group.wait(LIMIT_S) == [1, 1], group.said()
    assert f"port {environ['MASTER_PORT']} of 127.0.0.1 is taken → choose another MASTER_PORT" in (tmp_path / "0.out").read_text()
    assert "process 1 on" in (tmp_path / "1.out").read_text()


@needs_lab
@pytest.mark.root
def test_a_pair_that_cannot_reach_each_other(nursery: Nursery, tmp_path: Path) -> None:
    """Three hosts; 1 has no way to 2, but both reach 0."""
    with netlab.Lab(hosts=3) as lab:
        subprocess.run(["ip", "-n", lab.namespace(1), "route", "add", "blackhole", f"{lab.addresses[2]}/32"], check=True)
        environ = {"MASTER_ADDR": lab.addresses[0], "GLOO_SOCKET_IFNAME": netlab.INTERFACE}
        namespaces = [lab.namespace(host) for host in range(3)]
        group = nursery.start("process.doctors:examined", 3, tmp_path, environ, arguments=["--json"], namespaces=namespaces)
        assert group.wait(LIMIT_S) == [1, 1, 1], group.said()
    found = findings(tmp_path)
    assert found["reachability"]["level"] == "FAIL"
    assert lab.addresses[1] in found["reachability"]["text"].split("cannot reach")[0]
    assert lab.addresses[2] in found["reachability"]["text"].split("cannot reach")[1]
    assert found["exchange"]["text"] == "not tried"


def test_one_machine_needs_no_launcher(hocket: Hocket, tmp_path: Path) -> None:
    ended = hocket("doctor", "--out", str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("ok   processes: 1 on ")
    (tmp_path / "file").touch()
    ended = hocket("doctor", "--out", str(tmp_path / "file"))
    assert ended.returncode == 1
    assert "FAIL output folder: process 0 cannot write to" in ended.stdout
