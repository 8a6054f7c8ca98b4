"""What can be packed: class folders of pictures, folders of text, JSONL, CSV, Parquet, and data sets by name or from a factory."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hocket import noise
from hocket.data.base import CropFlip, DataSet, Normalise
from hocket.data.shards import decode
from hocket.data.shards.pack import Source
from hocket.data.shards.parquet import ParquetTable
from hocket.errors import HocketError

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
LABEL = "label"


class Pictures:
    """Files of pictures, one folder per class, or all in one; ``size`` crops and scales them to a square."""

    def __init__(self, folder: Path, files: list[Path], classes: list[str], size: int | None) -> None:
        self.folder, self.files, self.size = folder, files, size
        self.numbers = {name: number for number, name in enumerate(classes)}
        endings = dict.fromkeys("png" if size else file.suffix[1:].lower() for file in files)
        self.fields = (*endings, *(["cls"] if classes else []))
        self.about: dict[str, Any] = {"kind": "pictures", "classes": classes}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        file = self.files[number]
        content = file.read_bytes()
        try:
            decode.image(content)
        except (OSError, ValueError, SyntaxError) as error:
            raise HocketError(f"{file} is no picture that can be read ({error}): remove it, or convert it.") from None
        if self.size:
            content = _square(content, self.size)
        found = {"png" if self.size else file.suffix[1:].lower(): content}
        if self.numbers:
            found["cls"] = str(self.numbers[file.relative_to(self.folder).parts[0]]).encode()
        return found

    def digest(self) -> str:
        files = (f"{f.relative_to(self.folder)}:{f.stat().st_size}" for f in self.files)
        return f"{_digest([*files, *self.numbers])}/{self.size}"


class Texts:
    """Files of text, each a sample."""

    fields = ("txt",)

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self.folder, self.files = folder, files
        self.about: dict[str, Any] = {"kind": "text"}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        content = self.files[number].read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            raise HocketError(f"{self.files[number]} is no text in UTF-8: convert it, or move it elsewhere.") from None
        return {"txt": content}

    def digest(self) -> str:
        return _digest(f"{f.relative_to(self.folder)}:{f.stat().st_size}" for f in self.files)


class Lines:
    """The lines of a JSONL file: ``text`` becomes a field of its own where a line has nothing else but ``label``, and ``label``,
    where it is a whole number or a text, the class."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        ends = np.flatnonzero(self.content == ord("\n")) + 1
        edges = np.unique(np.concatenate([[0], ends, [len(self.content)]]))
        self.edges = [
            (a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True) if self.content[a:b].tobytes().strip()
        ]
        first = self._line(0) if self.edges else {}
        kind = type(first.get(LABEL))
        self.open = LABEL in first and kind not in (str, int, bool, type(None))  # a target of the user's own, which stays in JSON
        self.plain = isinstance(first.get("text"), str) and set(first) <= {"text", LABEL} and not self.open
        self.labels, self.numbers, names = LABEL in first and not self.open, dict[str, int](), list[str]()
        if kind is str:
            self.numbers, names = _numbered(str(self._line(number).get(LABEL)) for number in range(len(self.edges)))
        self.fields = ("txt" if self.plain else "json", *(["cls"] if self.labels else []))
        self.about: dict[str, Any] = {"kind": "text" if self.plain else "json", "classes": names}

    def __len__(self) -> int:
        return len(self.edges)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        line = self._line(number)
        found = {"cls": str(self._class(number, line)).encode()} if self.labels or (LABEL in line and not self.open) else {}
        if not self.plain:
            return {"json": json.dumps(line).encode(), **found}
        if not isinstance(line.get("text"), str) or not set(line) <= {"text", LABEL}:
            raise HocketError(f"{self.path} mixes records with only text and others (record {number + 1}): make them alike.")
        return {"txt": line["text"].encode(), **found}

    def _class(self, number: int, line: dict[str, Any]) -> int:
        """The number of a line's class, of the kind that the first line has."""
        label = line.get(LABEL)
        if self.labels and self.numbers and isinstance(label, str) and label.strip():
            return self.numbers[label]
        if self.labels and not self.numbers and isinstance(label, int) and label >= 0:
            return int(label)
        has = f"{json.dumps(label)} as {LABEL}" if LABEL in line else f"no {LABEL}"
        raise HocketError(
            f"{self.path} mixes labels (record {number + 1} has {has}): give all records a whole number from 0 as {LABEL}, or all "
            "a text, or none."
        )

    def _line(self, number: int) -> dict[str, Any]:
        start, stop = self.edges[number]
        try:
            found = json.loads(self.content[start:stop].tobytes())
        except ValueError as error:
            raise HocketError(f"Record {number + 1} of {self.path} is no JSON ({error}): correct it.") from None
        if not isinstance(found, dict):
            raise HocketError(
                f"Record {number + 1} of {self.path} is {type(found).__name__}, not an object with names: correct it."
            )
        return found

    def digest(self) -> str:
        return _digest([str(len(self.content)), str(len(self.edges))])


