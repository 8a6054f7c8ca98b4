"""Draws the pictures of the documentation's methods from the code itself: docs/methods/pictures/NAME.svg.

python scripts/pictures             writes them
python scripts/pictures --check     exits with 1 if one is not what the code does now
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods" / "pictures"
sys.path.insert(0, str(ROOT / "src"))

import codes  # noqa: E402
import others  # noqa: E402
import taxonomy  # noqa: E402
import timelines  # noqa: E402
import topology  # noqa: E402

PICTURES = {**codes.PICTURES, **others.PICTURES, **taxonomy.PICTURES, **timelines.PICTURES, **topology.PICTURES}


def main() -> None:
    import torch

    torch.set_num_threads(1)  # the same sums whatever the machine
    drawn = {f"{name}.svg": str(draw()) for name, draw in PICTURES.items()}
    there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    if "--check" in sys.argv[1:]:
        if wrong := sorted(name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name)):
            sys.exit(f"{FOLDER}: {', '.join(wrong)}: not what the code does now; run python scripts/pictures.")
        return
    for name in there.keys() - drawn.keys():
        (FOLDER / name).unlink()
    for name, text in drawn.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
