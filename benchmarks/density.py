"""How many steps a sparse code needs: test accuracy on the embedded digits by density and number of steps, 4 virtual workers.

python benchmarks/density.py [--seeds 3]

A row is a code, a column a number of steps, a cell the mean accuracy in percent and, in parentheses, density × steps.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import mean

import torch
from torch import nn

import hocket
from hocket.data import load

CODES = {"none": 1.0, "topk(0.1)": 0.1, "topk(0.01)": 0.01, "topk(0.001)": 0.001}
CODES |= {"threshold(keep=0.01)": 0.01, "randomk(0.01)": 0.01, "dgc(0.01, momentum=0)": 0.01}
STEPS = (25, 100, 400, 1600)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")
    data = load("digits")
    sets = [(data.prepare(x), y) for x, y in (data.train, data.test)]
    print("| | " + " | ".join(f"{steps:,} steps" for steps in STEPS) + " |")
    print("|---|" + "---|" * len(STEPS))
    for code, density in CODES.items():
        cells = []
        for steps in STEPS:
            options = {"strategy": f"bulk + {code}", "workers": 4, "batch_size": 16, "epochs": 100, "max_steps": steps}
            runs = [
                hocket.simulate(net, nn.functional.cross_entropy, *sets, seed=seed, optimizer=sgd, evaluate=False, **options)  # type: ignore[arg-type]
                for seed in range(seeds)
            ]
            x, y = sets[1]
            found = mean(float((run.model(x).argmax(1) == y).float().mean()) for run in runs)
            cells.append(f"{100 * found:.1f} ({density * steps:g})")
        print(f"| `{code}` | " + " | ".join(cells) + " |", flush=True)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


if __name__ == "__main__":
    main()
