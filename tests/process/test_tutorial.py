"""The tutorial: its cells run in order, and its page and pictures are those of the notebook."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tutorial.py"

spec = importlib.util.spec_from_file_location("tutorial", SCRIPT)
assert spec is not None
assert spec.loader is not None
tutorial = importlib.util.module_from_spec(spec)
sys.modules["tutorial"] = tutorial
spec.loader.exec_module(tutorial)


def notebook() -> dict[str, Any]:
    return json.loads(tutorial.NOTEBOOK.read_text())


def test_the_page_shows_what_the_notebook_has_shown() -> None:
    text, pictures = tutorial.page(notebook())
    folder = tutorial.NOTEBOOK.parent
    assert (folder / "tutorial.md").read_text() == text, "python scripts/tutorial.py --page writes it"
    assert {path.name: path.read_bytes() for path in folder.glob("tutorial-*.png")} == pictures
    cells = [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "it was run from the top, once"
    assert all(cell["outputs"] for cell in cells)


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore")
def test_its_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = notebook()
    for cell in found["cells"]:
        cell["outputs"] = []
    tutorial.run(found)
    text, pictures = tutorial.page(found)
    accuracies = [float(each) for each in re.findall(r"accuracy ([\d.]+)%", text)]
    assert len(accuracies) == 1 + 3 + 5, "alone, three strategies, five epochs of two processes"
    assert min(accuracies[:4]) > 93
    assert accuracies[-1] > 93
    assert [name for name in pictures] == ["tutorial-1.png"]
    for words in (
        "8 virtual workers, 8 epochs",
        "Predicted, not measured",
        "Goal: soonest within 1 point of bulk",  # what is advised depends on how fast this machine is
        "worker 0 sent 57 kB in 28 exchanges",
    ):
        assert words in text
    fewer = [int(times) for times in re.findall(r"(\d+) times fewer bytes than bulk\n", text)]
    assert fewer == sorted(fewer)
    assert fewer[-1] > 50
