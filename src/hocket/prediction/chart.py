"""A chart of predictions: samples per second against workers, one line per strategy, and what all workers alone would give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.errors import SettingError

if TYPE_CHECKING:
    from hocket.prediction.api import Predictions


def chart(found: Predictions, path: Path) -> None:
    """Draw it as a PNG file, where matplotlib is installed."""
    if path.suffix != ".png":
        raise SettingError("<chart>: a chart is a PNG file; give it a name that ends in .png.", chart=path)
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingError("<chart> needs matplotlib; install hocket[plot], or leave it out.", chart=path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="workers", ylabel="samples per second")
    rows = [row for row in found.rows if row.refused is None]
    lines = dict.fromkeys((row.strategy, row.mesh) for row in rows)
    for strategy, mesh in lines:
        own = [row for row in rows if (row.strategy, row.mesh) == (strategy, mesh)]
        axes.plot(
            [r.workers for r in own], [r.samples_per_s for r in own], marker=".", label=f"{strategy} ({mesh})" if mesh else strategy
        )
    if first := next((row for row in rows if row.workers == 1), None):
        counts = sorted({row.workers for row in rows})
        axes.plot(counts, [n * first.samples_per_s for n in counts], color="grey", linestyle=":", label="no communication")
    axes.set_title(f"{found.model.name}, predicted for {found.cluster.name}", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SettingError(f"<chart> cannot be written ({error.strerror}): choose another place.", chart=path) from None
