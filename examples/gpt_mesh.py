"""A GPT split over four processes: two stages, each stage's operations over two.

    torchrun --nproc-per-node 4 examples/gpt_mesh.py
    torchrun --nproc-per-node 4 examples/gpt_mesh.py --mesh data=2,tensor=2 --strategy "local(8)"

No process ever holds the whole model after it was split; the checkpoint at the end is that of a model that was never split.
"""

import argparse

import torch

import hocket
from hocket.models import cross_entropy, gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="pipeline=2,tensor=2")
    parser.add_argument("--strategy", default="bulk")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()

    cluster = hocket.init(device="cpu")
    mesh = hocket.Mesh.parse(arguments.mesh)
    text = "one melody is shared out among several voices, and each rests while another sings. "
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(c) for c in text * 40])

    model = gpt(len(alphabet), context=32, layers=4, heads=4, width=arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    job = hocket.parallelize(
        model,
        optimizer,
        arguments.strategy,
        mesh=mesh,
        pipeline=hocket.Pipeline(schedule=arguments.schedule, loss=cross_entropy, sample=torch.zeros(16, 32, dtype=torch.int64)),
    )
    picture = job.picture()
    if cluster.workers.start == 0:
        print(picture)

    replica = job.split.place.data.place  # all processes of a replica read the same
    draw = torch.Generator().manual_seed(replica)
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(tokens) - 33, (16,), generator=draw).tolist()
        x = torch.stack([tokens[s : s + 32] for s in starts])
        y = torch.stack([tokens[s + 1 : s + 33] for s in starts])
        loss = job.train(x, y)
        if cluster.workers.start == 0 and loss is not None and (step == 1 or step % max(1, arguments.steps // 5) == 0):
            print(f"step {step}: loss {loss.item():.3f}")

    whole = job.full_state()
    summary = job.summary(all_workers=True)
    job.finish()
    if cluster.workers.start == 0:
        for name, axis in summary["axes"].items():
            print(f"{name:8} {axis['bytes_sent'] / 1e6:8.2f} MB sent, {axis['seconds']:6.2f} s waited")
        one = gpt(len(alphabet), context=32, layers=4, heads=4, width=arguments.width)
        one.load_state_dict(whole["model"])
        print(f"one process loads it: loss {cross_entropy(one(x), y).item():.3f}")


if __name__ == "__main__":
    main()
