"""Sandblaster's portions against a slow worker: an evaluation's time relative to the ideal, and what passes the coordinator.

    python benchmarks/sandblaster.py [--workers 8] [--slow 10] [--step 1.0] [--model cnn] [--shards 2] [--iterations 5] [--seeds 3]

Virtual workers on the embedded digits, all alike but the last one, which is `--slow` times slower; links of 1 Gbit/s and 0.1 ms,
5 % jitter. `--step` is the seconds that a worker without slowdown takes for its equal share of the batch. The ideal is all work
divided by all workers' speed, messages free. A figure is the seconds of a whole run (L-BFGS's own orders included) divided by
its evaluations, median over seeds. Bytes through the coordinator are relative to those that move parameters and gradients.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rich.console import Console
from rich.table import Table

from hocket import Sandblaster, SandblasterRun
from hocket.cluster.spec import ClusterSpec
from hocket.data import load
from hocket.models import build, loss_for

SPLITS = {
    "static, 1/N each": {"static": True},
    "portions": {"backups": False},
    "portions, last twice": {},
}


def measure(options: dict[str, bool], args: argparse.Namespace, seed: int) -> tuple[SandblasterRun, float]:
    """A run, and its seconds per evaluation relative to the ideal."""
    spec = ClusterSpec("lab", step_s=args.step, bandwidth=125e6, latency_s=1e-4, jitter=0.05)
    data = load("digits")
    job = Sandblaster(
        lambda: build(args.model, data),
        loss_for(data),
        data,
        workers=args.workers,
        shards=args.shards,
        max_iter=args.iterations,
        portions_per_worker=args.portions,
        seed=seed,
        cluster=spec.slowed([1.0] * (args.workers - 1) + [args.slow]),
        **options,
    )
    run = job.run()
    return run, run.seconds / run.evaluations / job.world().ideal_s()


def main() -> None:
    """Prints one row per way to split the batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--step", type=float, default=1.0)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--portions", type=int, default=16, help="per worker")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"{args.workers} virtual workers, one of them {args.slow:g} times slower; {args.model} on digits")
    for name in ("split", "s/evaluation", "to ideal", "issued", "twice", "in vain", "MB at shards", "coordinator %"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, options in SPLITS.items():
        runs = [measure(options, args, seed) for seed in range(args.seeds)]
        run = runs[0][0]
        n = run.evaluations
        table.add_row(
            name,
            f"{statistics.median(r.seconds / r.evaluations for r, _ in runs):.3f}",
            f"{statistics.median(ratio for _, ratio in runs):.2f}",
            *(f"{run.total(what) / n:.1f}" for what in ("issued", "duplicated", "wasted")),
            f"{run.total('bytes_shards') / n / 1e6:.2f}",
            f"{100 * run.total('bytes_coordinator') / run.total('bytes_shards'):.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
