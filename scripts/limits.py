"""The size of src/hocket: total lines, job classes, and the longest classes, functions and files.

python scripts/limits.py            prints the figures and everything over its limit
python scripts/limits.py --check    and exits with 1 if something is over
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "hocket"
LIMITS = {"class": 250, "function": 60, "file": 400}
TOTAL = 29_000
JOBS = 1


@dataclass(frozen=True)
class Item:
    """A class, a function or a file, and how many lines it has."""

    kind: str
    name: str
    place: str
    lines: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name} has {self.lines} lines ({self.place}); the limit is {LIMITS[self.kind]}"


def items(source: Path = SOURCE) -> Iterator[Item]:
    """All classes, functions and files under ``source``."""
    for path in sorted(source.rglob("*.py")):
        text, place = path.read_text(), str(path.relative_to(source))
        yield Item("file", place, place, len(text.splitlines()))
        yield from _definitions(ast.parse(text), "", place)


def _definitions(node: ast.AST, prefix: str, place: str) -> Iterator[Item]:
    """The classes and functions inside ``node``; their length includes decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(child, ast.ClassDef) else "function"
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            name = f"{prefix}{child.name}"
            yield Item(kind, name, f"{place}:{child.lineno}", (child.end_lineno or first) - first + 1)
            yield from _definitions(child, f"{name}.", place)
        else:
            yield from _definitions(child, prefix, place)


def jobs(found: list[Item]) -> list[Item]:
    """The classes that a user could hold as the job of a training."""
    return [item for item in found if item.kind == "class" and item.name.endswith("Job") and "." not in item.name]


def problems(source: Path = SOURCE, total: int | None = TOTAL, most_jobs: int | None = JOBS) -> list[str]:
    """What is over its limit, one sentence each; None for ``total`` or ``most_jobs`` leaves that limit out."""
    found = list(items(source))
    said = [str(item) for item in found if item.lines > LIMITS[item.kind]]
    lines = sum(item.lines for item in found if item.kind == "file")
    if total is not None and lines >= total:
        said.append(f"{source} has {lines} lines; the limit is {total - 1}")
    names = [f"{job.name} ({job.place})" for job in jobs(found)]
    if most_jobs is not None and len(names) > most_jobs:
        said.append(f"there are {len(names)} job classes: {', '.join(names)}; the limit is {most_jobs}")
    return said


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if something is over its limit")
    parser.add_argument(
        "--under", default="", help="only this folder of src/hocket, such as cluster; without the total and the jobs"
    )
    given = parser.parse_args(arguments)
    source = SOURCE / given.under
    found = list(items(source))
    print(f"{sum(item.lines for item in found if item.kind == 'file')} lines, {len(jobs(found))} job classes")
    for kind, limit in LIMITS.items():
        longest = sorted((item for item in found if item.kind == kind), key=lambda item: -item.lines)[:3]
        shown = ", ".join(f"{item.name} {item.lines} ({item.place})" for item in longest)
        print(f"longest {kind}, limit {limit}: {shown}")
    over = problems(source) if not given.under else problems(source, None, None)
    for problem in over:
        print(f"over: {problem}")
    sys.exit(1 if given.check and over else 0)


if __name__ == "__main__":
    main()
