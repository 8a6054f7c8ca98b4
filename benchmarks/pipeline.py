"""Pipelines: how much of the time is idle, how they compare with PyTorch's own, and what they save on slow links.

    python benchmarks/pipeline.py                          # two processes: bubbles beside the formula, and PyTorch's schedules
    python benchmarks/pipeline.py --hosts 4 --rate 100mbit # VGG-11 in a lab (see netlab.py): pipeline against DDP

*Bubbles*: two stages of eight equal layers, micro-batches of equal size, m = 2, 4, 8, 16; the share is that of the measured
timeline, communication apart, the median over steps. *Peers*: the same model under Hocket and under
``torch.distributed.pipelining``, block by block in turn; the ratio is the median over rounds. *Hosts*: batch 16 per worker, so DDP
and the flushed pipeline make a step of 64 samples on four hosts, and PipeDream four mini-batches of 16. Compare within one run
only: all processes share this machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netlab import INTERFACE
from steps import machine, on_hosts, write_json
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hocket.models import cross_entropy, vgg11
from hocket.split import Axis, Mesh, init_mesh
from hocket.split.pipeline import PipelineRunner, cut_model
from hocket.split.pipeline.draw import picture

STAGES, LAYERS, WIDTH, SAMPLES = 2, 8, 768, 256
MICROS = (2, 4, 8, 16)
BATCH = 16
RATES = {"100mbit": 12.5e6, "1gbit": 125e6}


class Scale(nn.Module):
    """Something to learn before the first layer: so that this too has a gradient of its inputs to compute, like all others."""

    whole = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def even() -> nn.Sequential:
    """A model of equal layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(STAGES * LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(Scale(), *layers)


def square(output: Tensor, target: Tensor) -> Tensor:
    """A loss that costs next to nothing."""
    return (output - target).square().mean()


def ours(axis: Axis, schedule: str, num_microbatches: int) -> PipelineRunner:
    """Hocket's pipeline of the even model, cut in its middle."""
    cut = cut_model(even(), torch.zeros(SAMPLES, WIDTH), STAGES, points=[str(2 * LAYERS)])
    return PipelineRunner(cut, axis, square, schedule, num_microbatches)


def bubbles(axis: Axis, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The measured bubble of each schedule and number of micro-batches."""
    rows = []
    for num_microbatches in MICROS:
        row: dict[str, Any] = {"micro": num_microbatches, "formula": (STAGES - 1) / (num_microbatches + STAGES - 1)}
        for schedule in ("gpipe", "1f1b"):
            pipe = ours(axis, schedule, num_microbatches)
            x, y = torch.randn(2, SAMPLES * num_microbatches, WIDTH)
            found = []
            for step in range(options.steps + 2):
                dist.barrier()
                pipe.module.zero_grad()
                pipe.run(x, y)
                timeline = pipe.timeline()
                if step >= 2:
                    found.append(timeline)
            found.sort(key=lambda t: t.bubble_share)
            middle = found[len(found) // 2]
            shares = middle.shares()
            row[schedule] = {"bubble": shares.bubble_share, "communication": shares.communication_share}
            if options.picture and num_microbatches == 8 and axis.place == 0:
                title = f"{schedule}, {STAGES} stages, {num_microbatches} micro-batches, measured: {shares.bubble_share:.1%} idle"
                Path(options.picture).mkdir(parents=True, exist_ok=True)
                (Path(options.picture) / f"timeline-{schedule}.png").write_bytes(picture(middle, title, "ms"))
        rows.append(row)
    return rows


def theirs(schedule: str, num_microbatches: int, rank: int) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any]]:
    """PyTorch's pipeline of the same model."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    model = even()
    part = model[: 1 + 2 * LAYERS] if rank == 0 else model[1 + 2 * LAYERS :]
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    pipe = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, num_microbatches, loss_fn=square)
    return part, lambda x, y: pipe.step(x) if rank == 0 else pipe.step(target=y)


def peers(axis: Axis, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds per step of both, in turn, and the ratio."""
    rows = []
    for schedule in ("gpipe", "1f1b"):
        for num_microbatches in (4, 8):
            pipe = ours(axis, schedule, num_microbatches)
            part, step = theirs(schedule, num_microbatches, axis.place)
            x, y = torch.randn(2, SAMPLES * num_microbatches, WIDTH)
            runs: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"hocket": (pipe.module, pipe.run), "pytorch": (part, step)}
            found: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(options.rounds + 1):
                for name, (module, run) in runs.items():
                    took = _timed(lambda m=module, r=run, x=x, y=y: (m.zero_grad(), r(x, y)), options.steps)
                    if turn:  # the first one warms up
                        found[name].append(1000 * took)
            ratio = statistics.median(a / b for a, b in zip(found["hocket"], found["pytorch"], strict=True))
            rows.append(
                {
                    "schedule": schedule,
                    "micro": num_microbatches,
                    **{n: statistics.median(t) for n, t in found.items()},
                    "ratio": ratio,
                }
            )
    return rows


def _timed(step: Callable[[], Any], steps: int) -> float:
    """Seconds per step of the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return max(_gathered((time.perf_counter() - start) / steps))


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# --- hosts -----------------------------------------------------------------------------------------------------------------


def hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples per second and bytes of DDP, of 1F1B with four micro-batches, and of PipeDream."""
    place = init_mesh(Mesh(pipeline=dist.get_world_size()))
    methods = {"ddp": _ddp, "1f1b": _flushed, "pipedream": _pipedream}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for _ in range(options.rounds):
        for name, method in methods.items():
            work, samples = method(place.pipeline, options)
            work(1 if name == "ddp" else 2)
            dist.barrier()
            before, start = _sent(), time.perf_counter()
            steps = max(2, options.steps // 8) if name == "ddp" else options.steps  # it takes seconds for each, all alike
            work(steps)
            seconds = max(_gathered(time.perf_counter() - start))
            dist.barrier()
            sent = sum(_gathered(_sent() - before))
            done = steps * samples
            found[name].append({"samples_per_s": done / seconds, "bytes_per_sample": sent / done})
            if dist.get_rank() == 0:
                print(f"{name}: {done / seconds:.1f} samples/s", file=sys.stderr, flush=True)
    return [{"method": n, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}} for n, runs in found.items()]


Work = tuple[Callable[[int], None], int]
"""Does that many steps; samples of one step, over all hosts."""


def _images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-4)


def _ddp(axis: Axis, options: argparse.Namespace) -> Work:
    model = DistributedDataParallel(vgg11((3, 32, 32), 10))
    optimizer = _sgd(model)
    x, y = _images(BATCH)

    def work(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return work, BATCH * axis.size


def _staged(axis: Axis, options: argparse.Namespace, schedule: str) -> PipelineRunner:
    torch.manual_seed(0)
    model, (x, _) = vgg11((3, 32, 32), 10), _images(BATCH)
    cut = cut_model(model, x, axis.size, points=_points(axis.size, options.rate))
    return PipelineRunner(cut, axis, cross_entropy, schedule, num_microbatches=4)


@functools.cache
def _points(stages: int, rate: str) -> list[str]:
    """Where the model is cut, decided once: all pipelines of a run have the same stages."""
    cut = cut_model(vgg11((3, 32, 32), 10), _images(BATCH)[0], stages, "seconds", bandwidth=RATES.get(rate, 1.25e9))
    if dist.get_rank() == 0:
        print(cut.explain(), file=sys.stderr, flush=True)
    return [next(row.name for row in reversed(cut.rows) if row.stage == k) for k in range(stages - 1)]


def _flushed(axis: Axis, options: argparse.Namespace) -> Work:
    pipe = _staged(axis, options, "1f1b")
    optimizer = _sgd(pipe.module)
    torch.manual_seed(1)
    x, y = _images(BATCH * 4)

    def work(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.run(x, y)
            optimizer.step()

    return work, BATCH * 4


def _pipedream(axis: Axis, options: argparse.Namespace) -> Work:
    """A step are four mini-batches; filling and draining are part of the time."""
    pipe = _staged(axis, options, "pipedream")
    optimizer = _sgd(pipe.module)
    pipe.update = optimizer.step
    torch.manual_seed(1)
    x, y = _images(BATCH)

    def work(steps: int) -> None:
        for _ in range(4 * steps):
            pipe.feed(x, y)
        pipe.drain()

    return work, BATCH * 4


def _sent() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


# --- the command -----------------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> None:
    """One process's part; process 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if options.hosts:
        found["hosts"] = hosts(options)
    else:
        axis = init_mesh(Mesh(pipeline=STAGES)).pipeline
        found["bubbles"] = bubbles(axis, options)
        found["peers"] = peers(axis, options)
    if dist.get_rank() == 0:
        write_json(Path(options.result), found)
    dist.barrier()
    dist.destroy_process_group()


def on_this_machine(options: argparse.Namespace, arguments: Sequence[str]) -> Any:
    """Two processes, and what process 0 wrote."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--result", str(result), *arguments]
        common = {**os.environ, "WORLD_SIZE": str(STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        running = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(STAGES)]
        try:
            codes = [process.wait(options.timeout_s) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError(f"processes failed with exit codes {codes}")
        return json.loads(result.read_text())


def table(found: dict[str, Any]) -> str:
    """The figures as text."""
    lines = []
    if "bubbles" in found:
        lines += [f"{'m':>3}  {'formula':>8}  {'gpipe':>8}  {'1f1b':>8}   communication (gpipe, 1f1b)"]
        for row in found["bubbles"]:
            shares = "  ".join(f"{row[s]['bubble']:>8.1%}" for s in ("gpipe", "1f1b"))
            apart = ", ".join(f"{row[s]['communication']:.1%}" for s in ("gpipe", "1f1b"))
            lines.append(f"{row['micro']:>3}  {row['formula']:>8.1%}  {shares}   {apart}")
        lines += ["", f"{'schedule':<10} {'m':>3}  {'hocket ms':>10}  {'pytorch ms':>10}  ratio"]
        for row in found["peers"]:
            lines.append(
                f"{row['schedule']:<10} {row['micro']:>3}  {row['hocket']:>10.1f}  {row['pytorch']:>10.1f}  {row['ratio']:.3f}"
            )
    if "hosts" in found:
        base = found["hosts"][0]
        lines.append(f"{'method':<10}  {'samples/s':>10}  {'to ddp':>7}  {'kB/sample':>10}  fewer bytes")
        for row in found["hosts"]:
            speed, fewer = row["samples_per_s"] / base["samples_per_s"], 1 - row["bytes_per_sample"] / base["bytes_per_sample"]
            sent = row["bytes_per_sample"] / 1e3
            lines.append(f"{row['method']:<10}  {row['samples_per_s']:>10.1f}  {speed:>6.2f}×  {sent:>10.1f}  {fewer:.1%}")
        flushed, free = (next(r["samples_per_s"] for r in found["hosts"] if r["method"] == m) for m in ("1f1b", "pipedream"))
        lines.append(f"pipedream over 1f1b: {free / flushed:.2f}×")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Bubbles, peers and slow links of pipelines.")
    parser.add_argument("--hosts", type=int, nargs="?", const=4, default=0, help="VGG-11 on that many hosts of a lab (default 4)")
    parser.add_argument("--rate", default="100mbit", help="of each link and direction (default 100mbit)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per block (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks per method (default 3)")
    parser.add_argument("--picture", help="a folder for the measured timelines of m = 8 as PNG")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="seconds for the whole run at most (default 3600)")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    arguments = ["--steps", str(options.steps), "--rounds", str(options.rounds), "--rate", options.rate]
    arguments += ["--picture", str(Path(options.picture).resolve())] if options.picture else []
    try:
        if options.hosts:
            found = on_hosts(__file__, [*arguments, "--hosts", str(options.hosts)], options)
        else:
            found = on_this_machine(options, arguments)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise SystemExit(f"pipeline: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(table(found))
    if options.out is not None:
        write_json(options.out, {"benchmark": "pipeline", "machine": machine(), **found}, indent=1)


if __name__ == "__main__":
    main()
