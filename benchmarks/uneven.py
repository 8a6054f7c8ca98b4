"""Samples per second and seconds to an accuracy when one worker of four is four times slower, relative to ``bulk`` in the same run.

    python benchmarks/uneven.py --epochs 30 --target 0.95 --rounds 3 --json uneven.json

Real processes with one thread each, the digits, the small CNN. Who waits for everybody goes at the slowest worker's pace; who waits
for nobody could do (3 + 1/4) / (4 · 1/4) = 3.25 times as much; ``ssp`` waits for the slowest too, only a few steps later.

Workers are slowed by sleeping (``--slowdown``). All of them take ``--base`` times as long as they compute, so that cores which
they share do not decide the outcome: on 2 cores three fast workers would otherwise wait for cores instead of each other. The first
epoch is left out of the rates. Strategies take turns, ``--rounds`` times; medians are printed, beside the accuracy at the end.

Seconds to ``--target`` are those of training until the end of the first epoch whose accuracy is as good, all epochs counted. A
strategy that needs more epochs because its gradients are old pays for them here. ``--lr`` is for all alike; a strategy is given
another by ``@RATE`` behind its name.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
    target_s: float | None
    """Seconds until the target was reached; None where that was not so in every round."""
    sooner: float | None
    """How many times as soon as the first strategy."""


@dataclass
class Run:
    """One training."""

    samples_per_s: float
    accuracy: float
    wait_share: float
    target_s: float | None


def train(text: str, epochs: int, base: float, slow: float, batch: int, lr: float, target: float) -> Run:
    """Samples per second after the first epoch, the accuracy at the end, the share of time spent waiting, seconds to the target."""
    strategy, _, own = text.partition("@")
    lr = float(own or lr)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        factors = ",".join(str(base * f) for f in (1.0, 1.0, 1.0, slow))
        command = [sys.executable, "-m", "hocket.cli.main", "train", "--strategy", strategy, "--workers", str(WORKERS)]
        command += ["--model", "cnn", "--batch-size", str(batch), "--epochs", str(epochs), "--lr", str(lr), "--slowdown", factors]
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
    waiting = sum(m["wait_s"] for m in later) / sum(m["seconds"] for m in later)
    return Run(done * len(later) / seconds, metrics[-1]["accuracy"], waiting, reach(metrics, target))


def reach(metrics: Sequence[Mapping[str, float]], target: float) -> float | None:
    """Seconds of training until the first epoch that is as good as the target.

    >>> reach([{"wall_s": 2.0, "accuracy": 0.5}, {"wall_s": 1.0, "accuracy": 0.9}], 0.8)
    3.0
    """
    seconds = 0.0
    for epoch in metrics:
        seconds += epoch["wall_s"]
        if epoch["accuracy"] >= target:
            return seconds
    return None


def summed_up(runs: Mapping[str, Sequence[Run]]) -> list[Outcome]:
    """Medians over rounds, beside those of the first strategy."""
    outcomes: list[Outcome] = []
    for text, of in runs.items():
        rate, accuracy, waiting = (
            statistics.median(getattr(r, n) for r in of) for n in ("samples_per_s", "accuracy", "wait_share")
        )
        times = [r.target_s for r in of if r.target_s is not None]
        target_s = statistics.median(times) if len(times) == len(of) else None
        first = outcomes[0] if outcomes else None
        first_s = first.target_s if first is not None else target_s
        sooner = None if target_s is None or first_s is None else first_s / target_s
        outcomes.append(Outcome(text, rate, rate / (first.samples_per_s if first else rate), accuracy, waiting, target_s, sooner))
    return outcomes


def main() -> None:
    """Prints a table; the targets are 2.5 times bulk for async, and no gain for ssp."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.95, help="the accuracy to be reached (default 0.95)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base", type=float, default=6.0, help="how many times as long as computing everybody takes")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times slower the slow worker is")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs: at least 2, for the first one is left out")
    found: dict[str, list[Run]] = {text: [] for text in args.strategies}
    for _ in range(args.rounds):
        for text, runs in found.items():
            runs.append(train(text, args.epochs, args.base, args.slow, args.batch_size, args.lr, args.target))
            print(f"  {text}: {runs[-1]}", file=sys.stderr, flush=True)
    outcomes = summed_up(found)
    seconds = f"s to {args.target:.0%}"
    print(f"{'strategy':40} {'samples/s':>10} {'relative':>9} {'accuracy':>9} {'waiting':>8} {seconds:>10} {'sooner':>8}")
    for o in outcomes:
        target_s = "–" if o.target_s is None else f"{o.target_s:.2f}"
        sooner = "–" if o.sooner is None else f"{o.sooner:.2f}×"
        cells = f"{o.samples_per_s:10.0f} {o.relative:8.2f}× {o.accuracy:9.1%} {o.wait_share:8.1%} {target_s:>10} {sooner:>8}"
        print(f"{o.strategy:40} {cells}")
    print(f"bound for who never waits: {BOUND}×")
    if args.json is not None:
        given = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(args.json, {"machine": machine(), **given, "outcomes": [asdict(o) for o in outcomes]})


if __name__ == "__main__":
    main()
