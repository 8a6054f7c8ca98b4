"""Pruning as a lever on traffic: a small network of which one weight of ten is kept, on virtual workers.

    python examples/pruned.py

``torch.nn.utils.prune`` masks weights; their gradients are zero from then on. A plain all-reduce still sends the zeros.
``threshold(0)`` sends what is not zero, with its place, so traffic falls with the density; since no value is lost, the result is
that of the plain mean but for rounding. A mask must be the same on all workers: here every worker makes it from the same weights.
"""

import argparse

import torch
from torch import nn
from torch.nn.utils import prune

import hocket
from hocket.data import load
from hocket.models import cross_entropy


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def pruned(kept: float) -> nn.Module:
    """The network with the largest weights of each layer kept."""
    model = network()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=1 - kept)
    return model


def train(kept: float, strategy: str, epochs: int) -> tuple[float, float]:
    """Accuracy, and megabytes per worker."""
    data = load("digits")
    assert data.test is not None
    train_set, test_set = ((data.prepare(x), y) for x, y in (data.train, data.test))
    run = hocket.simulate(
        lambda: pruned(kept) if kept < 1 else network(), cross_entropy, train_set, test_set, strategy=strategy, workers=4,
        optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), batch_size=20, epochs=epochs, seed=0,
    )  # fmt: skip
    return run.metrics[-1]["accuracy"], sum(line["bytes_sent"] for line in run.metrics) / 4 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kept", type=float, default=0.1, help="the share of the weights that stays (default 0.1)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    print(f"{'weights':<10} {'strategy':<36} accuracy   MB per worker")
    for kept, strategy in ((1.0, "bulk"), (options.kept, "bulk"), (options.kept, "bulk + threshold(0, feedback=False)")):
        accuracy, sent = train(kept, strategy, options.epochs)
        print(f"{'all' if kept == 1 else f'{kept:.0%}':<10} {strategy:<36} {accuracy:>7.1%}   {sent:>10.2f}")


if __name__ == "__main__":
    main()
