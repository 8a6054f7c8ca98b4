"""Draws accuracy against bytes sent from what benchmarks/cifar.py left.

python benchmarks/picture.py docs/results/cifar10-16.json docs/results/frontier.png
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette: told apart by colour-blind readers.
COLOURS = {"none": "#0072B2", "sparse": "#D55E00", "other": "#009E73"}


def main(source: Path, target: Path) -> None:
    rows = json.loads(source.read_text())
    figure, axes = plt.subplots(figsize=(9, 5.2), dpi=140)
    seen = set()
    for row in rows:
        kind = kind_of(row["strategy"])
        label = (
            {"none": "not compressed", "sparse": "sparsified", "other": "quantised or low rank"}[kind] if kind not in seen else None
        )
        seen.add(kind)
        axes.scatter(row["mb_per_worker"], 100 * row["accuracy"], s=60, color=COLOURS[kind], label=label, zorder=3)
    place_names(axes, rows)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB sent per worker in the whole training (log scale; less traffic to the right)")
    axes.set_ylabel("test accuracy of the mean model, %")
    axes.set_title("CIFAR-10, small CNN, 16 virtual workers, 20 epochs, best of three rates", fontsize=10.5, loc="left")
    axes.grid(alpha=0.3, zorder=0)
    axes.legend(loc="lower left", frameon=False)
    axes.margins(x=0.16, y=0.16)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)


def kind_of(strategy: str) -> str:
    if any(word in strategy for word in ("topk", "dgc", "threshold", "randomk")):
        return "sparse"
    return "other" if any(word in strategy for word in ("qsgd", "lowrank", "sign", "cast", "ternary")) else "none"


def place_names(axes: plt.Axes, rows: list[dict[str, object]]) -> None:
    """Names beside their points, moved up or down where neighbours are close."""
    done: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda r: -float(r["accuracy"])):  # type: ignore[arg-type]
        x, y = math.log10(float(row["mb_per_worker"])), 100 * float(row["accuracy"])  # type: ignore[arg-type]
        # Above its point; below, where a neighbour's point stands just above it.
        below = any(abs(x - a) < 0.4 and 0 <= b - y < 0.25 for a, b in done)
        done.append((x, y))
        name = str(row["strategy"])
        axes.annotate(name, (10**x, y), xytext=(0, -14 if below else 10), textcoords="offset points", fontsize=8.5, ha="center")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
