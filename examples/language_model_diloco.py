"""A small language model with DiLoCo: ``--period`` steps alone, then an outer step along the workers' mean displacement.

    torchrun --nproc-per-node 2 examples/language_model_diloco.py
    HOCKET_DATA=/path/with/tinyshakespeare torchrun --nproc-per-node 2 examples/language_model_diloco.py --steps 2000

The text is Tiny Shakespeare where HOCKET_DATA names a folder that has it, else sentences made up on the spot. Each worker draws
its own windows. Every exchange sends the whole model, but only one step in ``--period`` has one.
"""

import argparse
import os
import random
from pathlib import Path

import torch

import hocket
from hocket.models import cross_entropy, gpt


def text() -> str:
    """Shakespeare, or sentences of a small grammar."""
    folder = os.environ.get("HOCKET_DATA")
    if folder and (path := Path(folder, "tinyshakespeare", "input.txt")).exists():
        return path.read_text()
    draw = random.Random(0)
    who, what = ["the king", "a fool", "the queen", "old john"], ["sings to", "waits for", "forgets", "laughs at"]
    return " ".join(f"{draw.choice(who)} {draw.choice(what)} {draw.choice(who)}." for _ in range(2000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--period", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()

    cluster = hocket.init(device="cpu")
    worker = cluster.workers.start
    corpus = text()
    alphabet = sorted(set(corpus))
    tokens = torch.tensor([alphabet.index(c) for c in corpus])

    model = gpt(len(alphabet), arguments.context, layers=2, heads=2, width=arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    job = hocket.parallelize(model, optimizer, f"diloco({arguments.period})", steps=arguments.steps)

    draw = torch.Generator().manual_seed(worker)  # every worker reads elsewhere
    every = max(1, arguments.steps // 10)
    for step in range(1, arguments.steps + 1):
        starts = torch.randint(len(tokens) - arguments.context - 1, (arguments.batch_size,), generator=draw).tolist()
        x = torch.stack([tokens[s : s + arguments.context] for s in starts])
        y = torch.stack([tokens[s + 1 : s + 1 + arguments.context] for s in starts])
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if worker == 0 and (step % every == 0 or step == 1):
            print(f"step {step}: loss {loss.item():.3f}")

    job.finish()
    summary = job.summary(all_workers=True)
    if worker == 0:
        sent, exchanges = summary["bytes_sent"] / cluster.size / 1e6, summary["exchanges"]
        print(f"{cluster.size} workers, {arguments.steps} steps, {exchanges} exchanges, {sent:.1f} MB sent per worker")
        print("sample:", sample(model, alphabet, arguments.context))


@torch.no_grad()
def sample(model: torch.nn.Module, alphabet: list[str], context: int, length: int = 60) -> str:
    """Text that the model goes on with, after a space."""
    draw = torch.Generator().manual_seed(0)
    tokens = [alphabet.index(" ")]
    for _ in range(length):
        chances = model(torch.tensor([tokens[-context:]]))[0, -1].softmax(0)
        tokens.append(int(torch.multinomial(chances, 1, generator=draw)))
    return "".join(alphabet[t] for t in tokens).strip().replace("\n", " ")


if __name__ == "__main__":
    main()
