"""The index of packed shards, ``index.npz`` beside them: where each sample lies, and checksums.

Shards are tar files by WebDataset's convention: the members of a sample follow each other and are named ``KEY.FIELD``
(``000000012.png``, ``000000012.cls``), so that ``tar`` and ``webdataset`` read them without the index. The index is a NumPy archive
of plain arrays, not compressed: one of a million samples with two fields has 32 MB and opens in a fraction of a second.

Compressed shards (``.tar.gz``) are one gzip stream each, in which each block, a run of samples, begins after a full flush: programs
that know gzip read them as any other, and a reader that knows the blocks inflates each on its own.

- ``starts [samples, fields]`` int64, ``sizes [samples, fields]`` int32: where a member's content lies in its shard; size −1: none;
- ``crc32 [samples]`` uint32: of all content of a sample, in the order of the fields;
- ``labels [samples]`` int32: the class, −1 where there is none;
- ``blocks [blocks, 3]`` int64, of compressed shards only: a block's first sample, and its first byte in the tar and in the file;
- ``meta``: JSON: the fields; per shard its name, count of samples, bytes and SHA-256; what is known of the source.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hocket.data.files import replacing
from hocket.data.shards.storage import OPEN_RETRY_S, Storage
from hocket.errors import HocketError

FILE, VERSION, COMPRESSED = "index.npz", 1, 2
RECORD = 512
"""Bytes of a header in a tar file, and what contents are padded to."""
GZIP_HEADER = 10
"""Bytes before the first block of a gzip stream without a name."""


@dataclass(frozen=True)
class Shard:
    """One tar file."""

    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Index:
    """Where all samples of a set of shards lie; sample numbers run through the shards in the order of their names."""

    fields: tuple[str, ...]
    shards: tuple[Shard, ...]
    starts: np.ndarray
    sizes: np.ndarray
    crc32: np.ndarray
    labels: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)
    """What is known of the source: ``classes`` (names), ``normalise``, ``augment``, ``source``."""
    blocks: np.ndarray | None = None
    """Of compressed shards."""

    @property
    def counts(self) -> list[int]:
        """Samples of each shard."""
        return [shard.samples for shard in self.shards]

    @property
    def bytes(self) -> int:
        """Of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def digest(self) -> str:
        """Equal for equal content: what a checkpoint remembers a set of shards by."""
        return hashlib.sha256("".join(f"{s.samples}:{s.sha256};" for s in self.shards).encode()).hexdigest()[:32]

    def save(self, folder: Path) -> None:
        """Write ``index.npz``, whole or not at all."""
        version = VERSION if self.blocks is None else COMPRESSED
        meta = {"version": version, "fields": self.fields, "shards": [vars(s) for s in self.shards], "about": self.about}
        arrays = {"starts": self.starts, "sizes": self.sizes, "crc32": self.crc32, "labels": self.labels}
        if self.blocks is not None:
            arrays["blocks"] = self.blocks
        with replacing(folder / FILE) as out:
            np.savez(out, allow_pickle=False, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)

    @classmethod
    def load(cls, url: str, retry_s: float = OPEN_RETRY_S) -> Index:
        """The index of the shards at a path or URL."""
        storage = Storage(url, retry_s)
        try:
            content = storage.read(FILE)
        except FileNotFoundError:
            raise HocketError(
                f"There are no packed shards at {url}, which has no {FILE}: make them with `hocket data pack`."
            ) from None
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                meta = json.loads(arrays["meta"].tobytes())
                if meta["version"] not in (VERSION, COMPRESSED):
                    known = f"{VERSION} and {COMPRESSED}"
                    raise HocketError(f"{FILE} at {url} has version {meta['version']}, this Hocket reads {known}: pack it again.")
                shards = tuple(Shard(**shard) for shard in meta["shards"])
                own = {name: arrays[name] for name in ("starts", "sizes", "crc32", "labels")}
                blocks = arrays["blocks"] if meta["version"] == COMPRESSED else None
        except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError) as error:
            if isinstance(error, HocketError):
                raise
            raise HocketError(f"{FILE} at {url} is damaged ({error}): copy it again or pack again.") from None
        index = cls(tuple(meta["fields"]), shards, **own, about=meta["about"], blocks=blocks)
        if any(len(array) != sum(index.counts) for array in own.values()):
            raise HocketError(f"{FILE} at {url} is damaged (its arrays differ in length): copy it again or pack again.")
        return index
