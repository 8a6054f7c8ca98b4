"""Language models over slow links: test loss of a GPT on virtual workers, and how many times fewer bytes it sent.

    python benchmarks/language.py prepare /tmp/corpus
    python benchmarks/language.py train /tmp/corpus --device cuda --seeds 0 1 2 \\
        --run "bulk; muon; lr=0.006; rest_lr=0.004; warmup=300" \\
        --run "diloco(4, 0.9, 0.5) + sign(block=4096); muon; lr=0.006; rest_lr=0.004; warmup=150"

``prepare`` copies Python source of this installation (its standard library and packages) into a folder, each file once, in an order
that mixes packages, until it has 66 MB; any folder of text will do in its place. A run is a strategy, an optimiser and its options:
``warmup`` counts steps, ``beta2`` is AdamW's, ``freeze`` 1-bit Adam's (``onebit``), ``matrices=1`` takes queries, keys and values
for one matrix of Muon's; ``sgd`` has no momentum. Rates fall by a cosine to 0, gradients are clipped to the norm 1, products are
bfloat16 on CUDA. ``--out`` adds each result to a file of JSON lines; runs that it has already are not repeated, so that an
interrupted command may be given again, and several processes may share the work (``--part 1/3``). ``chart`` draws loss against
bytes from such a file:

    python benchmarks/language.py chart docs/results/language.png --out docs/results/language.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
import sysconfig
import time
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from json_lines import add_line, read_lines

import hocket
from hocket.data import DataSet, load
from hocket.models import build, cross_entropy
from hocket.train.run import bulk_bytes_of

CORPUS_BYTES = 66_000_000
USUAL = {"steps": 1000, "workers": 8, "batch": 16}
"""What a run that does not name them has."""


def prepare(folder: Path, size: int) -> None:
    """Python source of this installation, as files with numbers for names."""
    paths = sysconfig.get_paths()
    roots = sorted({Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}) + [
        Path(torch.__file__).resolve().parents[1]
    ]
    files = {file.relative_to(root).as_posix(): file for root in roots for file in root.rglob("*.py") if file.is_file()}
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    total = 0
    for name in sorted(files, key=lambda name: (zlib.crc32(name.encode()), name)):
        content = files[name].read_bytes()
        digest = hashlib.sha1(content).digest()
        if digest in seen or len(content) < 64 or 0 in content:
            continue
        seen.add(digest)
        shutil.copyfile(files[name], folder / f"{len(seen):06}.py")
        total += len(content)
        if total >= size:
            break
    print(f"{len(seen):,} files, {total / 1e6:.1f} MB in {folder}")


def parsed(text: str) -> dict[str, Any]:
    """A run as its strategy, optimiser and options."""
    strategy, optimizer, *rest = [part.strip() for part in text.split(";")]
    options = {name.strip(): float(value) for name, value in (part.split("=") for part in rest)}
    return {"strategy": strategy, "optimizer": optimizer, **options}


def with_options(text: str, options: argparse.Namespace) -> str:
    """A run that names what differs from what is usual, so that its results tell it from others."""
    given = {"steps": options.steps, "workers": options.workers, "batch": options.batch_size}
    named = parsed(text)
    return text + "".join(f"; {name}={n}" for name, n in given.items() if n != USUAL[name] and name not in named)


def train(run: dict[str, Any], data: DataSet, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One training, and its figures."""
    model = build(options.model, data)
    counts = [min(n, int(run.get("matrices", 3))) for n in hocket.hidden_matrices(model)]
    decay, lr = run.get("weight_decay", 0.01), run["lr"]

    def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if run["optimizer"] == "muon":
            rest, momentum = run.get("rest_lr", lr), run.get("momentum", 0.9)
            betas = (0.9, run.get("beta2", 0.999))
            return hocket.Muon(params, lr, momentum, decay, rest_lr=rest, matrices=counts, betas=betas)
        if run["optimizer"] == "sgd":
            return torch.optim.SGD(params, lr, weight_decay=decay)
        options = {"betas": (0.9, run.get("beta2", 0.999)), "weight_decay": decay}
        if run["optimizer"] == "onebit":
            return hocket.OneBitAdam(params, lr, **options, freeze_step=int(run["freeze"]))
        return torch.optim.AdamW(params, lr, **options)

    steps = int(run.get("steps", options.steps))
    workers, batch = int(run.get("workers", options.workers)), int(run.get("batch", options.batch_size))
    epoch = len(data.train[0]) / (workers * batch)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = hocket.simulate(
            lambda: build(options.model, data),
            cross_entropy,
            tuple(part.to(torch.int64) for part in data.train),
            tuple(part.to(torch.int64) for part in data.test),
            strategy=run["strategy"],
            workers=workers,
            optimizer=optimizer,
            batch_size=batch,
            epochs=-(-steps // max(1, int(epoch))),
            max_steps=steps,
            seed=seed,
            lr_schedule="cosine",
            warmup_epochs=run.get("warmup", 0.15 * steps) / epoch,
            clip=None if "demo" in run["strategy"] else 1.0,  # signs have no norm to clip
            autocast=torch.bfloat16 if options.device == "cuda" else None,
            device=options.device,
        )
    seconds, plain = time.perf_counter() - started, bulk_bytes_of(found.replicas.layout, workers, steps)
    fewer = plain / found.ledger.bytes_sent if found.ledger.bytes_sent else math.inf
    return {"test_loss": found.test_loss, "fewer": fewer, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "train", "table", "chart"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="append", default=[], help="STRATEGY; OPTIMISER; option=number; …")
    parser.add_argument("--runs", type=Path, help="a file of runs, one per line")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="gpt:10m")
    parser.add_argument("--workers", type=int, default=USUAL["workers"])
    parser.add_argument("--batch-size", type=int, default=USUAL["batch"])
    parser.add_argument("--steps", type=int, default=USUAL["steps"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bytes", type=int, default=CORPUS_BYTES, help="of prepare: so much text, at least")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", default="1/1")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.folder, options.bytes)
        return
    if options.what == "chart":
        chart(_lines(options.out), options.folder)
        return
    wanted = options.run + ([line for line in options.runs.read_text().splitlines() if line.strip()] if options.runs else [])
    wanted = [with_options(text, options) for text in wanted]
    part, parts = map(int, options.part.split("/"))
    jobs = [(text, seed) for seed in options.seeds for text in wanted]
    done = _done(_lines(options.out), options.model)
    if options.what == "train":
        data = load(f"text:{options.folder}")
        for text, seed in jobs[part - 1 :: parts]:
            if (text, seed) in done:
                continue
            figures = train(parsed(text), data, options, seed)
            done[text, seed] = [figures]
            print(
                f"{figures['test_loss']:.4f}  {figures['fewer']:7.1f}x  {figures['seconds']:6.1f} s  seed {seed}  {text}",
                flush=True,
            )
            add_line(options.out, {"run": text, "seed": seed, "model": options.model, **figures})
    table(wanted, options.seeds, done)


