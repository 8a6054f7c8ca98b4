"""A worker is killed or stopped while others train: how long they pause, until it is back, and what it costs.

    python benchmarks/elastic.py                     faults of 1 of 4 workers under bulk, local(16) and gossip, beside torchft
    python benchmarks/elastic.py --faults kill       kill -9 alone (or stop)
    python benchmarks/elastic.py --overhead          steps with and without elastic, in turn, without faults, by step length
                                                     (both runs at once; while one computes 32 steps the other stands still)
    python benchmarks/elastic.py --json OUT.json     the figures as JSON, too

Every run is `hocket launch` of this very file: a small convolutional network on the embedded digits. Workers write the time of each
step to a file. "Pause" is the longest time between two steps of one of the others after the fault, also where the worker comes back
and gets its state from them; "rejoined" is the time until the first step of the worker that is back: after kill -9 from the fault
on, with the start of a new process, which imports PyTorch; after a stop, which lasts longer than the liveness timeout, from its
end on. The accuracy is that of the mean model on the test set. torchft, if torchft-nightly is installed, trains the same
model with as many steps; its lighthouse is in this process, which starts a killed worker again, as `hocket launch` does.
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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

STRATEGIES = ("bulk", "local(16)", "local(1) + gossip")
FAULTS = ("kill", "stop")
WORKERS, BATCH, SAMPLES = 4, 16, 1437
EPOCHS = {"bulk": 60, "local(16)": 160}
"""Of runs with faults, by strategy: long enough that a worker is back before the end (100 for others)."""
LIVENESS_S, AWAY_S = 3.0, 4.0
BATCHES = (64, 256, 1024)
"""Of --overhead, which make steps short or long."""
BLOCK = 32
"""Of --overhead: steps that one run computes while the other stands still."""
TORCHFT = {"bulk": "torchft DDP", "local(16)": "torchft LocalSGD(16)"}
HOCKET = [sys.executable, "-m", "hocket.cli.main"]


def work(strategy: str, folder: Path, epochs: int, elastic: bool, seed: int, batch: int = BATCH, samples: int = 0) -> None:
    """One worker; ``samples``: so many, the same ones again and again, instead of the data set's, in turn with another run."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hocket
    from hocket.data import load
    from hocket.models import build

    torch.set_num_threads(1)
    hocket.init(device="cpu", seed=seed)
    digits = load("digits", None)
    torch.manual_seed(seed)
    model = wide() if samples else build("cnn", digits)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    job = hocket.parallelize(model, optimizer, strategy, elastic="2:8" if elastic else None)
    given = torch.arange(samples or len(digits.train[0])) % len(digits.train[0])
    loader = DataLoader(TensorDataset(*(t[given] for t in digits.train)), batch_size=batch, shuffle=True)
    with open(folder / f"{os.getpid()}.steps", "w", buffering=1) as steps:
        for _ in hocket.epochs(epochs):
            for x, y in hocket.distribute(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(digits.prepare(x)), y).backward()
                optimizer.step()
                steps.write(f"{time.time()} {job.step}\n")
                if samples and job.step % BLOCK == 0:
                    take_turns(folder, job.step // BLOCK)
    job.finish()
    assert digits.test is not None
    with torch.no_grad():
        right = (model.eval()(digits.prepare(digits.test[0])).argmax(1) == digits.test[1]).float().mean()
    figures = {k: v for k, v in job.summary().items() if k in ("lost", "joined", "dealt_again", "skipped", "unmixed")}
    (folder / f"{os.getpid()}.json").write_text(json.dumps({"accuracy": float(right), **figures}))


def wide() -> Any:
    """563,722 parameters, nearly all of the time in products of matrices, which take equally long in each process."""
    from torch.nn import Flatten, Linear, ReLU, Sequential

    return Sequential(Flatten(), Linear(64, 512), ReLU(), Linear(512, 512), ReLU(), Linear(512, 512), ReLU(), Linear(512, 10))


def take_turns(folder: Path, computed: int) -> None:
    """Say when so many blocks were computed, and wait until the next one may begin."""
    (folder / f"{os.getpid()}.{computed}").write_text(str(time.time()))
    while not (folder / f"begin.{computed}").exists():
        time.sleep(0.001)


def command(strategy: str, folder: Path, epochs: int, elastic: bool, workers: int, *more: int) -> list[str]:
    own = [__file__, "--work", strategy, str(folder), str(epochs), str(int(elastic)), *map(str, more)]
    if elastic:
        limits = ["--elastic", "2:8", "--workers", str(workers), "--liveness-timeout", str(LIVENESS_S)]
        return [*HOCKET, "launch", *limits, *own]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers), *own]


# --- faults ------------------------------------------------------------------------------------------------------------------


