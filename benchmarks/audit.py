"""What ``check="audit"`` costs: the fastest steps of a wide model under bulk, without and with it, in turn, on two Gloo processes.

torchrun --nproc-per-node 2 benchmarks/audit.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

import hocket

ROUNDS, STEPS = 5, 20


def main() -> None:
    """The command; every process runs it."""
    cluster = hocket.init(device="cpu")
    torch.set_num_threads(1)
    least = [9.0, 9.0]
    for _ in range(ROUNDS):
        for k, check in enumerate((True, "audit")):
            torch.manual_seed(7)
            model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            job = hocket.parallelize(model, optimizer, "bulk", check=check)
            for _ in range(STEPS):
                begun = time.perf_counter()
                optimizer.zero_grad()
                model(torch.randn(512, 512)).square().mean().backward()
                optimizer.step()
                least[k] = min(least[k], time.perf_counter() - begun)
            job.finish()
    if cluster.workers.start == 0:
        print(f"a step: {1e3 * least[0]:.2f} ms, audited {1e3 * least[1]:.2f} ms: {least[1] / least[0]:.3f} (at most 1.1)")


if __name__ == "__main__":
    main()
