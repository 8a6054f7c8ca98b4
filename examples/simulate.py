"""Sixty virtual workers in this process: what a strategy does to accuracy and traffic, before any cluster is rented.

    python examples/simulate.py

Cell by cell (``# %%``) it is a notebook; as a script it takes sizes as options.
"""

# %%
import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.data import load

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--workers", type=int, default=60)
parser.add_argument("--epochs", type=int, default=20)
arguments, _ = parser.parse_known_args()  # a notebook's kernel has options of its own

# %% The data, and a model as a function that builds it
digits = load("digits")
train, test = ((digits.prepare(x), y) for x, y in (digits.train, digits.test))


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


# %% The same training under several strategies
strategies = ["bulk", "local(4)", "local(4) + qsgd(4)", "local(4) + gossip", "local(4) + gossip + qsgd(4)"]
runs = {
    strategy: hocket.simulate(
        net,
        F.cross_entropy,
        train,
        test,
        strategy=strategy,
        workers=arguments.workers,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        batch_size=4,
        epochs=arguments.epochs,
    )
    for strategy in strategies
}

# %% What each gave
most = runs["bulk"].ledger.bytes_sent
print(f"{'strategy':32} accuracy   MB sent   times less")
for strategy, run in runs.items():
    sent = run.ledger.bytes_sent
    print(f"{strategy:32} {run.accuracy:8.3f} {sent / 1e6:9.1f} {most / sent:12.1f}")