class Observed:
    """The steps of a run's workers, of which one meets with an accident after a third of them."""

    def __init__(self, folder: Path, planned: int, hurt: Callable[[int], None] | None, heal: Callable[[int], None] | None) -> None:
        """``hurt`` and ``heal`` are called with the worker's pid."""
        self.folder, self.planned, self.hurt, self.heal = folder, planned, hurt, heal
        self.hurt_at = self.healed_at = 0.0
        self.victim = ""

    def look(self) -> None:
        """To be called many times a second."""
        files = sorted(self.folder.glob("*.steps"))
        if self.hurt is not None and not self.hurt_at and len(files) == WORKERS and all(_last(f) > self.planned / 3 for f in files):
            self.victim = files[1].stem
            self.hurt_at = time.time()
            self.hurt(int(self.victim))
        if self.heal is not None and self.hurt_at and not self.healed_at and time.time() > self.hurt_at + AWAY_S:
            self.heal(int(self.victim))
            self.healed_at = time.time()

    def figures(self) -> dict[str, Any]:
        stamps = {f.stem: [float(line.split()[0]) for line in f.read_text().splitlines()] for f in self.folder.glob("*.steps")}
        ends = [json.loads(f.read_text()) for f in self.folder.glob("*.json")]
        found: dict[str, Any] = {"accuracy": ends[0]["accuracy"]}
        if self.hurt is None:
            return found
        others = {pid: own for pid, own in stamps.items() if pid != self.victim and own[0] < self.hurt_at}
        gaps = [(b, b - a) for own in others.values() for a, b in pairwise(own) if b > self.hurt_at]
        back_at = self.healed_at or self.hurt_at
        back = [t for pid, own in stamps.items() if pid not in others for t in own if t > back_at]
        early = [gap for b, gap in gaps if not back or b < min(back) - 1.0]
        found |= {"pause_s": max(gap for _, gap in gaps), "rejoin_s": min(back) - back_at if back else None}
        found["loss_pause_s"] = max(early, default=None)
        return found | {k: max(end.get(k, 0) for end in ends) for k in ("lost", "dealt_again", "skipped", "unmixed")}


