"""Readers on hosts of their own against a real nginx on another: the parts of ``benchmarks/data.py network`` and ``shared``.

The server and each worker are hosts of a lab (:mod:`netlab`), each with a link of the given rate, so the server's link is what all
share. Workers import, open what they read, and wait; then the system's caches are dropped and all start at once. Rates count from
that moment to the end of the slowest worker. ``latency_ms`` makes nginx wait before it answers
each request, as object storage does.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netlab import Lab

PORT = 8080
_CONF = """
{modules}
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err; worker_processes 1; user root;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000; default_type application/octet-stream;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4;
  scgi_temp_path {folder}/t5;
  server {{ listen {port}; root {root}; location / {{ {wait} {directives} }} }}
}}
"""
_MODULES = "load_module /usr/lib/nginx/modules/ndk_http_module.so; load_module /usr/lib/nginx/modules/ngx_http_lua_module.so;"


@contextmanager
def nginx(lab: Lab, host: int, root: Path, latency_ms: float = 0.0, directives: str = "") -> Iterator[str]:
    """A server of the files under ``root`` on a host of the lab; gives its address. ``directives``: more of nginx's own."""
    if shutil.which("nginx") is None:
        raise SystemExit("data.py: nginx is missing: apt-get install nginx-light (and libnginx-mod-http-lua for --latency-ms)")
    folder = root / ".nginx"
    folder.mkdir(exist_ok=True)
    wait = f"access_by_lua_block {{ ngx.sleep({latency_ms / 1000:g}) }}" if latency_ms else ""
    text = _CONF.format(
        modules=_MODULES if latency_ms else "", folder=folder, port=PORT, root=root, wait=wait, directives=directives
    )
    (folder / "nginx.conf").write_text(text)
    command = [
        "ip",
        "netns",
        "exec",
        lab.namespace(host),
        "nginx",
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "nginx.err"),
    ]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        yield f"http://{lab.addresses[host]}:{PORT}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def drop_caches() -> None:
    """Empty the system's caches of files (root)."""
    subprocess.run("sync && echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)


def measure(lab: Lab, workers: int, way: str, given: dict[str, Any], gate: Path, cold: bool = True) -> dict[str, float]:
    """Run ``way`` on the first hosts: samples and bytes per second of all workers."""
    shutil.rmtree(gate, ignore_errors=True)
    gate.mkdir()
    me = [sys.executable, str(Path(__file__).resolve())]
    commands = [[*me, way, json.dumps({**given, "worker": k, "workers": workers, "gate": str(gate)})] for k in range(workers)]
    opener = subprocess.Popen([*me, "open", json.dumps({"gate": str(gate), "workers": workers, "cold": cold})])
    try:
        results = lab.run(commands, given.get("env", {}), timeout_s=330)
    finally:
        opener.kill()
        opener.wait()
    for result in results:
        if result.returncode:
            raise SystemExit(f"data.py: {way} failed: {result.stderr[-1500:]}")
    found = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    seconds = max(one["ended"] for one in found) - float((gate / "go").read_text())
    return {
        "seconds": seconds,
        "samples": sum(one["samples"] for one in found),
        "samples_per_s": sum(one["samples"] for one in found) / seconds,
        "bytes_per_s": sum(one["bytes"] for one in found) / seconds,
        "cpu_s": sum(one["cpu_s"] for one in found),
        "wait_s": max(one["wait_s"] for one in found),
    }


def write_chunks(folder: Path) -> None:
    """litdata's chunks of the same files, of 16 MB."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from data_network import chunk_sample
import json, litdata
if __name__ == "__main__":
    names = json.load(open({str(folder / "files.json")!r}))
    litdata.optimize(chunk_sample, [({str(folder / "files")!r}, name) for name in names], {str(folder / "litdata")!r},
                     chunk_bytes="16MB", num_workers=1)
"""
    (folder / "chunks.py").write_text(code)
    scratch = folder / "litdata-scratch"  # its processor empties folders named data and chunks in the temporary directory
    scratch.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(scratch), "DATA_OPTIMIZER_CACHE_FOLDER": str(scratch), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(folder / "chunks.py")], check=True, env=env, stdout=subprocess.DEVNULL)


def chunk_sample(item: tuple[str, str]) -> tuple[bytes, int]:
    """A file as litdata keeps it: its bytes and its class."""
    folder, name = item
    return (Path(folder) / name).read_bytes(), int(name.removeprefix("class").split("/")[0])


# --- in the workers' processes ---------------------------------------------------------------------------------------------


def _open_gate(given: dict[str, Any]) -> None:
    """Wait until all workers are ready, drop the caches, let them go."""
    gate = Path(given["gate"])
    while len(list(gate.glob("ready*"))) < given["workers"]:
        time.sleep(0.02)
    if given["cold"]:
        drop_caches()
    (gate / "go.part").write_text(str(time.monotonic()))
    (gate / "go.part").rename(gate / "go")


def _pass(given: dict[str, Any]) -> None:
    gate = Path(given["gate"])
    gc.collect()  # what imports left would be collected at some moment of the run: 0.1 s
    (gate / f"ready{given['worker']}").touch()
    while not (gate / "go").exists():
        time.sleep(0.001)
    given["cpu_before_s"] = _cpu_s()


