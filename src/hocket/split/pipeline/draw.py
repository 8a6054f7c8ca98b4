"""Pictures of a timeline: as text for terminals, and as PNG or SVG (with matplotlib, the extra ``hocket[plot]``)."""

from __future__ import annotations

import io
from fractions import Fraction
from math import gcd
from typing import Any

from hocket.errors import HocketError
from hocket.split.pipeline.timeline import Timeline

_COLOURS = {"F": "#0072B2", "B": "#009E73", "I": "#3A9AD9", "W": "#B07A00"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_INK, _QUIET = "#1b1e24", "#5b6270"
_WIDEST = 400
"""The most columns of a text: a wider grid cannot be read."""


def text(timeline: Timeline) -> str:
    """Rows are processes, columns are units of time; dots are idle.

    >>> from hocket.split.pipeline.schedules import make
    >>> from hocket.split.pipeline.timeline import simulate
    >>> print(text(simulate(make("gpipe", stages=2, num_microbatches=2))))
     0 │ F0 F1 ·  ·  ·  B0─── B1───
     1 │ ·  F0 F1 B0─── B1─── ·  ·
    """
    unit = _unit(timeline)
    several = len({span.action.stage for row in timeline.rows for span in row}) > len(timeline.rows)
    actions = [span.action for row in timeline.rows for span in row]
    names = {action: str(action) if several else f"{action.kind}{action.microbatch}" for action in actions}
    width = max(map(len, names.values()), default=1) + 1
    columns = round(timeline.length / unit)
    if columns * width > _WIDEST * 4:
        raise HocketError(f"{columns} columns are too wide for a terminal: draw fewer micro-batches, or use picture(…).")
    lines = []
    for process, row in enumerate(timeline.rows):
        line, at = "", 0
        for span in row:
            start, end = round(span.start / unit), round(span.end / unit)
            line += ("·".ljust(width)) * (start - at) + names[span.action].ljust((end - start) * width - 1, "─") + " "
            at = end
        lines.append(f"{process:>2} │ {line}{'·'.ljust(width) * (columns - at)}".rstrip())
    return "\n".join(lines)


def _unit(timeline: Timeline) -> Fraction:
    """The longest time of which all times are multiples (to a quarter)."""
    times = {Fraction(t).limit_denominator(4) for row in timeline.rows for span in row for t in (span.start, span.end)}
    steps = [int(t * 12) for t in times if t]
    return Fraction(gcd(*steps), 12) if steps else Fraction(1)


def picture(timeline: Timeline, title: str, unit: str = "units of time", form: str = "png") -> bytes:
    """The same as a figure; ``form`` is png or svg."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HocketError("Pictures are drawn with matplotlib, which is missing: pip install 'hocket[plot]'.") from None
    figure = Figure(figsize=(9.6, 1.5 + 0.42 * len(timeline.rows)), dpi=144)
    axes = figure.add_subplot()
    scale = 1000 if unit == "ms" else 1
    _bars(axes, timeline, scale)
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel(unit, color=_QUIET)
    axes.set_yticks(range(len(timeline.rows)), [f"process {p}" for p in range(len(timeline.rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.length * scale or 1)
    axes.tick_params(colors=_QUIET, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#c3c8d0")
    axes.set_facecolor("#f2f3f5")  # uncovered time is idle
    below = (0, -0.9 / figure.get_figheight())
    axes.legend(loc="upper left", bbox_to_anchor=below, ncols=4, frameon=False, fontsize=8, labelcolor=_INK, borderaxespad=0)
    out = io.BytesIO()
    plain = {"Software": None} if form == "png" else {"Date": None}
    figure.savefig(out, format=form, bbox_inches="tight", pad_inches=0.15, facecolor="white", metadata=plain)
    return out.getvalue()


def _bars(axes: Any, timeline: Timeline, scale: float) -> None:
    """A bar for each action; later stages of one process are paler, narrow bars have no number."""
    processes = len(timeline.rows)
    named: set[str] = set()
    for process, row in enumerate(timeline.rows):
        for span in row:
            kind, stage, microbatch = span.action
            start, length = span.start * scale, (span.end - span.start) * scale
            label = "_" if kind in named else _WORDS[kind]
            named.add(kind)
            look = {"color": _COLOURS[kind], "alpha": max(0.4, 1 - 0.35 * (stage // processes)), "edgecolor": "white"}
            axes.barh(process, length, 0.8, left=start, linewidth=0.6, label=label, **look)
            if length * 9.6 > 0.13 * len(str(microbatch)) * timeline.length * scale:
                axes.annotate(str(microbatch), (start + length / 2, process), ha="center", va="center", fontsize=7, color="white")
