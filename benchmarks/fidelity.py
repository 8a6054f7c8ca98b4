"""How near predictions come: probes, predicts and measures a list of configurations on hosts of a lab (see netlab.py and labs.py).

    python benchmarks/fidelity.py --out fidelity.json          # all labs; what the file has already is not measured again
    python benchmarks/fidelity.py --list                       # the labs and their numbers
    python benchmarks/fidelity.py --out fidelity.json --labs 3 "6 hosts" held-out
    python benchmarks/fidelity.py --out fidelity.json --minutes 5        # no new lab after five minutes; the same command goes on
    python benchmarks/fidelity.py --out fidelity.json --again            # only predict again, from the probes in the file
    python benchmarks/fidelity.py --hosts 4 --rate 100mbit --model cnn --strategies bulk "bulk + gossip"

In each lab there are rounds: a probe (`hocket.prediction.probe`) with the codes of the lab's strategies, then a block of steps of
every strategy. From the probe's file alone `hocket.predict` says what a step takes. Nothing is fitted to the measured steps;
predictions and measurements are medians over the rounds, so that drift of the machine hits both alike. A measured step is what one
mini-batch of each worker takes: `N / sum of the workers' steps per second`; each worker's is the median over periods.
The error is predicted / measured − 1; mean and worst are of its magnitude, apart for the labs that the model was improved on and
for those held out. All hosts share this machine's cores, so before each lab the command waits until nothing else runs
(`--wait-minutes`; `--busy` measures all the same, and marks the lab). A lab that fails is told and left for the next time; one
whose strategies have changed since is measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import steps
import torch
import torch.distributed as dist
from labs import HELD_OUT, LABS, SETS, LabPlan, busy_share, chosen, wait_until_idle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hocket
from hocket import ClusterSpec, Strategy, predict
from hocket.prediction.probe import probe
from hocket.split import Mesh, init_mesh
from hocket.split.pipeline import PipelineRunner, cut_model
from hocket.transport import Keys

WIDTH, SLOW, WINDOWS = 960, 3, 5


def tiny() -> nn.Module:
    """0.1 MB."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))


