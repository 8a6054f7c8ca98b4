"""Laws of the axes: the specs declare what they can do, and no other module asks which method it has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hocket

SOURCE = Path(hocket.__file__).parent
AXES = ("sync", "topology", "compression")
BASES = {"Sync", "Topology", "Compressor"}
"""The kinds of spec; a strategy checks that each of its parts is of the right kind."""
SPECS = {"Asynchronous", "Codec", "Precision", "Selection"}
"""Bases of some of the methods."""


def _methods() -> set[str]:
    """The names of all classes that descend from the base of an axis."""
    trees = [ast.parse(path.read_text()) for axis in AXES for path in (SOURCE / axis).glob("*.py")]
    classes = {
        node.name: {ast.unparse(b) for b in node.bases} for t in trees for node in ast.walk(t) if isinstance(node, ast.ClassDef)
    }
    found = set(BASES)
    while more := {name for name, bases in classes.items() if bases & found} - found:
        found |= more
    return found - BASES


def _tests_of_class(tree: ast.AST, methods: set[str]) -> list[str]:
    """The expressions of ``tree`` that compare an object's class with a method's: isinstance, issubclass, type(…) and match."""
    found = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            asked = list(node.args[1:])
        elif isinstance(node, ast.Compare) and any("type(" in ast.unparse(side) for side in (node.left, *node.comparators)):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        names = {getattr(part, "id", getattr(part, "attr", "")) for a in asked for part in ast.walk(a)}
        if names & methods:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


def test_no_module_outside_the_axes_asks_which_method_it_has() -> None:
    methods = _methods()
    assert SPECS | {"Bulk", "Stale", "Gossip", "Server", "DGC", "Chain", "NoCompression", "LowRank"} <= methods
    outside = [p for p in sorted(SOURCE.rglob("*.py")) if p.relative_to(SOURCE).parts[0] not in AXES]
    asking = {str(p.relative_to(SOURCE)): found for p in outside if (found := _tests_of_class(ast.parse(p.read_text()), methods))}
    assert asking == {}, "ask for a capability that the spec declares"


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(strategy.sync, Bulk)",
        "isinstance(s, (Local, PostLocal))",
        "isinstance(c, compression.DGC)",
        "type(t) is Gossip",
        "issubclass(kind, Codec)",
        "match s:\n    case Stale():\n        pass",
    ],
)
def test_such_a_question_is_found(text: str) -> None:
    assert len(_tests_of_class(ast.parse(text), _methods())) == 1