def _cpu_s() -> float:
    """Seconds of processor of this process and its children that have ended."""
    return sum(os.times()[:4])


def _picture(given: dict[str, Any]) -> Callable[[bytes], Any]:
    from hocket.data.shards import decode

    return decode.image if given["decode"] else bytes


def _get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status}")
    return content


def _connection(given: dict[str, Any]) -> http.client.HTTPConnection:
    host, port = given["url"].removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port))


def download(given: dict[str, Any]) -> tuple[int, int]:
    """One connection, one shard after the other, nothing done with them."""
    from hocket.data.shards.index import Index

    index = Index.load(f"{given['url']}/shards")
    connection, block, total = _connection(given), bytearray(1 << 20), 0
    _pass(given)
    for shard in index.shards:
        connection.request("GET", f"/shards/{shard.name}")
        response = connection.getresponse()
        while count := response.readinto(block):
            total += count
    return sum(index.counts), total


def files(given: dict[str, Any]) -> tuple[int, int]:
    """Every file a request, in random order, one after the other on a connection that stays open."""
    picture, connection, own, total = _picture(given), _connection(given), _own_names(given), 0
    _pass(given)
    for name in own:
        content = _get(connection, f"/files/{name}")
        picture(content)
        total += len(content)
    return len(own), total


class _Files:
    """Small files as a ``Dataset``, each with a connection of its own: what ``urllib.request.urlopen`` does."""

    def __init__(self, given: dict[str, Any], names: list[str]) -> None:
        self.folder, self.names, self.picture = f"{given['url']}/files", names, _picture(given)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        with urllib.request.urlopen(f"{self.folder}/{self.names[number]}") as response:
            content = response.read()
        return self.picture(content), len(content)


def files_opened(given: dict[str, Any]) -> tuple[int, int]:
    """Every file a request with a connection of its own, in random order, one after the other."""
    data = _Files(given, _own_names(given))
    _pass(given)
    return len(data), sum(data[number][1] for number in range(len(data)))


def files_loader(given: dict[str, Any]) -> tuple[int, int]:
    """The same by a ``DataLoader`` with 4 processes."""
    from torch.utils.data import DataLoader

    data = _Files(given, _own_names(given))
    loader = DataLoader(data, batch_size=given["batch_size"], num_workers=4, collate_fn=_listed)  # type: ignore[arg-type, var-annotated]
    _pass(given)
    return len(data), sum(size for batch in loader for _, size in batch)


def _own_names(given: dict[str, Any]) -> list[str]:
    with urllib.request.urlopen(f"{given['url']}/files.json") as response:  # its first use reads certificates: not measured
        names = json.loads(response.read())
    random.Random(0).shuffle(names)
    return list(names[given["worker"] : given["limit"] : given["workers"]])


def hocket(given: dict[str, Any], shards: str = "shards") -> tuple[int, int]:
    """``hocket.data.stream``, shuffled."""
    from hocket.data import stream

    picture = _picture(given)
    more = {"decode": lambda sample: (picture(sample["png"]), int(sample["cls"])), "collate": _listed, **given.get("more", {})}
    own = stream(
        f"{given['url']}/{shards}", batch_size=given["batch_size"], worker=given["worker"], workers=given["workers"], **more
    )
    _pass(given)
    count = sum(len(batch) for batch in own)
    return count, own.bytes_fetched


def hocket_gz(given: dict[str, Any]) -> tuple[int, int]:
    """``hocket.data.stream`` on compressed shards."""
    return hocket(given, "compressed")


def webdataset(given: dict[str, Any], shards: str = "shards") -> tuple[int, int]:
    """WebDataset on the same shards, a part of them for each worker, shuffled with a buffer of 1,000."""
    import webdataset as wds

    from hocket.data.shards.index import Index

    picture, index, total = _picture(given), Index.load(f"{given['url']}/{shards}"), 0
    own = index.shards[given["worker"] :: given["workers"]]
    urls = [f"{given['url']}/{shards}/{shard.name}" for shard in own]
    data = wds.DataPipeline(
        wds.SimpleShardList(urls), wds.shuffle(100), wds.tarfile_to_samples(), wds.shuffle(1000), wds.to_tuple("png", "cls"),
        wds.batched(given["batch_size"], collation_fn=list),
    )  # fmt: skip
    _pass(given)
    for batch in data:
        total += len([(picture(x), int(y)) for x, y in batch])
    return total, sum(shard.bytes for shard in own)


def webdataset_gz(given: dict[str, Any]) -> tuple[int, int]:
    """WebDataset on Hocket's compressed shards."""
    return webdataset(given, "compressed")


