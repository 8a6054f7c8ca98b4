"""Hocket's ``bulk`` beside DDP on CUDA: a step with one process, and with two processes that share one GPU.

    python benchmarks/steps_cuda.py [--model gpt] [--rounds 5] [--strategies bulk "bulk + qsgd(4)"] [--trace FOLDER]
    python benchmarks/steps_cuda.py --device cpu --ways 2:gloo --model mlp --steps 2 --rounds 1      # to see that it runs

A way is a number of processes and a backend: ``1:nccl 2:nccl 2:gloo``. Gloo copies gradients to the CPU and back. NCCL refuses two
processes on one GPU in most versions; the table then says how. A round gives each method a block of ``--steps`` steps on a model of
its own, warmed up; a block's time is that of its slowest process, ratios are taken within a round, and figures are medians over
rounds. Processes of one GPU take turns on it, so a step of two takes about twice as long: only ratios within a way mean anything.

Three more steps of each method are profiled: ``overlap`` is the share of the time of its exchanges (``gloo:all_reduce`` on the CPU,
NCCL's kernels on the device) in which process 0 computes kernels that its backward pass has launched. ``--trace`` keeps the traces,
one file per way and method, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import MODELS, _gather
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import hocket

WAYS = ("1:nccl", "1:gloo", "2:nccl", "2:gloo")
BACKWARD = "backward pass"
Spans = list[tuple[float, float]]


class Task:
    """This process's model, optimiser and data."""

    def __init__(self, model: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[model]().to(device)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(dist.get_rank())
        if model == "gpt":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.x, self.y = torch.randint(256, (2, batch, 256), device=device)
        else:
            self.x, self.y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.x).flatten(0, -2), self.y.flatten())
        with record_function(BACKWARD):
            loss.backward()
        self.optimizer.step()


def prepared(method: str, task: Task) -> Callable[[], object]:
    """Lets the task train together; returns what ends that."""
    if method == "ddp":
        task.model = DistributedDataParallel(task.model)
    elif method != "compute":
        return hocket.parallelize(task.model, task.optimizer, method).detach
    return lambda: None


def block(method: str, options: argparse.Namespace, trace: Path | None) -> float:
    """Milliseconds of a step of the slowest process; with ``trace`` three more steps are recorded there."""
    task = Task(options.model, options.batch_size, options.device)
    end, wait = prepared(method, task), torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for _ in range(options.warm_up):
        task.step()
    wait()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(options.steps):
        task.step()
    wait()
    took = 1000 * (time.perf_counter() - begun) / options.steps
    if trace is not None:
        dist.barrier()
        with all_threads() as found:
            for _ in range(3):
                task.step()
            wait()
        if dist.get_rank() == 0:
            found.export_chrome_trace(str(trace))
    slowest = max(_gather(took))
    end()
    return slowest


