"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images 32×32 in 10 or 100 classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. Read from the published binary version:
``cifar-10-batches-bin`` and ``cifar-100-binary`` under the data folder, or their .tar.gz there. A record is the label bytes
(CIFAR-100: coarse, fine; the fine one is used), then the red, green and blue planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hocket.data import files
from hocket.data.base import CropFlip, DataSet, Normalise, Pair

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
_IMAGE = 3 * 32 * 32


@dataclass(frozen=True)
class _Kind:
    classes: int
    label_bytes: int
    prepare: Normalise
    sha256: str
    """Of the archive."""
    train: dict[str, str]
    test: dict[str, str]


_BATCHES = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
)
_CIFAR10 = _Kind(
    classes=10,
    label_bytes=1,
    prepare=Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    train={f"cifar-10-batches-bin/data_batch_{number}.bin": sha256 for number, sha256 in enumerate(_BATCHES, 1)},
    test={"cifar-10-batches-bin/test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"},
)
_CIFAR100 = _Kind(
    classes=100,
    label_bytes=2,
    prepare=Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    train={"cifar-100-binary/train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    test={"cifar-100-binary/test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
)


def load_10(data_dir: Path) -> DataSet:
    """CIFAR-10, downloaded into ``data_dir`` when it is not there."""
    return _load(data_dir, _CIFAR10)


def load_100(data_dir: Path) -> DataSet:
    """CIFAR-100 with its fine labels, downloaded into ``data_dir`` when it is not there."""
    return _load(data_dir, _CIFAR100)


def _load(data_dir: Path, kind: _Kind) -> DataSet:
    archive = f"cifar-{kind.classes}-binary.tar.gz"

    def absent() -> dict[str, str]:
        return {path: digest for path, digest in (kind.train | kind.test).items() if not (data_dir / path).exists()}

    def missing() -> list[files.Remote]:
        there = not absent() or (data_dir / archive).exists()
        return [] if there else [files.Remote(ADDRESS + archive, archive, kind.sha256)]

    files.obtain(f"CIFAR-{kind.classes}", data_dir, missing)
    if absent():
        with files.locked(data_dir):
            files.unpack(data_dir / archive, data_dir, absent())
    train, test = _part(data_dir, kind.train, kind.label_bytes), _part(data_dir, kind.test, kind.label_bytes)
    return DataSet(f"cifar{kind.classes}", train, test, kind.classes, kind.prepare, CropFlip())


def _part(data_dir: Path, paths: dict[str, str], label_bytes: int) -> Pair:
    content = bytearray(b"".join(files.read(data_dir / path, digest) for path, digest in paths.items()))
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, label_bytes + _IMAGE)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].to(torch.int64)
