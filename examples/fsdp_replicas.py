"""FSDP2 inside a host, where links are fast, and a strategy of Hocket between hosts, where they are slow.

    torchrun --nproc-per-node 4 examples/fsdp_replicas.py --hosts 2 --strategy "local(4) + topk(0.1) | qsgd(4)"

On real hosts start torchrun on each, as ever: processes of a host are numbered one after another.
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.data import load


def network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--strategy", default="local(4) + topk(0.1) | qsgd(4)")
    arguments = parser.parse_args()

    world = hocket.init(device="cpu")
    mesh = init_device_mesh("cpu", (arguments.hosts, world.size // arguments.hosts), mesh_dim_names=("replicate", "shard"))

    digits = load("digits")
    train_set = TensorDataset(digits.prepare(digits.train[0]), digits.train[1])
    loader = DataLoader(train_set, 32, shuffle=True)

    torch.manual_seed(0)
    model = network()
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    job = hocket.parallelize(model, optimizer, arguments.strategy)

    for _ in range(arguments.epochs):
        for x, y in hocket.distribute(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    job.finish()
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"process {world.rank}: {held} of {sum(p.numel() for p in model.parameters())} weights")
    figures, state = job.summary(), job.full_state()
    if world.rank == 0:
        whole = network()
        whole.load_state_dict(state["model"])
        right = whole(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]
        print(f"accuracy {right.float().mean():.3f}")
        print(f"{figures['bytes_sent'] / 1e3:.0f} kB sent to the other hosts in {figures['exchanges']} exchanges")


if __name__ == "__main__":
    main()
