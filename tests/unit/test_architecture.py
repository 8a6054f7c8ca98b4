"""docs/architecture.md says what the tree is: its drawing follows the imports, its walks name files that there are and go down."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def walks() -> dict[str, list[list[str]]]:
    """By a walk's title the files of each process that takes part, in order."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", TEXT, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        processes = re.split(r"^\*\*In ", body, flags=re.M)
        listed = [re.findall(r'^\d+\. <a href="\.\./src/hocket/([^"]+)">', part, flags=re.M) for part in processes]
        found[title] = [files for files in listed if files]
    return found


def depth() -> dict[str, int]:
    """How far down each package lies in the contract on imports."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        layers = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]["layers"]
    return {name.strip().removeprefix("hocket."): k for k, layer in enumerate(layers) for name in layer.split("|")}


def test_the_drawing_is_what_the_imports_say() -> None:
    ended = subprocess.run([sys.executable, ROOT / "scripts" / "architecture.py", "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_there_are_three_walks_of_files_that_there_are() -> None:
    found = walks()
    assert len(found) == 3
    assert [len(processes) for processes in found.values()] == [1, 1, 2]
    missing = [f for processes in found.values() for files in processes for f in files if not (ROOT / "src/hocket" / f).is_file()]
    assert not missing


def test_a_walk_never_goes_back_up_the_layers() -> None:
    layer = depth()
    for title, processes in walks().items():
        for files in processes:
            places = [layer[name.split("/")[0].removesuffix(".py")] for name in files]
            assert places == sorted(places), f"{title}: {list(zip(files, places, strict=True))}"
