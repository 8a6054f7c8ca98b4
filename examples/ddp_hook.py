"""A script that stays with DistributedDataParallel, and sends its gradients by a code of Hocket.

    torchrun --nproc-per-node 2 examples/ddp_hook.py --code "topk(0.01) | qsgd(4)"

Only the line with ``register_comm_hook`` is new.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hocket
from hocket.data import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--code", default="topk(0.01) | qsgd(4)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    digits = load("digits")
    train_set = TensorDataset(digits.prepare(digits.train[0]), digits.train[1])
    loader = DataLoader(train_set, 32, sampler=DistributedSampler(train_set))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    state, hook = hocket.ddp_hook(arguments.code)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    for epoch in range(arguments.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            right = model(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {right.float().mean():.3f}")

    if dist.get_rank() == 0:
        gradients = 4 * sum(p.numel() for p in model.parameters()) * state.step
        print(f"{state.summary()['bytes_sent'] / 1e3:.0f} kB sent by this worker; its gradients are {gradients / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
