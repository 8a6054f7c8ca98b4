"""Packed shards against small files: the index of a million samples, samples per second from the disk and over a network.

    python benchmarks/data.py index
    python benchmarks/data.py shuffle
    python benchmarks/data.py read [--samples 20000] [--drop-caches] [--data-dir DIR]
    python benchmarks/data.py network --data-dir DIR [--decode] [--latency-ms 10] [--ways hocket,files,…]
    python benchmarks/data.py shared --data-dir DIR [--latency-ms 10]
    python benchmarks/data.py busy [--device cuda] [--data-dir DIR]

``index`` writes an index of a million samples with two fields and opens it in a process of its own: seconds and peak memory beyond
what the imports take. ``shuffle`` prints how well orders mix classes where the shards are sorted by class, the worst case. ``read``
reads one epoch each: files in random order with a DataLoader's threads' worth of decoding, shards in their own shuffled order,
shards in plain order. ``--drop-caches`` (root) empties the system's caches before each; otherwise they are warm.

``network`` (root; nginx, and for comparison the packages webdataset, litdata and torchdata) reads CIFAR-10 from nginx on a host of
its own, 4 workers on 4 hosts, all links 1 Gbit/s, caches cold: one sequential download; small files on a connection that stays open
(``files``), on one each (``files_opened``), and by a DataLoader of 4 processes (``files_loader``); shards and compressed shards by
Hocket and by WebDataset; shards by torchdata; and litdata's chunks. Give 4 shards or more. ``shared`` trains with 2 workers whose
gradients travel over the same links as the data.

``busy`` trains resnet20 on shards and prints how much of the time its steps wait for data.

Pictures are CIFAR-10's 60,000 as PNG files where ``--data-dir`` has it, otherwise made up. ``--folder`` keeps what was written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import data_network
import numpy as np
import torch
from data_network import drop_caches
from netlab import Lab
from torch.nn import functional
from torch.utils.data import DataLoader

from hocket.data import DataSet, load, stream
from hocket.data.shards import decode, sources
from hocket.data.shards.check import shuffle_quality
from hocket.data.shards.index import FILE, Index, Shard
from hocket.data.shards.order import ShardOrder
from hocket.data.shards.pack import pack
from hocket.models.registry import build

MEMORY = """
import sys, time
from hocket.data.shards.index import Index
from hocket.data.shards.order import ShardOrder
rss = lambda name: next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = rss("VmRSS")
begun = time.perf_counter()
index = Index.load(sys.argv[1])
opened = time.perf_counter() - begun
order = ShardOrder(index.counts, 0)
order.at(0, 100)
first = time.perf_counter() - begun - opened
print(f"opened in {opened:.2f} s, first batch of the order after {first:.2f} s more, "
      f"{rss('VmRSS') - before:.0f} MB held, {rss('VmHWM') - before:.0f} MB at the peak")
