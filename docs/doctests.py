"""For mkdocstrings: examples in docstrings (``>>>``, up to the next empty line) become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences every example, so that Markdown leaves it alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(lambda example: f"\n```pycon\n{example[0]}\n```\n", obj.docstring.value)
