"""Samples of packed shards by their number, from a folder, a cache or memory; every sample is checked by its CRC-32.

Shards on a path are read where they lie. Others are fetched whole and checked by their SHA-256: into the cache, or else into
memory, where those that were not used for longest are dropped.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
import zlib
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np

from hocket.data.shards.cache import Cache
from hocket.data.shards.index import Index
from hocket.data.shards.storage import RETRY_S, Storage
from hocket.errors import HocketError, nearest

OnBad = Literal["stop", "skip"]
Sample = dict[str, bytes]


class BadShard(HocketError):
    """A shard, or a sample in it, that is not what its index says."""


class ShardReader:
    """Reads samples; its methods may be called by many threads at once."""

    def __init__(
        self,
        url: str,
        index: Index,
        *,
        cache: Path | str | None = None,
        cache_bytes: int | None = None,
        on_bad_shard: OnBad = "stop",
        retry_s: float = RETRY_S,
        keep: int = 32,
    ) -> None:
        if on_bad_shard not in get_args(OnBad):
            raise HocketError(f"on_bad_shard is stop or skip, got '{on_bad_shard}'{nearest(on_bad_shard, get_args(OnBad)) or '.'}")
        self.index, self.storage, self.on_bad_shard, self.keep = index, Storage(url, retry_s), on_bad_shard, keep
        self.cache = None if cache is None else Cache(cache, cache_bytes)
        self.bytes_read = self.bytes_fetched = self.skipped = 0
        """Bytes of samples, bytes fetched from elsewhere, and samples that were left out."""
        self._ends = np.cumsum(index.counts)
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = threading.Lock()
        self._told: set[str] = set()

    @property
    def remote(self) -> bool:
        """Whether shards have to be fetched."""
        return self.storage.path is None or self.cache is not None

    def close(self) -> None:
        """Let go of all files."""
        self.storage.close()
        with self._lock:
            self._open.clear()

    def sample(self, number: int) -> Sample | None:
        """The content of a sample by field; None if it is bad and may be left out."""
        shard = int(self.shards_of(np.array(number)))
        try:
            return self._checked(number, shard)
        except BadShard as error:
            self.bad(error)
            return None

    def bad(self, error: BadShard) -> None:
        """Stop, or count a sample that is left out and say so once per shard."""
        if self.on_bad_shard == "stop":
            raise error
        with self._lock:
            self.skipped += 1
            known = str(error) in self._told
            self._told.add(str(error))
        if not known:
            warnings.warn(f"Left out: {error}", stacklevel=3)

    def where(self, number: int) -> str:
        """A sample's name, for messages."""
        shard = int(self.shards_of(np.array(number)))
        return f"sample {number} in shard {self.index.shards[shard].name} of {self.storage.url}"

    def shards_of(self, numbers: np.ndarray) -> np.ndarray:
        """The shards of samples."""
        return np.searchsorted(self._ends, numbers, side="right")

    def want(self, shard: int) -> None:
        """Fetch a shard; what is wrong with it is said when it is read."""
        with suppress(HocketError):
            self._shard(shard)

    def _checked(self, number: int, shard: int) -> Sample:
        index = self.index
        starts, sizes = index.starts[number], index.sizes[number]
        there = sizes >= 0
        first = int(starts[there].min())
        size = int((starts + sizes)[there].max()) - first
        content = self._shard(shard).read(first, size)
        fields = zip(index.fields, (starts - first).tolist(), sizes.tolist(), strict=True)
        sample = {name: content[at : at + length] for name, at, length in fields if length >= 0}
        if len(content) < size or zlib.crc32(b"".join(sample.values())) != index.crc32[number]:
            what = "is truncated" if len(content) < size else "is damaged"
            raise BadShard(f"Shard {index.shards[shard].name} of {self.storage.url} {what} at byte {first:,}: {_REMEDY}")
        with self._lock:
            self.bytes_read += size
        return sample

    def _shard(self, shard: int) -> _Shard:
        with self._lock:
            entry = self._open.setdefault(shard, _Shard())
            self._open.move_to_end(shard)
            while len(self._open) > self.keep:
                self._open.popitem(last=False)  # whoever reads it still holds it
        with entry.lock:
            if entry.error is not None:
                raise entry.error
            if entry.file is None and entry.content is None:
                try:
                    entry.file, entry.content = self._opened(shard)
                except HocketError as error:
                    entry.error = error
                    raise
        return entry

    def _opened(self, shard: int) -> tuple[IO[bytes] | None, bytes | None]:
        known = self.index.shards[shard]
        if not self.remote:
            assert self.storage.path is not None
            try:
                return (self.storage.path / known.name).open("rb"), None
            except OSError as error:
                text = f"Shard {known.name} of {self.storage.url} cannot be opened ({error.strerror}): {_REMEDY}"
                raise BadShard(text) from None
        file = None if self.cache is None else self.cache.obtain(known.sha256, known.bytes, lambda out: self._fetch(shard, out))
        return (file, None) if file is not None else (None, self._fetch(shard))

    def _fetch(self, shard: int, out: IO[bytes] | None = None) -> bytes:
        """Fetch a shard into ``out``, or into memory; a second time if its bytes are wrong."""
        known, got = self.index.shards[shard], "nothing"
        for _ in range(2):
            digest, content, count = hashlib.sha256(), [], 0
            try:
                for block in self.storage.blocks(known.name):
                    digest.update(block)
                    count += len(block)
                    if out is None:
                        content.append(block)
                    else:
                        out.write(block)
            except FileNotFoundError:
                break
            with self._lock:
                self.bytes_fetched += count
            if digest.hexdigest() == known.sha256:
                return b"".join(content)
            got = f"{count:,} bytes with SHA-256 {digest.hexdigest()[:12]}…"
            if out is not None:
                out.seek(0)
                out.truncate(0)
        expected = f"expected {known.bytes:,} bytes with SHA-256 {known.sha256[:12]}…, got {got}"
        raise BadShard(f"Shard {known.name} of {self.storage.url} is damaged ({expected}): {_REMEDY}")


_REMEDY = "copy it again or pack again, or leave it out with on_bad_shard=skip."


class _Shard:
    """An open file, or content in memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file: IO[bytes] | None = None
        self.content: bytes | None = None
        self.error: HocketError | None = None

    def read(self, start: int, size: int) -> bytes:
        if self.content is not None:
            return self.content[start : start + size]
        assert self.file is not None
        return os.pread(self.file.fileno(), size, start)
