"""What ``check="audit"`` costs: the fastest steps of a wide model under bulk, without and with it, in turn, on two Gloo processes.
And what it costs to find late workers and step times, which is always done: the notes of an exchange and of a step, and those of a
heartbeat.

torchrun --nproc-per-node 2 benchmarks/audit.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

import hocket
from hocket.cluster.ledger import Span
from hocket.cluster.progress import Progress, stack_of
from hocket.cluster.virtual import VirtualCluster

ROUNDS, STEPS, NOTES = 5, 20, 20_000


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
        exchange, step, beat = notes()
        share = (2 * exchange + step) / least[0] + 2 * beat
        print(f"notes of an exchange {1e6 * exchange:.1f} µs, of a step {1e6 * step:.1f} µs, twice a second {1e6 * beat:.0f} µs")
        print(f"are {share:.2%} of a step with two exchanges")
        print(f"a step: {1e3 * least[0]:.2f} ms, audited {1e3 * least[1]:.2f} ms: {least[1] / least[0]:.3f} (at most 1.1)")


def notes() -> tuple[float, float, float]:
    """Seconds per exchange, step and heartbeat."""
    progress, ledger = Progress(), VirtualCluster(1, timed=True).ledger
    track, span = progress.track("group", [0, 1]), Span(0.0, 0.0, 0.0, 0.0)

    def exchange() -> None:
        track.wait(int, track.launch(), "gradients of bucket 0")
        ledger.record(span)

    def beat() -> None:
        progress.describe()
        stack_of(progress._thread)

    found = []
    for work in (exchange, ledger.end_step, beat):
        begun = time.perf_counter()
        for _ in range(NOTES):
            work()
        found.append((time.perf_counter() - begun) / NOTES)
    return found[0], found[1], found[2]


if __name__ == "__main__":
    main()