"""


def index(samples: int = 1_000_000, per_shard: int = 1000) -> None:
    """An index of that many samples."""
    place = np.arange(samples, dtype=np.int64) % per_shard * 4096
    shards = tuple(Shard(f"shard-{k:06}.tar", per_shard, per_shard * 4096, f"{k:064x}") for k in range(samples // per_shard))
    sizes = np.full((samples, 2), 1000, np.int32)
    made = Index(
        ("png", "cls"),
        shards,
        np.stack([place, place + 2048], 1),
        sizes,
        np.zeros(samples, np.uint32),
        np.arange(samples, dtype=np.int32) % 1000,
    )
    with tempfile.TemporaryDirectory() as folder:
        made.save(Path(folder))
        print(f"{samples:,} samples: {(Path(folder) / FILE).stat().st_size / 1e6:.0f} MB on disk", flush=True)
        subprocess.run([sys.executable, "-c", MEMORY, folder], check=True)


def shuffle(batch_size: int = 100) -> None:
    """χ² / degrees of freedom of the classes in a batch, for 10 classes of 2,000 samples in 40 shards."""
    labels = np.repeat(np.arange(10), 2000)
    orders = {
        "one permutation of all": ShardOrder([20_000], 0, lanes=1),
        **{f"{lanes} lanes, window of a shard": ShardOrder([500] * 40, 0, lanes) for lanes in (1, 4, 16, 32)},
        "16 lanes, window of two shards": ShardOrder([500] * 40, 0, 16, 1000),
        "in the order of the files": ShardOrder([500] * 40, 0, shuffle=False),
    }
    for name, order in orders.items():
        batches = (order.at(start, start + batch_size) for start in range(0, 20_000, batch_size))
        print(f"{name}: {shuffle_quality(labels, batches):.2f}")


def read(options: argparse.Namespace, threads: int = 4, batch_size: int = 100) -> None:
    """Samples per second, by three ways of reading."""
    with prepared(options) as folder:
        files, packed = folder / "files", folder / "shards"
        given = {"batch_size": batch_size, "threads": threads}
        raw = {"decode": _raw, "collate": list}
        ways: dict[str, Callable[[], int]] = {
            "small files, random order": lambda: _files(files, threads, batch_size),
            "shards, shuffled": lambda: sum(len(y) for _, y in stream(packed, **given)),
            "shards, in order": lambda: sum(len(y) for _, y in stream(packed, shuffle=False, **given)),
            "shards, shuffled, not decoded": lambda: sum(map(len, stream(packed, **raw, **given))),
            "shards, in order, not decoded": lambda: sum(map(len, stream(packed, shuffle=False, **raw, **given))),
        }
        for _ in range(options.rounds):
            for name, way in ways.items():
                if options.drop_caches:
                    drop_caches()
                begun = time.perf_counter()
                count = way()
                print(f"{name}: {count / (time.perf_counter() - begun):,.0f} samples/s", flush=True)


def _raw(sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample


@contextmanager
def prepared(options: argparse.Namespace, chunks: bool = False, compressed: bool = False) -> Iterator[Path]:
    """A folder with ``files/CLASS/NUMBER.png``, their names in ``files.json``, ``shards/`` and, if asked for, litdata's chunks and
    ``compressed/`` shards."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hocket-data-"))
    try:
        folder.mkdir(exist_ok=True)
        if not (folder / "files.json").exists():
            names = _write(folder / "files", options.samples, options.data_dir)
            (folder / "files.json").write_text(json.dumps(names))
        if not (folder / "shards" / FILE).exists():
            begun = time.perf_counter()
            made = pack(sources.parts(str(folder / "files"))[""], folder / "shards", shard_bytes=int(options.shard_mb * 2**20))
            print(f"packed {len(made.labels):,} files into {len(made.shards)} shards in {time.perf_counter() - begun:.1f} s")
        if compressed and not (folder / "compressed" / FILE).exists():
            source = sources.parts(str(folder / "files"))[""]
            pack(source, folder / "compressed", shard_bytes=int(options.shard_mb * 2**20), compress=True)
        if chunks and not (folder / "litdata").exists():
            data_network.write_chunks(folder)
        yield folder
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def _write(folder: Path, samples: int, data_dir: Path | None) -> list[str]:
    if data_dir is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (samples, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.arange(samples) % 10
    else:
        data = load("cifar10", data_dir)
        assert data.test is not None
        images, labels = (torch.cat(pair)[:samples] for pair in zip(data.train, data.test, strict=True))
    names = [f"class{label}/{number:06}.png" for number, label in enumerate(labels.tolist())]
    for name in {Path(name).parent for name in names}:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, image in zip(names, images, strict=True):
        (folder / name).write_bytes(decode.png(image))
    return names


def _files(folder: Path, threads: int, batch_size: int) -> int:
    """All files in random order, opened and decoded by threads, batch by batch."""
    paths = sorted(folder.rglob("*.png"))
    random.Random(0).shuffle(paths)
    with ThreadPoolExecutor(threads) as pool:
        batches = [paths[k : k + batch_size] for k in range(0, len(paths), batch_size)]
        return sum(len(batch) for batch in pool.map(lambda b: torch.stack([decode.image(p.read_bytes()) for p in b]), batches))


def network(options: argparse.Namespace) -> None:
    """Samples per second of 4 workers from nginx, by each way; of small files, a part of them."""
    ways = options.ways.split(",")
    with (
        prepared(options, chunks="litdata" in ways, compressed=any(way.endswith("_gz") for way in ways)) as folder,
        Lab(options.workers + 1, options.rate) as lab,
        data_network.nginx(lab, options.workers, folder, options.latency_ms) as url,
        tempfile.TemporaryDirectory() as scratch,
    ):
        limit = min(options.samples, options.files)
        given = {"url": url, "decode": options.decode, "batch_size": 100, "limit": limit, "scratch": scratch}
        rates = {}
        for way in ways * options.rounds:
            found = data_network.measure(lab, 1 if way == "download" else options.workers, way, given, Path(scratch) / "gate")
            rates.setdefault(way, []).append(found["samples_per_s"])
            print(
                f"{way}: {found['samples_per_s']:,.0f} samples/s, {found['bytes_per_s'] / 1e6:.1f} MB/s, "
                f"{found['samples']:,.0f} samples in {found['seconds']:.1f} s, {1e6 * found['cpu_s'] / found['samples']:.0f} µs of "
                "processor per sample",
                flush=True,
            )
    for own in ("hocket", "hocket_gz"):
        for way in ways:
            if own in rates and not way.startswith("hocket"):
                print(f"{own} / {way}: {np.median(rates[own]) / np.median(rates[way]):.2f}")


def shared(options: argparse.Namespace) -> None:
    """Training speed of two workers whose gradients and data travel over the same links."""
    workers = 2
    with (
        prepared(options) as folder,
        Lab(workers + 1, options.rate) as lab,
        data_network.nginx(lab, workers, folder, options.latency_ms) as url,
        tempfile.TemporaryDirectory() as scratch,
    ):
        for source in ("memory", "files", "shards", "cache") * options.rounds:
            given = {"url": url, "batch_size": 100, "scratch": scratch, "source": source, "steps": options.steps}
            found = data_network.measure(lab, workers, "train", given, Path(scratch) / "gate", cold=source != "cache")
            print(
                f"{source}: {found['samples_per_s']:,.0f} samples/s, {1000 * found['seconds'] / options.steps:.1f} ms a step, "
                f"{1000 * found['wait_s'] / options.steps:.1f} ms wait for data; {found['bytes_per_s'] / 1e6:.1f} MB/s of data",
                flush=True,
            )


def busy(options: argparse.Namespace) -> None:
    """How much of resnet20's time is waiting for data: its steps on samples from shards against steps on samples on the device."""
    device = torch.device(options.device)
    with prepared(options) as folder:
        size, model = options.batch_size, build("resnet20", load("cifar10", options.data_dir)) if options.data_dir else _resnet()
        model = model.to(device).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        here = torch.zeros(size, 3, 32, 32, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.int64, device=device)
        data = stream(folder / "shards", batch_size=size, threads=2)
        loader = DataLoader(data, batch_size=None, num_workers=options.processes, pin_memory=device.type == "cuda", **(
            {"prefetch_factor": 8, "persistent_workers": True} if options.processes else {}
        ))  # fmt: skip

        def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for epoch in itertools.count():
                data.set_epoch(epoch)
                yield from (batch for batch in loader if len(batch[1]) == size)

        _steps(model, optimizer, itertools.repeat(here), 10, device)
        batches = endless()
        _steps(model, optimizer, batches, 10, device)
        for _ in range(options.rounds):
            alone, _ = _steps(model, optimizer, itertools.repeat(here), options.steps, device)
            took, waited = _steps(model, optimizer, batches, options.steps, device)
            print(
                f"a step of {size}: {1000 * alone:.2f} ms on samples on the {options.device}, {1000 * took:.2f} ms from shards "
                f"({size / took:,.0f} samples/s); loading costs {max(0.0, took / alone - 1):.1%} of a step, "
                f"the loop waited {waited / took:.1%} of its time",
                flush=True,
            )


def _resnet() -> torch.nn.Module:
    pair = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
    return build("resnet20", DataSet("made up", pair, None, 10, lambda x: x))


def _steps(model: torch.nn.Module, optimizer: Any, batches: Iterator[Any], steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and how many of them the loop waited for data."""
    wait_s = 0.0
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        x, y = next(batches)
        wait_s += time.perf_counter() - asked
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x.float() / 255), y).backward()
        optimizer.step()
    synchronize()
    return (time.perf_counter() - begun) / steps, wait_s / steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "shuffle", "read", "network", "shared", "busy"])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--files", type=int, default=12_000, help="of small files, read so many")
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies")
    parser.add_argument("--folder", type=Path, help="write pictures and shards there and keep them")
    parser.add_argument("--shard-mb", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="nginx waits so long before each answer")
    parser.add_argument("--decode", action="store_true", help="decode the pictures, too")
    parser.add_argument("--ways", default=",".join(name for name in data_network.WAYS if name != "train"))
    parser.add_argument("--device", default="cpu", help="of busy")
    parser.add_argument("--processes", type=int, default=min(8, (os.cpu_count() or 2) - 2), help="of busy: that load")
    parser.add_argument("--batch-size", type=int, default=128, help="of busy")
    parser.add_argument("--steps", type=int, default=100, help="of shared and busy")
    options = parser.parse_args()
    plain = {"index": index, "shuffle": shuffle}
    if options.what in plain:
        plain[options.what]()
    else:
        {"read": read, "network": network, "shared": shared, "busy": busy}[options.what](options)
