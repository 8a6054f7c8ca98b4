"""Optimisers of N virtual workers on stacked rows: one step of all workers against steps of one model.

    python benchmarks/stacked_optimizers.py --device cuda [--models gpt resnet20] [--workers 16] [--optimizers adamw lamb muon]
    python benchmarks/stacked_optimizers.py --device cpu --small --workers 3 --rounds 2    # to see that it runs

A step is that of the optimiser alone; gradients are random and lie on the device. Beside the stacked step are measured

- ``one``: the step of one model's own optimiser; the workers one after another take N of these (``to N``);
- ``alike``: the step of one optimiser of as many values, N copies of every parameter (``to alike``): what one model costs that is N
  times as large. Stacked rows are to take at most 1.2 of it.

Times are minima over interleaved rounds, milliseconds. Optimisers have default options; ``rows`` says whether the stacked one
computes all rows at once (``no``: row by row).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hocket
from hocket.cluster.layout import layout_of
from hocket.models.gpt import gpt
from hocket.models.images import resnet20
from hocket.train.stacked import StackedOptimizer

Step = Callable[[], Any]
Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def model_of(name: str, small: bool) -> nn.Module:
    """A transformer of 10.8 M parameters, or a network for images of 270,000."""
    if name == "resnet20":
        return resnet20((3, 32, 32), 10)
    return gpt(64, context=16, layers=1, heads=2, width=32) if small else gpt(256, context=256, layers=6, heads=6, width=384)


def made_by(name: str, model: nn.Module) -> Made:
    """What builds the optimiser of a model's parameters, or of several copies of each."""
    own = len(list(model.parameters()))
    matrices = hocket.hidden_matrices(model)

    def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return hocket.Muon(params, matrices=[count for count in matrices for _ in range(len(params) // own)])

    simple: dict[str, Made] = {
        "adamw": torch.optim.AdamW,
        "sgd": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
        "lamb": hocket.LAMB,
        "lars": hocket.LARS,
    }
    return muon if name == "muon" else simple[name]


def alone(model: nn.Module, made: Made, copies: int) -> Step:
    """A step of one optimiser of ``copies`` copies of each parameter."""
    params = [nn.Parameter(p.detach().clone()) for p in model.parameters() for _ in range(copies)]
    for p in params:
        p.grad = torch.randn_like(p)
    return made(params).step


def stacked(model: nn.Module, made: Made, rows: int) -> tuple[Step, bool]:
    """A step of all workers' optimisers, and whether it computes their rows at once."""
    named, layout = dict(model.named_parameters()), layout_of(model.named_parameters())
    flat = [torch.cat([named[s.name].detach().flatten() for s in b.slots]) for b in layout.buckets]
    weights = [f.expand(rows, -1).clone() for f in flat]
    optimizer = StackedOptimizer(made, layout, weights, [torch.randn_like(w) for w in weights], "buckets", names=list(named))
    return optimizer.step, optimizer.stacked


def milliseconds(step: Step, device: str, calls: int) -> float:
    """Of one of several calls in a row."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    return 1000 * (time.perf_counter() - begun) / calls


def measured(name: str, optimizer: str, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """A line of the table."""
    torch.manual_seed(0)
    model = model_of(name, args.small).to(args.device)
    made = made_by(optimizer, model)
    all_rows, together = stacked(model, made, rows)
    steps = {"stacked": all_rows, "one": alone(model, made, 1), "alike": alone(model, made, rows)}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(args.rounds):
        for key, step in steps.items():
            times[key].append(milliseconds(step, args.device, args.calls))
    found = {key: min(values) for key, values in times.items()}
    values = sum(p.numel() for p in model.parameters())
    return {"model": name, "values": values, "optimizer": optimizer, "workers": rows, "rows": together, **found}


def show(row: dict[str, Any]) -> str:
    ratios = row["stacked"] / (row["workers"] * row["one"]), row["stacked"] / row["alike"]
    cells = [row["model"], row["optimizer"], row["workers"], "yes" if row["rows"] else "no"]
    cells += [f"{row['stacked']:.3f}", f"{row['one']:.3f}", f"{ratios[0]:.2f}", f"{row['alike']:.3f}", f"{ratios[1]:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Prints one line per model, optimiser and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=("gpt", "resnet20"), default=["gpt", "resnet20"])
    parser.add_argument(
        "--optimizers", nargs="+", choices=("adamw", "sgd", "lamb", "lars", "muon"), default=["adamw", "lamb", "muon"]
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=5, help="steps in a row, of each round")
    parser.add_argument("--small", action="store_true", help="a tiny transformer, to see that it runs")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; milliseconds per step, least of {args.rounds} x {args.calls}")
    print("| model | optimiser | workers | rows | stacked | one | to N | alike | to alike |\n|---|---|---|---|---|---|---|---|---|")
    rows = []
    for name in args.models:
        for optimizer in args.optimizers:
            for workers in args.workers:
                rows.append(measured(name, optimizer, workers, args))
                print(show(rows[-1]), flush=True)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
