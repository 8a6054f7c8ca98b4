"""When splitting does not pay: a fully connected network of 42 million parameters, whole and split by its operations.

    torchrun --nproc-per-node 2 examples/split_or_not.py

Every layer of such a network needs all outputs of the one before, so processes exchange after every layer and little is computed
between two exchanges. DistBelief (Dean et al., 2012) measured 2.2 times the speed on eight machines at best, and less beyond;
networks whose layers see only a part of their input gained twelve times. Splitting such a network buys room, not time: each process
holds its part of the weights, the gradients and the optimiser's state.
"""

import argparse
import time

import torch

import hocket
from hocket.models import cross_entropy, mlp


def seconds_per_step(mesh: hocket.Mesh, hidden: int, batch: int, steps: int) -> tuple[float, float, float]:
    """Seconds, of these waiting, and million parameters held."""
    torch.manual_seed(0)
    model = mlp(3072, 10, hidden=(hidden, hidden, hidden))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job = hocket.parallelize(model, optimizer, mesh=mesh, pipeline=hocket.Pipeline(loss=cross_entropy))
    x, y = torch.randn(batch, 3072), torch.zeros(batch, dtype=torch.int64)
    job.train(x, y)  # the first step also warms up
    before = job.summary()["axes"]["tensor"]["seconds"]
    begun = time.perf_counter()
    for _ in range(steps):
        job.train(x, y)
    seconds = (time.perf_counter() - begun) / steps
    waited = (job.summary()["axes"]["tensor"]["seconds"] - before) / steps
    held = sum(p.numel() for p in job.model.parameters()) / 1e6
    job.finish()
    return seconds, waited, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=3900)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = hocket.init(device="cpu")
    split, waited, held = seconds_per_step(
        hocket.Mesh(tensor=cluster.size), arguments.hidden, arguments.batch_size, arguments.steps
    )
    # All replicas compute the same here, so that the processes disturb each other as much as above.
    whole, _, all_of_it = seconds_per_step(hocket.Mesh(data=cluster.size), arguments.hidden, arguments.batch_size, arguments.steps)
    if cluster.workers.start == 0:
        step = f"{split * 1e3:7.1f} ms per step of {arguments.batch_size} samples, {waited * 1e3:.1f} of it waiting"
        print(f"split in {cluster.size}: {step}; {held:.1f} million parameters each")
        print(
            f"replicas: {whole * 1e3:7.1f} ms per step of {cluster.size * arguments.batch_size} samples; "
            f"{all_of_it:.1f} million each"
        )


if __name__ == "__main__":
    main()
