"""A plan file: which operations of a model are split in which way, as TOML.

1 = "columns"                 # a module's name
blocks.0.attention = "heads"  # dots in names may stand as they are
"blocks.*.mlp.*" = "whole"    # a pattern stands in quotes
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket.errors import SettingError, nearest


def read_plan(path: str | Path) -> dict[str, str]:
    """Kinds by module name or pattern, as ``hocket.parallelize(…, plan=…)`` takes them."""
    from hocket.split.tensor import KINDS  # loaded only where a model is split

    path = Path(path)
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingError(
            f"<plan_file>: it cannot be read ({error.strerror}); name a TOML file of modules and kinds.", plan_file=path
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"<plan_file> is not a TOML file: {error}.", plan_file=path) from None
    plan = dict(_entries(content))
    for name, kind in plan.items():
        if not isinstance(kind, str) or kind not in KINDS:
            hint = nearest(str(kind), KINDS) or "."
            raise SettingError(f"<plan_file> has {kind!r} for '{name}'{hint} Kinds are {', '.join(KINDS)}.", plan_file=path)
    if not plan:
        raise SettingError(
            '<plan_file> names no module; write for example 1 = "columns", or leave it out, and hocket finds a plan.',
            plan_file=path,
        )
    return plan


def _entries(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and kinds; what TOML reads as a table in a table is a name with a dot.

    >>> dict(_entries({"1": "columns", "blocks": {"0": {"attention": "heads"}}}))
    {'1': 'columns', 'blocks.0.attention': 'heads'}
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{before}{name}.")
        else:
            yield before + name, value
