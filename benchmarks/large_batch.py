"""Accuracy against the global batch, with and without each ingredient of the large-batch recipe: the study and its picture.

    python benchmarks/large_batch.py --device cuda --out large-batch            # CIFAR-10, resnet20, batches 128 … 16384, 90 epochs
    python benchmarks/large_batch.py --small --out large-batch-small           # digits on a CPU, minutes: to see that it works

It is ``hocket study large-batch``, which resumes where it stopped; a picture and a table (CSV) are made of what it left.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FULL = "--data cifar10 --model resnet20 --batch-size 128 --workers 1,4,16,32,64,128 --seeds 0,1,2 --epochs 90 --augment --lr 0.1"
SMALL = "--data digits --model cnn --batch-size 20 --workers 1,4,16,64 --epochs 10 --warmup 2 --device cpu"
MARKS = "os^Dv*P"


def name_of(run: dict) -> str:
    """A run's ingredients in words."""
    words = {"lars": "LARS", "lamb": "LAMB"}.get(run["optimizer"], "SGD")
    words += {"linear": ", linear", "sqrt": ", square root"}.get(run["scale_lr"], ", unscaled")
    words += ", warm-up" if run["warmup"] else ""
    return words + (", norms and biases do not decay" if run["decay"] == "matrices" else "")


def read(folder: Path) -> dict[str, dict[int, list[float]]]:
    """By ingredients and global batch, the last accuracy of each seed; 0 where a run diverged."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("runs/*/run.json")):
        run, metrics = json.loads(path.read_text()), path.with_name("metrics.jsonl")
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if not run.get("finished") and not run.get("failure"):
            continue
        accuracy = json.loads(lines[-1])["accuracy"] if run.get("finished") else 0.0
        found[name_of(run)][run["batch"] * run["workers"]].append(accuracy)
    return found


def draw(found: dict[str, dict[int, list[float]]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for mark, (name, by_batch) in zip(MARKS, found.items(), strict=False):
        batches = sorted(by_batch)
        means = [100 * statistics.mean(by_batch[batch]) for batch in batches]
        spread = [100 * statistics.pstdev(by_batch[batch]) for batch in batches]
        axes.errorbar(batches, means, spread, marker=mark, label=name, capsize=2)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="global batch", ylabel="test accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="digits on a CPU: shows that it works, says nothing about large models"
    )
    parser.add_argument("--out", type=Path, default=Path("large-batch"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("further", nargs="*", help="further options of hocket study, after --")
    given = parser.parse_args()
    options = SMALL.split() if given.small else [*FULL.split(), "--device", given.device]
    command = [sys.executable, "-m", "hocket.cli.main", "study", "large-batch", *options, "--out", str(given.out), *given.further]
    subprocess.run(command, check=True)
    found = read(given.out)
    with open(given.out / "large-batch.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ingredients", "batch", "seeds", "accuracy", "spread"])
        for name, by_batch in found.items():
            for batch, values in sorted(by_batch.items()):
                row = [name, batch, len(values), f"{statistics.mean(values):.4f}", f"{statistics.pstdev(values):.4f}"]
                rows.writerow(row)
                print(*row, sep="\t")
    draw(found, given.out / "large-batch.png", "digits, cnn (small)" if given.small else "CIFAR-10, resnet20")


if __name__ == "__main__":
    main()
