"""DistBelief's picture: accuracy against time for one CPU worker, one GPU, Downpour, Downpour with Adagrad, and Sandblaster.

    python benchmarks/distbelief.py --data cifar10 --data-dir DIR --device cuda --jobs 7 --out distbelief

Time is *measured* for one GPU (`hocket train --workers 1`, the median of its epochs' seconds times their number, so that what a
first epoch needs to start does not count). It is *predicted* for everything with CPU workers: an epoch on one thread of this
machine is timed (`hocket train --workers 1 --device cpu`), which gives a worker's operations per second; links have 1 Gbit/s and
0.1 ms, and steps vary by 5 %. The one CPU worker makes the steps of the one GPU, so its accuracies are those.

Every method has its own rate: all in `--…-rates` are tried, and the best at the end is shown. Virtual runs go side by side
(`--jobs`) when everything that is timed is over. Writes curves as OUT.json and the picture as OUT.png (where matplotlib is
installed); `--draw OUT.json` draws it from a file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from steps import machine, write_json

from hocket.data import load
from hocket.models import build, loss_for
from hocket.train.flops import step_flops

HOCKET = [sys.executable, "-W", "ignore", "-c", "from hocket.cli.main import main; main()"]
CPU, GPU = "one CPU worker", "one {device}"


@dataclass
class Curve:
    """A method with its best rate: seconds and accuracy after each epoch (of L-BFGS: iteration)."""

    name: str
    rate: float
    kind: str
    seconds: list[float]
    accuracy: list[float]
    tried: dict[str, float]
    """The last accuracy with each rate."""

    def reach(self, mark: float) -> float | None:
        """Seconds until the accuracy was first seen.

        >>> Curve("one", 0.1, "measured", [1.0, 2.0], [0.3, 0.5], {}).reach(0.4)
        2.0
        """
        return next((s for s, a in zip(self.seconds, self.accuracy, strict=True) if a >= mark), None)


def train(folder: Path, args: argparse.Namespace, *options: str, threads: int | None = None) -> list[dict[str, Any]]:
    """Run ``hocket train`` and return what it recorded; nothing where the rate was too high."""
    common = ["--data", args.data, "--model", args.model, "--seed", str(args.seed), "--no-checkpoints", "--out", str(folder)]
    if args.data_dir is not None:
        common += ["--data-dir", str(args.data_dir)]
    environ = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    ended = subprocess.run([*HOCKET, "train", *common, *options], capture_output=True, text=True, env=environ)
    if ended.returncode:
        if "NaN or Inf" in ended.stderr:
            return []
        raise SystemExit(f"hocket train {' '.join(options)}:\n{ended.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def best(name: str, kind: str, runs: dict[float, list[dict[str, Any]]], epoch_s: float | None = None) -> Curve:
    """The run that ended best, as a curve; ``epoch_s`` replaces the recorded seconds."""
    tried = {f"{rate:g}": (rows[-1]["accuracy"] if rows else 0.0) for rate, rows in runs.items()}
    rate = max(runs, key=lambda r: tried[f"{r:g}"])
    lasts = [epoch_s if epoch_s is not None else row["seconds"] for row in runs[rate]]
    seconds = [sum(lasts[: k + 1]) for k in range(len(lasts))]
    return Curve(name, rate, kind, seconds, [row["accuracy"] for row in runs[rate]], tried)


def measure(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All curves, and what they stand on."""
    folder: Path = args.out.with_suffix(".runs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data = load(args.data, args.data_dir)
    x, y = (t[:2] for t in data.train)
    operations = step_flops(build(args.model, data), loss_for(data), data.prepare(x), y, len(data.train[0]))
    options = ("--epochs", "1", "--batch-size", str(args.batch_size), "--no-augment", "--workers", "1", "--device", "cpu")
    cpu_s = train(folder / "cpu", args, *options, "--lr", str(args.rates[0]), threads=1)[0]["seconds"]
    console.print(f"One thread: {cpu_s:.1f} s per epoch, {operations / cpu_s / 1e9:.1f} GFLOP/s.")
    spec = folder / "lab.toml"
    spec.write_text(
        f'[compute]\nflops = "{operations / cpu_s / 1e9:.4f}G"\njitter = 0.05\n\n[link]\nbandwidth = "1Gbit"\nlatency = "0.1ms"\n'
    )
    sgd = ("--epochs", str(args.epochs), "--batch-size", str(args.batch_size), "--no-augment")
    alone = {
        rate: train(folder / f"alone-{rate:g}", args, *sgd, "--workers", "1", "--device", args.device, "--lr", str(rate))
        for rate in args.rates
    }
    device = {"cuda": "GPU", "cpu": "worker here, all its threads"}[args.device]
    curves = [best(GPU.format(device=device), "measured", alone)]
    epoch_s = statistics.median(row["seconds"] for row in alone[curves[0].rate])
    curves[0] = best(curves[0].name, "measured", alone, epoch_s)
    curves.insert(0, best(CPU, "predicted", alone, cpu_s))
    server = f"server(shards={args.shards})"
    adagrad = f"server(shards={args.shards}, optimizer=adagrad)"
    downpour = f"downpour(push={args.push}, fetch={args.push})"
    free = (*sgd, "--engine", "loop")
    virtual = ("--virtual", "--device", args.device, "--workers", str(args.workers), "--cluster", str(spec))
    plan = {
        "Downpour SGD": [(rate, (*free, "--strategy", f"{downpour} + {server}")) for rate in args.downpour_rates],
        "Downpour with Adagrad": [(rate, (*free, "--strategy", f"{downpour} + {adagrad}")) for rate in args.adagrad_rates],
        "Sandblaster L-BFGS": [
            (1.0, ("--optimizer", "sandblaster", "--strategy", server, "--epochs", str(args.iterations))),
        ],
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        asked = {
            name: {
                rate: pool.submit(train, folder / f"{name}-{rate:g}", args, *virtual, *options, "--lr", str(rate))
                for rate, options in runs
            }
            for name, runs in reversed(plan.items())  # the longest first
        }
        for name in plan:
            curves.append(best(f"{name}, {args.workers} workers", "predicted", {r: run.result() for r, run in asked[name].items()}))
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    found = {"cpu_epoch_s": cpu_s, "gpu_epoch_s": epoch_s, "curves": [asdict(curve) for curve in curves]}
    return {"machine": machine(), "settings": settings, **found}


def show(curves: list[Curve], mark: float, console: Console) -> None:
    """A table: how long each took to the mark."""
    table = Table(title=f"Time to {mark:.0%}")
    for column in (
        "",
        "time is",
        "rate",
        "accuracy at the end",
        "seconds in all",
        f"seconds to {mark:.0%}",
        "sooner than one CPU",
    ):
        table.add_column(column, justify="left" if column in ("", "time is") else "right")
    first = curves[0].reach(mark)
    for curve in curves:
        reached = curve.reach(mark)
        table.add_row(
            curve.name,
            curve.kind,
            f"{curve.rate:g}",
            f"{curve.accuracy[-1]:.1%}",
            f"{curve.seconds[-1]:,.1f}",
            "–" if reached is None else f"{reached:,.1f}",
            "–" if reached is None or first is None else f"{first / reached:,.1f}×",
        )
    console.print(table)


def draw(curves: list[Curve], title: str, path: Path) -> None:
    """Accuracy over seconds, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for curve, colour in zip(curves, ("#4c566a", "#2e7d32", "#1565c0", "#c62828", "#8e24aa"), strict=True):
        line = "-" if curve.kind == "measured" else "--"
        axes.plot(
            curve.seconds,
            [100 * a for a in curve.accuracy],
            line,
            color=colour,
            marker="o",
            markersize=3,
            linewidth=1.6,
            label=f"{curve.name} ({curve.kind})",
        )
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.set_xscale("log")
    axes.set_xlabel("seconds (solid: measured; dashed: predicted from a measured epoch)")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25, which="both", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--push", type=int, default=1, help="steps between pushes, and fetches (DistBelief: 1)")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=80, help="of L-BFGS")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1])
    parser.add_argument("--downpour-rates", type=float, nargs="+", default=[0.003, 0.01, 0.03])
    parser.add_argument("--adagrad-rates", type=float, nargs="+", default=[0.0003, 0.001, 0.003])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("distbelief"))
    parser.add_argument("--draw", type=Path, metavar="JSON")
    args = parser.parse_args()
    console = Console(width=140)
    found = measure(args, console) if args.draw is None else json.loads(args.draw.read_text())
    curves = [Curve(**row) for row in found["curves"]]
    if args.draw is None:
        write_json(args.out.with_suffix(".json"), found)
    show(curves, args.target, console)
    picture = (args.draw or args.out).with_suffix(".png")
    settings = found["settings"]
    try:
        draw(
            curves,
            f"{settings['model']} on {settings['data']}: DistBelief's methods with {settings['workers']} CPU workers",
            picture,
        )
        console.print(f"Drawn in {picture}")
    except ModuleNotFoundError:
        console.print("No picture without matplotlib; draw it elsewhere with --draw.")


if __name__ == "__main__":
    main()
