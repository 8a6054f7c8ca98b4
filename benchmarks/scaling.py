"""Why scaling stops: predicted speed-up, efficiency and limits of data-parallel training, and of models that are split.

    python benchmarks/scaling.py                       # prints all tables
    python benchmarks/scaling.py --out docs/results    # also writes scaling.json and its three pictures

Nothing is measured: everything is `hocket.predict` on described clusters, and says so. GPUs of 5 TFLOP/s in practice (a small one),
a network card each; so a step of 32 images takes a ResNet-50 32 · 24.6 GFLOP / 5 TFLOP/s, the same on each worker.

*Limit* is the slowest link on which 64 workers still compute half of the time; a lever's *factor* is the limit without it over the
limit with it. DistBelief's curves split one model over machines (tensor axis): what a fully connected layer sends are all its
outputs, what a locally connected one sends are those at the edges of its parts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import steps
import torch

import hocket
from hocket import ClusterSpec
from hocket.cluster.cost import Network
from hocket.cluster.message import framed
from hocket.prediction.model import ModelSize, of_size

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BATCHES = (64, 256, 1024, 4096)
"""Of all workers together."""
LINKS = {"1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "100 Gbit/s": 1e11}
STRATEGIES = (
    "bulk", "bulk + cast(bf16)", "bulk + topk(0.01)", "bulk + lowrank(2)", "bulk + gossip", "local(16)", "local(16) + gossip",
    "diloco(100)", "local(16) + topk(0.01) | qsgd(4)", "diloco(100) + sign",
)  # fmt: skip
FLOPS, LATENCY_S, JITTER = 5e12, 50e-6, 0.05
HELD, AT = 0.9, 64
BALANCED = 0.5
PRUNED = 0.1
MACHINES = (1, 2, 4, 8, 16, 32, 64, 81, 128)


@dataclass(frozen=True)
class Net:
    """A network: its parameters, and the operations of a training step per sample, forward and backward."""

    name: str
    parameters: float
    flops: float
    batch: int = 32

    def size(self, batch: int | None = None) -> ModelSize:
        return replace(of_size(self.parameters, batch or self.batch), flops=self.flops * (batch or self.batch))


RESNET = Net("ResNet-50", 25.6e6, 3 * 8.2e9)
NETS = (
    Net("small CNN (0.5 M)", 545e3, 3 * 11.5e6, 100),
    Net("MobileNetV2 (3.5 M)", 3.5e6, 3 * 0.6e9),
    RESNET,
    Net("VGG-16 (138 M)", 138e6, 3 * 31e9),
    Net("GPT-2 (124 M, 1,024 tokens)", 124e6, 6 * 124e6 * 1024, 4),
)


def link(bits: float, **more: Any) -> ClusterSpec:
    """Single GPUs on links of so many bits per second."""
    return ClusterSpec(flops=FLOPS, jitter=JITTER, bandwidth=bits / 8, latency_s=LATENCY_S, **more)


def speedups(net: Net, spec: ClusterSpec, batch: int) -> list[float]:
    """How many times sooner a mini-batch of ``batch`` samples of all workers together is done than by one worker; bulk."""
    counts = [n for n in WORKERS if n <= batch]
    steps_s = [hocket.predict(net.size(batch // n), spec, ["bulk"], n, batch_size=batch // n).rows[0].step_s for n in counts]
    return [steps_s[0] / s for s in steps_s]


def pays_until(speeds: Sequence[float]) -> int:
    """The number of workers beyond which twice as many give less than a tenth more."""
    for n, (now, more) in zip(WORKERS, pairwise(speeds), strict=False):
        if more < 1.1 * now:
            return n
    return WORKERS[len(speeds) - 1]


# --- the note's pictures -------------------------------------------------------------------------------------------------------


def batches() -> list[dict[str, Any]]:
    """Speed-up against workers, for several batch sizes of all workers together, and links."""
    found = []
    for name, bits in LINKS.items():
        for batch in BATCHES:
            speeds = speedups(RESNET, link(bits), batch)
            ends = pays_until(speeds)
            found.append({"link": name, "batch": batch, "speedup": speeds, "pays_until": ends})
    return found


def models() -> list[dict[str, Any]]:
    """Computing and communication of a step of bulk training, for several networks on 10 Gbit/s."""
    found = []
    for net in NETS:
        rows = hocket.predict(net.size(), link(1e10), ["bulk"], WORKERS, batch_size=net.batch).rows
        over = next((r.workers for r in rows if r.exchange_s > r.compute_s), None)
        found.append(
            {
                "net": net.name,
                "batch": net.batch,
                "compute_ms": [r.compute_s * 1e3 for r in rows],
                "exchange_ms": [r.exchange_s * 1e3 for r in rows],
                "overtakes": over,
            }
        )
    return found


# --- what holds -----------------------------------------------------------------------------------------------------------------


def holding() -> list[dict[str, Any]]:
    """Efficiency of strategies with 64, 256 and 1,024 workers."""
    counts = (64, 256, 1024)
    found = []
    for name, bits in LINKS.items():
        rows = hocket.predict(RESNET.size(), link(bits), STRATEGIES, counts, batch_size=RESNET.batch).rows
        for strategy in dict.fromkeys(r.strategy for r in rows):
            found.append({"link": name, "strategy": strategy, "efficiency": [r.efficiency for r in rows if r.strategy == strategy]})
    return found


def efficiency(strategy: str, net: Net, workers: int, spec: ClusterSpec) -> float:
    """The share of their time in which workers compute."""
    return hocket.predict(net.size(), spec, [strategy], workers, batch_size=net.batch).rows[0].efficiency


def limit(strategy: str, net: Net = RESNET, workers: int = AT) -> float | None:
    """The slowest link in bits per second on which the workers compute half of the time; None where no link is enough."""
    low, high = math.log(1e3), math.log(1e15)
    if efficiency(strategy, net, workers, link(math.exp(high))) < BALANCED:
        return None
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if efficiency(strategy, net, workers, link(math.exp(middle))) >= BALANCED else (middle, high)
    return math.exp(high)


def most_workers(strategy: str, net: Net) -> int:
    """With how many workers on 10 Gbit/s they still compute half of the time."""
    counts = [2**k for k in range(1, 13)]
    return max((n for n in counts if efficiency(strategy, net, n, link(1e10)) >= BALANCED), default=1)


CAUSES: dict[str, dict[str, Any]] = {
    "waiting for the slowest": {"jitter": 0.0},
    "latency": {"latency_s": 0.0},
    "coding": {"coding": {"other": (0.0, 0.0)}},
}


def remains(strategy: str, net: Net, workers: int = 1024) -> str:
    """What is left on links of unlimited bandwidth: the share of the time, and what most of it is."""
    spec = link(1e15)
    own = 1 - efficiency(strategy, net, workers, spec)
    if own < 0.02:
        return f"{own:.1%}"
    without = {cause: 1 - efficiency(strategy, net, workers, replace(spec, **change)) for cause, change in CAUSES.items()}
    return f"{own:.0%}, mostly {min(without, key=lambda cause: without[cause])}"


@dataclass(frozen=True)
class Lever:
    """What is changed against plain bulk training."""

    name: str
    strategy: str = "bulk"
    net: Net = RESNET


LEVERS = (
    Lever("none"),
    Lever("pruning, one weight of ten kept", net=replace(RESNET, parameters=RESNET.parameters * PRUNED)),
    Lever("precision: bfloat16", "bulk + cast(bf16)"),
    Lever("compression: one value of a hundred", "bulk + topk(0.01)"),
    Lever("compression: rank 2", "bulk + lowrank(2)"),
    Lever("fewer exchanges: every 16 steps", "local(16)"),
    Lever("fewer exchanges: every 100 steps", "diloco(100)"),
    Lever("fewer partners: gossip", "bulk + gossip"),
    Lever("fewer exchanges and compression", "diloco(100) + sign"),
)


def levers() -> list[dict[str, Any]]:
    """By which factor each lever moves the limit, and what is left."""
    plain, found = limit("bulk"), []
    assert plain is not None
    for lever in LEVERS:
        own = limit(lever.strategy, lever.net)
        found.append(
            {
                "lever": lever.name,
                "strategy": lever.strategy,
                "limit_bits": own,
                "factor": None if own is None else plain / own,
                "most_workers": most_workers(lever.strategy, lever.net),
                "remains": remains(lever.strategy, lever.net),
            }
        )
    return found


# --- DistBelief's curves ---------------------------------------------------------------------------------------------------------

MACHINE = ClusterSpec(flops=60e9, bandwidth=1e9 / 8, latency_s=2e-4, message_s=5e-5)
"""A machine of 2012: one link of 1 Gbit/s; assumed, the paper names neither."""


def distbelief() -> list[dict[str, Any]]:
    """Speed-up of one replica that is split over machines: a fully connected and a locally connected network."""
    return [_split("fully connected, 42 M", _dense), _split("locally connected, 1.7 G", _local)]


def _dense(machines: int) -> float:
    """Five layers of 2,560 units, 32 samples: after each pair all machines need all outputs (Hocket's tensor axis)."""
    size = of_size(42e6, 32, layers=3, activation_bytes=2560 * 4 * 32)
    meshes = [f"tensor={machines}"]
    return hocket.predict(size, MACHINE, ["bulk"], machines, batch_size=32, meshes=meshes).rows[0].step_s


def _local(machines: int) -> float:
    """Three layers of 18 maps of an image of 200 × 200, one sample: a machine has a square of it, and hears from four others the
    rim that its filters of 10 × 10 need, forward and backward."""
    seconds = of_size(1.7e9, 1).seconds(MACHINE) / machines
    if machines == 1:
        return seconds
    network, side = Network(MACHINE, machines), max(1, round(math.sqrt(machines)))
    at = torch.arange(machines)
    heard = torch.stack([(at + shift) % machines for shift in (1, -1, side, -side)])
    rim = framed(round(18 * 10 * 200 / math.sqrt(machines) * 4))
    traffic = network.from_sources(torch.full((machines,), float(rim), dtype=torch.float64), heard)
    return seconds + 2 * 3 * float(network.exchange(traffic, False, False).max())


def _split(name: str, step_s: Callable[[int], float]) -> dict[str, Any]:
    speeds = [step_s(1) / step_s(machines) for machines in MACHINES]
    best = max(range(len(speeds)), key=lambda k: speeds[k])
    return {"net": name, "machines": list(MACHINES), "speedup": speeds, "best": speeds[best], "best_at": MACHINES[best]}


# --- showing it ------------------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    text = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join(text + [f"| {' | '.join(line)} |" for line in lines])


def rate(bits: float | None) -> str:
    """
    >>> rate(2.5e9), rate(None)
    ('2.5 Gbit/s', 'none')
    """
    if bits is None:
        return "none"
    unit, scale = next((u, s) for u, s in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)) if bits >= s)
    return f"{float(f'{bits / scale:.2g}'):g} {unit}"


