"""What the constraints pin can be installed by every Python that the package supports."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def test_pins_ask_for_no_newer_python_than_the_package_does() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = re.fullmatch(r">=(\d+\.\d+)", project["requires-python"])
    assert lowest is not None
    checked = 0
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        try:
            found = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # only a build needs it
        if found["Version"].split("+")[0] == version:
            checked += 1
            assert SpecifierSet(found.get("Requires-Python") or "").contains(f"{lowest[1]}.0"), f"{name} {version}"
    assert checked > 20
