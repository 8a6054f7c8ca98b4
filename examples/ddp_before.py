"""An ordinary training script with DistributedDataParallel: a small network on the digits that come with Hocket.

    torchrun --nproc-per-node 2 examples/ddp_before.py
    python examples/ddp_before.py

``hocket_after.py`` is the same script with Hocket; ``diff`` shows what changes.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hocket.data import load


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()

    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, alone)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    digits = load("digits")
    train_set = TensorDataset(digits.prepare(digits.train[0]), digits.train[1])
    test_set = digits.prepare(digits.test[0]), digits.test[1]
    loader = DataLoader(train_set, arguments.batch_size, sampler=DistributedSampler(train_set))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9)

    for epoch in range(arguments.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy(model, *test_set):.3f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
