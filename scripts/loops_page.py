"""Writes docs/guide/loops.md, "Does my loop work?", from the loops of tests/loops/published.py.

``python scripts/loops_page.py`` writes the page; a test compares it with the suite.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "loops.md"
sys.path.insert(0, str(ROOT / "tests"))

from loops.published import LOOPS, Loop  # noqa: E402
from loops.strategies import STRATEGIES  # noqa: E402

HEAD = """# Does my loop work?

Each line is a training loop as people publish it, run on two real processes with DDP and with Hocket under {count} strategies:
{strategies}. All workers must end with the same weights, and the loss must fall (not where two networks play against each other).
*Equal to DDP* compares the weights after `bulk` with those after `DistributedDataParallel`. What cannot work is refused in one
sentence at the first step it concerns; the last column has it.

The loops are in `tests/loops/published.py`; `python -m pytest tests/loops/test_published.py` runs them,
`python scripts/loops_page.py` writes this page.

| loop | `bulk` equal to DDP | refused |
|---|---|---|
"""


def equality(loop: Loop) -> str:
    """What the suite holds of bulk and DDP."""
    if "" in loop.refused or "bulk" in loop.refused:
        return "–"
    if not loop.ddp:
        return "DDP cannot run it as it stands"
    return "equal bits" if loop.tolerance == 0 else f"within {loop.tolerance:g}"


def refusal(loop: Loop) -> str:
    """Which strategies refuse it, with what words."""
    return "; ".join(f"{f'with `{key}`' if key else 'always'}: “… {words} …”" for key, words in loop.refused.items()) or "no"


def page() -> str:
    """The page as it should be."""
    head = HEAD.format(count=len(STRATEGIES), strategies=", ".join(f"`{strategy}`" for strategy in STRATEGIES))
    rows = (f"| {(inspect.getdoc(loop.run) or '').rstrip('.')} | {equality(loop)} | {refusal(loop)} |\n" for loop in LOOPS.values())
    return head + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
