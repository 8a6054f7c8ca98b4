"""``shards:URL``: packed shards as the data set of ``hocket train`` and ``hocket study``, read while the training goes on.

Real and virtual workers take the same samples: rounds come from the same :class:`ShardOrder`. What lies under ``URL/test`` is
evaluated on, in memory. Options follow a ``#``: ``shards:https://host/set#cache=/scratch,cache_gb=50,on_bad_shard=skip``; a bad
sample that is left out is replaced by another of its mini-batch, so that no worker has fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.data import base
from hocket.data.base import CropFlip, DataSet, Normalise, Pair, identity, normalise_by
from hocket.data.shards import decode
from hocket.data.shards.index import FILE, Index
from hocket.data.shards.order import ShardOrder
from hocket.data.shards.reader import BadShard, ShardReader, check_reading
from hocket.data.shards.storage import Storage
from hocket.data.shards.stream import announced, decoded, in_order
from hocket.errors import HocketError, nearest

TEST = "test"
_HEAD, _THREADS, _PREFETCH, _AHEAD = 256, 4, 8, 1000
_OPTIONS = {"cache": str, "cache_gb": float, "on_bad_shard": str, "retry_s": float, "lanes": int, "window": int}


class Streamed:
    """The training samples of packed shards."""

    device = torch.device("cpu")

    def __init__(self, reader: ShardReader, options: dict[str, Any], device: torch.device | None = None) -> None:
        self.reader, self.options, self.target = reader, options, device
        self._wait_s = 0.0
        self._told: tuple[float, ...] = (0.0, reader.bytes_read, reader.skipped)

    def __len__(self) -> int:
        return sum(self.reader.index.counts)

    def __getitem__(self, index: Tensor) -> Pair:
        begun = time.perf_counter()
        found = self._read(index)
        self._wait_s += time.perf_counter() - begun
        return found

    def _read(self, index: Tensor) -> Pair:
        examples = decoded(self.reader, index.flatten().numpy(), _example)
        good = [example for example in examples if example is not None]
        if not good:
            raise BadShard(f"No sample of a mini-batch of {self.reader.storage.url} can be read: copy its shards again.")
        try:
            filled = [good[place % len(good)] if example is None else example for place, example in enumerate(examples)]
            pair = torch.stack([x for x, _ in filled]), torch.stack([y for _, y in filled])
        except RuntimeError as error:
            remedy = "pack pictures with --size, text as text:FOLDER"
            raise HocketError(f"Samples of {self.reader.storage.url} differ in shape ({error}): {remedy}.") from None
        x, y = (part.view(*index.shape, *part.shape[1:]) for part in pair)
        return (x, y) if self.target is None else (_moved(x, self.target), _moved(y, self.target))

    def on(self, device: torch.device) -> Streamed:
        return Streamed(self.reader, self.options, device)

    def batches(self, indices: Iterable[base.Index]) -> Iterator[Pair | list[Pair]]:
        items: Iterable[base.Index] = indices
        if self.reader.remote:
            items = announced(items, _numbers, _AHEAD, self.reader, _THREADS)
        read = self._read
        work = in_order(lambda i: read(i) if isinstance(i, Tensor) else [read(part) for part in i], items, _THREADS, _PREFETCH)
        while True:
            begun = time.perf_counter()
            found = next(work, None)
            self._wait_s += time.perf_counter() - begun
            if found is None:
                return
            yield found

    def order(self, seed: int) -> ShardOrder:
        return ShardOrder.of(self.reader.index, seed, self.options.get("lanes"), self.options.get("window"))

    def labels(self) -> Tensor | None:
        labels = self.reader.index.labels
        return torch.from_numpy(labels.astype(np.int64)) if (labels >= 0).all() else None

    def figures(self) -> dict[str, float]:
        """Of this process: seconds waited for data, bytes of samples read, samples left out."""
        now = (self._wait_s, self.reader.bytes_read, self.reader.skipped)
        found = [new - old for new, old in zip(now, self._told, strict=True)]
        self._told = now
        return dict(zip(("data_wait_s", "data_bytes", "data_skipped"), found, strict=True))


def load(reference: str) -> DataSet:
    """The data set of packed shards at a URL, with the options behind its ``#``."""
    url, _, text = reference.partition("#")
    options = _options(text)
    index = Index.load(url)
    reader = _reader(url, index, options)
    source = Streamed(reader, options)
    train = source[torch.arange(min(_HEAD, len(source)))]
    test = _test(url, options)
    classes = _classes(index, train[1])
    about = index.about
    augment = CropFlip(**about["augment"]) if "augment" in about else None
    return DataSet(f"shards:{reference}", train, test, classes, _prepare(about, train), augment, source)


