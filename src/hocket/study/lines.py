"""The line numbers of keys and values in a TOML file: ``tomllib`` reads values without their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|(?P<string>\"\"\"(?:\\.|[^\\])*?\"{3,5}|'''.*?'{3,5}|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*')"
    r"|(?P<newline>\n)"
    r"|(?P<mark>[\[\]{},=])"
    r"|(?P<word>[^\s\[\]{},=#\"']+)"
    r"|(?P<space>[^\S\n]+)",
    re.DOTALL,
)


@dataclass
class Lines:
    """Lines of keys (``("run", 0, "lr")``: of the first ``[[run]]`` table) and of the elements of lists."""

    keys: dict[tuple[str | int, ...], int] = field(default_factory=dict)
    elements: dict[tuple[str | int, ...], list[int]] = field(default_factory=dict)

    def of(self, *path: str | int) -> int:
        """The line of a key or of an element, or of the table it is in."""
        if path[:-1] in self.elements and isinstance(path[-1], int):
            return self.elements[path[:-1]][path[-1]]
        while path and path not in self.keys:
            path = path[:-1]
        return self.keys.get(path, 1)


def lines_of(text: str) -> Lines:
    """The lines of keys and list elements in a text that ``tomllib`` has read.

    >>> found = lines_of('workers = [4,\\n  8]\\n[[run]]\\nlr = 1\\n')
    >>> found.of("workers", 1), found.of("run", 0, "lr"), found.of("run", 0)
    (2, 4, 3)
    """
    found = Lines()
    table: tuple[str | int, ...] = ()
    value: tuple[str | int, ...] | None = None  # whose value is being read
    key: list[str] = []  # parts of the key or header being read
    line, depth, headed = 1, 0, 0
    fresh = True  # an element may begin here
    counts: dict[str, int] = {}
    for match in _TOKEN.finditer(text + "\n"):
        kind, token = match.lastgroup, match.group()
        if kind == "newline" and depth == 0:
            if headed:
                name = ".".join(key)
                table = (name, counts.get(name, 0)) if headed == 2 else (name,)
                counts[name] = counts.get(name, 0) + 1
                found.keys.setdefault(table, line)
            key, value, headed = [], None, 0
        elif value is None and kind in ("word", "string"):
            key += [part for part in token.strip("\"'").split(".") if part]
        elif value is None and token == "[":
            headed += 1
        elif value is None and token == "=":
            value, fresh = (*table, *key[:1]), True
            found.keys.setdefault(value, line)
        elif value is not None and kind in ("word", "string", "mark"):
            if depth == 1 and fresh and token not in (",", "]"):
                found.elements.setdefault(value, []).append(line)
                fresh = False
            depth += (token in ("[", "{")) - (token in ("]", "}"))
            fresh = fresh or (token == "," and depth == 1)
        line += token.count("\n")
    return found
