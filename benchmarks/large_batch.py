"""Accuracy against the global batch, with and without each ingredient of the large-batch recipe: the study and its picture.

    python benchmarks/large_batch.py --device cuda --out large-batch            # CIFAR-10, resnet20, batches 128 … 16384, 90 epochs
    python benchmarks/large_batch.py --small --out large-batch-small           # digits on a CPU, minutes: to see that it works
    python benchmarks/large_batch.py --device cuda --data-dir DIR --epochs 12 --seeds 0 --limit-s 540 --out short     # in minutes

It is the study ``large-batch``, which resumes where it stopped; a picture and a table (CSV) are made of what it left. A process
for each number of workers trains in a folder of its own under ``--out``, all at the same time on a GPU, one after another on a CPU.
After ``--limit-s`` seconds those that are not done are stopped, the picture shows what there is, and the same command goes on:
trainings that were under way start again. ``--draw`` draws only, where there is matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hocket.study.carry_out import Data, Virtual, Watch, carry_out, check
from hocket.study.folder import Folder, Outcome
from hocket.study.plan import Planned, expand
from hocket.study.presets import preset

FULL: dict[str, Any] = {"data": "cifar10", "model": "resnet20", "batch_size": 128, "epochs": 90, "augment": True, "lr": 0.1}
SMALL: dict[str, Any] = {"data": "digits", "model": "cnn", "batch_size": 20, "epochs": 10, "warmup": 2.0}
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
    for path in sorted(folder.glob("*/runs/*/run.json")):
        run, metrics = json.loads(path.read_text()), path.with_name("metrics.jsonl")
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if not run.get("finished") and not run.get("failure"):
            continue
        accuracy = json.loads(lines[-1])["accuracy"] if run.get("finished") else 0.0
        found[name_of(run)][run["batch"] * run["workers"]].append(accuracy)
    return found


class Lines(Watch):
    """A line for each training that has ended."""

    def begin(self, number: int, planned: Planned, outcome: Outcome | None) -> None:
        self.begun = time.perf_counter()

    def end(self, number: int, outcome: Outcome) -> None:
        run, found = dict(outcome.run), outcome.failure or f"{outcome.metrics[-1]['accuracy']:.2%}"
        took = time.perf_counter() - self.begun
        print(f"{run['batch'] * run['workers']:6}  {took:6.1f} s  {found}  {name_of(run)}", flush=True)


def study(workers: int, given: argparse.Namespace) -> None:
    """All trainings of one number of workers that are not done yet."""
    settings = SMALL if given.small else FULL
    settings = settings | {name: value for name in ("epochs", "warmup") if (value := getattr(given, name)) is not None}
    outline = preset("large-batch")
    if given.autocast != "none":
        outline = replace(outline, settings={**outline.settings, "autocast": given.autocast})
    if given.device == "cpu":
        torch.set_num_threads(1)
    data, folder = Data(given.data_dir), Folder(given.out / str(workers))
    planned = expand(outline.changed((workers,), given.seeds, **settings), data)
    check(planned, data)
    with folder.taken():
        planned = folder.begin(planned)

        def real(*_: object) -> Any:
            raise AssertionError("all workers are virtual")

        carry_out(folder, planned, data, Virtual(data, torch.device(given.device)), real, Lines())


def train(given: argparse.Namespace) -> None:
    """A process for each number of workers, until all are done or the time is over."""
    ends = time.monotonic() + (given.limit_s or float("inf"))
    given.out.mkdir(parents=True, exist_ok=True)
    waiting, running = sorted(given.workers, reverse=True), dict[int, subprocess.Popen[bytes]]()
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < given.processes:
                workers = waiting.pop(0)
                running[workers] = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--part", str(workers)])
            for workers, process in list(running.items()):
                if process.poll() is not None and running.pop(workers).returncode:
                    print(f"the trainings of {workers} workers ended with exit code {process.returncode}", file=sys.stderr)
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    if waiting or running:
        print(f"stopped after {given.limit_s:g} s with {sorted([*waiting, *running])} workers not done; the same command goes on")


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


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="digits on a CPU: shows that it works, says nothing about large models"
    )
    parser.add_argument("--out", type=Path, default=Path("large-batch"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data-dir", type=Path, help="where CIFAR-10 lies")
    parser.add_argument("--workers", type=numbers, help="of 128 (20) images each (1,4,16,32,64,128; 1,4,16,64)")
    parser.add_argument("--seeds", type=numbers, help="(0,1,2; 0)")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--warmup", type=float, help="epochs of it, where there is warm-up (5; 2)")
    parser.add_argument("--autocast", choices=("none", "bf16"), default="none")
    parser.add_argument("--limit-s", type=float, help="stop after so many seconds")
    parser.add_argument("--processes", type=int, help="at the same time (one for each number of workers; 1 on a CPU)")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.workers = given.workers or ((1, 4, 16, 64) if given.small else (1, 4, 16, 32, 64, 128))
    given.seeds = given.seeds or ((0,) if given.small else (0, 1, 2))
    given.processes = given.processes or (1 if given.device == "cpu" else len(given.workers))
    return given


def main() -> None:
    given = parse()
    if given.part is not None:
        return study(given.part, given)
    if not given.draw:
        train(given)
    found = read(given.out)
    with open(given.out / "large-batch.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ingredients", "batch", "seeds", "accuracy", "spread"])
        for name, by_batch in found.items():
            for batch, values in sorted(by_batch.items()):
                row = [name, batch, len(values), f"{statistics.mean(values):.4f}", f"{statistics.pstdev(values):.4f}"]
                rows.writerow(row)
                print(*row, sep="\t")
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no picture, matplotlib is not installed: draw it elsewhere with --draw --out {given.out}")
    else:
        draw(found, given.out / "large-batch.png", "digits, cnn (small)" if given.small else "CIFAR-10, resnet20")


if __name__ == "__main__":
    main()