def with_bad_shards(name: str, on_bad_shard: str | None) -> str:
    """The name of a data set of shards with what is done about bad ones among its options.

    >>> with_bad_shards("shards:/data", "skip"), with_bad_shards("shards:/data#cache=/tmp", "stop"), with_bad_shards("digits", None)
    ('shards:/data#on_bad_shard=skip', 'shards:/data#cache=/tmp,on_bad_shard=stop', 'digits')
    """
    if on_bad_shard is None:
        return name
    if not name.startswith("shards:"):
        raise HocketError(f"--on-bad-shard {on_bad_shard}: {name} has no shards; leave it out, or use --data shards:URL.")
    check_reading(on_bad_shard)
    return f"{name}{',' if '#' in name else '#'}on_bad_shard={on_bad_shard}"


def _reader(url: str, index: Index, options: dict[str, Any]) -> ShardReader:
    given: dict[str, Any] = {name: options[name] for name in ("cache", "on_bad_shard", "retry_s") if name in options}
    if "cache_gb" in options:
        given["cache_bytes"] = int(options["cache_gb"] * 1e9)
    order, reader = ShardOrder.of(index, 0, options.get("lanes"), options.get("window")), ShardReader(url, index, **given)
    reader.keep = order.open_pieces(1, reader.pieces) + _THREADS
    return reader


def _test(url: str, options: dict[str, Any]) -> Pair | None:
    """All samples of the shards for testing, where there are some."""
    inner = f"{url.rstrip('/')}/{TEST}"
    try:
        Storage(inner, 0.0).read(FILE)
    except FileNotFoundError:
        return None
    reader = _reader(inner, index := Index.load(inner), options)
    found = Streamed(reader, options)[torch.arange(sum(index.counts))]
    reader.close()
    return found


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """A copy on a device; to a GPU through pinned memory, so that the copy does not hold up what computes there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def _example(sample: dict[str, bytes]) -> Pair:
    found = decode.example(sample)
    if not isinstance(found, tuple) or not isinstance(found[0], Tensor):
        raise HocketError(
            f"A training needs pictures or arrays with a target; got samples of {', '.join(sample)}: pack class folders, a CSV "
            "file with a column label, or text as text:FOLDER, or read them in a loop of your own with hocket.data.stream."
        )
    return found[0], torch.as_tensor(found[1])


def _classes(index: Index, targets: Tensor) -> int:
    about = index.about
    if "class_count" in about:
        return int(about["class_count"])
    if about.get("classes"):
        return len(about["classes"])
    return int(index.labels.max()) + 1 if targets.dim() == 1 else targets.shape[1]


def _prepare(about: dict[str, Any], train: Pair) -> Any:
    if "normalise" in about:
        given = about["normalise"]
        return Normalise(tuple(given["mean"]), tuple(given["std"]), given["scale"])
    if not train[0].is_floating_point() and train[0].shape == train[1].shape:
        return _as_tokens
    return normalise_by(train[0]) if train[0].dtype == torch.uint8 and train[0].dim() == 4 else identity


def _as_tokens(x: Tensor) -> Tensor:
    return x.to(torch.int64)


def _numbers(index: base.Index) -> np.ndarray:
    return (index if isinstance(index, Tensor) else torch.cat(index)).flatten().numpy()


def _options(text: str) -> dict[str, Any]:
    """The options behind the ``#``.

    >>> _options("cache=/scratch,cache_gb=2.5")
    {'cache': '/scratch', 'cache_gb': 2.5}
    """
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            known = ", ".join(_OPTIONS)
            raise HocketError(f"'{name}' is no option of shards: after # come {known}{nearest(name, _OPTIONS) or '.'}")
        try:
            found[name] = _OPTIONS[name](value)
        except ValueError:
            raise HocketError(f"'{part}': the option {name} of shards needs a number.") from None
    return found