def tables(found: dict[str, Any]) -> str:
    """All tables, in Markdown."""
    return "\n".join([*_pictures(found), *_limits(found)])


def _pictures(found: dict[str, Any]) -> list[str]:
    places = [WORKERS.index(n) for n in (4, 16, 64)]
    text = ["ResNet-50, bulk, predicted: speed-up for a fixed mini-batch of all workers; until where twice as many give 10 % more"]
    lines = []
    for b in found["batches"]:
        speeds = [f"{b['speedup'][k]:.1f}" for k in places]
        lines.append([b["link"], str(b["batch"]), *speeds, f"{max(b['speedup']):.1f}", str(b["pays_until"])])
    text.append(table(["link", "batch of all", "4 workers", "16 workers", "64 workers", "best", "pays until"], lines))
    text.append("\nComputing and communication on 10 Gbit/s, predicted, ms per step of bulk training")
    lines = []
    for m in found["models"]:
        times = [f"{m['compute_ms'][0]:.3g}", *(f"{m['exchange_ms'][k]:.3g}" for k in (2, 4, 8))]
        lines.append([m["net"], str(m["batch"]), *times, str(m["overtakes"] or "not up to 1,024")])
    heads = ["network", "batch", "compute", "exchange, 4 workers", "exchange, 16", "exchange, 256", "communication overtakes at"]
    text.append(table(heads, lines))
    return text