class Scale(nn.Module):
    """Something to learn before the first layer, so that all layers have the same to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def deep() -> nn.Module:
    """Eight equal layers, 29.5 MB."""
    return nn.Sequential(Scale(), *(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


steps.MODELS |= {"tiny": tiny, "deep": deep}


@dataclass(frozen=True)
class Comparison:
    """One strategy in one lab; ``parts_ms`` are compute, wait, transfer and hidden transfer, predicted and measured."""

    lab: str
    strategy: str
    predicted_ms: float
    measured_ms: float
    rounds: list[list[float]] = field(default_factory=list)
    parts_ms: list[list[float | None]] = field(default_factory=list)
    held_out: bool = False

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


class Task(steps.Task):
    """This worker's model and data."""

    def __init__(self, model: str, slow: bool = False) -> None:
        super().__init__(model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        if model == "deep":
            self._x = torch.randn(steps.BATCH, WIDTH, generator=generator)
        if slow and dist.get_rank() == dist.get_world_size() - 1:
            self._x, self._y = (t.repeat(SLOW, *[1] * (t.dim() - 1)) for t in (self._x, self._y))


# --- one host's part ---------------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> None:
    """Rounds of probes and blocks; worker 0 writes the cluster files' texts and the blocks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = hocket.init(keys=options.keys)
    plain = [s for s in options.strategies if not s.startswith("pipeline")]
    wanted = sorted({c for s in map(Strategy.parse, plain) for c in _codes(s)})
    served = any("server" in s for s in plain)
    sgd = lambda params: torch.optim.SGD(params, 0.01, momentum=0.9)  # noqa: E731
    found: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        task = Task(options.model, options.slow)
        batch = task._x, task._y
        probed = probe(task.model, _loss, batch, cluster, optimizer=sgd, codes=wanted, limit_s=options.probe_s, servers=served)
        blocks: dict[str, Any] = {}
        for strategy in options.strategies:
            blocks[strategy] = block(strategy, options)
            steps._say(f"round {turn + 1}, {strategy}: {blocks[strategy]}")
        found.append({"file": probed.text(), "blocks": blocks})
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # the job's group and threads end with the process


def block(strategy: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """A strategy's steps per worker in milliseconds, and what its ledger says; the reason where it cannot be built."""
    gc.collect()
    step, finish, ledger, refusal = (lambda: None), (lambda: None), (lambda: {}), None
    try:
        step, finish, ledger = (
            _pipeline(strategy, options)
            if "=" in strategy and "+" not in strategy and "(" not in strategy
            else _job(strategy, options)
        )
    except Exception as error:  # the others are still measured
        refusal = f"{type(error).__name__}: {error}".splitlines()[0]
    refusal = next((text for text in steps._gather(refusal) if text), None)
    if refusal is not None:
        return refusal
    period = steps.period_of(strategy) * (max(1, dist.get_world_size() // 2) if "gossip" in strategy else 1)  # partners rotate
    for _ in range(max(2, period)):
        step()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(period):
        step()
    once_s = max(steps._gather(time.perf_counter() - begun))
    windows = max(WINDOWS, min(options.steps // period, int(options.limit_s / once_s)))
    dist.barrier()
    before, times = ledger(), [time.perf_counter()]
    for _ in range(windows):
        for _ in range(period):
            step()
        times.append(time.perf_counter())
    after = ledger()
    own = statistics.median(b - a for a, b in pairwise(times)) / period * 1000
    whole = (times[-1] - times[0]) / windows / period * 1000
    parts = {k: (after[k] - before[k]) / windows / period * 1000 for k in after if after[k] is not None}
    everyone = steps._gather((own, whole, parts))
    finish()
    time.sleep(1.5 if "server" in strategy else 0.2)  # shards end after their workers
    dist.barrier()
    means = {k: round(statistics.fmean(p[k] for _, _, p in everyone), 3) for k in parts}
    return {"ms": [round(t, 3) for t, _, _ in everyone], "mean_ms": [round(t, 3) for _, t, _ in everyone], "parts": means}


Run = tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, Any]]]
_PARTS = ("compute_s", "wait_s", "transfer_s", "transfer_hidden_s")


def _job(strategy: str, options: argparse.Namespace) -> Run:
    task = Task(options.model, options.slow)
    job = hocket.parallelize(task.model, task.optimizer, strategy)

    def ledger() -> dict[str, Any]:
        found = job.summary(all_workers=True)
        return {name: found.get(name) for name in _PARTS}

    return task.step, job.detach, ledger


def _pipeline(strategy: str, options: argparse.Namespace) -> Run:
    axis = init_mesh(Mesh.parse(strategy)).pipeline
    task = Task(options.model)
    torch.manual_seed(0)
    model = steps.MODELS[options.model]()
    cut = cut_model(model, task._x, axis.size, points=[str(2 * 8 // axis.size * (k + 1)) for k in range(axis.size - 1)])
    pipe = PipelineRunner(cut, axis, _loss, "1f1b", num_microbatches=2 * axis.size)
    optimizer = torch.optim.SGD(pipe.module.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        pipe.run(task._x, task._y)
        optimizer.step()

    return step, lambda: None, dict


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def _codes(strategy: Strategy) -> list[str]:
    """What the probe is asked for: the code, with the topology where it matters, and the copying of weights."""
    parts = str(strategy).split(" + ")
    names = (["gossip"] if strategy.topology.name == "gossip" else []) + ([parts[2]] if strategy.compression.compresses else [])
    return [*([" + ".join(names)] if names else []), *([strategy.sync.name] if strategy.sync.name in ("local", "diloco") else [])]


# --- comparing ---------------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, plan: LabPlan) -> list[Comparison]:
    """Probe, measure and predict in one lab."""
    options.hosts, options.rate = plan.hosts, plan.rate
    arguments = ["--model", plan.model, "--probe-s", str(options.probe_s), "--keys", str(Path(options.folder) / "keys")]
    arguments += ["--steps", str(options.steps), "--rounds", str(options.rounds), "--limit-s", str(options.limit_s)]
    arguments += ["--slow"] * plan.slow + ["--strategies", *plan.strategies]
    rounds = steps.on_hosts(__file__, arguments, options)
    print(f"\n{plan.name}\n{rounds[0]['file']}", flush=True)
    found = [c for s in plan.strategies if (c := compared(plan, s, rounds)) is not None]
    print(table(found), flush=True)
    options.raw[plan.name] = {"plan": plan._asdict(), "rounds": rounds, "busy": options.busy_share}
    return found


_HELD_OUT = {plan.name for plan in HELD_OUT}


def compared(plan: LabPlan, strategy: str, rounds: Sequence[dict[str, Any]]) -> Comparison | None:
    """Medians over the rounds of what was predicted, and of what was measured."""
    pairs: list[list[float]] = []
    parts: list[list[float | None]] = []
    for turn in rounds:
        measured = turn["blocks"][strategy]
        if isinstance(measured, str):
            print(f"refused: {strategy}: {measured}")
            return None
        row = _predicted(plan, strategy, turn["file"])
        if row.refused:
            print(f"not predicted: {strategy}: {row.refused}")
            return None
        pairs.append([row.step_s * 1000, plan.hosts / sum(1 / t for t in measured["ms"])])
        for name in _PARTS:
            parts.append([round(getattr(row, name) * 1000, 3), measured["parts"].get(name)])
    predicted, measured_ms = (statistics.median(pair[k] for pair in pairs) for k in (0, 1))
    return Comparison(plan.name, strategy, predicted, measured_ms, pairs, parts[:4], plan.name in _HELD_OUT)


def _predicted(plan: LabPlan, strategy: str, text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.toml"
        path.write_text(text)
        spec = ClusterSpec.parse(path)
    torch.manual_seed(0)
    model = steps.MODELS[plan.model]()
    mesh = strategy if strategy.startswith("pipeline") else None
    shape = (2, WIDTH) if plan.model == "deep" else (2, 3, 32, 32)
    batch = (torch.randn(shape), torch.zeros(2, dtype=torch.int64)) if mesh else None
    strategies, meshes = (["bulk"], [mesh]) if mesh else ([strategy], [])
    found = predict(model, spec, strategies, plan.hosts, batch_size=steps.BATCH, batch=batch, loss=_loss, meshes=meshes)
    return found.rows[0]


def table(found: Sequence[Comparison]) -> str:
    """Predicted and measured steps, one line each, and the errors together."""
    width = max(len(f.strategy) for f in found)
    lines = [f"{'strategy':<{width}}  predicted ms   measured ms   error   lab"]
    for f in found:
        lines.append(f"{f.strategy:<{width}}  {f.predicted_ms:>12.1f}  {f.measured_ms:>12.1f}  {f.error:>+6.1%}   {f.lab}")
    for name, own in (
        ("configurations", found),
        ("looked at", [f for f in found if not f.held_out]),
        ("held out", [f for f in found if f.held_out]),
    ):
        if own:
            said = figures(own)
            lines.append(
                f"{said['count']} {name}: mean error {said['mean']:.1%}, median {said['median']:.1%}, worst {said['worst']:.1%}"
            )
    return "\n".join(lines)


def figures(found: Sequence[Comparison]) -> dict[str, float]:
    """The errors' magnitudes together."""
    errors = [abs(f.error) for f in found]
    within = sum(error <= 0.12 for error in errors)
    mean, median, worst = statistics.fmean(errors), statistics.median(errors), max(errors)
    return {
        "count": len(found),
        "mean": round(mean, 4),
        "median": round(median, 4),
        "worst": round(worst, 4),
        "within 12 %": within,
    }


def scatter(found: Sequence[Comparison], path: Path) -> None:
    """Predicted against measured steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="measured ms per step", ylabel="predicted ms per step")
    for model in ("tiny", "cnn", "mlp", "deep"):
        own = [f for f in found if f", {model}" in f.lab]
        axes.scatter([f.measured_ms for f in own], [f.predicted_ms for f in own], s=12, label=model)
    ends = [min(f.measured_ms for f in found), max(f.measured_ms for f in found)]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.fill_between(ends, [0.88 * e for e in ends], [1.12 * e for e in ends], color="grey", alpha=0.15, label="± 12 %")
    axes.legend()
    figure.savefig(path, dpi=150)


# --- the command -------------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Predicted against measured steps.")
    parser.add_argument("--hosts", type=int, help="only labs of so many hosts")
    parser.add_argument("--rate", help="only these links, such as 100mbit or unlimited")
    parser.add_argument("--model", choices=list(steps.MODELS), help="only this model")
    parser.add_argument("--slow", action="store_true", help="only labs with a slow worker")
    parser.add_argument("--labs", nargs="+", default=[], help="only these: numbers, parts of names, looked-at or held-out")
    parser.add_argument("--list", action="store_true", help="print the labs and their numbers")
    parser.add_argument("--wait-minutes", type=float, default=30.0, help="wait so long for an idle machine (default 30)")
    parser.add_argument("--busy", action="store_true", help="do not wait: measure beside other work, and mark the lab")
    parser.add_argument("--replace", action="store_true", help="measure labs again that the file has")
    parser.add_argument("--strategies", nargs="+", help="these instead of each lab's own")
    parser.add_argument("--steps", type=int, default=24, help="timed steps per block at most (default 24)")
    parser.add_argument("--rounds", type=int, default=2, help="probes, and blocks per strategy (default 2)")
    parser.add_argument("--limit-s", type=float, default=1.5, help="seconds per block, about; three periods at least (default 1.5)")
    parser.add_argument("--probe-s", type=float, default=12.0, help="seconds of a probe, about (default 12)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no lab after so many minutes")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for one lab at most (default 600)")
    parser.add_argument("--out", type=Path, help="results as JSON, with a scatter beside it; an existing file is continued")
    parser.add_argument("--again", action="store_true", help="only predict again from the probes and blocks in --out")
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def wanted(options: argparse.Namespace) -> list[LabPlan]:
    """The labs that the options name; one of their own where none of the list fits."""
    rate = None if options.rate == "unlimited" else options.rate
    plans = [
        plan
        for plan in chosen(options.labs)
        if options.hosts in (None, plan.hosts)
        and (options.rate is None or plan.rate == rate)
        and options.model in (None, plan.model)
        and (plan.slow or not options.slow)
    ]
    if not plans and not options.labs and None not in (options.hosts, options.rate, options.model):
        plans = [LabPlan(options.hosts, rate, options.model, SETS["a"], options.slow)]
    return [plan._replace(strategies=tuple(options.strategies)) if options.strategies else plan for plan in plans]


def main() -> None:
    """The command."""
    options = parse()
    if options.worker:
        return worker(options)
    if options.list:
        print("\n".join(f"{k:>2}  {'held out ' if p.name in _HELD_OUT else 'looked at'}  {p.name}" for k, p in enumerate(LABS, 1)))
        return
    plans = wanted(options)
    saved = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {}
    options.raw = saved.get("labs", {})
    done = {name: LabPlan(**lab["plan"]) for name, lab in options.raw.items()}
    todo = [p for p in plans if options.replace or p.name not in done or list(done[p.name].strategies) != list(p.strategies)]
    for plan in todo if not options.again else ():
        done.pop(plan.name, None)
    found = [c for name, plan in done.items() for s in plan.strategies if (c := compared(plan, s, options.raw[name]["rounds"]))]
    failed = [] if options.again else measure(options, todo, found)
    if not found:
        raise SystemExit("fidelity: no configuration was measured; see --help")
    write(options, found)
    print("\n" + table(found))
    left = [plan.name for plan in todo if plan.name not in {f.lab for f in found}]
    if left and not options.again:
        print(f"Not measured yet: {'; '.join(left)}. Run the command again to continue.")
    if failed:
        raise SystemExit(1)


def measure(options: argparse.Namespace, todo: Sequence[LabPlan], found: list[Comparison]) -> list[str]:
    """Measure these labs, each on an idle machine, and add what was found; the names of those that failed."""
    begun, failed = time.monotonic(), []
    with tempfile.TemporaryDirectory() as options.folder:
        Keys.make().write(Path(options.folder) / "keys")
        for plan in todo:
            if time.monotonic() - begun > 60 * options.minutes:
                break
            options.busy_share = busy_share() if options.busy else wait_until_idle(options.wait_minutes)
            if options.busy_share is None:
                print(f"This machine is not idle: {plan.name} was not measured. Run the command again, or give --busy.")
                break
            try:
                found += compare(options, plan)
            except (RuntimeError, TimeoutError) as error:
                failed.append(plan.name)
                print(f"failed: {plan.name}: {error}", flush=True)
                continue
            write(options, found)
    return failed


def write(options: argparse.Namespace, found: Sequence[Comparison]) -> None:
    """All so far, in one piece."""
    if options.out is not None:
        rows = [{**asdict(f), "error": round(f.error, 4)} for f in found]
        parts = {"looked at": [f for f in found if not f.held_out], "held out": [f for f in found if f.held_out]}
        errors = {name: figures(own) for name, own in {"all": found, **parts}.items() if own}
        run = {"benchmark": "fidelity", "machine": steps.machine(), "errors": errors, "rows": rows, "labs": options.raw}
        steps.write_json(options.out, run, indent=1)
        scatter(found, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
