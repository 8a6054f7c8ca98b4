"""How near predictions come: probes, predicts and measures a list of configurations on hosts of a lab (see netlab.py).

    python benchmarks/fidelity.py                              # all configurations: hosts, rates, models, kinds of strategies
    python benchmarks/fidelity.py --hosts 4 --rate 100mbit --model cnn --strategies bulk "bulk + gossip" --out fidelity.json

Each lab is probed once (`hocket.prediction.probe`, at most a minute), with the codes of its strategies; from that file alone
`hocket.predict` says what a step of each strategy takes. Then the strategies run, a block of steps each and round, as in steps.py,
and the slowest worker's time per step is compared. Nothing is fitted to the measured steps. The error is predicted / measured − 1;
mean and worst are of its magnitude. All hosts share this machine's cores: run it on a machine that does nothing else.

Servers and asynchronous gossip can be named, but are not compared by default: a job starts its shards on the first worker's host, a
prediction puts them on hosts of their own; and under `async + gossip` a prediction counts all workers' batches, not the slowest's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import steps
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import hocket
from hocket import ClusterSpec, Strategy, predict
from hocket.prediction.probe import probe
from hocket.transport import Keys

FAMILIES = (
    "bulk", "local(4)", "local(8, mean=after)", "diloco(8)", "bulk + gossip", "bulk + gossip + exchange=gradients",
    "local(4) + gossip", "bulk + cast(bf16)", "bulk + lowrank(2)", "bulk + topk(0.01)", "bulk + qsgd(4)", "local(4) + sign",
    "bulk + gossip + topk(0.05)",
)  # fmt: skip
CONFIGURATIONS = [
    (hosts, rate, model)
    for model in ("tiny", "cnn", "mlp")
    for hosts, rate in ((2, "20mbit"), (2, "1gbit"), (4, "100mbit"), (4, None), (6, "50mbit"), (3, "300mbit"))
    if not (model == "mlp" and rate in ("20mbit", "50mbit"))  # a step would take minutes
]


def tiny() -> nn.Module:
    """0.1 MB."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))


steps.MODELS["tiny"] = tiny


