"""Samples per second when one worker of four is four times slower, relative to ``bulk`` in the same run.

    python benchmarks/uneven.py --epochs 6 --rounds 3 --json uneven.json

Real processes with one thread each, the digits, the small CNN. Who waits for everybody goes at the slowest worker's pace; who waits
for nobody could do (3 + 1/4) / (4 · 1/4) = 3.25 times as much; ``ssp`` waits for the slowest too, only a few steps later.

Workers are slowed by sleeping (``--slowdown``). All of them take ``--base`` times as long as they compute, so that cores which
they share do not decide the outcome: on 2 cores three fast workers would otherwise wait for cores instead of each other. The first
epoch is left out. Strategies take turns, ``--rounds`` times; medians are printed, beside the accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from steps import machine, write_json

from hocket.data import load
from hocket.data.partition import Partition

STRATEGIES = (
    "bulk + allreduce",
    "bulk + server",
    "ssp(4) + server",
    "stale(4) + server",
    "async + server",
    "downpour(push=4, fetch=4) + server",
)
WORKERS, BOUND = 4, 3.25


@dataclass
class Outcome:
    """What a strategy reached."""

    strategy: str
    samples_per_s: float
    relative: float
    accuracy: float
    wait_share: float


def train(strategy: str, epochs: int, base: float, slow: float, batch: int, lr: float) -> tuple[float, float, float]:
    """Samples per second after the first epoch, the accuracy at the end, and the share of time spent waiting."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        factors = ",".join(str(base * f) for f in (1.0, 1.0, 1.0, slow))
        command = [sys.executable, "-m", "hocket.cli.main", "train", "--strategy", strategy, "--workers", str(WORKERS)]
        command += ["--model", "cnn", "--batch", str(batch), "--epochs", str(epochs), "--lr", str(lr), "--slowdown", factors]
        command += ["--device", "cpu", "--out", str(out)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
        if ended.returncode:
            sys.exit(f"{strategy}: {ended.stderr.strip()}")
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    samples = len(load("digits").train[0])
    partition = Partition(samples, WORKERS, batch, 0)
    done = sum(sum(r.sizes) for r in partition.rounds(0))
    later = metrics[1:]
    seconds = sum(m["wall_s"] for m in later)
    return done * len(later) / seconds, metrics[-1]["accuracy"], sum(m["wait_s"] for m in later) / sum(m["seconds"] for m in later)


def main() -> None:
    """Prints a table; the targets are 2.5 times bulk for async, and no gain for ssp."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base", type=float, default=6.0, help="how many times as long as computing everybody takes")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times slower the slow worker is")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs: at least 2, for the first one is left out")
    found: dict[str, list[tuple[float, float, float]]] = {text: [] for text in args.strategies}
    for _ in range(args.rounds):
        for text, results in found.items():
            results.append(train(text, args.epochs, args.base, args.slow, args.batch, args.lr))
            print(f"  {text}: {results[-1][0]:.0f} samples/s", file=sys.stderr, flush=True)
    medians = {text: [statistics.median(column) for column in zip(*results, strict=True)] for text, results in found.items()}
    first = medians[args.strategies[0]][0]
    outcomes = [Outcome(text, rate, rate / first, accuracy, wait) for text, (rate, accuracy, wait) in medians.items()]
    print(f"{'strategy':40} {'samples/s':>10} {'relative':>9} {'accuracy':>9} {'waiting':>8}")
    for o in outcomes:
        print(f"{o.strategy:40} {o.samples_per_s:10.0f} {o.relative:8.2f}× {o.accuracy:9.1%} {o.wait_share:8.1%}")
    print(f"bound for who never waits: {BOUND}×")
    if args.json is not None:
        given = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, {"machine": machine(), **given, "outcomes": [asdict(o) for o in outcomes]})


if __name__ == "__main__":
    main()
