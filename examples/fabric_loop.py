"""A loop on Lightning Fabric with a strategy of Hocket.

    python examples/fabric_loop.py --strategy "local(4) + topk(0.05)" --devices 2

Needs ``pip install 'hocket[lightning]'``.
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.data import load
from hocket.integrations.fabric import FabricHocketStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--strategy", default="local(4) + topk(0.05)")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--save")
    arguments = parser.parse_args()

    strategy = FabricHocketStrategy(arguments.strategy)
    fabric = Fabric(accelerator="cpu", devices=arguments.devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    digits = load("digits")
    loader = DataLoader(TensorDataset(digits.prepare(digits.train[0]), digits.train[1]), 32, shuffle=True)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    loader = fabric.setup_dataloaders(loader)
    for _ in range(arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    if arguments.save:
        fabric.save(arguments.save, {"model": model, "optimizer": optimizer})
    strategy.finish()

    with torch.no_grad():
        right = model(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]
    fabric.print(
        f"fabric: accuracy {right.float().mean():.3f}, {strategy.summary()['bytes_sent'] / 1e3:.0f} kB sent by this worker"
    )


if __name__ == "__main__":
    main()