@dataclass(frozen=True)
class Comparison:
    """One strategy in one lab."""

    hosts: int
    rate: str | None
    model: str
    strategy: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def worker(options: argparse.Namespace) -> None:
    """One host's part: all probe, then all measure; worker 0 writes the cluster file's text and the blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = hocket.init(keys=options.keys)
    steps._hocket = lambda: hocket  # joined already
    task = steps.Task(options.model)
    wanted = sorted({_code(s) for s in map(Strategy.parse, options.strategies)} - {""})
    sgd = lambda params: torch.optim.SGD(params, 0.01, momentum=0.9)  # noqa: E731
    found = probe(task.model, _loss, (task._x, task._y), cluster, optimizer=sgd, codes=wanted, limit_s=options.probe_s)
    blocks: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    planned: dict[str, int] = {}
    for turn in range(options.rounds):
        for strategy in options.strategies:
            outcome = steps.run_block(f"hocket:{strategy}", options, planned)
            steps._say(f"round {turn + 1}, {strategy}: {steps._line(outcome)}")
            if isinstance(outcome, str):
                refused[strategy] = outcome
            else:
                blocks.append({"strategy": strategy, **asdict(outcome)})
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps({"file": found.text(), "blocks": blocks, "refused": refused}))
    dist.barrier()
    os._exit(0)  # the job's group and threads end with the process


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def _code(strategy: Strategy) -> str:
    parts = str(strategy).split(" + ")
    return parts[2] if strategy.compression.compresses else ""


def compare(options: argparse.Namespace, hosts: int, rate: str | None, model: str) -> list[Comparison]:
    """Probe, measure and predict in one lab."""
    options.hosts, options.rate = hosts, rate
    arguments = ["--model", model, "--probe-s", str(options.probe_s), "--keys", str(Path(options.folder) / "keys")]
    arguments += ["--steps", str(options.steps), "--rounds", str(options.rounds), "--limit-s", str(options.limit_s)]
    arguments += ["--strategies", *options.strategies]
    measured = steps.on_hosts(__file__, arguments, options)
    print(f"\n{hosts} hosts, {rate or 'unlimited'}, {model}\n{measured['file']}", flush=True)
    for strategy, reason in measured["refused"].items():
        print(f"refused: {strategy}: {reason}")
    path = Path(options.folder) / "lab.toml"
    path.write_text(measured["file"])
    spec = ClusterSpec.parse(path)
    found = []
    for strategy in options.strategies:
        times = [block["ms_per_step"] for block in measured["blocks"] if block["strategy"] == strategy]
        if times:
            (row,) = predict(steps.MODELS[model](), spec, [strategy], hosts, batch_size=steps.BATCH).rows
            found.append(Comparison(hosts, rate, model, strategy, row.step_s * 1000, statistics.median(times)))
    print(table(found), flush=True)
    return found


def table(found: Sequence[Comparison]) -> str:
    """Predicted and measured steps, one line each, and the errors together."""
    width = max(len(f.strategy) for f in found)
    lines = [f"{'strategy':<{width}}  hosts       rate  model   predicted   measured   error"]
    for f in found:
        times = f"{f.predicted_ms:>9.1f}  {f.measured_ms:>9.1f}  {f.error:>+6.1%}"
        lines.append(f"{f.strategy:<{width}}  {f.hosts:>5}  {f.rate or 'unlimited':>9}  {f.model:<5}  {times}")
    errors = [abs(f.error) for f in found]
    lines.append(f"{len(found)} configurations: mean error {statistics.fmean(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


def scatter(found: Sequence[Comparison], path: Path) -> None:
    """Predicted against measured steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="measured ms per step", ylabel="predicted ms per step")
    for model in dict.fromkeys(f.model for f in found):
        own = [f for f in found if f.model == model]
        axes.scatter([f.measured_ms for f in own], [f.predicted_ms for f in own], s=12, label=model)
    ends = [min(f.measured_ms for f in found), max(f.measured_ms for f in found)]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Predicted against measured steps.")
    parser.add_argument("--hosts", type=int, help="only labs of so many hosts")
    parser.add_argument("--rate", help="only these links, such as 100mbit or unlimited")
    parser.add_argument("--model", choices=list(steps.MODELS), help="only this model")
    parser.add_argument("--strategies", nargs="+", default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=32, help="timed steps per block at most (default 32)")
    parser.add_argument("--rounds", type=int, default=2, help="blocks per strategy (default 2)")
    parser.add_argument("--limit-s", type=float, default=8.0, help="seconds per block at most, whole periods kept (default 8)")
    parser.add_argument("--probe-s", type=float, default=45.0, help="seconds of a probe, about (default 45)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="seconds for one lab at most (default 1800)")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON, and a scatter beside it")
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """The command."""
    options = parse()
    if options.worker:
        return worker(options)
    rate = None if options.rate == "unlimited" else options.rate
    wanted = [
        c
        for c in CONFIGURATIONS
        if options.hosts in (None, c[0]) and (options.rate is None or c[1] == rate) and options.model in (None, c[2])
    ]
    if not wanted and None not in (options.hosts, options.rate, options.model):
        wanted = [(options.hosts, rate, options.model)]
    with tempfile.TemporaryDirectory() as options.folder:
        Keys.make().write(Path(options.folder) / "keys")
        found = [row for c in wanted for row in compare(options, *c)]
    if not found:
        raise SystemExit("fidelity: no configuration fits; see --help")
    print("\n" + table(found))
    if options.out is not None:
        run = {"benchmark": "fidelity", "machine": steps.machine(), "rows": [{**asdict(f), "error": f.error} for f in found]}
        steps.write_json(options.out, run, indent=1)
        scatter(found, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
