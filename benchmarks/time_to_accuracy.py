"""Seconds until the accuracy that DDP ends with, over links of a given rate.

    python benchmarks/time_to_accuracy.py --data-dir DIR --rate 100mbit --model cnn --steps 500 \\
        --methods ddp ddp+powersgd "hocket:local(16)" "hocket:local(32) + sign"

One worker per host of a lab (see netlab.py), CIFAR-10, SGD with momentum 0.9 and a constant rate (``@0.02`` after a method gives it
another). DDP trains first, for ``--steps`` steps; its last accuracy is the mark. Every other method trains until its mean model
reaches the mark, or gives up after ``--patience`` times as many steps. All see the same mini-batches. The clock stands still while
the model is evaluated, and counts exchanges under way to their end. Every time is the first at which the mark was seen, DDP's too,
plus what it takes to average the workers' weights into that model, where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import BATCH, METHODS, MODELS, machine, on_hosts, write_json
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket.data import load
from hocket.data.partition import Partition

PEERS = [name for name in METHODS if name.startswith("ddp")]


@dataclass
class Curve:
    """One method's way: after so many steps and seconds, that accuracy."""

    method: str
    lr: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    average_s: list[float] = field(default_factory=list)
    """What averaging the weights took, at each evaluation."""

    def reach(self, mark: float) -> tuple[int, float] | None:
        """Steps and seconds at which the mark was first seen.

        >>> Curve("ddp", 0.1, [5, 10], [1.0, 2.0], [0.3, 0.5], [0.0, 0.5]).reach(0.4)
        (10, 2.5)
        """
        points = zip(self.steps, self.seconds, self.average_s, self.accuracy, strict=True)
        return next(((steps, s + average_s) for steps, s, average_s, accuracy in points if accuracy >= mark), None)