def _limits(found: dict[str, Any]) -> list[str]:
    text = ["\nEfficiency with 64, 256 and 1,024 workers, ResNet-50, batch 32 per worker, predicted"]
    kinds = list(dict.fromkeys(h["strategy"] for h in found["holding"]))
    by = {(h["link"], h["strategy"]): h["efficiency"] for h in found["holding"]}
    cells = lambda shares: " / ".join(f"**{e:.0%}**" if e >= HELD else f"{e:.0%}" for e in shares)  # noqa: E731
    written = {k: k.replace(" | ", " \\| ") for k in kinds}
    text.append(table(["strategy", *LINKS], [[f"`{written[k]}`", *(cells(by[name, k]) for name in LINKS)] for k in kinds]))
    text.append("\nLevers, ResNet-50, batch 32 per worker, predicted: the limit is where workers compute half of the time")
    lines = []
    for lever in found["levers"]:
        factor = "–" if lever["factor"] is None else f"{lever['factor']:.3g}"
        most = f"{lever['most_workers']:,}" + " or more" * (lever["most_workers"] == 2**12)
        lines.append([lever["lever"], f"`{lever['strategy']}`", rate(lever["limit_bits"]), factor, most, lever["remains"]])
    heads = [
        "lever",
        "strategy",
        "slowest link, 64 workers",
        "factor",
        "most workers on 10 Gbit/s",
        "left on an unlimited link, 1,024",
    ]
    text.append(table(heads, lines))
    text.append("\nOne model split over machines, predicted speed-up")
    lines = [[d["net"], *(f"{s:.2f}" for s in d["speedup"]), f"{d['best']:.2f} at {d['best_at']}"] for d in found["distbelief"]]
    text.append(table(["network", *(str(m) for m in MACHINES), "best"], lines))
    return text


