"""Virtual workers on a GPU: one step of N workers, each with its own weights, against one model on the same images.

    PYTHONPATH=src python benchmarks/virtual_cuda.py [--workers 16 60 210] [--batch-size 100] [--rounds 30]

A step is the gradients of all workers plus SGD with momentum on the stacked rows; the data is already on the device. Beside it run
one eager model, one compiled model, and one compiled with CUDA graphs, each with all N x batch images and torch's own SGD. Times
are CUDA events, medians over interleaved rounds. Precision is torch's default: TF32 for convolutions, full float32 for matrices.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.cluster.layout import layout_of
from hocket.train.engines import VmapEngine
from hocket.train.stacked import StackedOptimizer


def cnn() -> nn.Module:
    """The study's small network: 545,098 parameters."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10))


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of both sides."""
    return torch.optim.SGD(params, 0.01, momentum=0.9)


def one_model(x: Tensor, y: Tensor, mode: str | None) -> Callable[[], None]:
    """A step of one model on the images of all workers; ``mode`` None is eager."""
    model = cnn().cuda()
    optimizer = sgd(list(model.parameters()))
    x, y = x.flatten(0, 1), y.flatten()

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    function = loss if mode is None else torch.compile(loss, dynamic=False, mode=mode)

    def step() -> None:
        optimizer.zero_grad()
        function().backward()
        optimizer.step()

    return step


def virtual_workers(x: Tensor, y: Tensor) -> Callable[[], None]:
    """A step of one worker per row of ``x``."""
    model, rows = cnn().cuda(), len(x)
    layout = layout_of(model.named_parameters())
    named = dict(model.named_parameters())
    flat = [torch.cat([named[s.name].detach().flatten() for s in b.slots]) for b in layout.buckets]
    weights = [f.expand(rows, -1).clone() for f in flat]
    grads = [torch.zeros_like(w) for w in weights]
    engine = VmapEngine(model, F.cross_entropy, layout, rows)
    optimizer = StackedOptimizer(sgd, layout, weights, grads, "buckets")
    keys = torch.arange(rows)

    def step() -> None:
        _, used = engine.gradients(weights, {}, x, y, grads, keys)
        optimizer.step(used)

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int, warm_up: int = 5) -> dict[str, float]:
    """Median milliseconds of each step, taken in turn."""
    for step in steps.values():
        for _ in range(warm_up):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Prints one line per number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 60, 210])
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds per step, and virtual / one model")
    for workers in args.workers:
        x = torch.randn(workers, args.batch_size, 3, 32, 32, device="cuda")
        y = torch.randint(0, 10, (workers, args.batch_size), device="cuda")
        steps = {
            "virtual": virtual_workers(x, y),
            "eager": one_model(x, y, None),
            "compiled": one_model(x, y, "default"),
            "compiled+graphs": one_model(x, y, "reduce-overhead"),
        }
        ms = measure(steps, args.rounds)
        against = ", ".join(f"{k} {v:.2f} (ratio {ms['virtual'] / v:.2f})" for k, v in ms.items() if k != "virtual")
        print(f"{workers:4d} workers: virtual {ms['virtual']:.2f}; one model: {against}", flush=True)


if __name__ == "__main__":
    main()
