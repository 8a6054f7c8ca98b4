"""Delays of asynchronous DiLoCo's momentum: test loss and accuracy on the embedded digits; a CPU suffices.

python benchmarks/delay.py [--workers 4] [--seeds 3]

Virtual workers with mini-batches of 16, every fourth half as fast as the others, 20 epochs of a perceptron 64-64-10. The momentum
of the servers' outer optimiser changes once in so many pushes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import mean

import torch

import hocket
from hocket.data import load
from hocket.models import cross_entropy

CLUSTER = hocket.ClusterSpec(step_s=0.01, slowdown=(1, 1, 1, 2), jitter=0.1, bandwidth=1e8, latency_s=1e-4)
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD, 0.1": lambda params: torch.optim.SGD(params, 0.1),
    "AdamW, 0.003": lambda params: torch.optim.AdamW(params, 0.003),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    data, n = load("digits"), options.workers
    train, test = ((data.prepare(x), y) for x, y in (data.train, data.test))
    print(f"| strategy | {' | '.join(OPTIMIZERS)} |\n|---|---|---|")
    delays = [f"asyncdiloco(8, delay={delay})" for delay in (1, n // 2, n, 2 * n)]
    for strategy in ("bulk", "diloco(8)", *delays, "asyncdiloco(8, 0.7, 0)"):
        cells = []
        for optimizer in OPTIMIZERS.values():
            given = {"strategy": strategy, "workers": n, "batch_size": 16, "epochs": 20, "cluster": CLUSTER, "optimizer": optimizer}
            runs = [hocket.simulate(_model, cross_entropy, train, test, seed=seed, **given) for seed in range(options.seeds)]
            cells.append(f"{mean(r.test_loss for r in runs):.3f}, {100 * mean(r.metrics[-1]['accuracy'] for r in runs):.1f}")
        print(f"| `{strategy}` | {' | '.join(cells)} |", flush=True)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


if __name__ == "__main__":
    main()
