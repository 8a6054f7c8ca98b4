"""Whether advice is good: the advised strategy's measured time to an accuracy, against the best of all that were tried.

    python benchmarks/advice.py --out advice.json              # all configurations; the same command goes on where it was stopped
    python benchmarks/advice.py --list
    python benchmarks/advice.py --out advice.json --only "4 hosts, 5mbit, cnn" 7 --minutes 30

For each configuration (hosts of netlab.py, a rate, a model on the embedded digits) the cluster is probed (`hocket probe`), and from
the probe's file alone `hocket.advise` ranks its candidates for the goal "TARGET % soonest". Then every candidate trains for real on
these hosts, with the rate and the schedule of its virtual training, and the seconds until the target are taken from its metrics, on
straight lines between epochs as the advice does. An advice is good where its strategy needs at most 1.1 times the seconds of the
fastest. All hosts share this machine's cores, so before each configuration the command waits until nothing else runs (see labs.py).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import steps
import torch
from labs import busy_share, wait_until_idle
from netlab import Lab

from hocket.cli.options import arguments
from hocket.prediction.advise import CANDIDATES, Advice, advise
from hocket.prediction.race import Curve, Point
from hocket.train.settings import RunSettings
from hocket.transport import Keys

GOOD = 1.1
BATCH = 20


class Plan(NamedTuple):
    """Hosts, the rate of their links, and a model."""

    hosts: int
    rate: str | None
    model: str

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {self.rate or 'unlimited'}, {self.model}"


PLANS = [Plan(n, rate, model) for model in ("cnn", "mlp") for n in (2, 3, 4) for rate in ("5mbit", "20mbit", "100mbit", "500mbit")]


def settings_of(plan: Plan, epochs: int) -> RunSettings:
    """A training as the advice's virtual ones."""
    return RunSettings.of(
        workers=plan.hosts, data="digits", model=plan.model, optimizer="sgd", batch_size=BATCH, momentum=0.9, lr_schedule="cosine",
        epochs=epochs, warmup=epochs / 10, augment=False,
    )  # fmt: skip


def hocket(lab: Lab, timeout_s: float, *words: str) -> None:
    """Run a command of Hocket's on every host."""
    one_thread = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the hosts share this machine's cores
    done = lab.run([[sys.executable, "-m", "hocket.cli.main", *words]] * lab.hosts, one_thread, timeout_s=timeout_s)
    failed = next((process for process in done if process.returncode), None)
    if failed is not None:
        raise RuntimeError(f"{' '.join(words[:4])} … failed with exit code {failed.returncode}: {failed.stderr[-600:]}")


