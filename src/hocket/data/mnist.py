"""MNIST: 60,000 + 10,000 grey images 28×28 of handwritten digits (LeCun, Bottou, Bengio and Haffner, 1998).

Read from ``MNIST/raw`` under the data folder, in the published idx files, gzipped or not.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor

from hocket.data import files
from hocket.data.base import DataSet, Normalise, Pair

ADDRESS = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FOLDER = "MNIST/raw"
# name: SHA-256 of the gzipped file, SHA-256 of its content
FILES = {
    "train-images-idx3-ubyte": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}


def load(data_dir: Path) -> DataSet:
    """MNIST, downloaded into ``data_dir`` when it is not there."""
    folder = data_dir / FOLDER

    def missing() -> list[files.Remote]:
        absent = [name for name in FILES if not (folder / name).exists() and not (folder / f"{name}.gz").exists()]
        return [files.Remote(f"{ADDRESS}{name}.gz", f"{FOLDER}/{name}.gz", FILES[name][0]) for name in absent]

    files.obtain("MNIST", data_dir, missing)
    return DataSet("mnist", _part(folder, "train"), _part(folder, "t10k"), 10, Normalise((0.1307,), (0.3081,)))


def _part(folder: Path, part: str) -> Pair:
    # idx headers: 16 bytes before images, 8 before labels; the SHA-256 guarantees their content.
    images, labels = _content(folder, f"{part}-images-idx3-ubyte")[16:], _content(folder, f"{part}-labels-idx1-ubyte")[8:]
    return images.view(-1, 1, 28, 28), labels.to(torch.int64)


def _content(folder: Path, name: str) -> Tensor:
    zipped, plain = FILES[name]
    unpacked = (folder / name).exists()
    content = files.read(folder / name, plain) if unpacked else gzip.decompress(files.read(folder / f"{name}.gz", zipped))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
