"""The documentation names what is there: every benchmark, every extra, and figures of every method, or that there are none."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = sorted(path for path in (ROOT / "docs" / "methods").glob("*.md") if path.stem not in ("index", "taxonomy"))


def test_every_benchmark_stands_in_the_table_with_its_command() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text().partition("\n## ")[0]
    named = []
    for first, command in re.findall(r"^\| (`[^|]+) \|.*\| ([^|]+) \|$", table, re.MULTILINE):
        files = re.findall(r"`(\w+\.py)`", first)
        assert all(f"benchmarks/{name}" in command for name in files) or command == "not started by hand", first
        named += files
    assert sorted(named) == sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def test_getting_started_names_what_the_core_needs_and_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "guide" / "getting-started.md").read_text()
    core = re.search(r"The core needs (.*)\. Codes", page, re.MULTILINE)
    assert core is not None
    assert re.split(", | and ", core[1]) == [re.match(r"\w+", needed)[0] for needed in project["dependencies"]]
    extras = [extra for row in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for extra in re.findall(r"`(\w+)`", row)]
    assert set(project["optional-dependencies"]) <= set(extras)


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_page_of_a_method_has_figures_or_says_that_there_are_none(page: Path) -> None:
    assert re.search(r"\*\*Figures|\(\.\./results/|python benchmarks/|[Nn]ot measured here", page.read_text())