def all_threads() -> AbstractContextManager[Any]:
    """A profile of all threads: exchanges are launched by one of their own."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with suppress(ImportError, TypeError):
        from torch._C._profiler import _ExperimentalConfig

        return profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    return profile(activities=kinds)


def joined(spans: Iterable[tuple[float, float]]) -> Spans:
    """Spans that overlap as one.

    >>> joined([(0, 2), (5, 6), (1, 3)])
    [(0, 3), (5, 6)]
    """
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def shared(a: Spans, b: Spans) -> float:
    """How long spans of both lists go on at the same time.

    >>> shared([(0, 4), (6, 9)], [(1, 2), (3, 7)])
    3
    """
    first, second = joined(a), joined(b)
    return sum(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x in first for y in second)


def overlap(events: list[dict[str, Any]]) -> dict[str, float]:
    """Of a trace of three steps: exchanges and kernels of the backward pass in milliseconds per step, and the share of the first
    that overlaps with the second."""
    timed = [e for e in events if "dur" in e]

    def spans(wanted: Callable[[dict[str, Any]], bool]) -> Spans:
        return [(e["ts"], e["ts"] + e["dur"]) for e in timed if wanted(e)]

    kernels = [e for e in timed if e.get("cat") == "kernel"]
    backward = joined(spans(lambda e: e["name"] == BACKWARD and e.get("cat") == "user_annotation"))
    launched = {
        e["args"]["correlation"]
        for e in timed
        if "correlation" in e.get("args", {})
        and e.get("cat") in ("cuda_runtime", "cuda_driver")
        and any(begin <= e["ts"] <= end for begin, end in backward)
    }
    exchanges = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" in e["name"].lower()]
    exchanges += spans(lambda e: re.match(r"gloo:\w+", e["name"]) is not None and e.get("cat") == "user_annotation")
    own = [e for e in kernels if e["args"].get("correlation") in launched and "nccl" not in e["name"].lower()]
    computed: Spans = [(e["ts"], e["ts"] + e["dur"]) for e in own]
    lasted = sum(end - begin for begin, end in joined(exchanges))
    found = {"exchanges_ms": lasted / 3e3, "backward_ms": sum(end - begin for begin, end in joined(computed)) / 3e3}
    return found | ({"overlap": shared(exchanges, computed) / lasted} if lasted and computed else {})


def worker(options: argparse.Namespace) -> None:
    """One process of one way; process 0 writes what all measured."""
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1, device=options.device if options.backend == "nccl" else "cpu"))
    if options.device == "cuda":
        torch.cuda.synchronize()
    hocket.init(device=options.device)
    methods = ["compute", "ddp", *options.strategies]
    times: dict[str, list[float]] = {method: [] for method in methods}
    traces = {method: options.result.parent / f"{number}.json" for number, method in enumerate(methods)}
    for turn in range(options.rounds):
        for method in methods[:: 1 if turn % 2 else -1]:
            times[method].append(block(method, options, traces[method] if turn == options.rounds - 1 else None))
    if dist.get_rank() == 0:
        found = {}
        for method in methods:
            text = traces[method].read_text()
            found[method] = {"ms": times[method], **overlap(json.loads(text)["traceEvents"])}
            if options.trace is not None:
                name = re.sub(r"\W+", "-", f"{dist.get_world_size()}-{options.backend}-{method}").strip("-")
                with gzip.open(options.trace / f"{name}.json.gz", "wt") as file:
                    file.write(text)
        options.result.write_text(json.dumps(found))
    dist.barrier()
    hocket.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(way: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """The figures of one way by method, or why there are none."""
    count, backend = way.split(":")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend, "--result", str(result)]
        logs = [(Path(folder) / f"{rank}.txt").open("w+") for rank in range(int(count))]
        processes = [
            subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=log)
            for rank, log in enumerate(logs)
        ]
        until = time.monotonic() + options.timeout_s
        try:
            while any(p.poll() is None for p in processes) and time.monotonic() < until:
                if any(p.poll() for p in processes):
                    until = min(until, time.monotonic() + 10)  # the others hear of it
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if result.exists() and not any(p.returncode for p in processes):
            return json.loads(result.read_text())
        said = []
        for log in logs:
            log.seek(0)
            said += [line.strip() for line in log if re.search(r"Error|Duplicate|ncclInvalid|hocket:", line)]
            log.close()
        named = [line for line in said if "Duplicate" in line or "invalid usage" in line]
        return (named or said or [f"not done after {options.timeout_s:g} s"])[-1][:300]


def show(way: str, found: dict[str, Any] | str) -> None:
    """The lines of one way."""
    if isinstance(found, str):
        print(f"| {way} | refused: {found} |", flush=True)
        return
    for method, figures in found.items():
        pairs = [zip(figures["ms"], found[base]["ms"], strict=True) for base in ("compute", "ddp")]
        ratios = [f"{statistics.median(own / other for own, other in pair):.3f}" for pair in pairs]
        share = f"{figures['overlap']:.0%}" if "overlap" in figures else "-"
        cells = [way, f"`{method}`", f"{statistics.median(figures['ms']):.2f}", *ratios]
        cells += [f"{figures['exchanges_ms']:.2f}", f"{figures['backward_ms']:.2f}", share]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints one line per way and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="processes:backend")
    parser.add_argument("--strategies", nargs="+", default=["bulk"])
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=180.0, help="for each way")
    parser.add_argument("--trace", type=Path, help="a folder for the traces")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
    if options.result is not None:
        return worker(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    size = f"batch {options.batch_size}, {options.rounds} rounds of {options.steps} steps"
    print(f"{where}, torch {torch.__version__}, {options.model}, {size}")
    heads = ["way", "method", "ms/step", "to compute", "to ddp", "exchanges, ms", "backward kernels, ms", "overlap"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    results = {}
    for way in options.ways:
        results[way] = run(way, options)
        show(way, results[way])
    if options.out:
        run_of = {"device": where, "torch": torch.__version__, "model": options.model, "batch": options.batch_size}
        options.out.write_text(json.dumps({**run_of, "ways": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
