"""Images over slow links: accuracy on CIFAR-10 with virtual workers, and how many times fewer bytes were sent than by all-reduce.

    python benchmarks/vision.py --data-dir DIR --device cuda --model resnet20 --epochs 60 --batch-size 16 --seeds 0 1 2 \\
        --run "bulk; lr=0.2" --run "diloco(4, 1.0, 0.3) + sign(block=4096); lr=0.2"

A run is a strategy and its options: ``lr``, ``momentum``, ``warmup`` (in epochs), ``weight_decay``, ``epochs``. Rates fall by a
cosine to 0. ``--out`` adds each result to a file of JSON lines; runs that it has already are not repeated, so that several
processes may share the work (``--part 1/3``).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from json_lines import add_line, read_lines

from hocket.cluster.virtual import VirtualCluster
from hocket.data import DataSet, load
from hocket.train.run import Engines, bulk_bytes_of, make_training
from hocket.train.settings import RunSettings

ENGINES: Engines = {}


def train(text: str, seed: int, options: argparse.Namespace, data: DataSet) -> dict[str, Any]:
    """One training, and its figures."""
    strategy, *rest = [part.strip() for part in text.split(";")]
    given = {name.strip(): float(value) for name, value in (part.split("=") for part in rest)}
    settings = RunSettings.of(
        strategy=strategy,
        workers=options.workers,
        virtual=True,
        data="cifar10",
        model=options.model,
        lr=given["lr"],
        momentum=given.get("momentum", 0.9),
        weight_decay=given.get("weight_decay", options.weight_decay),
        lr_schedule="cosine",
        warmup=given.get("warmup", options.warmup),
        batch_size=options.batch_size,
        epochs=int(given.get("epochs", options.epochs)),
        augment=not options.plain,
        seed=seed,
    )
    cluster, started = VirtualCluster(options.workers, options.device), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = make_training(settings, cluster, data, ENGINES)
        metrics = list(training.run())
    steps = training.step
    plain = bulk_bytes_of(training.replicas.layout, options.workers, steps)
    figures = {"accuracy": metrics[-1]["accuracy"], "loss": metrics[-1]["loss"], "steps": steps}
    return {**figures, "fewer": plain / training.ledger.total().bytes_sent, "seconds": round(time.perf_counter() - started, 1)}


def table(lines: list[dict[str, Any]]) -> None:
    """Mean, spread and each seed of every run."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["run"], {})[line["seed"]] = line
    for text, seeds in found.items():
        values = [100 * line["accuracy"] for _, line in sorted(seeds.items())]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"{statistics.mean(values):.2f}{spread}  1/{next(iter(seeds.values()))['fewer']:.0f}  {text}  ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--run", action="append", default=[], help="STRATEGY; option=number; …")
    parser.add_argument("--runs", type=Path, help="a file of runs, one per line")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--plain", action="store_true", help="no random crops and flips")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", default="1/1")
    options = parser.parse_args()
    wanted = options.run + ([line for line in options.runs.read_text().splitlines() if line.strip()] if options.runs else [])
    part, parts = map(int, options.part.split("/"))
    lines = [line for line in read_lines(options.out) if line["model"] == options.model]
    done = {(line["run"], line["seed"]) for line in lines}
    data = load("cifar10", options.data_dir)
    for text, seed in [(text, seed) for seed in options.seeds for text in wanted][part - 1 :: parts]:
        if (text, seed) in done:
            continue
        line = {"run": text, "seed": seed, "model": options.model, **train(text, seed, options, data)}
        lines.append(line)
        print(f"{100 * line['accuracy']:.2f}  1/{line['fewer']:.0f}  {line['seconds']} s  seed {seed}  {text}", flush=True)
        add_line(options.out, line)
    table([line for line in lines if line["run"] in wanted])


if __name__ == "__main__":
    main()
