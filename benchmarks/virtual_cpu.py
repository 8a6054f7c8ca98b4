"""Virtual workers on a CPU: N workers with the loop engine against N plain PyTorch steps one after another.

    PYTHONPATH=src python benchmarks/virtual_cpu.py [--workers 4 8] [--batch-size 100] [--rounds 15]

Both sides take one step of N models with their own weights and SGD with momentum: `LoopEngine` + `StackedOptimizer` here, N
separate models with N optimisers there. One thread; medians over interleaved rounds; the ratio should stay below 1.15.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.cluster.layout import layout_of
from hocket.train.engines import LoopEngine
from hocket.train.stacked import StackedOptimizer


def cnn() -> nn.Module:
    """The study's small network: 545,098 parameters."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    """3072-1024-1024-10: 4,206,602 parameters."""
    hidden = [nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(1024, 10))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of both sides."""
    return torch.optim.SGD(params, 0.01, momentum=0.9)


def plain_workers(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """N models with N optimisers, one after another."""
    models = [copy.deepcopy(model) for _ in x]
    optimizers = [sgd(list(m.parameters())) for m in models]

    def step() -> None:
        for m, optimizer, xi, yi in zip(models, optimizers, x, y, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(xi), yi).backward()
            optimizer.step()

    return step


def virtual_workers(model: nn.Module, x: Tensor, y: Tensor, granularity: str) -> Callable[[], None]:
    """N rows, one template, one stacked optimiser."""
    layout = layout_of(model.named_parameters())
    named = dict(model.named_parameters())
    flat = [torch.cat([named[s.name].detach().flatten() for s in b.slots]) for b in layout.buckets]
    weights = [f.expand(len(x), -1).clone() for f in flat]
    grads = [torch.zeros_like(w) for w in weights]
    engine = LoopEngine(model, F.cross_entropy, layout)
    optimizer = StackedOptimizer(sgd, layout, weights, grads, granularity)
    keys = torch.arange(len(x))

    def step() -> None:
        _, used = engine.gradients(weights, {}, x, y, grads, keys)
        optimizer.step(used)

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each step, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Prints one line per model and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for build in (cnn, mlp):
        for workers in args.workers:
            x, y = torch.randn(workers, args.batch_size, 3, 32, 32), torch.randint(0, 10, (workers, args.batch_size))
            model = build()
            steps = {
                "plain": plain_workers(model, x, y),
                "slots": virtual_workers(copy.deepcopy(model), x, y, "slots"),
                "buckets": virtual_workers(copy.deepcopy(model), x, y, "buckets"),
            }
            ms = measure(steps, args.rounds)
            against = ", ".join(f"{k} {ms[k]:.1f} ms (ratio {ms[k] / ms['plain']:.2f})" for k in ("slots", "buckets"))
            print(f"{build.__name__} {workers:2d} workers: plain {ms['plain']:.1f} ms; virtual by {against}", flush=True)


if __name__ == "__main__":
    main()
