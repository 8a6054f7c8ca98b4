"""Files of JSON lines to which several processes add results, and which an interrupted one may have left with a part of a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path | None) -> list[dict[str, Any]]:
    """All whole lines; none where there is no file."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path and path.exists() else [], 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}, line {number}: not a whole result; it is left out.", flush=True)
    return found


def add_line(path: Path | None, line: dict[str, Any]) -> None:
    """Add a result; after a part of a line on a line of its own."""
    if path is None:
        return
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(line) + "\n")
