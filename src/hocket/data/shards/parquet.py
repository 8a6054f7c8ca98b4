"""Parquet tables as a source of samples: a file, or a folder of files with the same columns, read into memory by pyarrow.

The column ``label`` is the class. ``text`` alone becomes text, ``image`` alone (bytes, or a struct with ``bytes`` as in Hugging
Face's data sets) a picture; other columns become one array where all are numbers, and a JSON object where they are not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from hocket.data.shards import decode
from hocket.errors import HocketError

LABEL = "label"
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}


class ParquetTable:
    """The rows of a table."""

    def __init__(self, path: Path) -> None:
        self.path, self.table = path, _read(path)
        names = [name for name in self.table.column_names if name != LABEL]
        if not names:
            raise HocketError(f"{path} has no column but {LABEL}: give a table with inputs, too.")
        labels = self.table[LABEL].to_pylist() if LABEL in self.table.column_names else []
        if (empty := next((n for n, label in enumerate(labels, 1) if label is None or not str(label).strip()), None)) is not None:
            raise HocketError(f"Row {empty} of {path} has no {LABEL}: fill it in, or remove the row.")
        known = sorted(set(labels))
        whole = all(isinstance(label, int) and label >= 0 for label in known)
        self.labels = labels if whole else list(map({name: n for n, name in enumerate(known)}.__getitem__, labels))
        self.columns = {name: self.table[name] for name in names}
        self.kind = self._kind()
        self.fields = (self.kind if self.kind != "image" else _picture(self._image(0), path), *(["cls"] if labels else []))
        self.about: dict[str, Any] = {"kind": "table", "columns": names, "classes": [] if whole else [str(name) for name in known]}

    def _kind(self) -> str:
        import pyarrow as pa

        types = {name: column.type for name, column in self.columns.items()}
        if list(types) == ["text"] and (pa.types.is_string(types["text"]) or pa.types.is_large_string(types["text"])):
            return "txt"
        if list(types) == ["image"]:
            return "image"
        numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        return "npy" if all(any(fits(found) for fits in numbers) for found in types.values()) else "json"

    def _image(self, number: int) -> Any:
        value = self.columns["image"][number].as_py()
        return value.get("bytes") if isinstance(value, dict) else value

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        row = {} if self.kind == "image" else {name: column[number].as_py() for name, column in self.columns.items()}
        if self.kind != "json" and None in row.values():
            empty = next(name for name, value in row.items() if value is None)
            raise HocketError(f"Row {number + 1} of {self.path} has no value for {empty}: fill it in, or remove the row.")
        if self.kind == "image":
            content = self._image(number)
            found = {_picture(content, self.path, number): content}
        elif self.kind == "txt":
            found = {"txt": row["text"].encode()}
        elif self.kind == "npy":
            found = {"npy": decode.npy(torch.tensor([float(value) for value in row.values()]))}
        else:
            found = {"json": json.dumps(row, default=str).encode()}
        if not set(found) <= set(self.fields):
            raise HocketError(f"{self.path} mixes pictures of several formats (row {number + 1}): convert them to one.")
        return {**found, "cls": str(self.labels[number]).encode()} if self.labels else found

    def digest(self) -> str:
        files = sorted(self.path.rglob("*.parquet")) if self.path.is_dir() else [self.path]
        sizes = [f"{file.name}:{file.stat().st_size}" for file in files]
        return hashlib.sha256(f"{self.table.schema}{self.table.num_rows}{sizes}".encode()).hexdigest()[:32]


def _picture(content: Any, path: Path, number: int = 0) -> str:
    found = next((ending for magic, ending in _MAGIC.items() if isinstance(content, bytes) and content.startswith(magic)), None)
    if found is None:
        raise HocketError(f"The image in row {number + 1} of {path} is no picture in bytes: store the bytes of PNG or JPEG files.")
    return found


def _read(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        raise HocketError("Parquet tables are read with pyarrow, which is not installed: pip install hocket[parquet].") from None
    try:
        return parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise HocketError(f"{path} cannot be read as Parquet ({str(error).splitlines()[0]}): write it again.") from None
