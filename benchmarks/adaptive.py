"""Codes under AdamW: test loss of a small GPT by what workers exchange, and how many times fewer bytes they send; a CPU suffices.

python benchmarks/adaptive.py [--steps 400] [--seeds 1] [--only sign]

A GPT of 2 layers × 64 learns bytes of this Python's standard library: 4 virtual workers × 8 sequences × 64 bytes, rate 0.003 (SGD
of DeMo: 0.001), linear warm-up over a tenth of the steps, cosine to 0. Each run is a strategy and an optimiser.
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import hocket
from hocket.models import cross_entropy, gpt
from hocket.train.run import bulk_bytes_of

CONTEXT, WORKERS, BATCH, LR = 64, 4, 8, 0.003
RUNS = [
    ("bulk", "adamw"),
    ("bulk + exchange=updates", "adamw"),
    ("bulk + sign + exchange=gradients", "adamw"),
    ("bulk + sign + exchange=updates", "adamw"),
    ("bulk + sign + exchange=momentum", "onebit"),
    ("bulk + topk(0.01) | qsgd(4) + exchange=gradients", "adamw"),
    ("bulk + topk(0.01) | qsgd(4) + exchange=updates", "adamw"),
    ("bulk + topk(0.01) | qsgd(4) + exchange=momentum", "onebit"),
    ("bulk + sign(feedback=ef21) + exchange=gradients", "adamw"),
    ("bulk + sign(feedback=ef21) + exchange=updates", "adamw"),
    ("bulk + sign(feedback=ef21) + exchange=momentum", "onebit"),
    ("bulk + topk(0.01, feedback=ef21) | qsgd(4) + exchange=gradients", "adamw"),
    ("bulk + topk(0.01, feedback=ef21) | qsgd(4) + exchange=updates", "adamw"),
    ("bulk + topk(0.01, feedback=ef21) | qsgd(4) + exchange=momentum", "onebit"),
    ("bulk + sign + exchange=momentum", "zeroone"),
    ("local(4) + exchange=momentum", "zeroone"),
    ("local(4) + qsgd(4) + exchange=momentum", "zeroone"),
    ("local(4) + sign + exchange=momentum", "zeroone"),
    ("local(4) + sign + exchange=momentum", "onebit"),
    ("local(4) + sign", "adamw"),
    ("bulk + lowrank(2) + exchange=gradients", "adamw"),
    ("bulk + lowrank(2) + exchange=updates", "adamw"),
    ("local(8)", "adamw"),
    ("local(8, moments=3)", "adamw"),
    ("local(8, moments=1)", "adamw"),
    ("bulk + demo(32)", "sgd"),
    ("bulk + demo(32) | qsgd(8)", "sgd"),
]


def optimizer(name: str, steps: int) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """What makes an optimiser by its name; 1-bit Adam's variance is fixed after a fifth of the steps, 0/1 Adam's after one."""
    if name in ("onebit", "zeroone"):
        schedule = {"freeze_step": steps // 5} if name == "onebit" else {"freeze_step": 1, "refresh": 16}
        return lambda params: hocket.OneBitAdam(params, LR, **schedule)
    return lambda params: torch.optim.SGD(params, LR / 3) if name == "sgd" else torch.optim.AdamW(params, LR)


def text() -> list[tuple[Tensor, Tensor]]:
    """Windows of the standard library's modules and of the bytes after each: those to train on, and every 16th file to test."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(f.read_bytes() for k, f in enumerate(files) if (k % 16 == 15) == test) for test in (False, True)]
    cut = [torch.frombuffer(bytearray(part), dtype=torch.uint8).to(torch.int64) for part in parts]
    windows = [t[: (len(t) - 1) // CONTEXT * CONTEXT + 1] for t in cut]
    return [(t[:-1].view(-1, CONTEXT), t[1:].view(-1, CONTEXT)) for t in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="only runs whose strategy has this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    train, (x, y) = text()
    test = x[:512], y[:512]
    print("| strategy | optimiser | bytes | loss |\n|---|---|---|---|")
    for strategy, name in (run for run in RUNS if options.only in run[0]):
        given: dict[str, Any] = {"strategy": strategy, "workers": WORKERS, "batch_size": BATCH, "max_steps": options.steps}
        epoch = len(train[0]) / (WORKERS * BATCH)
        given |= {"epochs": -(-options.steps // int(epoch)), "lr_schedule": "cosine", "warmup_epochs": 0.1 * options.steps / epoch}
        runs = [
            hocket.simulate(_model, cross_entropy, train, test, optimizer=optimizer(name, options.steps), seed=seed, **given)
            for seed in range(options.seeds)
        ]
        fewer = bulk_bytes_of(runs[0].replicas.layout, WORKERS, options.steps) / runs[0].ledger.bytes_sent
        loss = mean(run.test_loss for run in runs if run.test_loss is not None)
        print(f"| `{strategy.replace('|', chr(92) + '|')}` | {name} | 1/{fewer:.0f} | {loss:.3f} |", flush=True)


def _model() -> torch.nn.Module:
    return gpt(256, context=CONTEXT, layers=2, heads=4, width=64)


if __name__ == "__main__":
    main()
