"""Packing: the samples of a source into tar shards and an index, the same bytes for the same source and options.

Samples are shuffled once (``shuffle``), so that neighbours in a shard are no neighbours in the source. A shard holds a fixed number
of them, as many as fill ``shard_bytes`` by the mean size of the first samples. Threads make shards; each is renamed when it is
whole, with its part of the index in ``.parts/``, so a run that was interrupted goes on with what is missing. At the end each shard
has been read again with ``tarfile`` and compared. ``compress`` writes ``.tar.gz``, in blocks that are read on their own.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch

from hocket import noise
from hocket.data.files import replacing
from hocket.data.shards.index import FILE, GZIP_HEADER, RECORD, Index, Shard
from hocket.errors import HocketError

SHARD_BYTES = 16 * 2**20
BLOCK_BYTES = 1 << 19
_PARTS, _PLAN, _PROBED = ".parts", "plan.json", 64


class Source(Protocol):
    """Samples by number, each a dict from field to bytes."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that a sample may have."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """What the index is to say of it."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, bytes]: ...

    def digest(self) -> str:
        """Changes with the source, as far as that can be seen without reading all of it."""
        ...


@dataclass(frozen=True)
class Plan:
    """Which samples go into which shards."""

    samples: int
    per_shard: int
    order: Sequence[int]

    @property
    def shards(self) -> int:
        return math.ceil(self.samples / self.per_shard)

    def of(self, shard: int) -> range:
        """The places, in the order, of a shard's samples."""
        return range(shard * self.per_shard, min(self.samples, (shard + 1) * self.per_shard))


