"""A study as a TOML file.

    title = "Mine"
    workers = [4, 8]
    seeds = [0, 1]
    epochs = 5                                      # any setting of a run
    lr = "auto"                                     # or a number
    outer = "auto"                                  # searches for rate and momentum of outer optimisers
    strategies = ["bulk + allreduce", "local(4)"]

    [[run]]                                         # one more, with settings of its own
    strategy = "bulk + dgc(0.01)"
    momentum = 0.0

Every error is one sentence that names the file and the line.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from hocket.errors import HocketError, is_number, nearest
from hocket.strategy import Strategy
from hocket.study.plan import AUTO, EACH, Entry, Outline
from hocket.train.settings import FIELDS, RunSettings, defaults, types

_TYPES = types()
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_COMMON = ("title", "strategies", "workers", "seeds", "run", "within", "outer", *(f for f in FIELDS if f not in EACH))
_OWN = ("strategy", "workers", "seeds", *(f for f in FIELDS if f not in EACH))


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
    """Line numbers, which ``tomllib`` does not give: of keys (``("run", 0, "lr")``: of the first ``[[run]]``) and list elements."""

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


def read(path: Path) -> Outline:
    return _Reader(path).outline()


class _Reader:
    """One file: what was read, and on which lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise HocketError(f"Cannot read the study {path} ({error.strerror}); name a preset or a TOML file.") from None
        except UnicodeDecodeError as error:
            raise HocketError(f"{path} is not text in UTF-8 ({error.reason}); write the study as a TOML file.") from None
        text = text.replace("\r\n", "\n")
        try:
            self.content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HocketError(_syntax(path, text, error)) from None
        except RecursionError:
            raise HocketError(f"{path} is nested too deeply; a study has no nested tables.") from None
        self.lines = lines_of(text)

    def outline(self) -> Outline:
        content = self.content
        self.check_names(content, _COMMON, ())
        strategies = content.get("strategies", [])
        tables = content.get("run", [])
        if not isinstance(strategies, list):
            self.wrong("strategies is a list of texts, such as ['bulk + allreduce', 'local(4)']", "strategies")
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            self.wrong("a single run is a table that begins with [[run]]", "run")
        if not strategies and not tables:
            raise HocketError(f"{self.path} names no strategies; add strategies = ['bulk + allreduce', 'local(4)'].")
        workers, seeds = self.numbers(content, "workers", ()) or (4,), self.numbers(content, "seeds", ()) or (0,)
        settings = self.settings(content, ())
        entries = [self.entry(s, {}, "strategies", i) for i, s in enumerate(strategies)]
        entries += [self.own(table, i, workers, seeds) for i, table in enumerate(tables)]
        lr = settings.pop("lr", defaults()["lr"])
        title, within = content.get("title", self.path.stem), content.get("within")
        if not isinstance(title, str):
            self.wrong(f"title is text, got {title!r}", "title")
        if within is not None and (not is_number(within) or not within >= 0):
            self.wrong(f"within is a number of points of accuracy, got {within!r}", "within")
        outer = content.get("outer")
        if outer not in (None, AUTO):
            self.wrong(f"outer is 'auto', got {outer!r}; write rate and momentum in the strategy", "outer")
        return Outline(title, lambda *_: entries, None, workers, seeds, settings, lr, within, outer=outer)

    def own(self, table: Mapping[str, Any], index: int, workers: tuple[int, ...], seeds: tuple[int, ...]) -> Entry:
        """A run with settings of its own; workers and seeds must be among the study's."""
        here = ("run", index)
        self.check_names(table, _OWN, here)
        if "strategy" not in table:
            self.wrong("a run needs a strategy", *here)
        own = self.settings(table, here)
        for name, all_of_them in (("workers", workers), ("seeds", seeds)):
            if chosen := self.numbers(table, name, here):
                own[name] = chosen
                for value in set(chosen) - set(all_of_them):
                    others = f"the study's {list(all_of_them)}"
                    self.wrong(f"{name} {value} of this run is not among {others}; add it there", *here, name)
        return self.entry(table["strategy"], own, *here, "strategy")

    def entry(self, strategy: Any, own: dict[str, Any], *where: str | int) -> Entry:
        if not isinstance(strategy, str):
            self.wrong(f"a strategy is text such as 'local(4) + gossip', got {strategy!r}", *where)
        try:
            Strategy.parse(strategy)
        except HocketError as error:
            self.wrong(str(error).removesuffix("."), *where)
        return Entry(strategy, own, f"{self.path}, line {self.lines.of(*where)}")

    def settings(self, table: Mapping[str, Any], here: tuple[str | int, ...]) -> dict[str, Any]:
        """The settings in a table, each checked for its type and for its effect."""
        given = {name: value for name, value in table.items() if name in FIELDS and name not in EACH}
        for name, value in given.items():
            if name == "lr" and value == AUTO:
                continue
            kind = next(t for t in (_TYPES[name], *get_args(_TYPES[name])) if t in _WORDS)
            if type(value) is not kind and not (kind is float and type(value) is int):
                auto = " or 'auto'" if name == "lr" else ""
                self.wrong(f"{name} is {_WORDS[kind]}{auto}, got {value!r}", *here, name)
            try:
                RunSettings.of(**{**_beside(name, table, self.content), name: value})
            except HocketError as error:
                self.wrong(str(error).removesuffix("."), *here, name)
        return given

    def numbers(self, table: Mapping[str, Any], name: str, here: tuple[str | int, ...]) -> tuple[int, ...]:
        if name not in table:
            return ()
        value = table[name]
        values = value if isinstance(value, list) else [value]
        least = 1 if name == "workers" else 0
        for i, one in enumerate(values):
            where = (*here, name, i) if value is values else (*here, name)
            if type(one) is not int or one < least:
                self.wrong(f"{name} are whole numbers of at least {least}, got {one!r}", *where)
            if values.index(one) < i:
                self.wrong(f"{name} names {one} twice", *where)
        if not values:
            self.wrong(f"{name} is empty; give at least one", *here, name)
        return tuple(values)

    def check_names(self, table: Mapping[str, Any], known: tuple[str, ...], here: tuple[str | int, ...]) -> None:
        for name in table:
            if name not in known:
                which = "a run of its own" if here else "a study"
                hint = nearest(name, known) or f"; it may have {', '.join(known)}"
                self.wrong(f"{which} has no field '{name}'{hint}", *here, name)

    def wrong(self, what: str, *where: str | int) -> NoReturn:
        mark = "" if what.endswith("?") else "."
        raise HocketError(f"{self.path}, line {self.lines.of(*where)}: {what}{mark}")


def _beside(name: str, *tables: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which checks of others depend: whether workers are virtual, and on which cluster."""
    if name not in ("cluster", "slowdown", "balance"):
        return {}
    given = {key: value for table in reversed(tables) for key, value in table.items()}
    virtual, cluster = given.get("virtual", True), given.get("cluster")
    return {"virtual": virtual is not False, "cluster": cluster if isinstance(cluster, str) else None}


def _syntax(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    message = str(error)
    found = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    line = found.group(1) if found else len(text.rstrip("\n").split("\n"))
    return f"{path}, line {line}: this is not TOML ({re.sub(r' .at .*$', '', message)}); correct the line."
