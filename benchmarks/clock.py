"""What the virtual clock adds to a virtual training, and how long predictions take: CPU seconds of one core.

    python benchmarks/clock.py

First `hocket.simulate` with and without a described cluster, the same small CNN and strategies, in turn: the shortest of ten each,
since others may use the machine, too. Then `hocket.predict` of a model of 124 million parameters for 4096 workers: the strategies
that it takes by itself, and one for each synchronisation, topology and code; the shortest of three each.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch.nn.functional import cross_entropy

import hocket
from hocket.models.images import cnn
from hocket.prediction.api import STRATEGIES
from hocket.prediction.probe import CODES

SIMULATED = ("bulk", "local(4)", "bulk + gossip", "bulk + topk(0.01)")

METHODS = (
    "bulk", "local(16)", "postlocal(16, 100)", "diloco(100)", "acco", "aedit", "bulk + gossip", "bulk + gossip(ring)",
    "bulk + gossip(exponential)", "bulk + gossip(random)", "bulk + hierarchical", "bulk + server(4)", "async + server(4)",
    "ssp(4) + server(4)", "stale(4) + server(4)", "downpour + server(4)", "async + gossip", *(f"bulk + {code}" for code in CODES),
)  # fmt: skip


def predicted(strategy: str) -> float:
    """CPU seconds of a prediction, the shortest of three with different disturbances."""
    found = []
    for seed in range(3):
        begun = time.process_time()
        hocket.predict(None, "datacentres", [strategy], 4096, parameters=124e6, step_s=0.2, optimizer="sgd", seed=seed)
        found.append(time.process_time() - begun)
    return min(found)


def simulated(strategy: str, workers: int, cluster: str | None) -> float:
    """CPU seconds of a training."""
    x = torch.randn(workers * 20 * 10, 3, 16, 16)
    y = torch.zeros(len(x), dtype=torch.int64)
    begun = time.process_time()
    hocket.simulate(
        lambda: cnn((3, 16, 16), 10), cross_entropy, (x, y), strategy=strategy, workers=workers, batch_size=20, cluster=cluster,
        evaluate=False,
    )  # fmt: skip
    return time.process_time() - begun


def main() -> None:
    """The command."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    simulated("bulk", 4, "1gbit")
    for strategy in SIMULATED:
        pairs = [(simulated(strategy, 16, "1gbit"), simulated(strategy, 16, None)) for _ in range(10)]
        on, off = (min(times) for times in zip(*pairs, strict=True))
        print(f"{strategy:<24} clock on / off: {on:.3f} s / {off:.3f} s = {on / off:.3f}", flush=True)
    hocket.predict(parameters=1e6, step_s=0.1, workers=2)
    for what, strategies in (("by itself", STRATEGIES), ("of each method", METHODS)):
        took = {strategy: predicted(strategy) for strategy in strategies}
        longest = max(took, key=lambda strategy: took[strategy])
        print(
            f"predict, 4096 workers, {len(took)} strategies {what}: {sum(took.values()):.1f} s, {took[longest]:.1f} of it {longest}"
        )


if __name__ == "__main__":
    main()
