"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hocket.data import cifar, digits, mnist, shakespeare
from hocket.data.base import DataSet
from hocket.data.factory import resolve
from hocket.data.files import DEFAULT_DIR
from hocket.data.tensors import from_parts
from hocket.errors import HocketError, nearest

DATA_SETS: dict[str, Callable[[Path], DataSet]] = {
    "digits": digits.load,
    "mnist": mnist.load,
    "cifar10": cifar.load_10,
    "cifar100": cifar.load_100,
    "shakespeare": shakespeare.load,
}


def load(name: str, data_dir: Path | None = None) -> DataSet:
    """The data set of that name, its files under ``data_dir`` (None: ``~/.cache/hocket``), downloaded when they are not there.

    ``module:factory`` names a function of your own; it returns a ``DataSet`` or the two parts (train, test), each of them a pair of
    tensors or a map-style torch data set.

    >>> load("digits").name
    'digits'
    """
    if ":" in name:
        return _own(name)
    if name not in DATA_SETS:
        hint = nearest(name, DATA_SETS) or ": choose one of these."
        raise HocketError(f"There is no data set '{name}' among {', '.join(DATA_SETS)} and 'module:factory'{hint}")
    return DATA_SETS[name]((data_dir or DEFAULT_DIR).expanduser())


def _own(reference: str) -> DataSet:
    made = resolve(reference)()
    if isinstance(made, DataSet):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        return from_parts(reference, *made)
    raise HocketError(
        f"'{reference}' must return a DataSet or the pair (train, test); got {type(made).__name__}: change what it returns."
    )
