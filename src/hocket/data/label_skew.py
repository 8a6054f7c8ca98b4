"""Partitions for experiments on data that are not identically distributed: each worker owns samples, chosen by their labels.

- ``label(k)``: samples sorted by label are cut into ``k`` parts per worker, and each worker gets ``k`` of them at random, so about
  ``k`` classes (McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data).
- ``dirichlet(a)``: each worker draws shares of classes from a Dirichlet distribution around those of the whole set, with
  concentration ``a`` times the number of classes: small ``a``, few classes per worker (Hsu, Qi, Brown 2019, Measuring the
  effects of non-identical data distribution). Classes that are used up are replaced by the others, so that all own equally many.

Who owns what depends on the labels, the number of workers and the seed alone; every sample has one owner.
"""

from __future__ import annotations

import math
import re

import numpy as np
import torch
from torch import Tensor

from hocket import noise
from hocket.errors import HocketError, SettingError

IID = "iid"
_TEXT = re.compile(r"(label|dirichlet)\(([0-9.e+-]+)\)")


def check(text: str) -> None:
    """Refuse what is no partition.

    >>> check("dirichlet(0.5)"), check("label(2)"), check("iid")
    (None, None, None)
    """
    if text != IID:
        _parsed(text)


def owners(text: str, labels: Tensor | None, workers: int, seed: int) -> Tensor | None:
    """The worker that owns each sample; None where any worker may have any.

    >>> owners("label(1)", torch.tensor([1, 0, 1, 0]), 2, seed=0).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    True
    """
    if text == IID:
        return None
    kind, value = _parsed(text)
    if labels is None:
        raise HocketError(f"The partition {text} divides data by label, but these labels are not whole numbers: use iid.")
    generator = np.random.default_rng(noise.fold(seed, 0x0B5E))
    order = generator.permutation(len(labels))
    by_label = order[np.argsort(labels.numpy()[order], kind="stable")]
    found = np.empty(len(labels), np.int64)
    if kind == "label":
        parts = np.array_split(by_label, workers * int(value))
        for place, part in enumerate(generator.permutation(len(parts)).tolist()):
            found[parts[part]] = place % workers
    else:
        counts = _dirichlet(np.unique(labels.numpy(), return_counts=True)[1], workers, value, generator)
        found[by_label] = np.concatenate([np.repeat(np.arange(workers), column) for column in counts.T])
    return torch.from_numpy(found)


def _dirichlet(sizes: np.ndarray, workers: int, concentration: float, generator: np.random.Generator) -> np.ndarray:
    """How many samples of each class each worker owns ``[workers, classes]``."""
    left, total = sizes.copy(), int(sizes.sum())
    found = np.zeros((workers, len(sizes)), np.int64)
    for worker in range(workers):
        missing = total // workers + (worker < total % workers)
        shares = generator.dirichlet(np.maximum(concentration * sizes * len(sizes) / total, 1e-6))
        while missing:
            open_shares = np.where(left > 0, np.maximum(shares, 1e-12), 0.0)
            drawn = np.minimum(generator.multinomial(missing, open_shares / open_shares.sum()), left)
            found[worker] += drawn
            left -= drawn
            missing -= int(drawn.sum())
    return found


def _parsed(text: str) -> tuple[str, float]:
    match = _TEXT.fullmatch(text)
    try:
        value = float(match[2]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not 0 < value < math.inf or (match[1] == "label" and value != int(value)):
        raise SettingError(
            "<partition>: it is iid, label(2) (about two classes per worker) or dirichlet(0.5) (smaller numbers, fewer classes).",
            partition=text,
        )
    return match[1], value
