"""The notation of strategies: terms joined by ``+``, chains by ``|``, arguments in parentheses.

It reads text as terms and writes specs as text, without knowing the methods.

    term   = name [ "(" argument { "," argument } ")" ]  |  name "=" name
    argument = [ name "=" ] value
    value  = number | number "/" number | word | True | False | None | list | chain of terms
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from hocket.errors import HocketError, is_number, is_whole

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z_0-9.]))|(?P<word>[A-Za-z_][A-Za-z_0-9]*)|(?P<mark>[-+|/(),=\[\]]))"
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "none": None}
NAMED = ("feedback", "fragments")
"""Arguments that are written with their names, and those after them, too."""
_MAX_DEPTH = 20
_MAX_TOKEN = 100
"""No name is longer; a longer integer exceeds the range of float, and Python refuses integers of 4300 digits and more."""


@dataclass(frozen=True)
class Term:
    """``name(arguments)``."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ratio:
    """``count/of``: so many of each ``of`` consecutive values.

    >>> str(Ratio(64, 4096)), float(Ratio(64, 4096))
    ('64/4096', 0.015625)
    """

    count: int
    of: int

    def __post_init__(self) -> None:
        if not is_whole(self.of) or not is_whole(self.count, 1, self.of):
            raise HocketError(f"{self}: a ratio is two whole numbers, the first from 1 up to the second, such as 64/4096.")

    def __str__(self) -> str:
        return f"{self.count}/{self.of}"

    def __float__(self) -> float:
        return self.count / self.of


def read(text: str) -> list[list[Term]]:
    """The terms of a strategy, each a chain of one or more.

    >>> [[t.name for t in chain] for chain in read("local(4) + topk(0.01) | qsgd(4)")]
    [['local'], ['topk', 'qsgd']]
    """
    reader = _Reader(text)
    chains = [reader.chain()]
    while reader.take("+"):
        chains.append(reader.chain())
    if reader.peek()[0] != "end":
        raise reader.wrong("'+' or the end")
    return chains


class _Reader:
    """The tokens of one text, read from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens: list[tuple[str, str, int]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                start = end - len(text[position:end].lstrip())
                raise self.unreadable(f"unexpected {text[start]!r} at position {start + 1}")
            kind = match.lastgroup or ""
            if len(match.group(kind)) > _MAX_TOKEN:
                raise self.unreadable(f"a word or number is longer than {_MAX_TOKEN} characters")
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at][:2] if self.at < len(self.tokens) else ("end", "")

    def take(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise self.wrong(f"'{mark}'")

    def unreadable(self, why: str) -> HocketError:
        return HocketError(f"Cannot read the strategy {shortened(self.text, 60)}: {why}.")

    def wrong(self, wanted: str) -> HocketError:
        kind, token = self.peek()
        got = "the end" if kind == "end" else f"{token!r} at position {self.tokens[self.at][2] + 1}"
        return self.unreadable(f"expected {wanted}, got {got}")

    def chain(self, depth: int = 0) -> list[Term]:
        links = [self.term(depth)]
        while self.take("|"):
            links.append(self.term(depth))
        return links

    def term(self, depth: int) -> Term:
        kind, name = self.peek()
        if kind != "word":
            raise self.wrong("a method's name, such as bulk, gossip or topk(0.01)")
        self.at += 1
        if self.take("="):
            return Term(name, (self.value(depth + 1),), (("=", True),))
        if not self.take("("):
            return Term(name)
        arguments: list[Any] = []
        options: list[tuple[str, Any]] = []
        while not self.take(")"):
            if arguments or options:
                self.need(",")
            word = self.peek()
            if word[0] == "word" and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1][1] == "=":
                self.at += 2
                if word[1] in dict(options):
                    raise self.unreadable(f"{name} is given {word[1]} twice")
                options.append((word[1], self.value(depth + 1)))
            elif options:
                raise self.unreadable(f"in {name}(…) values without a name come first")
            else:
                arguments.append(self.value(depth + 1))
        return Term(name, tuple(arguments), tuple(options))

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self.unreadable("it is nested too deeply")
        kind, token = self.peek()
        if kind == "number":
            self.at += 1
            number = _number(token)
            if not self.take("/"):
                return number
            kind, token = self.peek()
            if kind != "number":
                raise self.wrong("a whole number after '/', as in 64/4096")
            self.at += 1
            return Ratio(number, _number(token))  # type: ignore[arg-type]  # a ratio refuses other numbers with a sentence
        if kind == "word":
            chain = self.chain(depth)
            return _WORDS[token] if token in _WORDS and chain == [Term(token)] else chain
        if self.take("["):
            values: list[Any] = []
            while not self.take("]"):
                if values:
                    self.need(",")
                values.append(self.value(depth + 1))
            return tuple(values)
        raise self.wrong("a value")


def _number(token: str) -> float:
    return float(token) if any(c in token for c in ".eE") else int(token)


def shortened(text: str, most: int) -> str:
    """A text in quotation marks, and its end left out where it has more than ``most`` characters."""
    return repr(text if len(text) <= most else f"{text[: most - 3]}…")


def write(spec: Any) -> str:
    """A spec (a frozen dataclass with a ``name``) in the notation; defaults are left out, but for a leading number or word."""
    arguments, positional = [], True
    named = [f for f in fields(spec) if not f.kw_only]
    for f in named:
        value = getattr(spec, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        leading = f is named[0] and (is_number(value) or hasattr(spec, "spelled"))
        if value == default and type(value) is type(default) and not leading:
            positional = False
            continue
        positional = positional and f.name not in NAMED
        arguments.append(_value(value) if positional else f"{f.name}={_value(value)}")
    return f"{spec.name}({', '.join(arguments)})" if arguments else spec.name


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if hasattr(value, "name") and hasattr(value, "__dataclass_fields__"):
        return write(value)
    return repr(value) if isinstance(value, (int, float)) else str(value)