def _last(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(lines[-1].split()[1]) if lines and len(lines[-1].split()) == 2 else 0


def run(strategy: str, fault: str | None, seed: int) -> dict[str, Any]:
    """One run of Hocket's."""
    epochs = EPOCHS.get(strategy, 100)
    planned = epochs * SAMPLES // (WORKERS * BATCH)
    hurt = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(fault or "")
    with tempfile.TemporaryDirectory() as name:
        observed = Observed(
            Path(name),
            planned,
            None if hurt is None else lambda pid: os.kill(pid, hurt),
            (lambda pid: os.kill(pid, signal.SIGCONT)) if fault == "stop" else None,
        )
        given = command(strategy, Path(name), epochs, True, WORKERS, seed)
        process = subprocess.Popen(given, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(0.02)
            observed.look()
        return observed.figures()


def run_torchft(strategy: str, fault: str | None, seed: int) -> dict[str, Any]:
    """The same with torchft."""
    os.environ["RUST_LOG"] = "error"  # the lighthouse would write several lines per step
    from torchft.coordination import LighthouseServer

    planned = EPOCHS[strategy] * SAMPLES // (WORKERS * BATCH)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    script = str(Path(__file__).with_name("elastic_torchft.py"))
    with tempfile.TemporaryDirectory() as name:

        def start(place: int) -> subprocess.Popen[bytes]:
            given = [sys.executable, script, strategy, name, str(planned), str(place), str(seed)]
            return subprocess.Popen(given, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        observed = Observed(Path(name), planned, None if fault is None else lambda pid: os.kill(pid, signal.SIGKILL), None)
        processes, crashed, deadline = [start(place) for place in range(WORKERS)], 0, time.time() + 180
        try:
            while any(process.poll() is None for process in processes) and time.time() < deadline:
                time.sleep(0.02)
                observed.look()
                for place, process in enumerate(processes):
                    if process.poll() not in (None, 0):
                        crashed += str(process.pid) != observed.victim
                        processes[place] = start(place)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            lighthouse.shutdown()
        if not list(Path(name).glob("*.json")):
            raise RuntimeError("no worker of torchft's has come to the end")
        return {**observed.figures(), "crashed": crashed}


def faults(strategies: Sequence[str], chosen: Sequence[str], seeds: int, torchft: bool) -> list[dict[str, Any]]:
    """A line per strategy and fault: the longest pause and return of all seeds, the accuracies of each."""
    print(f"{'':22} {'fault':5} {'pause s':>8} {'rejoined s':>11} {'lost':>5} {'again':>6}   accuracy (undisturbed), % by seed")
    found = []
    ways: list[tuple[str, str, Callable[[str, str | None, int], dict[str, Any]]]] = []
    for strategy in strategies:
        ways.append((strategy, strategy, run))
        if torchft and strategy in TORCHFT:
            ways.append((TORCHFT[strategy], strategy, run_torchft))
    for name, strategy, go in ways:
        calm = [go(strategy, None, seed) for seed in range(seeds)]
        for fault in chosen if go is run else [one for one in chosen if one == "kill"]:
            hurt = [go(strategy, fault, seed) for seed in range(seeds)]
            found.append({"name": name, "fault": fault, "undisturbed": [one["accuracy"] for one in calm], "runs": hurt})
            back = [one["rejoin_s"] for one in hurt]
            rejoined = "-" if None in back else f"{max(back):.2f}"
            pairs = " ".join(f"{100 * a['accuracy']:.1f} ({100 * b['accuracy']:.1f})" for a, b in zip(hurt, calm, strict=True))
            pause, lost, again = (max(one[k] for one in hurt) for k in ("pause_s", "lost", "dealt_again"))
            counted = f"{lost:5} {again:6}" if go is run else f"{'-':>5} {'-':>6}"
            print(f"{name:22} {fault:5} {pause:8.2f} {rejoined:>11} {counted}   {pairs}", flush=True)
    return found


# --- without faults ----------------------------------------------------------------------------------------------------------


class Turns:
    """A run that computes a block of steps when it is told to."""

    def __init__(self, strategy: str, elastic: bool, workers: int, batch: int, blocks: int, folder: Path) -> None:
        self.folder, self.workers = folder, workers
        given = command(strategy, folder, 1, elastic, workers, 0, batch, (blocks + 1) * BLOCK * batch * workers)
        self.process = subprocess.Popen(given, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    def wait(self, block: int) -> float:
        """The mean over workers of the times at which they had computed ``block`` blocks."""
        deadline = time.time() + 300
        while (
            len(found := [f.read_text() for f in self.folder.glob(f"*.{block}") if f.stem != "begin"]) < self.workers or "" in found
        ):
            if self.process.poll() is not None or time.time() > deadline:
                raise RuntimeError(f"the run has not computed {block} blocks")
            time.sleep(0.001)
        return statistics.mean(map(float, found))

    def compute(self, block: int) -> float:
        """Milliseconds per step of the block after ``block`` others."""
        begin = time.time()
        (self.folder / f"begin.{block}").touch()
        return 1000 * (self.wait(block + 1) - begin) / BLOCK


def compare(strategy: str, workers: int, batch: int, blocks: int) -> list[tuple[float, float]]:
    """Milliseconds per step of blocks without and with elastic, in turn; the first block of each is left out."""
    with tempfile.TemporaryDirectory() as fixed, tempfile.TemporaryDirectory() as elastic:
        runs = [Turns(strategy, kind, workers, batch, blocks, Path(folder)) for kind, folder in ((False, fixed), (True, elastic))]
        try:
            for run in runs:
                run.wait(1)
            found = []
            for block in range(1, blocks + 1):
                order = (0, 1) if block % 2 else (1, 0)
                ms = {place: runs[place].compute(block) for place in order}
                found.append((ms[0], ms[1]))
            for run in runs:
                (run.folder / f"begin.{blocks + 1}").touch()
                run.process.wait(60)
        finally:
            for run in runs:
                run.process.terminate()
                run.process.wait(30)
    return found


def overhead(rounds: int, blocks: int, workers: int, strategies: Sequence[str], batches: Sequence[int]) -> list[dict[str, Any]]:
    """With elastic and without, in turn: the median ratio of the blocks of each pair of runs, and the mean over pairs."""
    print(f"{'strategy':34} {'batch':>6} {'step, fixed ms':>15} {'step, elastic ms':>17} {'ratio':>6}   (of each pair of runs)")
    found = []
    for batch in batches:
        for strategy in strategies:
            pairs = [compare(strategy, workers, batch, blocks) for _ in range(rounds)]
            fixed, elastic = (statistics.median(one[k] for pair in pairs for one in pair) for k in (0, 1))
            ratios = [statistics.median(b / a for a, b in pair) for pair in pairs]
            ratio = statistics.mean(ratios)
            found.append({"strategy": strategy, "batch": batch, "fixed_ms": fixed, "elastic_ms": elastic, "ratios": ratios})
            each = " ".join(f"{one:.3f}" for one in ratios)
            print(f"{strategy:34} {batch:6} {fixed:15.2f} {elastic:17.2f} {ratio:6.3f}   ({each})", flush=True)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (default 1)")
    parser.add_argument("--no-torchft", action="store_true", help="leave torchft out, also where it is installed")
    parser.add_argument("--overhead", action="store_true", help="without faults, against the same strategy without elastic")
    parser.add_argument("--rounds", type=int, default=3, help="of --overhead: pairs of runs (default 3)")
    parser.add_argument("--blocks", type=int, default=20, help=f"of --overhead: blocks of {BLOCK} steps per run (default 20)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of --overhead (default 4)")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="of --overhead: step lengths")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.work is not None:
        strategy, folder, epochs, elastic, *more = given.work
        work(strategy, Path(folder), int(epochs), elastic == "1", *map(int, more))
        return
    if given.overhead:
        found = overhead(given.rounds, given.blocks, given.workers, given.strategies, given.batches)
    else:
        found = faults(given.strategies, given.faults, given.seeds, find_spec("torchft") is not None and not given.no_torchft)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
