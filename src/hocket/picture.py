"""Charts for notebooks, drawn with matplotlib (the extra ``hocket[plot]``), which is imported only for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.errors import HocketError
from hocket.extras import require

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07A00", "#3A9AD9", "#7A5195")
INK, QUIET, GRID, FRAME = "#1b1e24", "#5b6270", "#e6e8ec", "#c3c8d0"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK, "handlelength": 3}


@dataclass(frozen=True)
class Chart:
    """A picture that notebooks show."""

    png: bytes = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write it as a PNG file."""
        try:
            Path(path).write_bytes(self.png)
        except OSError as error:
            raise HocketError(f"{path} cannot be written ({error.strerror}): choose another place.") from None

    def _repr_png_(self) -> bytes:
        return self.png


@dataclass(frozen=True)
class Panel:
    """One plot: a line (label, xs, ys) for each series; lines with the same place have the same look in every panel."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]
    log: bool = False
    """Whether the x axis is logarithmic."""


def draw(panels: Sequence[Panel]) -> Chart:
    """Panels side by side, with one legend."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(panels), 3.4), dpi=110)
    plots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(plots, panels, strict=True):
        for place, (label, xs, ys) in enumerate(panel.lines):
            look = {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place // len(COLOURS) % len(DASHES)]}
            axes.plot(xs, ys, label=label, marker="o" if len(xs) == 1 else "", markersize=4, linewidth=1.6, **look)
        axes.set_title(panel.title, loc="left", fontsize=10, color=INK)
        axes.set_xlabel(panel.xlabel, color=QUIET)
        axes.set_ylabel(panel.ylabel, color=QUIET)
        if panel.log:
            axes.set_xscale("log")
        elif panel.xlabel == "epoch":
            axes.xaxis.get_major_locator().set_params(integer=True)
        style(axes)
    handles, labels = plots[0].get_legend_handles_labels()
    figure.tight_layout()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.02, 0), ncols=3, **LEGEND)
    return Chart(png(figure))


def style(axes: Any) -> None:
    """The look that all plots share."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FRAME)


def png(figure: Any) -> bytes:
    """A figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", bbox_inches="tight", pad_inches=0.15, facecolor="white", metadata={"Software": None})
    return out.getvalue()