def draw(found: dict[str, Any], folder: Path) -> None:
    """The pictures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for place, name in enumerate(LINKS):
        axes = figure.add_subplot(1, 3, place + 1, xscale="log", yscale="log", title=f"{name}, predicted")
        for b in (b for b in found["batches"] if b["link"] == name):
            axes.plot(WORKERS[: len(b["speedup"])], b["speedup"], marker="o", markersize=3, label=f"batch {b['batch']}")
        axes.plot(WORKERS, WORKERS, color="grey", linewidth=0.8, linestyle="--", label="ideal")
        axes.axvline(16, color="grey", linewidth=0.6)
        _ticks(axes, WORKERS)
        axes.set(xlabel="workers", ylabel="speed-up of ResNet-50, bulk", ylim=(0.1, 1200))
        axes.legend(fontsize=8)
    figure.savefig(folder / "scaling-batches.png", dpi=120)
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", title="10 Gbit/s, bulk, predicted")
    for m in found["models"]:
        ratio = [x / c for x, c in zip(m["exchange_ms"][1:], m["compute_ms"][1:], strict=True)]
        axes.plot(WORKERS[1:], ratio, marker="o", markersize=3, label=m["net"])
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.text(
        0.99, 0.02, "above the line communication takes longer", transform=axes.transAxes, ha="right", fontsize=8, color="grey"
    )
    _ticks(axes, WORKERS[1:])
    axes.set(xlabel="workers", ylabel="communication / computing")
    axes.legend(fontsize=8)
    figure.savefig(folder / "scaling-models.png", dpi=120)
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", title="one model split over machines, predicted")
    for d in found["distbelief"]:
        axes.plot(d["machines"], d["speedup"], marker="o", markersize=3, label=d["net"])
    axes.plot(MACHINES, MACHINES, color="grey", linewidth=0.8, linestyle="--", label="ideal")
    axes.scatter([8, 81], [2.2, 12], marker="x", color="black", label="DistBelief's figures: 2.2 at 8, over 12 at 81")
    _ticks(axes, (1, 2, 4, 8, 16, 32, 81, 128))
    axes.set(xlabel="machines", ylabel="speed-up")
    axes.legend(fontsize=8)
    figure.savefig(folder / "scaling-split.png", dpi=120)


def _ticks(axes: Any, at: Sequence[int]) -> None:
    axes.set_xticks(list(at), [str(n) for n in at], fontsize=8)
    axes.minorticks_off()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Why scaling stops, predicted.")
    parser.add_argument("--out", type=Path, help="a folder for scaling.json and the pictures")
    options = parser.parse_args()
    found = {"batches": batches(), "models": models(), "holding": holding(), "levers": levers(), "distbelief": distbelief()}
    print(tables(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        steps.write_json(options.out / "scaling.json", {"benchmark": "scaling", "predicted": True, **found}, indent=1)
        draw(found, options.out)


if __name__ == "__main__":
    main()
