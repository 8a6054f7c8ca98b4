"""Data sets by name, and functions of the user's named in a string, ``module:factory``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hocket.data import cifar, digits, mnist, shakespeare, text
from hocket.data.base import DataSet
from hocket.data.files import DEFAULT_DIR
from hocket.data.shards import dataset as shards
from hocket.data.tensors import from_parts
from hocket.errors import HocketError, nearest

T = TypeVar("T")
DATA_SETS: dict[str, Callable[[Path], DataSet]] = {
    "digits": digits.load,
    "mnist": mnist.load,
    "cifar10": cifar.load_10,
    "cifar100": cifar.load_100,
    "shakespeare": shakespeare.load,
}


def load(name: str, data_dir: Path | None = None) -> DataSet:
    """The data set of that name, its files under ``data_dir`` (None: ``~/.cache/hocket``), downloaded when they are not there.

    ``text:PATH`` reads text files byte by byte (:mod:`hocket.data.text`), ``shards:URL`` packed shards
    (:mod:`hocket.data.shards.dataset`). ``module:factory`` names a function of your own, called
    without arguments; it returns a ``DataSet`` or two parts (train, test), each of them a pair of tensors (inputs, targets) or a
    map-style torch data set of ``(tensor, label)``. Targets are class numbers (int64) or shares of classes (floats
    ``[n, classes]``); it must return the same samples in every process.

    >>> load("digits").name
    'digits'
    """
    if name.startswith("text:"):
        return text.load(name.removeprefix("text:"))
    if name.startswith("shards:"):
        return shards.load(name.removeprefix("shards:"))
    if ":" not in name:
        return named("data set", name, DATA_SETS, "text:PATH", "shards:URL", "module:factory")(
            (data_dir or DEFAULT_DIR).expanduser()
        )
    made = resolve(name)()
    if isinstance(made, DataSet):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        return from_parts(name, *made)
    got = f"got {type(made).__name__}"
    raise HocketError(f"'{name}' must return a DataSet or the pair (train, test); {got}: change what it returns.")


def named(what: str, name: str, known: Mapping[str, T], *others: str) -> T:
    """The one of that name."""
    if name not in known:
        hint = nearest(name, known) or ": choose one of these."
        *most, last = [*known, *others]
        raise HocketError(f"There is no {what} '{name}' among {', '.join(most)} and {last}{hint}")
    return known[name]


def resolve(reference: str) -> Callable[..., Any]:
    """The callable that ``module:factory`` names.

    >>> resolve("math:floor")(2.5)
    2
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise HocketError(f"A factory is named 'module:function'; got '{reference}': write both sides of the colon.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but lacks one of its own imports must say so itself.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise HocketError(
            f"There is no module '{error.name}' for '{reference}': run where it can be imported or install its package."
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        hint = nearest(attribute, [name for name in vars(module) if callable(vars(module)[name])])
        raise HocketError(f"Module '{module_name}' has no function '{attribute}'{hint or ': name one that it defines.'}")
    return found