class Task:
    """This worker's model, optimiser and share of CIFAR-10; the same for every method."""

    def __init__(self, model: str, lr: float, data: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[model]()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self._data = data
        self._batches = self._endless()

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._data.train
        partition = Partition(len(x), dist.get_world_size(), BATCH, 0, "drop")
        epoch = 0
        while True:
            for round_ in partition.rounds(epoch):
                index = round_.indices[dist.get_rank()]
                yield self._data.prepare(x[index]), y[index]
            epoch += 1

    def step(self) -> None:
        x, y = next(self._batches)
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


@torch.no_grad()
def right_answers(model: nn.Module, data: Any) -> float:
    """All workers' share of right answers, each on its own part of the test set."""
    x, y = (t.tensor_split(dist.get_world_size())[dist.get_rank()] for t in data.test)
    model.eval()
    right = sum((model(data.prepare(a)).argmax(1) == b).sum() for a, b in zip(x.split(500), y.split(500), strict=True))
    model.train()
    counted = torch.tensor([float(right), float(len(y))])
    dist.all_reduce(counted)
    return float(counted[0] / counted[1])


def train(name: str, lr: float, data: Any, options: argparse.Namespace, mark: float | None) -> Curve:
    """One method until the mark (None: all steps)."""
    task, job = Task(options.model, lr, data), None
    if name.startswith("hocket:"):
        job = hocket.parallelize(task.model, task.optimizer, name.removeprefix("hocket:"))
    finish = METHODS[name](task).finish if job is None else job.detach  # type: ignore[arg-type]
    curve, seconds = Curve(name, lr), 0.0
    most = options.steps if mark is None else int(options.patience * options.steps)
    for begin in range(0, most, options.every):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(options.every):
            task.step()
        if job is not None:
            job.runtime.drain()
        dist.barrier()
        seconds += time.perf_counter() - start
        start = time.perf_counter()
        with nullcontext(task.model) if job is None else job.averaged() as model:
            dist.barrier()
            curve.average_s.append(0.0 if job is None else time.perf_counter() - start)
            accuracy = right_answers(model.module if job is None else model, data)
        curve.steps.append(begin + options.every)
        curve.seconds.append(seconds)
        curve.accuracy.append(accuracy)
        _say(f"{name}: {curve.steps[-1]} steps, {seconds:.1f} s, {accuracy:.2%}")
        if mark is not None and accuracy >= mark:
            break
    finish()
    return curve


def worker(options: argparse.Namespace) -> None:
    """One host's part; worker 0 writes what all measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hocket.init()  # adopts the group that is there
    data = load("cifar10", options.data_dir)
    curves: list[Curve] = []
    for name, lr in options.methods:
        mark = curves[0].accuracy[-1] if curves else None
        curves.append(train(name, lr, data, options, mark))
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps([asdict(curve) for curve in curves]))
    dist.barrier()
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def table(curves: Sequence[Curve]) -> str:
    """One line per method."""
    mark = curves[0].accuracy[-1]
    reference = curves[0].reach(mark)
    assert reference is not None
    width = max(len(curve.method) for curve in curves)
    lines = [f"{'method':<{width}}   rate   steps   seconds   times faster   ms/step"]
    for curve in curves:
        reached, per_step = curve.reach(mark), 1000 * curve.seconds[-1] / curve.steps[-1]
        if reached is None:
            lines.append(f"{curve.method:<{width}}  {curve.lr:5g}  not reached: best {max(curve.accuracy):.2%}  {per_step:9.1f}")
            continue
        steps, seconds = reached
        lines.append(
            f"{curve.method:<{width}}  {curve.lr:5g}  {steps:6}  {seconds:8.1f}  {reference[1] / seconds:13.2f}  {per_step:8.1f}"
        )
    return "\n".join(lines)


def write(path: Path, options: argparse.Namespace, curves: Sequence[Curve]) -> None:
    """The run as JSON."""
    run = {
        "benchmark": "time_to_accuracy",
        "hosts": options.hosts,
        "rate": options.rate,
        "model": options.model,
        "batch": BATCH,
        "command": shlex.join(["python", "benchmarks/time_to_accuracy.py", *sys.argv[1:]]),
        "mark": curves[0].accuracy[-1],
        "machine": machine(),
        "curves": [asdict(curve) for curve in curves],
    }
    write_json(path, run)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Seconds until the accuracy that DDP ends with.")
    parser.add_argument("--hosts", type=int, default=4, help="one worker on each (default 4)")
    parser.add_argument("--rate", help="of each link and direction, such as 100mbit (default: unlimited)")
    parser.add_argument("--model", choices=list(MODELS), default="cnn")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("HOCKET_DATA"), help="where CIFAR-10 lies")
    parser.add_argument("--steps", type=int, default=500, help="DDP's steps (default 500)")
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations (default 25)")
    parser.add_argument("--patience", type=float, default=2.0, help="give up after this many times DDP's steps (default 2)")
    parser.add_argument("--lr", type=float, default=0.05, help="rate of all methods without one of their own (default 0.05)")
    parser.add_argument("--methods", nargs="+", required=True, help=f"ddp first; then {', '.join(PEERS)}, hocket:<strategy>; @RATE")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, help="also write the curves there, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    named = [name.rpartition("@") if "@" in name else (name, "", str(options.lr)) for name in options.methods]
    options.methods = [(name.strip(), float(lr)) for name, _, lr in named]
    strange = next((n for n, _ in options.methods if n not in PEERS and not n.startswith("hocket:")), None)
    if strange is not None:
        parser.error(f"unknown method {strange!r}: use {', '.join(PEERS)} or hocket:<strategy>")
    if options.methods[0][0] != "ddp":
        parser.error("the first method must be ddp: it sets the mark")
    if options.steps % options.every:
        parser.error(f"--steps {options.steps} must be a multiple of --every {options.every}")
    return options


def main() -> None:
    """The command."""
    options = parse()
    if options.worker:
        return worker(options)
    try:
        curves = [Curve(**curve) for curve in on_hosts(__file__, sys.argv[1:], options)]
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise SystemExit(f"time_to_accuracy: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"{options.hosts} hosts, {options.rate or 'unlimited'} links, {options.model}; the mark: {curves[0].accuracy[-1]:.2%}")
    print(table(curves))
    if options.out is not None:
        write(options.out, options, curves)


if __name__ == "__main__":
    main()
