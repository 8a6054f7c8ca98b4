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
from loops.simulated import SIMULATED  # noqa: E402
from loops.strategies import STRATEGIES  # noqa: E402

HEAD = """# Does my loop work?

Each line is a training loop as people publish it, run on two real processes with DDP and with Hocket under {count} strategies:
{strategies}. All workers must end with the same weights, and the loss must fall (not where two networks play against each other).
*Equal to DDP* compares the weights after `bulk` with those after `DistributedDataParallel`. What cannot work is refused in one
sentence at the first step it concerns; the last column has it.

*Virtual workers*: what is a model, a loss, a data set and one optimiser also runs on two [virtual workers](virtual-workers.md)
under the same strategies: the loss must fall under each, and after `bulk` the weights must be within 1e-05 of those of a plain loop
over all mini-batches. Other loops do more between two steps than `hocket.simulate` knows of (–).

Under `async`, `downpour` and `stale` the loops stay as they are, but a fast worker makes more steps than a slow one:
[what that means for a loop](asynchronous.md#on-real-machines).

The loops are in `tests/loops/published.py` and `tests/loops/simulated.py`, run by `python -m pytest
tests/loops/test_published.py tests/loops/test_simulated.py`; `python scripts/loops_page.py` writes this page.

| loop | `bulk` equal to DDP | virtual workers | refused |
|---|---|---|---|
"""


def equality(loop: Loop) -> str:
    """What the suite holds of bulk and DDP."""
    if "" in loop.refused or "bulk" in loop.refused:
        return "–"
    if not loop.ddp:
        return "DDP cannot run it as it stands"
    return "equal bits" if loop.tolerance == 0 else f"within {loop.tolerance:g}"


def virtual(loop: Loop) -> str:
    """What the suite holds of it on virtual workers."""
    found = SIMULATED.get(loop.name)
    if found is None:
        return "–"
    if found.refused:
        return f"always refused: “… {found.refused} …”"
    return "`bulk` equal to a plain loop" if found.equal else "they learn; random numbers are each worker's own"


def refusal(loop: Loop) -> str:
    """Which strategies refuse it, with what words."""
    return "; ".join(f"{f'with `{key}`' if key else 'always'}: “… {words} …”" for key, words in loop.refused.items()) or "no"


def page() -> str:
    """The page as it should be."""
    head = HEAD.format(count=len(STRATEGIES), strategies=", ".join(f"`{strategy}`" for strategy in STRATEGIES))
    names = {(inspect.getdoc(loop.run) or "").rstrip("."): loop for loop in LOOPS.values()}
    return head + "".join(f"| {name} | {equality(loop)} | {virtual(loop)} | {refusal(loop)} |\n" for name, loop in names.items())


if __name__ == "__main__":
    PAGE.write_text(page())
