"""A study as a TOML file.

    title = "Mine"
    workers = [4, 8]
    seeds = [0, 1]
    epochs = 5                                      # any setting of a run
    lr = "auto"                                     # or a number
    strategies = ["bulk + allreduce", "local(4)"]

    [[run]]                                         # one more, with settings of its own
    strategy = "bulk + dgc(0.01)"
    momentum = 0.0

Every error is one sentence that names the file and the line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from hocket.errors import HocketError, nearest
from hocket.strategy import Strategy
from hocket.study.lines import Lines, lines_of
from hocket.study.plan import AUTO, EACH, Outline
from hocket.study.presets import Entry
from hocket.train.settings import FIELDS, RunSettings, defaults, types

_TYPES = types()
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_COMMON = ("title", "strategies", "workers", "seeds", "run", "within", *(f for f in FIELDS if f not in EACH))
_OWN = ("strategy", "workers", "seeds", *(f for f in FIELDS if f not in EACH))


def read(path: Path) -> Outline:
    """The study that a file asks for."""
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
        self.lines: Lines = lines_of(text)

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
        if within is not None and (not isinstance(within, (int, float)) or isinstance(within, bool) or not within >= 0):
            self.wrong(f"within is a number of points of accuracy, got {within!r}", "within")
        return Outline(title, lambda *_: entries, None, workers, seeds, settings, lr, within)

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
                for value in chosen:
                    if value not in all_of_them:
                        self.wrong(
                            f"{name} {value} of this run is not among the study's {list(all_of_them)}; add it there", *here, name
                        )
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
        """A whole number or a list of different ones."""
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
    said = str(error)
    found = re.search(r" \(at line (\d+), column (\d+)\)$", said)
    line = found.group(1) if found else len(text.rstrip("\n").split("\n"))
    return f"{path}, line {line}: this is not TOML ({re.sub(r' .at .*$', '', said)}); correct the line."