def _lines(path: Path | None) -> list[dict[str, Any]]:
    return [{"model": "gpt:10m", **line} for line in read_lines(path)]


def _done(lines: list[dict[str, Any]], model: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The trainings of each run and seed of a model."""
    done: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for found in lines:
        if found["model"] == model:
            done.setdefault((found["run"], found["seed"]), []).append(found)
    return done


def _losses(text: str, seeds: Iterable[int], done: dict[tuple[str, int], list[dict[str, Any]]]) -> list[float]:
    """One loss per seed; of a seed that was trained more than once, the mean."""
    return [statistics.mean(f["test_loss"] for f in done[text, seed]) for seed in seeds if (text, seed) in done]


def table(wanted: list[str], seeds: list[int], done: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Mean and spread over the seeds of each run."""
    for text in wanted:
        if losses := _losses(text, seeds, done):
            spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            fewer = next(found[0]["fewer"] for (run, _), found in done.items() if run == text)
            print(f"{statistics.mean(losses):.4f}{spread} ({len(losses)} seeds)  1/{fewer:.0f}  {text}")


SERIES = (
    ("gpt:10m", "muon", 1000, "#0072B2", "o", "10.8 M parameters, Muon, 1,000 steps"),
    ("gpt:10m", "adamw", 1000, "#D55E00", "s", "10.8 M parameters, AdamW, 1,000 steps"),
    ("gpt:10m", "muon", 4000, "#009E73", "^", "10.8 M parameters, Muon, 4,000 steps"),
    ("gpt:100m", "muon", 1000, "#7A5195", "D", "101 M parameters, Muon, 1,000 steps"),
)


DRAWN = 1.0
"""Higher losses are left out of the picture."""


def chart(lines: list[dict[str, Any]], path: Path) -> None:
    """Loss against bytes, of 8 workers: a line joins, at each size, the setting of most seeds and lowest loss among those, unless
    one with fewer bytes has a lower loss."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150)
    for model, optimizer, steps, colour, marker, name in SERIES:
        done = _done(lines, model)
        best: dict[int, tuple[int, float, float]] = {}
        for text in dict.fromkeys(run for run, _ in done):
            run = parsed(text)
            if run["optimizer"] != optimizer or run.get("steps", 1000) != steps or "workers" in run or "matrices" in run:
                continue
            losses = _losses(text, range(100), done)
            x, y = 1 / next(found[0]["fewer"] for (other, _), found in done.items() if other == text), statistics.mean(losses)
            spread, filled = (statistics.stdev(losses), colour) if len(losses) > 2 else (0.0, "white")
            if y > DRAWN:
                continue
            axes.errorbar(x, y, spread or None, color=colour, marker=marker, markerfacecolor=filled, markersize=6, capsize=4)
            best[round(x**-1 / 20)] = min(best.get(round(x**-1 / 20), (0, 9.0, 0.0)), (-len(losses), y, x))
        points = sorted((x, y) for _, y, x in best.values() if not any(b < x and a < y for _, a, b in best.values()))
        axes.plot(*zip(*points, strict=True), color=colour, zorder=0)
        axes.plot([], [], color=colour, marker=marker, label=name)
    axes.set_xscale("log")
    axes.invert_xaxis()
    ticks = {1: "1\nbulk", 1 / 10: "1/10", 1 / 126: "1/126\ndiloco(4)\n+ sign", 1 / 412: "1/412\ndiloco(13)\n+ sign"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(xlabel="bytes sent, relative to bulk all-reduce", ylabel="test loss, nats per byte")
    axes.set_title(
        "GPT on Python source, 8 workers; filled: mean and standard deviation of 3 seeds, hollow: one training", fontsize=9
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
