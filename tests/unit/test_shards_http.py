"""Shards over HTTP from a real server that resets, throttles, is gone for a while, ignores ranges, or refuses."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hocket.data import load, stream
from hocket.data.shards import pack as packing
from hocket.data.shards import reader, sources
from hocket.data.shards.index import GZIP_HEADER, Index
from hocket.data.shards.pack import pack
from hocket.data.shards.storage import Storage
from hocket.errors import HocketError

BLOCK = 20_000


class Server(ThreadingHTTPServer):
    """Answers as ``fault(path, number of the request for that path)`` says."""

    fault: Any = staticmethod(lambda path, number: None)
    ranges = True
    moved: str | None = None

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), partial(Handler, directory=str(folder)))
        self.asked: Counter[str] = Counter()
        self.connections: list[socket.socket] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Readers that hang up are expected."""


class Handler(SimpleHTTPRequestHandler):
    server: Server

    protocol_version = "HTTP/1.1"  # connections stay open

    def setup(self) -> None:
        super().setup()
        self.server.connections.append(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        fault = self.server.fault(name, self.server.asked[name])
        self.server.asked[name] += 1
        path = Path(self.translate_path(self.path))
        if self.server.moved:
            self.send_response(307)
            self.send_header("Location", self.server.moved + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if isinstance(fault, int) or not path.is_file():
            self.send_response(fault or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, first = path.read_bytes(), 0
        asked = self.headers.get("Range") if self.server.ranges else None
        if asked:
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            first, content = int(start), content[: int(stop) + 1 if stop else None]
        self.close_connection = fault == "close"  # without saying so
        self.send_response(416 if first and first >= len(content) else 206 if asked else 200)
        self.send_header("Content-Length", str(max(0, len(content) - first)))
        self.end_headers()
        for start in range(first, len(content), BLOCK):
            if fault == "reset" and start >= first + 2 * BLOCK:
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(content[start : start + BLOCK])
            self.server.sent += len(content[start : start + BLOCK])


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Server]:
    with Server(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            for connection in server.connections:
                with suppress(OSError):  # it has ended already
                    connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, part in sources.parts("digits", load("digits")).items():
        pack(part, folder / name, shard_bytes=300_000)
    return folder


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_BYTES", 1_000_000)
        pack(sources.parts("digits", load("digits"))[""], folder, shard_bytes=1_600_000, compress=True)
    return folder


def sums(batches: Any) -> Counter[bytes]:
    return Counter(bytes(x.numpy()) for images, _ in batches for x in images)


@pytest.fixture(scope="module")
def whole(shards: Path) -> Counter[bytes]:
    return sums(stream(shards, batch_size=100))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("cached, piece", [(True, 1 << 20), (False, 1 << 22), (False, 70_000), (True, None), (False, None)])
def test_a_server_that_resets_and_throttles_loses_and_repeats_nothing(
    shards: Path,
    compressed: Path,
    whole: Counter[bytes],
    tmp_path: Path,
    ranges: bool,
    cached: bool,
    piece: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of so many bytes at most; None: compressed."""
    monkeypatch.setattr(reader, "PIECE_BYTES", piece or reader.PIECE_BYTES)
    shards = shards if piece else compressed
    faults: dict[int, Any] = {0: 503, 1: "reset", 2: 429, 3: "reset" if ranges else None}
    with serving(shards) as server:
        server.fault, server.ranges = lambda name, number: faults.get(number) if name.startswith("shard") else None, ranges
        own = stream(server.url, batch_size=100, cache=tmp_path if cached else None)
        assert sums(own) == whole
        assert min(server.asked[shard.name] for shard in own.index.shards) >= 4
        assert own.bytes_fetched == own.index.bytes - (0 if piece or cached else GZIP_HEADER * len(own.index.shards))
        if ranges:  # what had arrived was not sent again
            assert server.sent <= own.index.bytes + len(own.index.shards) * BLOCK + os.path.getsize(shards / "index.npz")


def test_connections_stay_open_and_one_that_the_server_closed_is_replaced_at_once(shards: Path) -> None:
    expected = (shards / "index.npz").read_bytes()
    with serving(shards) as server:
        storage = Storage(server.url, retry_s=0.0)
        for _ in range(4):
            assert storage.read("index.npz") == expected
        assert len(server.connections) == 1
        server.fault = lambda name, number: "close"
        for _ in range(3):
            assert storage.read("index.npz") == expected
        assert (len(server.connections), storage.retries) == (3, 0)
        storage.close()


def test_what_is_redirected_is_read_where_it_lies(shards: Path) -> None:
    with serving(shards) as server, serving(shards.parent) as front:
        front.moved = server.url
        assert sums(stream(front.url, batch_size=100)) == sums(stream(shards, batch_size=100))


def test_a_server_that_is_gone_for_a_while_is_waited_for(shards: Path, whole: Counter[bytes]) -> None:
    with serving(shards) as server:
        own = stream(server.url, batch_size=100)
        port = server.server_address[1]
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(sums(own)))
    with socket.create_server(("127.0.0.1", port)) as listener:
        reading.start()
        listener.accept()[0].close()  # it has tried; from here on nobody listens
    with serving(shards, port):
        reading.join(60)
    assert found == [whole]


def test_workers_fetch_pieces_and_each_piece_about_once(
    shards: Path, whole: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 20_000)
    with serving(shards) as server:
        parts = [stream(server.url, batch_size=80, workers=3, worker=k) for k in range(3)]
        assert sum((sums(part) for part in parts), Counter()) == whole
        assert sum(part.bytes_fetched for part in parts) < 1.6 * parts[0].index.bytes


def test_what_does_not_pass_is_said_at_once(shards: Path) -> None:
    with serving(shards) as server:
        server.fault = lambda name, number: 403
        with pytest.raises(HocketError, match=r"may not be read .*credentials"):
            stream(server.url)
        server.fault = lambda name, number: 400
        with pytest.raises(HocketError, match="check the address"):
            stream(server.url)
        server.fault = lambda name, number: None
        with pytest.raises(HocketError, match="no packed shards"):
            stream(f"{server.url}/elsewhere")
        server.fault = lambda name, number: 503 if name.endswith(".tar") else None
        with pytest.raises(HocketError, match=r"\.tar could not be read for 0.2 s .*Service Unavailable"):
            list(stream(server.url, batch_size=100, retry_s=0.2))


def test_a_shard_that_arrives_damaged_is_fetched_again_then_named(
    shards: Path, tmp_path: Path, whole: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 1 << 22)  # a shard is a piece
    for file in (*shards.glob("*.npz"), *shards.glob("*.tar")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    victim = tmp_path / "shard-000002.tar"
    good = victim.read_bytes()
    victim.write_bytes(good[:-30_000])
    with serving(tmp_path) as server:
        with pytest.raises(HocketError, match=r"shard-000002\.tar of http.* is damaged or truncated at byte"):
            list(stream(server.url, batch_size=100))
        assert server.asked[victim.name] == 2
        own = stream(server.url, batch_size=100, on_bad_shard="skip")
        with pytest.warns(UserWarning, match="Left out"):
            found = sums(own)
        assert 0 < own.skipped < own.index.shards[2].samples / 2  # without a cache, only what is truncated is left out
        assert sum(found.values()) == sum(whole.values()) - own.skipped
        with pytest.raises(HocketError, match=r"shard-000002\.tar of http.* is damaged \(expected .* bytes"):
            list(stream(server.url, batch_size=100, cache=tmp_path / "cache"))
        own = stream(server.url, batch_size=100, on_bad_shard="skip", cache=tmp_path / "cache")
        with pytest.warns(UserWarning, match="Left out"):
            found = sums(own)
        assert own.skipped == own.index.shards[2].samples
        assert sum(found.values()) == sum(whole.values()) - own.skipped

        def mended(name: str, number: int) -> None:
            if name == victim.name and number > server.asked["index.npz"]:
                victim.write_bytes(good)

        server.fault = mended
        assert sums(stream(server.url, batch_size=100)) == whole


def test_processes_that_fill_one_cache_fetch_each_shard_once(shards: Path, tmp_path: Path, whole: Counter[bytes]) -> None:
    with serving(shards) as server:
        pids, (ready, go) = [], os.pipe()
        for worker in range(3):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.read(ready, 1)  # the server answers no one before all are forked
                    own = stream(server.url, batch_size=50, workers=3, worker=worker, cache=tmp_path)
                    count = sum(sums(own).values())
                    code = 0 if count >= 450 else 2
                finally:
                    os._exit(code)
            pids.append(pid)
        os.write(go, b"!!!")
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
        asked = Counter({name: count for name, count in server.asked.items() if name.endswith(".tar")})
        assert set(asked.values()) == {1}
        assert len(asked) == len(Index.load(str(shards)).shards)
        assert not list(tmp_path.glob(".*.part"))
        os.close(ready)
        os.close(go)


def test_training_over_http_is_that_from_a_folder(shards: Path, tmp_path: Path) -> None:
    import torch

    index = torch.arange(60).view(2, 30)
    with serving(shards) as server:
        there, here = load(f"shards:{server.url}#cache={tmp_path},cache_gb=1"), load(f"shards:{shards}")
        assert torch.equal(there.samples[index][0], here.samples[index][0])
        assert there.test is not None
        assert there.classes == 10
        assert [len(x) for x, _ in there.samples.batches([index, index])] == [2, 2]  # type: ignore[misc]
        with pytest.raises(HocketError, match="did you mean 'cache_gb'"):
            load(f"shards:{server.url}#cachegb=1")


def test_a_file_that_is_not_there_is_told_from_one_that_may_come(shards: Path) -> None:
    with serving(shards) as server, pytest.raises(FileNotFoundError):
        Storage(server.url).read("none.tar")
    with pytest.raises(FileNotFoundError):
        Storage(str(shards)).read("none.tar")
    assert Storage(f"file://{shards}").read("index.npz") == (shards / "index.npz").read_bytes()
