"""Shards in S3-compatible storage: a real server (moto's) over HTTP, read by s3fs."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hocket.data import load, stream
from hocket.data.shards import sources
from hocket.data.shards.pack import pack
from hocket.errors import HocketError

s3fs = pytest.importorskip("s3fs")
boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    for name, part in sources.parts("digits", load("digits")).items():
        pack(part, made / name, shard_bytes=300_000)
    return made


@pytest.fixture(scope="module")
def bucket(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket with the shards, and an environment that leads to its server."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path_factory.mktemp("home")),
    }.items():
        patch.setenv(name, value)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket="data")
        for file in folder.rglob("*"):
            if file.is_file():
                client.upload_file(str(file), "data", f"set/{file.relative_to(folder)}")
        yield "s3://data/set"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        patch.undo()
        server.stop()


def sums(batches: Any) -> Counter[bytes]:
    return Counter(bytes(x.numpy()) for images, _ in batches for x in images)


def test_a_bucket_is_read_as_a_folder_is(bucket: str, folder: Path, tmp_path: Path) -> None:
    whole = sums(stream(folder, batch_size=100))
    own = stream(bucket, batch_size=100)
    assert sums(own) == whole
    assert own.bytes_fetched == own.index.bytes
    parts = [stream(bucket, batch_size=50, workers=3, worker=k, cache=tmp_path) for k in range(3)]
    assert sum((sums(part) for part in parts), Counter()) == whole
    assert sum(part.bytes_fetched for part in parts) == own.index.bytes  # each shard once, through the cache
    data = load(f"shards:{bucket}#cache={tmp_path}")
    assert (data.classes, len(data.samples), data.test is not None) == (10, sum(own.index.counts), True)


def test_what_is_wrong_with_a_bucket_is_said_in_one_sentence(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (f"{bucket}/nothing", "s3://no-such-bucket/set"):
        with pytest.raises(HocketError, match="no packed shards"):
            stream(url)
    client = boto3.client("s3")
    client.put_object(Bucket="data", Key="bad/index.npz", Body=b"no index")
    with pytest.raises(HocketError, match="damaged"):
        stream("s3://data/bad")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(HocketError, match=r"may not be read .*credentials") as refused:
        stream(bucket)
    assert "\n" not in str(refused.value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(HocketError, match=r"could not be read for 0.1 s .*check the address"):
        stream(bucket, retry_s=0.1)
    s3fs.S3FileSystem.clear_instance_cache()


BAD = "shard-000002.tar"


class Faulty(ThreadingHTTPServer):
    """Passes requests on to another server, but the first ``faults`` for one shard it answers with 503, or hangs up on."""

    daemon_threads = True

    def __init__(self, behind: str, fault: str, faults: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind, self.fault, self.faults = behind.removeprefix("http://"), fault, faults
        self.asked: Counter[str] = Counter()


class Passing(BaseHTTPRequestHandler):
    server: Faulty
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        self.server.asked[name] += 1
        if name == BAD and self.server.asked[name] <= self.server.faults:
            if self.server.fault == "hangs up":
                self.close_connection = True
                self.connection.shutdown(2)
                return
            return self._answer(503, {}, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>")
        behind = HTTPConnection(self.server.behind)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        behind.request(self.command, self.path, body, dict(self.headers))
        response = behind.getresponse()
        self._answer(response.status, dict(response.headers), response.read())
        behind.close()

    do_HEAD = do_POST = do_GET

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def faulty(behind: str, fault: str, faults: int) -> Iterator[Faulty]:
    with Faulty(behind, fault, faults) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("fault", ["503", "hangs up"])
def test_a_store_that_fails_for_a_while_loses_and_repeats_nothing(
    bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with faulty(os.environ["AWS_ENDPOINT_URL"], fault, 7) as server:  # s3fs itself tries six times
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            own = stream(bucket, batch_size=100)
            assert sums(own) == sums(stream(folder, batch_size=100))
            assert server.asked[BAD] > 7
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
