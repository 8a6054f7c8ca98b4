"""Packages that come with an extra: imported, or an error that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from hocket.errors import HocketError


class MissingExtra(HocketError, ImportError):
    """A package that comes with an extra is not installed."""


def require(module: str, extra: str) -> Any:
    """The module; without it, the command that installs it.

    >>> require("json", "tensorboard").__name__
    'json'
    >>> require("no_such_module", "tensorboard")
    Traceback (most recent call last):
    hocket.extras.MissingExtra: no_such_module is not installed; install it with: pip install 'hocket[tensorboard]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, but lacks something of its own
        name = module.partition(".")[0]
        raise MissingExtra(f"{name} is not installed; install it with: pip install 'hocket[{extra}]'") from None
