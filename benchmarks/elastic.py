"""A worker is killed while others train: how long until their next step, until another has joined, and what it costs.

    python benchmarks/elastic.py                   faults: kill -9 of 1 of 4 under bulk, local(16) and gossip
    python benchmarks/elastic.py --overhead        steps with and without elastic, in turn, without faults
    python benchmarks/elastic.py --json OUT.json   the figures as JSON, too

Every run is `hocket launch` of this very file: a small convolutional network on the embedded digits. Workers write the time of each
step to a file; "next step" is the longest time from the fault to the next step of one of the others, "rejoined" the time from the
fault to the first step of the new process (which has to import PyTorch first). The accuracy is that of the mean model on the test
set.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

STRATEGIES = ("bulk", "local(16)", "local(1) + gossip")
WORKERS, EPOCHS, BATCH = 4, 30, 16


def work(strategy: str, folder: Path, epochs: int, elastic: bool) -> None:
    """One worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hocket
    from hocket.data import load
    from hocket.models import build

    torch.set_num_threads(1)
    hocket.init(device="cpu")
    digits = load("digits", None)
    torch.manual_seed(0)
    model = build("cnn", digits)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    job = hocket.parallelize(model, optimizer, strategy, elastic="2:8" if elastic else None)
    loader = DataLoader(TensorDataset(*digits.train), batch_size=BATCH, shuffle=True)
    with open(folder / f"{os.getpid()}.steps", "w", buffering=1) as steps:
        for _ in hocket.epochs(epochs):
            for x, y in hocket.distribute(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(digits.prepare(x)), y).backward()
                optimizer.step()
                steps.write(f"{time.time()} {job.step}\n")
    job.finish()
    assert digits.test is not None
    with torch.no_grad():
        right = (model.eval()(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]).float().mean()
    found = {
        "accuracy": float(right),
        **{k: v for k, v in job.summary().items() if k in ("lost", "joined", "dealt_again", "seconds")},
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps({**found, "steps": job.step}))


def command(strategy: str, folder: Path, epochs: int, elastic: bool, workers: int = WORKERS) -> list[str]:
    own = [__file__, "--work", strategy, str(folder), str(epochs), str(int(elastic))]
    if elastic:
        return [sys.executable, "-m", "hocket.cli.main", "launch", "--elastic", "2:8", "--workers", str(workers), *own]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), *own]


def run(strategy: str, elastic: bool, kill: bool, epochs: int = EPOCHS) -> dict[str, Any]:
    """A run, in which the first worker is killed once all have made a third of their steps."""
    with tempfile.TemporaryDirectory() as name:
        folder, killed = Path(name), 0.0
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command(strategy, folder, epochs, elastic), env=environ, stderr=subprocess.DEVNULL)
        planned = epochs * 1437 // (WORKERS * BATCH)
        while process.poll() is None:
            time.sleep(0.02)
            files = sorted(folder.glob("*.steps"))
            if kill and not killed and len(files) == WORKERS and all(_last(file) > planned / 3 for file in files):
                os.kill(int(files[0].stem), signal.SIGKILL)
                killed, victim = time.time(), files[0].stem
        stamps = {f.stem: [float(line.split()[0]) for line in f.read_text().splitlines()] for f in folder.glob("*.steps")}
        ends = [json.loads(f.read_text()) for f in folder.glob("*.json")]
    found: dict[str, Any] = {"strategy": strategy, "accuracy": ends[0]["accuracy"], "steps": ends[0]["steps"]}
    gaps = [b - a for own in stamps.values() for a, b in pairwise(own)]
    found |= {"step_s": statistics.median(gaps), "seconds": statistics.mean(end["seconds"] for end in ends)}
    if kill:
        others = {pid: own for pid, own in stamps.items() if pid != victim and own[0] < killed}
        found["gap_s"] = max(next(t for t in own if t > killed + 0.01) - killed for own in others.values())
        joined = [own[0] - killed for own in stamps.values() if own[0] > killed]
        found |= {"rejoin_s": min(joined) if joined else None, "lost": max(end["lost"] for end in ends)}
        found["dealt_again"] = max(end["dealt_again"] for end in ends)
    return found


def _last(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(lines[-1].split()[1]) if lines and " " in lines[-1] else 0


def faults() -> list[dict[str, Any]]:
    print(f"{'strategy':20} {'next step s':>12} {'rejoined s':>11} {'accuracy':>9} {'undisturbed':>12} {'lost':>5} {'again':>12}")
    found = []
    for strategy in STRATEGIES:
        calm, hurt = run(strategy, True, kill=False), run(strategy, True, kill=True)
        line = {**hurt, "undisturbed": calm["accuracy"]}
        found.append(line)
        rejoined = "-" if line["rejoin_s"] is None else f"{line['rejoin_s']:.1f}"
        print(
            f"{strategy:20} {line['gap_s']:12.2f} {rejoined:>11} {100 * line['accuracy']:8.1f}% {100 * calm['accuracy']:11.1f}% "
            f"{line['lost']:5} {line['dealt_again']:12}",
            flush=True,
        )
    return found


def overhead(rounds: int) -> list[dict[str, Any]]:
    print(f"{'strategy':20} {'step, fixed ms':>15} {'step, elastic ms':>17} {'ratio':>6}")
    found = []
    for strategy in STRATEGIES:
        pairs = [[run(strategy, elastic, kill=False, epochs=6)["seconds"] for elastic in (False, True)] for _ in range(rounds)]
        steps = 6 * (1437 // (WORKERS * BATCH) + 1)
        fixed, elastic = (statistics.median(pair[k] for pair in pairs) / steps * 1000 for k in (0, 1))
        ratio = statistics.median(b / a for a, b in pairs)
        found.append({"strategy": strategy, "fixed_ms": fixed, "elastic_ms": elastic, "ratio": ratio})
        print(f"{strategy:20} {fixed:15.1f} {elastic:17.1f} {ratio:6.3f}", flush=True)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--overhead", action="store_true", help="without faults, against the same strategy without elastic")
    parser.add_argument("--rounds", type=int, default=3, help="of --overhead: runs of each kind (default 3)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.work is not None:
        work(given.work[0], Path(given.work[1]), int(given.work[2]), given.work[3] == "1")
        return
    found = overhead(given.rounds) if given.overhead else faults()
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
