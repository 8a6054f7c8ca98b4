"""Packed shards in real processes: the samples of virtual workers, and every sample once whatever becomes of server and workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hocket.data.shards import sources
from hocket.data.shards.index import Index
from hocket.data.shards.pack import pack
from process.elastic import rendezvous
from process.launch import Hocket, Nursery, eventually
from process.test_cli import metrics_of, timeless
from process.test_netlab import FILE, needs_lab, netlab
from unit.test_shards import Numbers
from unit.test_shards_http import serving

READ, SAMPLES, GONE_S = "process.reading:read", 600, 2.0
LITTLE_AHEAD = {"lanes": 2, "window": 5}
"""So that a reader fetches what it needs soon, not all there is."""
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_real_and_virtual_workers_train_on_the_same_samples(hocket: Hocket, tmp_path: Path) -> None:
    packed = hocket("data", "pack", "digits", str(tmp_path / "digits"), "--shard-mb", "0.3")
    assert packed.returncode == 0, packed.stderr
    index = Index.load(str(tmp_path / "digits"))
    assert sum(index.counts) % (2 * 359) == 1, "fewer samples than workers are left at the end of an epoch"
    common = ["--data", f"shards:{tmp_path / 'digits'}", "--workers", "2", "--batch-size", "359", "--epochs", "2"]
    for name, where in (("real", "--exact"), ("virtual", "--virtual")):
        ended = hocket("train", *common, where, "--out", str(tmp_path / name))
        assert ended.returncode == 0, ended.stderr
    real, virtual = (timeless(metrics_of(tmp_path / name)) for name in ("real", "virtual"))
    assert real == virtual
    assert [line["data_bytes"] for line in real] == [index.sizes.sum()] * 2, "every sample was read once in every epoch"
    assert real[1]["loss"] < real[0]["loss"]


@pytest.mark.parametrize("strategy", ["async + server", "async + gossip"])
def test_runs_by_messages_read_every_sample_once_and_say_what_it_took(hocket: Hocket, tmp_path: Path, strategy: str) -> None:
    packed = write_table(tmp_path, 101)
    common = ["--data", f"shards:{packed}", "--workers", "2", "--batch-size", "10", "--epochs", "1", "--lr", "0.01"]
    ended = hocket("train", *common, "--strategy", strategy, "--out", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    (line,) = metrics_of(tmp_path / "run")
    assert line["data_bytes"] == Index.load(str(packed)).sizes.sum()
    assert line["data_wait_s"] > 0
    assert line["data_skipped"] == 0


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    assert len(pack(Numbers(SAMPLES, size=500), folder, shard_bytes=20_000).shards) == 60
    return folder


def write_table(folder: Path, samples: int) -> Path:
    """Packed samples of two numbers and one of two classes."""
    table = folder / "table.csv"
    table.write_text("a,b,label\n" + "".join(f"{n % 7},{n % 11},{n % 2}\n" for n in range(samples)))
    pack(sources.parts(str(table))[""], folder / "packed", shard_bytes=20_000)
    return folder / "packed"


@pytest.mark.parametrize(("samples", "at"), [(185, 5), (99, 4)])
def test_an_elastic_run_over_shards_computes_every_sample_once_when_a_worker_is_killed(
    nursery: Nursery, tmp_path: Path, samples: int, at: int
) -> None:
    """With 185 samples one is left over for the two that live; with 99 the loss leaves one sample, and one worker without any."""
    packed = write_table(tmp_path, samples)
    with rendezvous(3) as (_, environ):
        options = {"strategy": "bulk", "workers": 3, "victim": 1, "at": at, "epochs": 2}
        group = nursery.start("process.reading:train", 3, tmp_path / "run", environ, url=str(packed), **options)
        codes = group.wait(60)
    assert codes == [0, -9, 0], group.said()
    steps = [json.loads(line) for rank in range(3) for line in (tmp_path / "run" / f"{rank}.steps").read_text().splitlines()]
    for epoch in range(2):
        assert Counter(sample for of, own in steps for sample in own if of == epoch) == Counter(range(samples))
    assert any(not own for _, own in steps) == (samples == 99)


def seen(folder: Path, workers: int) -> Counter[int]:
    """The samples that all readers have had."""
    return Counter(number for worker in range(workers) for number in json.loads((folder / f"{worker}.json").read_text())["seen"])


def held(folder: Path, worker: int = 0) -> dict[str, Any]:
    """Where a reader waits, once it does."""
    file = folder / f"{worker}.json"
    assert eventually(lambda: file.exists() and json.loads(file.read_text())["batches"] == 5)
    return dict(json.loads(file.read_text()))


def test_a_reader_that_is_killed_goes_on_from_its_position(nursery: Nursery, shards: Path, tmp_path: Path) -> None:
    with serving(shards) as server:
        options: dict[str, Any] = {"url": server.url, "workers": 2, "cache": str(tmp_path / "cache"), **LITTLE_AHEAD}
        other = nursery.start(READ, 1, tmp_path, worker=1, **options)
        first = nursery.start(READ, 1, tmp_path, worker=0, hold=5, **options)
        held(tmp_path)
        os.kill(first.pids[0], signal.SIGKILL)
        assert first.wait(60) == [-9]
        again = nursery.start(READ, 1, tmp_path, worker=0, **options)
        assert (other.wait(60), again.wait(60)) == ([0], [0]), other.said()
    assert seen(tmp_path, 2) == Counter(range(SAMPLES))


def test_a_reader_waits_for_a_server_that_goes_in_mid_epoch(nursery: Nursery, shards: Path, tmp_path: Path) -> None:
    with serving(shards) as server:
        reader = nursery.start(READ, 1, tmp_path, url=server.url, workers=1, worker=0, hold=5, **LITTLE_AHEAD)
        assert held(tmp_path)["fetched"] < Index.load(str(shards)).bytes / 2
        port = server.server_address[1]
    with socket.create_server(("127.0.0.1", port)) as listener:
        (tmp_path / "go").touch()
        for _ in range(5):  # it tries again and again
            listener.accept()[0].close()
    with serving(shards, port):
        assert reader.wait(60) == [0], reader.said()
    assert seen(tmp_path, 1) == Counter(range(SAMPLES))


# --- nginx on a host of its own ------------------------------------------------------------------------------------------------

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with netlab.Lab(hosts=2) as made:
        yield made


@pytest.fixture
def nginx(lab: Any, shards: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractContextManager[str]]:
    """A real server on the second host, as the benchmarks have it; gives its address."""
    monkeypatch.syspath_prepend(FILE.parent)
    import data_network

    return partial(data_network.nginx, lab, 1, shards)


@needs_lab
@needs_nginx
@pytest.mark.root
@pytest.mark.parametrize("gone", ["ended", "unplugged"])
def test_a_real_server_may_be_gone_for_seconds(
    nginx: Any, lab: Any, nursery: Nursery, shards: Path, tmp_path: Path, gone: str
) -> None:
    options: dict[str, Any] = {"workers": 1, "worker": 0, "hold": 5, "netns": lab.namespace(0), **LITTLE_AHEAD}
    with ExitStack() as stack:
        with ExitStack() as first:
            reader = nursery.start(READ, 1, tmp_path, url=first.enter_context(nginx()), **options)
            assert held(tmp_path)["fetched"] < Index.load(str(shards)).bytes / 2
            if gone == "unplugged":
                lab.plug(1, False)
                stack.callback(lab.plug, 1, True)
                stack.enter_context(first.pop_all())
        (tmp_path / "go").touch()
        time.sleep(GONE_S)
        if gone == "unplugged":
            lab.plug(1, True)
        else:
            stack.enter_context(nginx())
        assert reader.wait(60) == [0], reader.said()
    assert seen(tmp_path, 1) == Counter(range(SAMPLES))


@needs_lab
@needs_nginx
@pytest.mark.root
@pytest.mark.parametrize("directives", ["limit_rate 400k;", "max_ranges 0;", "limit_rate 400k; max_ranges 0;"])
def test_a_real_server_may_throttle_and_know_no_ranges(
    nginx: Any, lab: Any, nursery: Nursery, tmp_path: Path, directives: str
) -> None:
    with nginx(directives=directives) as url:
        reader = nursery.start(READ, 1, tmp_path, url=url, workers=1, worker=0, netns=lab.namespace(0))
        assert reader.wait(60) == [0], reader.said()
    assert seen(tmp_path, 1) == Counter(range(SAMPLES))
