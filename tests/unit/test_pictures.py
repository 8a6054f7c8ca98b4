"""The pictures of the documentation are what the code does: they are drawn again and compared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "docs" / "methods"


def test_the_pictures_are_what_the_code_does() -> None:
    ended = subprocess.run([sys.executable, ROOT / "scripts" / "pictures", "--check"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("page", sorted(path.name for path in METHODS.glob("*.md") if path.name != "index.md"))
def test_every_method_has_a_picture_and_an_equation(page: str) -> None:
    text = (METHODS / page).read_text()
    assert re.search(r"!\[[^]]+\]\(pictures/[\w-]+\.svg\)", text), "no picture"
    assert "```math" in text, "no equation"
    assert re.search(r"\*\*(Papers?|Source)\.\*\*", text), "no paper"


def test_no_equation_loses_a_line() -> None:
    """The converter passes over what it does not know."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for latex in re.findall(r"^```math\n(.*?)^```$", page.read_text(), re.M | re.S):
            found = convert(latex.strip(), display="block")
            tables = latex.count(r"\begin{")
            assert found.count("<mtr>") == (latex.count("\\\\") + tables), f"{page.name}: {latex}"
            assert "&</mi>" not in found, f"{page.name}: {latex}"


def test_every_picture_is_on_a_page() -> None:
    shown = {name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(r"pictures/([\w-]+\.svg)", page.read_text())}
    assert shown == {path.name for path in (METHODS / "pictures").glob("*.svg")}
