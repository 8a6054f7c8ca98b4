"""The style of a strategy, the same in every chart: a number, a colour, and a mark (dash and marker) for its sync axis.

Colour is never the only difference: the mark shows the sync axis, and the number is in the legend. The baseline has the
colour of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.report.rows import Row

COLOURS = 7


@dataclass(frozen=True)
class Style:
    """The look of one label."""

    number: int
    colour: int
    mark: int
    sync: str
    baseline: bool


def styles(rows: Sequence[Row]) -> dict[str, Style]:
    """A style per label. Labels are ordered by sync axis and colours repeat in order, so neighbours of one axis differ."""
    kinds = {row.label: (not row.plain, row.sync != "bulk", row.sync) for row in rows}
    labels = sorted(kinds, key=lambda label: (kinds[label], _natural(label)))
    syncs = list(dict.fromkeys(kinds[label][2] for label in labels))
    found = {}
    colour = 0
    for place, label in enumerate(labels):
        other, _, sync = kinds[label]
        found[label] = Style(place + 1, colour % COLOURS, syncs.index(sync), sync, not other)
        colour += other
    return found


def _natural(text: str) -> list[str | int]:
    """Sorts local(4) before local(16): text and numbers alternate, so that equal kinds are compared."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d{1,18})", text))]
