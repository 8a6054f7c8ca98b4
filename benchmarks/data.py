"""Packed shards against small files: the index of a million samples, and samples per second from the local disk.

    python benchmarks/data.py index
    python benchmarks/data.py shuffle
    python benchmarks/data.py read [--samples 20000] [--drop-caches]

``index`` writes an index of a million samples with two fields and opens it in a process of its own: seconds and peak memory beyond
what the imports take. ``shuffle`` prints how well orders mix classes where the shards are sorted by class, the worst case. ``read``
writes pictures of 32×32 pixels as PNG files in class folders, packs them, and reads one epoch each: files in random order with a
DataLoader's threads' worth of decoding, shards in their own shuffled order, shards in plain order. ``--drop-caches`` (root) empties
the system's caches before each; otherwise they are warm.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from hocket.data import stream
from hocket.data.shards import decode, sources
from hocket.data.shards.check import shuffle_quality
from hocket.data.shards.index import FILE, Index, Shard
from hocket.data.shards.order import ShardOrder
from hocket.data.shards.pack import pack

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


def read(samples: int, drop: bool, threads: int = 4, batch_size: int = 100) -> None:
    """Samples per second, by three ways of reading."""
    with tempfile.TemporaryDirectory() as folder:
        files, packed = Path(folder) / "files", Path(folder) / "packed"
        _write(files, samples)
        begun = time.perf_counter()
        pack(sources.parts(str(files))[""], packed, threads=threads)
        print(f"packed {samples:,} files in {time.perf_counter() - begun:.1f} s")
        given = {"batch_size": batch_size, "threads": threads}
        ways: dict[str, Callable[[], int]] = {
            "small files, random order": lambda: _files(files, threads, batch_size),
            "shards, shuffled": lambda: sum(len(y) for _, y in stream(packed, **given)),
            "shards, in order": lambda: sum(len(y) for _, y in stream(packed, shuffle=False, **given)),
        }
        for name, way in ways.items():
            if drop:
                subprocess.run("sync && echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)
            begun = time.perf_counter()
            count = way()
            print(f"{name}: {count / (time.perf_counter() - begun):,.0f} samples/s", flush=True)


def _write(folder: Path, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(samples):
        path = folder / f"class{number % 10}" / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(decode.png(torch.randint(0, 256, (3, 32, 32), generator=generator, dtype=torch.uint8)))


def _files(folder: Path, threads: int, batch_size: int) -> int:
    """All files in random order, opened and decoded by threads, batch by batch."""
    paths = sorted(folder.rglob("*.png"))
    random.Random(0).shuffle(paths)
    with ThreadPoolExecutor(threads) as pool:
        batches = [paths[k : k + batch_size] for k in range(0, len(paths), batch_size)]
        return sum(len(batch) for batch in pool.map(lambda b: torch.stack([decode.image(p.read_bytes()) for p in b]), batches))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "shuffle", "read"])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--drop-caches", action="store_true")
    options = parser.parse_args()
    {"index": index, "shuffle": shuffle, "read": lambda: read(options.samples, options.drop_caches)}[options.what]()
