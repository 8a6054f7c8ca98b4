"""How the loss of a small language model goes on: the fitted law against trainings that it has not seen, and DiLoCo's scaling law.

    python benchmarks/law.py --out docs/results/law.json                       # CPU: a GPT of 0.1 million parameters
    python benchmarks/law.py --device cuda --model gpt:10m --global-batch 64 --steps 250 500 1000 2000 --held-steps 4000 \\
        --lr 0.001 --text /tmp/corpus --out law-10m.json                       # a GPU (prepare /tmp/corpus with language.py)
    python benchmarks/law.py --model digits --strategy "local({period})" --global-batch 32 --lr 0.1 --seeds 3 --periods 8 2 64 \\
        --steps 120 240 480 --held-steps 1920 --held-workers 16 --held-period 24   # a small network on digits, in a minute

The mini-batch of all workers together is fixed, as in arXiv:2503.09799, so that more workers have fewer samples each. Trainings of
all lengths and numbers of workers at the first period and density, and two each at the other periods and densities, are fitted by
`hocket.prediction.law`. Held out are trainings twice as long, with twice as many workers, and both; and others with a period, a
density and both between those that are fitted.

The published law says loss · M^β with β = 1.0923 · parameters^−0.2342 for `diloco(30)`; ours is the exponent of the workers that
the same trainings give, with the floor left out, as there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import steps
import torch
from torch import nn

import hocket
from hocket.data import DataSet, load
from hocket.models import build, cross_entropy
from hocket.models.gpt import gpt
from hocket.prediction.law import Law, Training, fit

BYTES = 1_500_000
OPTIMIZERS: tuple[Any, Any] = (partial(torch.optim.AdamW, weight_decay=0.1), torch.optim.SGD)
SMALL = {"layers": 2, "heads": 2, "width": 64}


def corpus(path: str | None, context: int) -> DataSet:
    """The text at ``path``, or source of Python's standard library."""
    if path is not None:
        return load(f"text:{path}")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:BYTES]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64).clamp(max=127)
    rows = tokens[: len(tokens) // (context + 1) * (context + 1)].view(-1, context + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows, held = rows[order[:-256]], rows[order[-256:]]
    return DataSet("stdlib", (rows[:, :-1], rows[:, 1:]), (held[:, :-1], held[:, 1:]), 128, lambda x: x)


def train(data: DataSet, options: argparse.Namespace, count: int, workers: int, period: int, density: float) -> Training:
    """Whole trainings, one for each seed; the mean loss at their end."""
    code = "" if density == 1 else f" + topk({density:g})"
    begun = time.perf_counter()
    losses = []
    for seed in range(options.seeds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            run = hocket.simulate(
                partial(built, options.model, data), cross_entropy, data.train, data.test,
                strategy=options.strategy.format(period=period) + code, workers=workers,
                batch_size=options.global_batch // workers, optimizer=partial(OPTIMIZERS[options.model == "digits"], lr=options.lr),
                epochs=-(-count * options.global_batch // len(data.train[0])), max_steps=count, lr_schedule="cosine", seed=seed,
                device=options.device,
            )  # fmt: skip
        losses.append(run.metrics[-1]["test_loss"])
    took = f"{time.perf_counter() - begun:.0f} s"
    loss = statistics.fmean(losses)
    print(f"{count} steps, {workers} workers, period {period}, density {density:g}: {loss:.4f} ({took})", flush=True)
    return Training(count, loss, workers, period, density)


def built(name: str, data: DataSet) -> nn.Module:
    """The model of that name."""
    if name == "digits":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return gpt(128, context=64, **SMALL) if name == "small" else build(name, data)


def digits() -> DataSet:
    """Digits of 8 × 8 pixels, as the network takes them."""
    data = load("digits")
    assert data.test is not None
    train, test = ((data.prepare(x), y) for x, y in (data.train, data.test))
    return DataSet("digits", train, test, 10, lambda x: x)


def beta(trainings: Sequence[Training], period: int) -> tuple[float, float]:
    """The exponent of the workers at one period, whole values sent, without a floor, and its standard error:
    log L = c + a·log t + β·log M."""
    own = [t for t in trainings if t.period == period and t.density == 1]
    rows = torch.tensor([[1.0, math.log(t.steps), math.log(t.workers)] for t in own], dtype=torch.float64)
    losses = torch.tensor([math.log(t.loss) for t in own], dtype=torch.float64).unsqueeze(1)
    solved = torch.linalg.lstsq(rows, losses).solution
    left = losses - rows @ solved
    variance = float((left**2).sum()) / max(1, len(own) - 3) * torch.linalg.inv(rows.T @ rows)
    return float(solved[2]), math.sqrt(float(variance[2, 2]))


def published(parameters: int) -> float:
    """
    >>> round(published(10**9), 4)
    0.0085
    """
    return 1.0923 * parameters**-0.2342


def table(law: Law, held: Sequence[Training]) -> str:
    """What was held out, the law's loss and its interval, and the error."""
    lines = ["| steps | workers | period | density | loss | law | error | within |", "|---:|---:|---:|---:|---:|---:|---:|---|"]
    for t in held:
        found = law.loss(t.steps, t.workers, t.period, t.density)
        inside = "yes" if found.low <= t.loss <= found.high else "no"
        asked = f"{t.steps:,} | {t.workers} | {t.period} | {t.density:g}"
        lines.append(f"| {asked} | {t.loss:.3f} | {found} | {found.loss / t.loss - 1:+.1%} | {inside} |")
    return "\n".join(lines)


def cases(options: argparse.Namespace) -> dict[str, list[tuple[int, int, int, float]]]:
    """What is trained: steps, workers, period, density."""
    lengths, counts, (period, *periods), (density, *densities) = options.steps, options.workers, options.periods, options.densities
    few = [(lengths[len(lengths) // 2], counts[-1]), (lengths[-1], counts[len(counts) // 2])]
    longer, more, between = options.held_steps, options.held_workers, (options.held_period, options.held_density)
    mixed = [(lengths[-1], counts[-1], between[0], density), (lengths[-1], counts[-1], period, between[1])]
    mixed += [(t, n, *between) for t, n in ((lengths[-1], counts[-1]), (lengths[-1], more), (longer, more))]
    return {
        "fitted": [
            *((t, n, period, density) for n in counts for t in lengths),
            *((t, n, p, density) for p in periods for t, n in few),
            *((t, n, period, d) for d in densities for t, n in few),
        ],
        "held_out": [
            *((t, n, period, density) for t, n in ((longer, counts[-1]), (lengths[-1], more), (longer, more))),
            *(mixed if periods and densities else ()),
        ],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="A fitted law of the loss against trainings that it has not seen.")
    parser.add_argument("--model", default="small", help="small (0.1 million parameters), gpt:10m, …, or digits")
    parser.add_argument("--text", help="text files to learn (default: Python's standard library)")
    parser.add_argument("--global-batch", type=int, default=16, help="samples of all workers together (default 16)")
    parser.add_argument("--steps", type=int, nargs="+", default=[240, 480, 960], help="lengths to fit (default 240 480 960)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="numbers of workers to fit (default 1 2 4)")
    parser.add_argument("--periods", type=int, nargs="+", default=[30, 10, 120], help="periods to fit (default 30 10 120)")
    parser.add_argument("--densities", type=float, nargs="+", default=[1, 0.1, 0.01], help="densities to fit (default 1 0.1 0.01)")
    parser.add_argument("--held-steps", type=int, default=1920, help="a length to hold out (default 1920)")
    parser.add_argument("--held-workers", type=int, default=8, help="a number of workers to hold out (default 8)")
    parser.add_argument("--held-period", type=int, default=60, help="a period to hold out (default 60)")
    parser.add_argument("--held-density", type=float, default=0.03, help="a density to hold out (default 0.03)")
    parser.add_argument("--lr", type=float, default=3e-3)
    strategy = "diloco({period}, 0.7, 0.6)"
    parser.add_argument("--strategy", default=strategy, help=f"without a code; density goes into topk (default '{strategy}')")
    parser.add_argument("--seeds", type=int, default=1, help="trainings whose mean loss counts as one (default 1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON; trainings in it are not repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = digits() if options.model == "digits" else corpus(options.text, 64)
    saved = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}
    known = {
        (t["steps"], t["workers"], t["period"], t["density"]): Training(**t)
        for t in saved.get("fitted", []) + saved.get("held_out", [])
    }
    run: dict[str, Any] = {"benchmark": "law", "model": options.model, "machine": steps.machine(), "fitted": [], "held_out": []}
    wanted = cases(options)
    found: dict[str, list[Training]] = {}
    for kind, chosen in wanted.items():
        found[kind] = []
        for case in chosen:
            found[kind].append(known.get(case) or train(data, options, *case))
            run[kind] = [asdict(t) for t in found[kind]]
            if options.out is not None:
                steps.write_json(options.out, {**saved, **{k: v for k, v in run.items() if v}}, indent=1)
    law = fit(found["fitted"])
    parameters = sum(p.numel() for p in built(options.model, data).parameters())
    own, error = beta(found["fitted"], options.periods[0])
    print(f"\n{law}\n{table(law, found['held_out'])}")
    print(f"workers' exponent at period {options.periods[0]}, {parameters:,} parameters: {own:.4f} ± {2 * error:.4f};", end=" ")
    print(f"published for period 30: {published(parameters):.4f}")
    if options.out is not None:
        run |= {
            "law": str(law),
            "beta": own,
            "beta_error": error,
            "published_beta": published(parameters),
            "parameters": parameters,
        }
        steps.write_json(options.out, run, indent=1)


if __name__ == "__main__":
    main()
