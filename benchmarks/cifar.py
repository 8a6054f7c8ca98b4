"""Whole trainings of the small CNN on CIFAR-10 with virtual workers: seconds, accuracy, bytes, for a list of strategies.

    python benchmarks/cifar.py --data-dir DIR [--device cuda] [--workers 16] [--epochs 20] [--rates 0.02 0.05 0.1] [--out
    results.json]

The first strategy is trained once beforehand, so that compilation does not count. Accuracy is that of the mean model on the test
set; bytes are counted per worker, as they would travel; seconds are this machine's, for all workers together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from hocket.cluster.virtual import VirtualCluster
from hocket.data import load
from hocket.train.run import Engines, make_training
from hocket.train.settings import RunSettings

STRATEGIES = (
    "bulk + allreduce",
    "bulk + gossip",
    "local(4)",
    "local(4) + gossip",
    "local(16)",
    "bulk + qsgd(4)",
    "bulk + topk(0.01)",
    "bulk + lowrank(2)",
    "local(4) + topk(0.01)",
    "local(4) + gossip + topk(0.05)",
    "local(4) + topk(0.01) | qsgd(4)",
    "bulk + topk(0.05)",
    "bulk + dgc(0.01, warmup=124)",
    "bulk + sign",
    "diloco(16)",
)


ENGINES: Engines = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="each strategy shows its best of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = load("cifar10", args.data_dir)
    train_one(args.strategies[0], args.rates[0], args, data, epochs=1)
    rows = []
    baseline = None
    print(
        f"CIFAR-10, cnn, {args.workers} virtual workers, {args.epochs} epochs, batch 100 each, "
        f"best of rates {args.rates}, on {args.device}"
    )
    print(
        f"{'strategy':44} {'accuracy':>8} {'worst':>7} {'rate':>5} {'MB/worker':>10} {'less':>7} {'seconds':>8}  accuracy per rate"
    )
    for strategy in args.strategies:
        tried = [train_one(strategy, rate, args, data, args.epochs) for rate in args.rates]
        row = max(tried, key=lambda r: r["accuracy"])
        row["accuracy_per_rate"] = {str(r["rate"]): r["accuracy"] for r in tried}
        baseline = baseline or row["mb_per_worker"]
        rows.append(row)
        less = baseline / row["mb_per_worker"]
        each = " ".join(f"{r['accuracy']:.2%}" for r in tried)
        print(
            f"{strategy:44} {row['accuracy']:8.2%} {row['worst']:7.2%} {row['rate']:5} {row['mb_per_worker']:10.2f} "
            f"{less:6.1f}x {row['seconds']:8.2f}  {each}",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


def train_one(strategy: str, rate: float, args: argparse.Namespace, data: object, epochs: int) -> dict[str, Any]:
    """One training; DGC carries its momentum itself."""
    settings = RunSettings.of(
        strategy=strategy,
        workers=args.workers,
        virtual=True,
        data="cifar10",
        model="cnn",
        lr=rate,
        momentum=0.0 if "dgc" in strategy else 0.9,
        lr_schedule="cosine",
        warmup=1.0,
        batch_size=100,
        epochs=epochs,
        augment=args.augment,
        seed=args.seed,
    )
    cluster = VirtualCluster(args.workers, args.device)
    training = make_training(settings, cluster, data, ENGINES)  # type: ignore[arg-type]
    synchronise(args.device)
    begun = time.perf_counter()
    metrics = list(training.run())
    synchronise(args.device)
    seconds = time.perf_counter() - begun
    last = metrics[-1]
    return {
        "strategy": strategy,
        "rate": rate,
        "accuracy": last["accuracy"],
        "worst": last.get("accuracy_worst", last["accuracy"]),
        "accuracies": [m["accuracy"] for m in metrics],
        "mb_per_worker": training.ledger.total().bytes_sent / args.workers / 1e6,
        "seconds": seconds,
    }


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
