"""VGG-11 by pipeline against data parallel: the same samples per step, on four processes.

    torchrun --nproc-per-node 4 examples/vgg_pipeline.py

Data parallel sends every weight in every step; a pipeline sends only what crosses its cuts. On slow links that decides (measured on
four hosts: `python benchmarks/pipeline.py --hosts`); on one machine there is hardly a difference in time, but in bytes there is.
"""

import argparse
import time

import torch

import hocket
from hocket.models import cross_entropy, vgg11


def train(mesh: hocket.Mesh, batch: int, steps: int) -> tuple[float, float]:
    """Samples per second and MB sent per step, all processes together."""
    torch.manual_seed(0)
    model = vgg11((3, 32, 32), 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    own = batch // mesh.data
    sample = torch.zeros(own, 3, 32, 32)
    num_microbatches = 4 if mesh.pipeline > 1 else None
    pipeline = hocket.Pipeline(num_microbatches=num_microbatches, loss=cross_entropy, sample=sample)
    job = hocket.parallelize(model, optimizer, mesh=mesh, pipeline=pipeline)
    draw = torch.Generator().manual_seed(job.split.place.data.place)
    begun = time.perf_counter()
    for _ in range(steps):
        x, y = torch.randn(own, 3, 32, 32, generator=draw), torch.randint(0, 10, (own,), generator=draw)
        job.train(x, y)
    seconds = time.perf_counter() - begun
    sent = job.summary(all_workers=True)["bytes_sent"]
    job.finish()
    return batch * steps / seconds, sent / steps / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, all processes together")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    cluster = hocket.init(device="cpu")
    for mesh in (hocket.Mesh(data=cluster.size), hocket.Mesh(pipeline=cluster.size)):
        speed, sent = train(mesh, arguments.batch_size, arguments.steps)
        if cluster.workers.start == 0:
            print(f"{mesh!s:12} {speed:8.1f} samples/s  {sent:8.1f} MB sent per step")


if __name__ == "__main__":
    main()
