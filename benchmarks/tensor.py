"""Ways to split the mlp's layers over processes: milliseconds and bytes of a step, and PyTorch's DTensor beside them.

    python benchmarks/tensor.py                    # loopback
    python benchmarks/tensor.py --rate 1gbit       # hosts of their own (needs root and iproute2, see netlab.py)

All ways run in turn within one run, several rounds; ratios are of medians. The processes share this machine's cores: with more of
them than cores a split gains nothing here, and what is compared are the ways with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from netlab import Lab
from rich.console import Console
from rich.table import Table

PLANS = {
    "columns, rows": {"1": "columns", "3": "rows"},
    "gather, gather": {"1": "gather", "3": "gather"},
    "columns, rotate, rows": {"1": "columns", "3": "rotate", "5": "rows"},
}
BASE, DTENSOR, ALONE = "columns, rows", "DTensor columns, rows", "not split"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", help="of every host's link, in each direction; without it processes share the loopback")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="timed together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    for processes in options.processes:
        show(processes, launch(processes, options), options)


def launch(processes: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What process 0 of a world measured."""
    numbers = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("batch-size", "hidden", "steps", "rounds")]
    me = [sys.executable, __file__, "--worker", *numbers]
    if options.rate:
        with Lab(processes, options.rate) as lab:
            done = lab.run([me] * processes)
        codes, said = [d.returncode for d in done], [(d.stdout, d.stderr) for d in done]
    else:
        world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
        running = [
            subprocess.Popen(
                me, env={**os.environ, **world, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for r in range(processes)
        ]
        said = [p.communicate(timeout=600) for p in running]
        codes = [p.returncode for p in running]
    if any(codes):
        raise SystemExit("\n".join(err for _, err in said))
    return json.loads(said[0][0].strip().splitlines()[-1])


def show(processes: int, found: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    where = options.rate or "loopback"
    table = Table(
        title=f"mlp 3072-{options.hidden}-{options.hidden}-10, batch {options.batch_size}, {processes} processes, {where}"
    )
    for column in ("", "ms/step", f"to '{BASE}'", "spread", "kB/step", "exchanges"):
        table.add_column(column, justify="right" if column else "left")
    for name, row in found.items():
        sent = f"{row['bytes'] / 1e3:.1f}" if "bytes" in row else ""
        exchanges = f"{row['exchanges']:.0f}" if "exchanges" in row else ""
        spread = f"{row['low']:.2f}–{row['high']:.2f}"
        table.add_row(name, f"{row['ms']:.2f}", f"{row['ms'] / found[BASE]['ms']:.2f}", spread, sent, exchanges)
    Console().print(table)


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from hocket.cluster.join import join
    from hocket.split import Mesh, init_mesh

    torch.set_num_threads(1)
    join(device="cpu").close()
    axis = init_mesh(Mesh(tensor=dist.get_world_size())).tensor
    ways = prepare(options, axis)
    times: dict[str, list[float]] = {name: [] for name in ways}
    comm_stats: dict[str, tuple[int, int]] = {}
    losses: dict[str, float] = {}
    for turn in range(options.rounds + 1):
        for name, step in ways.items():
            axis.comm_stats.take()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(options.steps):
                losses[name] = step()
            took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            stats = axis.comm_stats.take()
            comm_stats[name] = stats.bytes_sent // options.steps, stats.exchanges // options.steps
            if turn:  # the first one opens connections
                times[name].append(float(took) / options.steps * 1e3)
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    if axis.place == 0:
        print(json.dumps({name: measured(name, times, comm_stats) for name in ways}))
    dist.barrier()


def measured(name: str, times: dict[str, list[float]], comm_stats: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Median, the lowest and the highest ratio to the base in one round, and what was sent."""
    ratios = [a / b for a, b in zip(times[name], times[BASE], strict=True)]
    row = {"ms": statistics.median(times[name]), "low": min(ratios), "high": max(ratios)}
    return row if name == DTENSOR else {**row, "bytes": comm_stats[name][0], "exchanges": comm_stats[name][1]}


def prepare(options: argparse.Namespace, axis) -> dict:
    """One function per way that makes a training step and returns the loss; all start from the same weights."""
    import copy

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn import functional as F

    from hocket.models import mlp
    from hocket.split.tensor import split_tensor

    torch.manual_seed(0)
    whole = mlp(3072, 10, (options.hidden, options.hidden))
    x, y = torch.randn(options.batch_size, 3072), torch.randint(10, (options.batch_size,))

    def stepper(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

        def step() -> float:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    ways = {}
    for name, plan in PLANS.items():
        model = copy.deepcopy(whole)
        split_tensor(model, axis, plan)
        ways[name] = stepper(model)
    mesh = init_device_mesh("cpu", (axis.size,))
    ways[DTENSOR] = stepper(parallelize_module(copy.deepcopy(whole), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()}))
    return {**ways, ALONE: stepper(whole)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