def advised(plan: Plan, lab: Lab, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The probe's file, and what is advised from it."""
    file, keys = folder / "cluster.toml", folder / "keys"
    Keys.make().write(keys)
    where = ["--model", plan.model, "--data", "digits", "--batch-size", str(BATCH), "--device", "cpu", "--no-servers"]
    hocket(lab, 600, "probe", *where, "--limit-s", str(options.probe_s), "--keys", str(keys), "--out", str(file))
    found = advise(
        plan.model, "digits", file, plan.hosts, f"{options.target:g}% soonest", strategies=options.strategies, batch_size=BATCH,
        minutes=options.advise_minutes, seeds=options.seeds,
    )  # fmt: skip
    return {"cluster": file.read_text(), **plain(found)}


def plain(found: Advice) -> dict[str, Any]:
    """What is kept of an advice."""
    curves = [c.curves[0].points for c in found.contenders if c.curves]
    epochs = max(len(points) for points in curves) - 1
    start = curves[0][0].quality
    contenders = [
        {"strategy": c.strategy, "lr": c.lr, "predicted_s": c.seconds.mean if c.seconds is not None else None, "why": c.why}
        for c in found.contenders
    ]
    about = {"answer": found.answer, "about": found.about, "advised": found.strategy}
    return {**about, "epochs": epochs, "start": start, "contenders": contenders}


def trained(plan: Plan, lab: Lab, folder: Path, of: dict[str, Any], contender: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """A real training of one candidate: its points, seconds and accuracies after each epoch."""
    settings = settings_of(plan, of["epochs"]).changed(strategy=contender["strategy"], lr=contender["lr"])
    out = Path(tempfile.mkdtemp(dir=folder))
    try:
        hocket(lab, limit_s, "train", *arguments(settings), "--no-checkpoints", "--device", "cpu", "--out", str(out / "run"))
        failed = None
    except (RuntimeError, TimeoutError) as error:  # it diverged, or took too long: what it reached until then counts
        failed = str(error)[:300]
    metrics = out / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {"epochs": [[line["seconds"], line["accuracy"]] for line in lines], "failed": failed}


def seconds_to(target: float, start: float, epochs: Sequence[Sequence[float]]) -> float:
    """Seconds until a training has the accuracy ``target``; infinite: never.

    >>> seconds_to(0.7, 0.1, [[2.0, 0.5], [2.0, 0.9]])
    3.0
    """
    curve = Curve([Point(0.0, start)])
    for seconds, accuracy in epochs:
        curve.points.append(Point(curve.last.seconds + seconds, accuracy))
    return curve.reaches(target)


def judged(name: str, row: dict[str, Any], target: float) -> dict[str, Any] | None:
    """The advised strategy beside the best; None as long as a training is missing."""
    if len(row.get("trainings", {})) < len(row["contenders"]):
        return None
    took = {s: seconds_to(target, row["start"], t["epochs"]) for s, t in row["trainings"].items()}
    best = min(took, key=lambda s: took[s])
    if not math.isfinite(took[best]):
        return {"name": name, "advised": row["advised"], "best": None, "ratio": None, "good": row["advised"] is None}
    own = math.inf if row["advised"] is None else took[row["advised"]]
    ratio = own / took[best]
    return {
        "name": name, "advised": row["advised"], "advised_s": shown(own), "best": best, "best_s": shown(took[best]),
        "ratio": shown(ratio), "good": ratio <= GOOD,
    }  # fmt: skip


def shown(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return round(value, 3) if math.isfinite(value) else None


def table(judgements: Sequence[dict[str, Any]]) -> str:
    """One line per configuration, and the share of good advice."""
    lines = [f"{'configuration':<26}{'advised':<34}{'s':>8}  {'best':<34}{'s':>8}  ratio"]
    for j in judgements:
        own, best, ratio = (j.get(key) or "–" for key in ("advised_s", "best_s", "ratio"))
        lines.append(f"{j['name']:<26}{j['advised'] or 'none':<34}{own:>8}  {j['best'] or 'none':<34}{best:>8}  {ratio}")
    good = sum(j["good"] for j in judgements)
    lines.append(f"{good} of {len(judgements)} advised strategies need at most {GOOD:g} times the seconds of the fastest.")
    return "\n".join(lines)


def measure(plan: Plan, options: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Whatever is missing of one configuration, written as soon as it is known."""
    row = saved["configurations"].setdefault(plan.name, {"plan": plan._asdict()})
    with tempfile.TemporaryDirectory() as folder, Lab(plan.hosts, plan.rate) as lab:
        if "contenders" not in row:
            row |= advised(plan, lab, Path(folder), options) | {"target": options.target}
            print(f"{plan.name}: {row['answer']}", flush=True)
        for contender in row["contenders"]:
            trainings = row.setdefault("trainings", {})
            if contender["strategy"] not in trainings:
                trainings[contender["strategy"]] = trained(plan, lab, Path(folder), row, contender, options.limit_s)
                took = seconds_to(row["target"] / 100, row["start"], trainings[contender["strategy"]]["epochs"])
                print(f"  {contender['strategy']}, rate {contender['lr']:g}: {took:.1f} s", flush=True)
                write(options.out, saved)


def write(path: Path, saved: dict[str, Any]) -> None:
    """All so far, in one piece."""
    rows = saved["configurations"].items()
    saved["judgements"] = [j for name, row in rows if "contenders" in row and (j := judged(name, row, row["target"] / 100))]
    steps.write_json(path, {**saved, "benchmark": "advice", "machine": steps.machine()}, indent=1)


def chosen(words: Sequence[str]) -> list[Plan]:
    """Configurations by number (from 1) or by a part of their names; all without words."""
    found = [
        p
        for k, p in enumerate(PLANS, 1)
        if not words or any(word == str(k) or (not word.isdigit() and word in p.name) for word in words)
    ]
    if not found:
        raise SystemExit(f"no configuration is named {' or '.join(words)}; see --list")
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measured times of advised strategies, beside the best.")
    parser.add_argument("--out", type=Path, default=Path("advice.json"), help="one JSON file; an existing one is continued")
    parser.add_argument("--only", nargs="+", default=[], help="only these configurations: numbers, or parts of their names")
    parser.add_argument("--list", action="store_true", help="print the configurations and their numbers")
    parser.add_argument("--target", type=float, default=90.0, help="the accuracy to reach, in percent (default 90)")
    parser.add_argument("--strategies", nargs="+", default=list(CANDIDATES), help="instead of the candidates of hocket advise")
    parser.add_argument("--seeds", type=int, default=2, help="virtual trainings of the last strategies (default 2)")
    parser.add_argument("--advise-minutes", type=float, default=2.0, help="for one advice, about (default 2)")
    parser.add_argument("--probe-s", type=float, default=30.0, help="for one probe, about (default 30)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one real training (default 600)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no configuration after so many minutes")
    parser.add_argument("--wait-minutes", type=float, default=30.0, help="wait so long for an idle machine (default 30)")
    parser.add_argument("--busy", action="store_true", help="do not wait: measure beside other work, and mark it")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{k:>2}  {plan.name}" for k, plan in enumerate(PLANS, 1)))
        return
    torch.set_num_threads(1)  # virtual workers are small: threads would only wait for each other
    saved = json.loads(options.out.read_text()) if options.out.exists() else {"configurations": {}}
    begun = time.monotonic()
    for plan in chosen(options.only):
        done = {j["name"] for j in saved.get("judgements", [])}
        if plan.name in done or time.monotonic() - begun > 60 * options.minutes:
            continue
        busy = busy_share() if options.busy else wait_until_idle(options.wait_minutes)
        if busy is None:
            print(f"This machine is not idle: {plan.name} was not measured. Run the command again, or give --busy.")
            break
        saved["configurations"].setdefault(plan.name, {"plan": plan._asdict()})["busy"] = round(busy, 3)
        try:
            measure(plan, options, saved)
        except (RuntimeError, TimeoutError) as error:
            print(f"failed: {plan.name}: {error}", flush=True)
        write(options.out, saved)
    if saved.get("judgements"):
        print(table(saved["judgements"]))


if __name__ == "__main__":
    main()
