"""A loop on Hugging Face Accelerate with a strategy of Hocket.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --strategy "local(4) + qsgd(4)"

Needs ``pip install 'hocket[hf]'``. ``--save FOLDER`` saves the states of all workers, ``--resume FOLDER`` goes on from them.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.data import load
from hocket.integrations.accelerate import HocketAccelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--strategy", default="local(4) + qsgd(4)")
    parser.add_argument("--save")
    parser.add_argument("--resume")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parallel = HocketAccelerator(accelerator, arguments.strategy)

    digits = load("digits")
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(digits.prepare(digits.train[0]), digits.train[1]), 16, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if arguments.resume:
        accelerator.load_state(arguments.resume)
    job = parallel.begin(model, optimizer)

    for _ in range(arguments.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    if arguments.save:
        accelerator.save_state(arguments.save)
    job.finish()

    with torch.no_grad():
        right = model(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]
    accelerator.print(f"accelerate: accuracy {right.float().mean():.3f} after {job.step} steps")
    accelerator.print(f"accelerate: {job.summary()['bytes_sent'] / 1e3:.0f} kB sent by this worker")


if __name__ == "__main__":
    main()
