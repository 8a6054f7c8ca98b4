"""What a mesh costs and saves.

    python benchmarks/mesh.py overhead [--device cuda]     a 1×1×1 mesh against plain eager training of the same GPT
    torchrun --nproc-per-node 4 benchmarks/mesh.py memory   bytes per process against the whole model's

Overhead: steps are taken in turn, so that both meet the same machine; the ratio of medians is printed. Memory: weights, gradients
and the optimiser's state that a process really holds after a step, as a multiple of whole / (tensor × pipeline).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import hocket
from hocket.models import cross_entropy, gpt


def overhead(arguments: argparse.Namespace) -> None:
    """The same model and batches, in plain PyTorch and through ``parallelize`` with a mesh of one process."""
    device = torch.device(arguments.device)
    shape = (arguments.vocabulary, arguments.context, arguments.layers, arguments.heads, arguments.width)
    hocket.init(device=device)
    tokens = torch.randint(0, arguments.vocabulary, (arguments.batch_size, arguments.context + 1), device=device)
    x, y = tokens[:, :-1], tokens[:, 1:]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = gpt(*shape).to(device)
        return model, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    plain, own = make()
    split, theirs = make()
    job = hocket.parallelize(split, theirs, mesh=hocket.Mesh(), pipeline=hocket.Pipeline(loss=cross_entropy))
    count = sum(p.numel() for p in plain.parameters())

    def step_plain() -> Tensor:
        own.zero_grad()
        loss = cross_entropy(plain(x), y)
        loss.backward()
        own.step()
        return loss.detach()

    seconds: dict[str, list[float]] = {"plain": [], "mesh": []}
    losses: dict[str, float] = {}
    for turn in range(arguments.steps + 3):
        for name, step in (("plain", step_plain), ("mesh", lambda: job.train(x, y))):
            _settle(device)
            begun = time.perf_counter()
            loss = step()
            _settle(device)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - begun)
            losses[name] = float(loss)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{count / 1e6:.1f} million parameters, {arguments.batch_size} × {arguments.context} tokens on {device}")
    ratio = medians["mesh"] / medians["plain"]
    print(f"plain {medians['plain'] * 1e3:.2f} ms, mesh {medians['mesh'] * 1e3:.2f} ms per step: {ratio:.3f}×")
    print(f"losses after the last step: {losses['plain']:.6f} and {losses['mesh']:.6f}")


def memory(arguments: argparse.Namespace) -> None:
    """Bytes that a process holds, for every mesh of the processes at hand."""
    cluster = hocket.init(device="cpu")
    size = cluster.size
    meshes = [hocket.Mesh(pipeline=p, tensor=size // p) for p in range(1, size + 1) if size % p == 0]
    for mesh in meshes:
        torch.manual_seed(0)
        model = gpt(256, 64, 8, 8, arguments.width)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        whole = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
        tokens = torch.randint(0, 256, (8, 65))
        pipeline = hocket.Pipeline(loss=cross_entropy, sample=tokens[:, :-1])
        job = hocket.parallelize(model, optimizer, mesh=mesh, pipeline=pipeline)
        job.train(tokens[:, :-1], tokens[:, 1:])
        held = sum(
            t.numel() * t.element_size()
            for p in job.model.parameters()
            for t in (p, p.grad, *optimizer.state[p].values())
            if isinstance(t, Tensor)
        )
        most = float(cluster.all_gather_metrics(torch.tensor([[float(held)]])).max())
        job.finish()
        if cluster.workers.start == 0:
            print(f"{mesh!s:22} {most / 2**20:7.2f} MiB at most of {whole / 2**20:.2f}: {most * size / whole:.3f}× whole / {size}")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "memory"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    arguments = parser.parse_args()
    {"overhead": overhead, "memory": memory}[arguments.what](arguments)


if __name__ == "__main__":
    main()
