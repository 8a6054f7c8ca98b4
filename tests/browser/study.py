"""Made-up studies on disk, as runs would leave them: some ten runs, or a hundred over facets, virtual and real."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from hocket.split.pipeline.schedules import make
from hocket.split.pipeline.timeline import Costs, simulate

TEN = (
    "bulk + allreduce",
    "local(4) + allreduce",
    "local(16) + allreduce",
    "bulk + gossip",
    "local(4) + gossip",
    "local(16) + gossip",
    "bulk + allreduce + topk(0.01)",
    "local(4) + allreduce + topk(0.01) | qsgd(4)",
    "postlocal(5, 16) + allreduce",
    "diloco(16, momentum=0.5) + allreduce",
)
MORE = (
    "local(64) + allreduce",
    "local(64) + gossip",
    "bulk + allreduce + qsgd(4)",
    "bulk + allreduce + sign",
    "bulk + allreduce + lowrank(2)",
    "bulk + allreduce + threshold(keep=0.05)",
    "local(16) + gossip + threshold(keep=0.05)",
    "local(16) + allreduce + lowrank(2)",
    "bulk + hierarchical(inner=allreduce, outer=gossip)",
    "postlocal(5, 16) + gossip",
    "diloco(64, momentum=0.9) + allreduce",
    "bulk + allreduce + ternary",
    "bulk + allreduce + natural",
    "bulk + allreduce + randomk(0.01)",
    "local(4) + allreduce + qsgd(4)",
)


def write_run(folder: Path, strategy: str, lines: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    """A run's folder; ``lines`` default to made-up epochs."""
    run: dict[str, Any] = {
        "strategy": strategy,
        "workers": 4,
        "virtual": False,
        "data": "digits",
        "model": "mlp",
        "optimizer": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "schedule": "cosine",
        "batch": 32,
        "epochs": 10,
        "max_steps": None,
        "seed": 0,
        "versions": {"hocket": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux", "processor": "x86_64"},
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run))
    if lines is None:
        lines = made_up(run)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def made_up(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Epochs that look like a training: the same for the same settings."""
    strategy = run["strategy"]
    draw = random.Random(f"{strategy} {run['workers']} {run['data']} {run['seed']} {run['virtual']}")
    period = next((int(p) for p in ("64", "16", "4") if f"l({p})" in strategy or f", {p})" in strategy or f"o({p}," in strategy), 1)
    small = {"topk(0.01) |": 220, "topk": 50, "randomk": 50, "threshold": 20, "lowrank": 40, "sign": 31, "qsgd": 8, "ternary": 16}
    shrink = next((v for k, v in small.items() if k in strategy), 4 if "natural" in strategy else 1)
    share = (2 if "gossip" not in strategy else 0.9) / period / shrink
    top = {"digits": 0.975, "cifar10": 0.71}[run["data"]] - 0.004 * math.log2(run["workers"])
    top -= 0.006 * math.log2(period) + 0.004 * math.log2(shrink) - draw.uniform(-0.004, 0.006)
    if "sign" in strategy:
        top -= 0.12
    speed = draw.uniform(0.35, 0.6) / (1 + 0.05 * math.log2(period * shrink))
    lines = []
    for epoch in range(1, run["epochs"] + 1):
        compute = 3.1 * draw.uniform(0.95, 1.1) * 4 / run["workers"]
        wait, transfer = 0.4 / period + draw.uniform(0, 0.05), 4.2 * share * draw.uniform(0.9, 1.1)
        seconds = None if run["virtual"] else compute + wait + transfer
        line: dict[str, Any] = {
            "epoch": epoch,
            "accuracy": top - (top - 0.12) * math.exp(-speed * epoch) + draw.uniform(-0.004, 0.004),
            "loss": 2.3 * math.exp(-speed * epoch / 2),
            "seconds": seconds,
            "compute_s": None if run["virtual"] else compute,
            "wait_s": None if run["virtual"] else wait,
            "transfer_s": None if run["virtual"] else transfer,
            "bytes_sent": int(4.5e6 * 12 * share * (run["workers"] - 1)),
            "exchanges": 12 // period or 1,
            "nonfinite": 0,
            "wall_s": 1.0,
        }
        if epoch == run["epochs"] and period > 1:
            line["accuracy_worst"] = line["accuracy"] - 0.03
        lines.append(line)
    return lines


def write_study(folder: Path, title: str, runs: list[dict[str, Any]], **extra: Any) -> Path:
    """A study's folder with its runs."""
    entries = []
    for index, settings in enumerate(runs):
        settings = dict(settings)
        write_run(folder / "runs" / f"{index:03}", settings.pop("strategy"), settings.pop("lines", None), **settings)
        entries.append({"folder": f"runs/{index:03}", "settings": {}})
    entries += extra.pop("planned", [])
    content = {
        "title": title,
        "preset": None,
        "command": "hocket study --workers 4 --data digits",
        "notes": [],
        "runs": entries,
        **extra,
    }
    (folder / "study.json").write_text(json.dumps(content))
    return folder


def ten_runs(folder: Path) -> Path:
    """One facet, real workers, rates from a sweep, one failure."""
    rate = {"chosen": 0.05, "tried": {"0.02": 0.61, "0.05": 0.66, "0.1": 0.64}, "epochs": 3}
    runs: list[dict[str, Any]] = [{"strategy": s, "lr": 0.05, "rate": rate} for s in TEN]
    runs.append({"strategy": "bulk + allreduce + randomk(0.001)", "failure": "A gradient held NaN in epoch 2.", "lines": []})
    return write_study(folder, "Ten strategies on four workers", runs, notes=["Links were shaped to 1 Gbit/s."])


def hundred_runs(folder: Path) -> Path:
    """Two data sets, three worker counts, virtual and real, 25 strategies, some seeds, some unfinished."""
    every = (*TEN, *MORE)
    runs: list[dict[str, Any]] = [{"strategy": s, "workers": 4, "seed": seed} for s in every for seed in (0, 1)]
    runs += [{"strategy": s, "workers": w, "virtual": True, "epochs": 20} for w in (4, 16, 64) for s in every[:12]]
    runs += [{"strategy": s, "workers": 16, "virtual": True, "data": "cifar10", "model": "resnet20", "epochs": 20} for s in TEN]
    runs += [{"strategy": s, "workers": 4, "data": "cifar10", "model": "cnn"} for s in TEN[:4]]
    planned = [{"folder": "runs/later", "settings": {"strategy": "bulk + gossip", "data": "cifar10", "model": "cnn", "workers": 4}}]
    return write_study(folder, "A hundred runs: when, whom and what", runs, planned=planned)


def one_facet(folder: Path, count: int) -> Path:
    """``count`` strategies in one facet."""
    runs = [{"strategy": "bulk + allreduce"}]
    runs += [{"strategy": f"local({1 + i}) + {'gossip' if i % 2 else 'allreduce'} + topk(0.{i % 9 + 1})"} for i in range(count - 1)]
    return write_study(folder, f"{count} strategies", runs)


FREE = ("async", "ssp(4)", "downpour(4, 4) + server(2)", "async + server(2) + topk(0.05)", "async(compensation=rate)")


def staleness(strategy: str, seed: int, largest: int, pushes: int = 300) -> dict[str, int]:
    """Made-up staleness of gradients: most small, a few as large as ``largest``."""
    draw = random.Random(f"{strategy} {seed} {largest}")
    found = sorted(min(largest, int(draw.lognormvariate(math.log(3), 0.3 + 0.25 * math.log10(1 + largest)))) for _ in range(pushes))
    return {str(value): found.count(value) or 1 for value in dict.fromkeys([*found, largest])}


def free_runs(folder: Path, count: int = 5, largest: int = 12, **settings: Any) -> Path:
    """A baseline, and ``count`` strategies whose workers do not go in step."""
    names = [FREE[i] if i < len(FREE) else f"ssp({4 + i}) + server({1 + i % 4})" for i in range(count)]
    runs: list[dict[str, Any]] = [{"strategy": "bulk + allreduce", **settings}]
    for name in names:
        run = {"strategy": name, "workers": 4, "virtual": False, "data": "digits", "seed": 0, "epochs": 10, **settings}
        lines = [{**line, "staleness": staleness(name, line["epoch"], largest), "lost": 0} for line in made_up(run)]
        runs.append({"strategy": name, "lines": lines, **settings})
    return write_study(folder, f"{count} strategies that do not wait", runs)


def timeline(schedule: str = "1f1b", stages: int = 2, num_microbatches: int = 4) -> dict[str, Any]:
    """As a run would measure it: milliseconds of work, and a little for each transfer."""
    return simulate(make(schedule, stages, num_microbatches), Costs(forward=0.004, backward=0.008, transfer=0.0005)).to_dict()


def write_split(folder: Path, mesh: str, found: Any = None, strategy: str = "bulk + allreduce", **settings: Any) -> Path:
    """A run on a mesh; ``found`` is its timeline."""
    sent = {axis: count * (axis in mesh) for axis, count in (("data", 20_000_000), ("pipeline", 5_000_000), ("tensor", 8_000_000))}
    axes = {axis: {"bytes_sent": count, "exchanges": 12, "seconds": count / 1e7} for axis, count in sent.items()}
    run = {"strategy": strategy, "workers": 2, "virtual": False, "data": "digits", "seed": 7, "epochs": 10, **settings}
    lines = [{**line, "bytes_sent": sum(sent.values()), "axes": axes} for line in made_up(run)]
    write_run(folder, strategy, lines, **{"workers": 2, "mesh": mesh, "pipe": None, "micro": None, **settings})
    if found is not None:
        (folder / "timeline.json").write_text(json.dumps(found))
    return folder


def split_runs(folder: Path) -> Path:
    """Two workers: plain, by local steps, and split into stages of a pipeline."""
    write_run(folder / "plain", "bulk + allreduce", workers=2)
    write_run(folder / "local", "local(4) + allreduce", workers=2)
    write_split(folder / "split", "data=2,pipeline=2", timeline(), pipe="1f1b", micro=4)
    return folder