def litdata(given: dict[str, Any]) -> tuple[int, int]:
    """litdata on its own chunks, of the same files and size, by its S3 client from the same nginx; a cold cache of its own."""
    from litdata import StreamingDataset
    from litdata.streaming import downloader
    from litdata.utilities.env import _DistributedEnv  # noqa: F401  (it reads the environment below)

    getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = "true"  # else its client insists on TLS
    picture, total, size = _picture(given), 0, 0
    data = StreamingDataset(
        "s3://litdata", cache_dir=tempfile.mkdtemp(dir=given["scratch"]), shuffle=True, drop_last=False,
        storage_options={"endpoint_url": given["url"], **dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "x")},
        max_cache_size="10GB",
    )  # fmt: skip
    _pass(given)
    for content, label in data:
        picture(content)
        total += 1
        size += len(content) + 8 + 0 * label
    return total, size


def torchdata(given: dict[str, Any]) -> tuple[int, int]:
    """torchdata's nodes on the same shards, a part of them for each worker: four threads fetch and unpack, shuffled by shard."""
    import io
    import tarfile
    import urllib.request

    from torchdata import nodes

    from hocket.data.shards.index import Index

    picture, index, total = _picture(given), Index.load(f"{given['url']}/shards"), 0
    own = list(index.shards[given["worker"] :: given["workers"]])
    random.Random(0).shuffle(own)

    def samples(name: str) -> list[tuple[Any, int]]:
        with urllib.request.urlopen(f"{given['url']}/shards/{name}") as response:
            content = io.BytesIO(response.read())
        with tarfile.open(fileobj=content) as tar:
            contents = [tar.extractfile(entry).read() for entry in tar]  # type: ignore[union-attr]
        return [(picture(x), int(y)) for x, y in zip(contents[::2], contents[1::2], strict=True)]

    fetched = nodes.ParallelMapper(nodes.IterableWrapper([shard.name for shard in own]), samples, num_workers=4)
    loader = nodes.Loader(nodes.Batcher(nodes.Unbatcher(fetched), given["batch_size"], drop_last=False))
    _pass(given)
    for batch in loader:
        total += len(batch)
    return total, sum(shard.bytes for shard in own)


def train(given: dict[str, Any]) -> tuple[int, int]:
    """Steps of bulk training on data from memory, from small files, from shards, or from shards that a cache has."""
    import itertools

    import torch
    from torch.nn import functional as F

    import hocket as library

    source, steps, size = given["source"], given["steps"], given["batch_size"]
    library.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job = library.parallelize(model, optimizer, "bulk")
    batches, read = _batches(given, source, size)
    wait_s = 0.0
    _pass(given)
    for _ in itertools.repeat(None, steps):
        begun = time.perf_counter()
        x, y = next(batches)
        wait_s += time.perf_counter() - begun
        optimizer.zero_grad()
        F.cross_entropy(model(x.float() / 255), y).backward()
        optimizer.step()
    job.finish()
    given["wait_s"] = wait_s
    return steps * size, read()


def _batches(given: dict[str, Any], source: str, size: int) -> tuple[Iterator[Any], Callable[[], int]]:
    """Mini-batches without end, and the bytes that were fetched for them."""
    import itertools

    import torch

    from hocket.data import stream
    from hocket.data.shards.decode import image
    from hocket.data.shards.stream import in_order

    if source == "memory":
        pair = torch.zeros(size, 3, 32, 32, dtype=torch.uint8), torch.zeros(size, dtype=torch.int64)
        return itertools.repeat(pair), lambda: 0
    if source == "files":
        names, total, local = json.loads(_get(_connection(given), "/files.json")), [0], threading.local()
        random.Random(given["worker"]).shuffle(names)

        def batch(own: list[str]) -> Any:
            if not hasattr(local, "connection"):
                local.connection = _connection(given)
            contents = [_get(local.connection, f"/files/{name}") for name in own]
            total[0] += sum(map(len, contents))
            return torch.stack([image(c) for c in contents]), torch.tensor([int(name[5]) for name in own])

        parts = (names[k : k + size] for k in itertools.count(0, size))
        return in_order(batch, parts, 4, 8), lambda: total[0]
    more = {"cache": given["scratch"] + f"/cache{given['worker']}"} if source == "cache" else {}
    own = stream(f"{given['url']}/shards", batch_size=size, worker=given["worker"], workers=given["workers"], **more)
    if source == "cache":
        for _ in stream(f"{given['url']}/shards", batch_size=1000, worker=0, workers=1, decode=bytes_of, collate=_listed, **more):
            pass
    return itertools.chain.from_iterable(itertools.repeat(own)), lambda: own.bytes_fetched


def bytes_of(sample: dict[str, bytes]) -> int:
    """Nothing is decoded where only the cache is to be filled."""
    return len(sample)


def _listed(samples: list[Any]) -> list[Any]:
    return samples


WAYS = {
    f.__name__: f
    for f in (download, files, files_opened, files_loader, hocket, hocket_gz, webdataset, webdataset_gz, litdata, torchdata, train)
}


def _worker() -> None:
    way, given = sys.argv[1], json.loads(sys.argv[2])
    if way == "open":
        return _open_gate(given)
    samples, size = WAYS[way](given)
    used = _cpu_s() - given["cpu_before_s"]
    found = {"samples": samples, "bytes": size, "ended": time.monotonic(), "cpu_s": used, "wait_s": given.get("wait_s", 0.0)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # what a library's threads still do is not measured


if __name__ == "__main__":
    _worker()