def pack(
    source: Source,
    dest: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    shuffle: bool = True,
    compress: bool = False,
    threads: int = 4,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Index:
    """Write ``source`` into ``dest`` and return the index; ``advance`` hears the samples that are done, of how many."""
    if not len(source):
        raise HocketError("The source has no samples: name one that has.")
    if (dest / FILE).exists():
        raise HocketError(f"{dest} holds packed shards already: choose another folder, or delete it.")
    plan = _plan(source, shard_bytes, seed, shuffle)
    parts = dest / _PARTS
    options = {"per_shard": plan.per_shard, "seed": seed, "shuffle": shuffle, "compress": compress}
    _begin(dest, parts, {"source": source.digest(), **options})
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        work = {pool.submit(_shard, source, plan, shard, dest, compress): shard for shard in range(plan.shards)}
        try:
            for future in as_completed(work):
                future.result()
                done += len(plan.of(work[future]))
                advance(done, plan.samples)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    index = _join([parts / f"{shard:06}.npz" for shard in range(plan.shards)], source, shuffle)
    index.save(dest)
    shutil.rmtree(parts)
    return index


def _plan(source: Source, shard_bytes: int, seed: int, shuffle: bool) -> Plan:
    count = len(source)
    order: Sequence[int] = range(count)
    if shuffle:
        order = noise.bits(torch.tensor([noise.fold(seed, 0x9ACC)]), count)[0].argsort(dim=0, stable=True).tolist()
    probed = [source[number] for number in order[:_PROBED]]
    mean = sum(RECORD + _padded(len(content)) for sample in probed for content in sample.values()) / len(probed)
    return Plan(count, max(1, round(shard_bytes / mean)), order)


def _begin(dest: Path, parts: Path, plan: dict[str, Any]) -> None:
    """Note what is being packed; a folder in which something else was begun is refused."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
        if (parts / _PLAN).exists():
            if json.loads((parts / _PLAN).read_text()) != plan:
                raise HocketError(f"{dest} holds shards of another source or other options, not finished: delete it.")
        elif list(dest.glob("*.tar*")):
            raise HocketError(f"{dest} holds tar files of something else: choose another folder.")
        with replacing(parts / _PLAN) as out:
            out.write(json.dumps(plan).encode())
    except OSError as error:
        raise HocketError(f"{dest} cannot be written ({error.strerror}): choose another folder.") from None


def _shard(source: Source, plan: Plan, shard: int, dest: Path, compress: bool) -> None:
    """Make one shard, unless it is there."""
    part, name = dest / _PARTS / f"{shard:06}.npz", f"shard-{shard:06}.tar{'.gz' * compress}"
    if part.exists() and (dest / name).exists():
        return
    places = plan.of(shard)
    shape = (len(places), len(source.fields))
    starts, sizes = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    crc32, labels = np.zeros(len(places), np.uint32), np.full(len(places), -1, np.int32)
    blocks = np.empty((0, 3), np.int64)
    with replacing(dest / name) as raw, tempfile.TemporaryFile(dir=dest / _PARTS) as plain:
        out = _Hashing(raw)
        into = plain if compress else cast(IO[bytes], out)
        with tarfile.open(fileobj=into, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
            for row, place in enumerate(places):
                sample = source[plan.order[place]]
                for column, field in enumerate(source.fields):
                    if field not in sample:
                        continue
                    content = sample[field]
                    entry = tarfile.TarInfo(f"{place:09}.{field}")
                    entry.size = len(content)
                    starts[row, column], sizes[row, column] = tar.offset + RECORD, len(content)
                    tar.addfile(entry, io.BytesIO(content))
                    crc32[row] = zlib.crc32(content, int(crc32[row]))
                if "cls" in sample:
                    labels[row] = int(sample["cls"])
        if compress:
            blocks = _compressed(plain, out, np.where(sizes >= 0, starts, np.iinfo(np.int64).max).min(1) - RECORD)
    meta = Shard(name, len(places), out.count, out.digest.hexdigest())
    _verify(dest / name, meta, starts, sizes, crc32)
    with replacing(part) as file:
        arrays: dict[str, np.ndarray] = {"starts": starts, "sizes": sizes, "crc32": crc32, "labels": labels, "blocks": blocks}
        np.savez(file, allow_pickle=False, meta=np.frombuffer(json.dumps(vars(meta)).encode(), np.uint8), **arrays)


def _compressed(plain: IO[bytes], out: _Hashing, begins: np.ndarray) -> np.ndarray:
    """Write a tar, whose samples begin at ``begins``, as one gzip stream with a full flush before each block; gives the first
    sample of each and where it begins in the tar and in what was written."""
    firsts = np.flatnonzero(np.diff(begins // BLOCK_BYTES, prepend=-1))
    places = [0, *begins[firsts[1:]].tolist()]
    plain.seek(0)
    packer, written = zlib.compressobj(wbits=31), []
    for begin, end in itertools.pairwise([*places, None]):
        written.append(out.count or GZIP_HEADER)
        out.write(packer.compress(plain.read(-1 if end is None else end - begin)))
        out.write(packer.flush(zlib.Z_FINISH if end is None else zlib.Z_FULL_FLUSH))
    return np.stack([firsts, places, written], 1)


def _verify(path: Path, shard: Shard, starts: np.ndarray, sizes: np.ndarray, crc32: np.ndarray) -> None:
    """Read a shard as any program would that knows tar, and compare it with what the index is to say."""
    found = {start: size for start, size in zip(starts[sizes >= 0].tolist(), sizes[sizes >= 0].tolist(), strict=True)}
    sums: dict[str, int] = {}
    with tarfile.open(path) as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            if file is None or found.pop(entry.offset_data, None) != entry.size:
                raise HocketError(f"{path} was not written as it should be, at {entry.name}: check the disk and pack again.")
            key = entry.name.split(".", 1)[0]
            sums[key] = zlib.crc32(file.read(), sums.get(key, 0))
    if found or list(sums.values()) != crc32.tolist() or path.stat().st_size != shard.bytes:
        raise HocketError(f"{path} was not written as it should be: check the disk and pack again.")


def _join(parts: Sequence[Path], source: Source, shuffled: bool) -> Index:
    shards, arrays = [], []
    for part in parts:
        try:
            with np.load(part, allow_pickle=False) as found:
                shards.append(Shard(**json.loads(found["meta"].tobytes())))
                arrays.append([found[name] for name in ("starts", "sizes", "crc32", "labels", "blocks")])
        except (OSError, ValueError, zipfile.BadZipFile):
            raise HocketError(f"{part} is damaged: delete it and pack again.") from None
    for (*_, blocks), before in zip(arrays, itertools.accumulate((shard.samples for shard in shards), initial=0), strict=False):
        blocks[:, 0] += before
    starts, sizes, crc32, labels, blocks = (np.concatenate(column) for column in zip(*arrays, strict=True))
    about = {**source.about, "shuffled": shuffled}
    return Index(source.fields, tuple(shards), starts, sizes, crc32, labels, about, blocks if len(blocks) else None)


def _padded(size: int) -> int:
    return -(-size // RECORD) * RECORD


class _Hashing:
    """Counts and hashes what is written."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out, self.digest, self.count = out, hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        self.count += len(content)
        return self.out.write(content)
