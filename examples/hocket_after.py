"""The same script with Hocket: any strategy, and a ledger of where the seconds and bytes went.

    torchrun --nproc-per-node 2 examples/hocket_after.py --strategy "local(4) + topk(0.05)"
    python examples/hocket_after.py

``ddp_before.py`` is what it was; ``diff`` shows what changes.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.data import load


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--strategy", default="local(4) + topk(0.05)")
    arguments = parser.parse_args()

    rank = hocket.init(device="cpu").workers.start

    digits = load("digits")
    train_set = TensorDataset(digits.prepare(digits.train[0]), digits.train[1])
    test_set = digits.prepare(digits.test[0]), digits.test[1]
    loader = DataLoader(train_set, arguments.batch_size, shuffle=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)
    job = hocket.parallelize(model, optimizer, arguments.strategy)

    for epoch in range(arguments.epochs):
        for x, y in hocket.distribute(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with job.averaged() as mean:
            if rank == 0:
                print(f"epoch {epoch + 1}: accuracy {accuracy(mean, *test_set):.3f}")

    print(job.summary())


if __name__ == "__main__":
    main()
