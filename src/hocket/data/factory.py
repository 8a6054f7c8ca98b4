"""``module:factory``: a function of the user's, named in a string."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hocket.errors import HocketError, nearest


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
