"""Digits: 1,797 grey images 8×8 of handwritten digits, values 0…16, that come with the package and need no download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, licensed CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). This is its test part, the copy
that scikit-learn ships as ``load_digits``; values are unchanged, the file format is ours (``scripts/make_digits.py`` writes it).

Split: images sorted by ``noise.fold(0, i)``, ``i`` their place in the file; the first 1,437 are for training, the other
360 for testing.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from pathlib import Path

import torch

from hocket import noise
from hocket.data.base import DataSet, Normalise
from hocket.errors import HocketError

FILE = "digits.bin.gz"
SHA256 = "e1d88a0854e29e01d16358d2cd026aa8fc20dfc4cdb3fce004300857ea82aa70"
IMAGES, TRAIN = 1797, 1437


def load(data_dir: Path | None = None) -> DataSet:
    """The digits; ``data_dir`` is not used, it makes the signature that of the other sets.

    >>> data = load()
    >>> data.train[0].shape, data.test[0].shape, data.classes
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]), 10)
    """
    unzipped = gzip.decompress(resources.files("hocket.data").joinpath(FILE).read_bytes())
    if (got := hashlib.sha256(unzipped).hexdigest()) != SHA256:
        raise HocketError(
            f"The package's {FILE} is corrupt: expected SHA-256 {SHA256} of its content, got {got}; install hocket again."
        )
    # 1,797 label bytes, then 64 bytes for each image, row by row.
    content = torch.frombuffer(bytearray(unzipped), dtype=torch.uint8)
    labels, images = content[:IMAGES].to(torch.int64), content[IMAGES:].view(IMAGES, 1, 8, 8)
    order = torch.tensor(sorted(range(IMAGES), key=lambda i: noise.fold(0, i)))
    train, test = order[:TRAIN], order[TRAIN:]
    prepare = Normalise((0.3053,), (0.3760,), scale=16.0)
    return DataSet("digits", (images[train], labels[train]), (images[test], labels[test]), 10, prepare)