class Table:
    """A CSV file with a header: all columns but ``label`` are the input, as numbers where all of them are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open(newline="", encoding="utf-8") as file:
            try:
                rows = list(csv.reader(file))
            except (csv.Error, UnicodeDecodeError) as error:
                raise HocketError(f"{path} cannot be read as CSV ({error}): convert it to UTF-8 with commas.") from None
        self.header, self.rows = (rows[0] if rows else []), [row for row in rows[1:] if row]
        self.at = self.header.index(LABEL) if LABEL in self.header else None
        for number, row in enumerate(self.rows, 2):
            if len(row) != len(self.header):
                raise HocketError(f"Row {number} of {path} has {len(row)} columns, the header {len(self.header)}: correct it.")
            if self.at is not None and not row[self.at].strip():
                raise HocketError(f"Row {number} of {path} has no {LABEL}: fill it in, or remove the row.")
        self.classes, names = _numbered(row[self.at] for row in self.rows) if self.at is not None else ({}, [])
        self.numeric = bool(self.rows) and all(_is_number(cell) for row in self.rows for cell in self._inputs(row))
        self.fields = ("npy" if self.numeric else "json", *(["cls"] if self.at is not None else []))
        self.about: dict[str, Any] = {"kind": "table", "columns": self._inputs(self.header), "classes": names}

    def _inputs(self, row: list[str]) -> list[str]:
        return [cell for place, cell in enumerate(row) if place != self.at]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        row = self.rows[number]
        inputs = self._inputs(row)
        if self.numeric:
            found = {"npy": decode.npy(torch.tensor([float(cell) for cell in inputs]))}
        else:
            found = {"json": json.dumps(dict(zip(self._inputs(self.header), inputs, strict=True))).encode()}
        return found if self.at is None else {**found, "cls": str(self.classes[row[self.at]]).encode()}

    def digest(self) -> str:
        return _digest([json.dumps(self.header), str(self.path.stat().st_size), str(len(self.rows))])


class Tensors:
    """One part of a data set in memory: pictures as PNG, other inputs as .npy."""

    def __init__(self, data: DataSet, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.name, (self.inputs, self.targets) = data.name, pair
        shape = tuple(self.inputs.shape[1:])
        self.pictures = self.inputs.dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3)
        single = self.targets.dim() == 1 and not self.targets.is_floating_point()
        self.fields = ("png" if self.pictures else "npy", "cls" if single else "target.npy")
        self.about: dict[str, Any] = {"kind": "tensors", "source": data.name, "class_count": data.classes, "shape": list(shape)}
        if isinstance(data.prepare, Normalise):
            self.about["normalise"] = vars(data.prepare)
        if isinstance(data.augment, CropFlip):
            self.about["augment"] = vars(data.augment)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        x, y = self.inputs[number], self.targets[number]
        target = str(int(y)).encode() if self.fields[1] == "cls" else decode.npy(y.clone())
        return {self.fields[0]: decode.png(x) if self.pictures else decode.npy(x.clone()), self.fields[1]: target}

    def digest(self) -> str:
        return _digest([self.name, str(tuple(self.inputs.shape)), str(self.targets.double().sum().item())])


class Part:
    """Some samples of a source."""

    def __init__(self, source: Source, numbers: list[int]) -> None:
        self.source, self.numbers, self.fields, self.about = source, numbers, source.fields, source.about

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> dict[str, bytes]:
        return self.source[self.numbers[number]]

    def digest(self) -> str:
        return f"{self.source.digest()}/{_digest(map(str, self.numbers))}"


def divided(source: Source, test: float) -> dict[str, Source]:
    """A source of which about the share ``test`` is for testing: every sample by a hash of its number."""
    if not 0 < test < 1:
        raise HocketError(f"The share for testing is above 0 and below 1, got {test:g}: 0.1 is a tenth.")
    chosen = [noise.fold(number, 0x7E57) < test * 2**32 for number in range(len(source))]
    kept = {name: [n for n, taken in enumerate(chosen) if taken == tests] for name, tests in (("", False), ("test", True))}
    if not all(kept.values()):
        raise HocketError(f"{len(source)} samples are too few to take {test:g} of them for testing: give more, or another share.")
    return {name: Part(source, numbers) for name, numbers in kept.items()}


def parts(name: str, data: DataSet | None = None, size: int | None = None) -> dict[str, Source]:
    """The parts of a source, by where they go under the destination: ``""`` is what is trained on, ``"test"`` what is tested on."""
    if data is not None:
        if data.source is not None:
            raise HocketError(f"'{name}' is packed already: copy its folder, or pack what it was made of.")
        return {"": Tensors(data, data.train), **({} if data.test is None else {"test": Tensors(data, data.test)})}
    path = Path(name).expanduser()
    if path.is_dir():
        if (files := [file for file in path.iterdir() if file.is_file()]) and all(file.suffix == ".parquet" for file in files):
            return {"": ParquetTable(path)}
        inner = {part: path / part for part in ("train", "test") if (path / part).is_dir()}
        if set(inner) == {"train", "test"}:
            return _with_common_classes(_folder(inner["train"], size), _folder(inner["test"], size))
        return {"": _folder(path, size)}
    kinds: dict[str, Any] = {".jsonl": Lines, ".ndjson": Lines, ".csv": Table, ".parquet": ParquetTable}
    if path.suffix.lower() not in kinds:
        raise HocketError(
            f"'{name}' is not packed: give a folder, a .jsonl, .csv or .parquet file, a known data set or module:factory."
        )
    found: Source = kinds[path.suffix.lower()](path)
    if not len(found):
        raise HocketError(f"{path} has no samples: give one that has.")
    return {"": found}


def _folder(folder: Path, size: int | None) -> Source:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise HocketError(f"{folder} has no files: give a folder of pictures, one folder per class, or of text.")
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError:
            raise HocketError(f"The name of {str(file).encode(errors='replace').decode()} is not text: rename the file.") from None
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    if not pictures:
        return Texts(folder, files)
    depths = {len(file.relative_to(folder).parts) > 1 for file in pictures}
    if len(depths) > 1:
        raise HocketError(f"{folder} has pictures in class folders and beside them: move all into class folders, or none.")
    classes = sorted({file.relative_to(folder).parts[0] for file in pictures}) if depths == {True} else []
    return Pictures(folder, pictures, classes, size)


def _with_common_classes(train: Source, test: Source) -> dict[str, Source]:
    """Both parts with the classes of either, so that a class has the same number in both, also where one lacks some."""
    pictures = [part for part in (train, test) if isinstance(part, Pictures)]
    if len({(isinstance(part, Pictures), "cls" in part.fields) for part in (train, test)}) > 1:
        raise HocketError("Of the folders train and test one has pictures in class folders and the other not: make them alike.")
    classes = sorted({name for part in pictures for name in part.numbers})
    if not pictures:
        return {"": train, "test": test}
    common = (Pictures(part.folder, part.files, classes, part.size) for part in pictures)
    return dict(zip(("", "test"), common, strict=True))


def _square(content: bytes, size: int) -> bytes:
    from PIL import ImageOps

    with decode.pillow().open(io.BytesIO(content)) as picture:
        plain = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
        out = io.BytesIO()
        ImageOps.fit(plain, (size, size)).save(out, "png")
    return out.getvalue()


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()[:32]


def _numbered(labels: Iterable[str]) -> tuple[dict[str, int], list[str]]:
    """The number of each class, and their names: none where labels are whole numbers, which stay as they are.

    >>> _numbered(["yes", "no", "yes"]), _numbered(["7", "0"])
    (({'no': 0, 'yes': 1}, ['no', 'yes']), ({'0': 0, '7': 7}, []))
    """
    names = sorted(set(labels))
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}, []
    return {name: number for number, name in enumerate(names)}, names


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
