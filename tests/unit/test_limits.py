"""Laws of size: classes, functions and files that a reader can hold in mind, and one class of jobs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "limits.py"

spec = importlib.util.spec_from_file_location("limits", SCRIPT)
assert spec is not None
assert spec.loader is not None
limits = importlib.util.module_from_spec(spec)
sys.modules["limits"] = limits
spec.loader.exec_module(limits)


def test_the_source_keeps_the_limits() -> None:
    assert limits.problems(total=None) == []


def test_what_is_over_a_limit_is_named(tmp_path: Path) -> None:
    body = "\n".join(["        pass"] * 251)
    (tmp_path / "long.py").write_text(f"class FirstJob:\n    def run(self):\n{body}\n\n\nclass SecondJob:\n    pass\n")
    (tmp_path / "longer.py").write_text("x = 1\n" * 401)
    said = limits.problems(tmp_path, total=100, most_jobs=1)
    assert [sentence.split(" has ")[0] for sentence in said[:3]] == ["class FirstJob", "function FirstJob.run", "file longer.py"]
    assert "658 lines" in said[3]
    assert "2 job classes" in said[4]
