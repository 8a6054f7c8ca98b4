"""Samples of packed shards by their number, from a folder, a cache or memory; every sample is checked by its CRC-32.

Shards on a path are read where they lie. With a cache, others are fetched into it whole and checked by their SHA-256. Without one,
pieces of up to a MB are fetched into memory, by range, so that no two workers fetch the same bytes and the first batch need not
wait for whole shards; pieces that were not used for longest are dropped. Of compressed shards a block is a piece, which is inflated
in memory wherever it lies.
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
from hocket.data.shards.index import RECORD, Index
from hocket.data.shards.storage import RETRY_S, Storage
from hocket.errors import HocketError, nearest

PIECE_BYTES, _PIECES = 1 << 20, 1000
"""A piece has so many bytes, or down to a quarter of them where a set would have fewer pieces than that: those at the edges of
lanes are fetched twice."""
OnBad = Literal["stop", "skip"]
Sample = dict[str, bytes]


class BadShard(HocketError):
    """A shard, or a sample in it, that is not what its index says."""


def check_reading(on_bad_shard: str = "stop", **_: object) -> None:
    """Refuse what cannot be."""
    if on_bad_shard not in get_args(OnBad):
        raise HocketError(f"on_bad_shard is stop or skip, got '{on_bad_shard}'{nearest(on_bad_shard, get_args(OnBad)) or '.'}")


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
        check_reading(on_bad_shard)
        self.index, self.storage, self.on_bad_shard = index, Storage(url, retry_s), on_bad_shard
        self.cache = None if cache is None else Cache(cache, cache_bytes)
        self.bytes_read = self.bytes_fetched = self.skipped = 0
        """Bytes of samples, bytes fetched from elsewhere, and samples that were left out."""
        self._ends = np.cumsum(index.counts)
        local = self.storage.path is not None or cache is not None
        by_piece = index.blocks is not None if local else self.storage.knows_ranges()
        most_bytes = min(PIECE_BYTES, max(PIECE_BYTES // 4, index.bytes // _PIECES))
        self._pieces = _Pieces(index, most_bytes if by_piece else None)
        self.keep = keep
        """So many pieces are held open."""
        self._open: OrderedDict[int, _Piece] = OrderedDict()
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
        return self.samples(np.array([number]))[0]

    def samples(self, numbers: np.ndarray) -> list[Sample | None]:
        """The content of each sample by field; None where it is bad and may be left out."""
        index = self.index
        pieces, crcs = self.pieces_of(numbers).tolist(), index.crc32[numbers].tolist()
        wanted = zip(pieces, index.starts[numbers].tolist(), index.sizes[numbers].tolist(), crcs, strict=True)
        found: list[Sample | None] = []
        held: dict[int, _Piece] = {}
        for piece, starts, sizes, crc in wanted:
            try:
                found.append(self._checked(held, piece, starts, sizes, crc))
            except BadShard as error:
                self.bad(error)
                found.append(None)
        with self._lock:
            self.bytes_read += sum(len(content) for sample in found if sample is not None for content in sample.values())
        return found

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

    @property
    def pieces(self) -> int:
        """How many pieces the data are fetched in: the number of shards, or more."""
        return len(self._pieces)

    def pieces_of(self, numbers: np.ndarray) -> np.ndarray:
        """What is fetched for these samples."""
        return self._pieces.of(numbers)

    def want(self, piece: int) -> None:
        """Fetch a piece; what is wrong with it is said when it is read."""
        with suppress(HocketError):
            self._piece(piece)

    def _checked(self, held: dict[int, _Piece], piece: int, starts: list[int], sizes: list[int], crc: int) -> Sample:
        """A sample; ``held`` has the pieces of its batch that were looked up already."""
        entry = held[piece] if piece in held else self._piece(piece)
        held[piece] = entry
        sample = self._cut(entry, starts, sizes, crc)
        if sample is None and entry.content is not None and not entry.again:  # what arrived damaged is fetched once more
            held[piece] = self._piece(piece, again=entry)
            sample = self._cut(held[piece], starts, sizes, crc)
        if sample is None:
            name, first = self.index.shards[self._pieces.shards[piece]].name, min(starts)
            raise BadShard(f"Shard {name} of {self.storage.url} is damaged or truncated at byte {first:,}: {_REMEDY}")
        return sample

    def _cut(self, entry: _Piece, starts: list[int], sizes: list[int], crc: int) -> Sample | None:
        """A sample's fields; None if they are not what the index says."""
        sample, found = {}, 0
        for name, start, size in zip(self.index.fields, starts, sizes, strict=True):
            if size >= 0:
                sample[name] = content = entry.read(start, size)
                found = zlib.crc32(content, found)
        return sample if found == crc else None

    def _piece(self, piece: int, again: _Piece | None = None) -> _Piece:
        with self._lock:
            if again is not None and self._open.get(piece) is again:
                self._open[piece] = _Piece(again=True)
            entry = self._open.setdefault(piece, _Piece())
            self._open.move_to_end(piece)
            while len(self._open) > self.keep:
                self._open.popitem(last=False)  # whoever reads it still holds it
        with entry.lock:
            if entry.error is not None:
                raise entry.error
            if entry.file is None and entry.content is None:
                try:
                    self._fill(entry, piece)
                except HocketError as error:
                    entry.error = error
                    raise
        return entry

    def _fill(self, entry: _Piece, piece: int) -> None:
        shard, begin, end = self._pieces.extent(piece)
        file = self._file(shard)
        if self.index.blocks is not None:
            if file is None:
                packed = self._part(self.index.shards[shard].name, begin, end)
            else:
                with file:
                    packed = os.pread(file.fileno(), end - begin, begin)
            entry.begin, entry.content = int(self._pieces.places[piece]), _inflated(packed)
        elif file is None:
            entry.begin, entry.content = begin, self._part(self.index.shards[shard].name, begin, end)
        else:
            entry.file = file

    def _file(self, shard: int) -> IO[bytes] | None:
        """A shard's file, where it lies on a path or in the cache."""
        known = self.index.shards[shard]
        if self.remote:
            cache = self.cache
            return None if cache is None else cache.obtain(known.sha256, known.bytes, lambda out: self._fetch(shard, out))
        assert self.storage.path is not None
        try:
            return (self.storage.path / known.name).open("rb")
        except OSError as error:
            text = f"Shard {known.name} of {self.storage.url} cannot be opened ({error.strerror}): {_REMEDY}"
            raise BadShard(text) from None

    def _part(self, name: str, begin: int, end: int) -> bytes:
        """These bytes of a shard."""
        try:
            content = b"".join(self.storage.blocks(name, begin, end))
        except FileNotFoundError:
            raise BadShard(f"Shard {name} of {self.storage.url} is missing: {_REMEDY}") from None
        with self._lock:
            self.bytes_fetched += len(content)
        return content

    def _fetch(self, shard: int, out: IO[bytes]) -> None:
        """Fetch a shard for the cache; a second time if its bytes are wrong."""
        known, got = self.index.shards[shard], "nothing"
        for _ in range(2):
            digest, count = hashlib.sha256(), 0
            try:
                for block in self.storage.blocks(known.name):
                    digest.update(block)
                    count += len(block)
                    out.write(block)
            except FileNotFoundError:
                break
            with self._lock:
                self.bytes_fetched += count
            if digest.hexdigest() == known.sha256:
                return
            got = f"{count:,} bytes with SHA-256 {digest.hexdigest()[:12]}…"
            out.seek(0)
        expected = f"expected {known.bytes:,} bytes with SHA-256 {known.sha256[:12]}…, got {got}"
        raise BadShard(f"Shard {known.name} of {self.storage.url} is damaged ({expected}): {_REMEDY}")


_STEP = 1 << 16
_REMEDY = "copy it again or pack again, or leave it out with on_bad_shard=skip."


def _inflated(content: bytes) -> bytes:
    """What a block of a gzip stream holds, or all blocks; as much of it as is not damaged."""
    unpacker, found = zlib.decompressobj(-zlib.MAX_WBITS), []
    with suppress(zlib.error):
        for start in range(0, len(content), _STEP):
            found.append(unpacker.decompress(content[start : start + _STEP]))
    return b"".join(found)


class _Pieces:
    """What is fetched at a time: whole shards (``most_bytes`` None), or runs of samples of about so many bytes of a shard, or the
    blocks of compressed shards. ``places`` says where the content of each begins in the tar."""

    def __init__(self, index: Index, most_bytes: int | None) -> None:
        counts = np.asarray(index.counts, np.int64)
        if index.blocks is not None:
            first_samples = np.cumsum(counts) - counts
            blocks = index.blocks if most_bytes is not None else index.blocks[np.isin(index.blocks[:, 0], first_samples)]
            self._firsts, self.places, self._begins = blocks.T
            self.shards = np.searchsorted(first_samples, self._firsts, side="right") - 1
        else:
            self._of_plain(index, counts, most_bytes)
        last = np.append(self.shards[1:] != self.shards[:-1], True)
        self._ends = np.where(last, [index.shards[s].bytes for s in self.shards], np.roll(self._begins, -1))

    def _of_plain(self, index: Index, counts: np.ndarray, most_bytes: int | None) -> None:
        each = np.array([1 if most_bytes is None else min(s.samples, max(1, -(-s.bytes // most_bytes))) for s in index.shards])
        self.shards = np.repeat(np.arange(len(counts)), each)
        place = np.arange(len(self.shards)) - np.repeat(np.cumsum(each) - each, each)
        self._firsts = (np.cumsum(counts) - counts)[self.shards] + place * counts[self.shards] // each[self.shards]
        starts = np.where(index.sizes[self._firsts] >= 0, index.starts[self._firsts], np.iinfo(np.int64).max).min(1) - RECORD
        self.places = self._begins = np.where(place == 0, 0, starts)

    def __len__(self) -> int:
        return len(self.shards)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The pieces of samples."""
        return np.searchsorted(self._firsts, numbers, side="right") - 1

    def extent(self, piece: int) -> tuple[int, int, int]:
        """The shard of a piece, its first byte there and the one behind its last."""
        return int(self.shards[piece]), int(self._begins[piece]), int(self._ends[piece])


class _Piece:
    """An open file, or content in memory from byte ``begin`` of a shard on."""

    def __init__(self, again: bool = False) -> None:
        self.lock = threading.Lock()
        self.file: IO[bytes] | None = None
        self.content: bytes | None = None
        self.begin, self.again = 0, again
        self.error: HocketError | None = None

    def read(self, start: int, size: int) -> bytes:
        if self.content is not None:
            return self.content[start - self.begin : start - self.begin + size]
        assert self.file is not None
        return os.pread(self.file.fileno(), size, start)
