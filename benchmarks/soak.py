"""Hours of faults: workers and shards are killed and stopped at random while a run goes on; does it hang, lose count, or grow?

    python benchmarks/soak.py --minutes 30 --seed 0
    python benchmarks/soak.py --minutes 3 --seed 0 --only "local(8) + topk(0.05) | qsgd(4)"

Each strategy trains on the embedded digits with 6 workers; every 10 seconds a process chosen by the seed is killed (kill -9),
stopped for 2 seconds, or stopped for 12, which counts as lost. A run that makes no epoch for a minute hangs. Printed are faults,
epochs, the longest time without one, what the run itself has counted as lost, the best accuracy, and the resident memory of all
processes in the first and in the last third.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

STRATEGIES = {
    "local(8) + topk(0.05) | qsgd(4)": ["--elastic", "2:6"],
    "async + server(2)": ["--replace", "--liveness-timeout", "5", "--snapshot", "2"],
}
EVERY_S, HANG_S, WORKERS = 10.0, 60.0, 6
FAULTS = (("kill", 0.0), ("stop", 2.0), ("stop", 12.0))


def victims(launcher: psutil.Process) -> list[psutil.Process]:
    """Workers and shards."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sorted(launcher.children(), key=lambda p: p.pid)
    return []


def memory(launcher: psutil.Process) -> float:
    """Resident bytes of all processes of the run."""
    total = 0.0
    for process in [launcher, *victims(launcher)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def soak(strategy: str, minutes: float, seed: int) -> dict[str, Any]:
    """One run of one strategy."""
    rng, faults, resumes = random.Random(seed), [], list[tuple[float, int]]()
    with tempfile.TemporaryDirectory() as name:
        out, log = Path(name, "run"), open(Path(name, "log"), "w")  # noqa: SIM115 - as long as the folder
        arguments = [
            "train",
            "--strategy",
            strategy,
            "--workers",
            str(WORKERS),
            "--data",
            "digits",
            "--model",
            "mlp",
            "--lr",
            "0.05",
        ]
        arguments += ["--epochs", "1000000", "--batch-size", "16", "--no-checkpoints", "--out", str(out), *STRATEGIES[strategy]]
        command = [sys.executable, "-m", "hocket.cli.main", *arguments]
        process = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        launcher, metrics = psutil.Process(process.pid), out / "metrics.jsonl"
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.1)
        begun = seen = time.monotonic()
        lines, longest, held, due = 0, 0.0, list[float](), begun + EVERY_S
        while time.monotonic() - begun < 60 * minutes and process.poll() is None and time.monotonic() - seen < HANG_S:
            time.sleep(0.2)
            now = time.monotonic()
            for at, pid in [one for one in resumes if one[0] <= now]:
                resumes.remove((at, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            found = len(metrics.read_text().splitlines())
            if found > lines:
                lines, longest, seen = found, max(longest, now - seen), now
            if now >= due and (chosen := victims(launcher)):
                due, (kind, seconds), victim = now + EVERY_S, rng.choice(FAULTS), rng.choice(chosen)
                faults.append(kind if not seconds else f"{kind} {seconds:g} s")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                resumes += [(now + seconds, victim.pid)] * (kind == "stop")
                held.append(memory(launcher))
        ended, hung = process.poll(), time.monotonic() - seen >= HANG_S
        for _, pid in resumes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        process.terminate()
        process.wait(60)
        told = [json.loads(line) for line in metrics.read_text().splitlines()]
        said = Path(name, "log").read_text().splitlines()[-3:]
        log.close()
    third = max(1, len(held) // 3)
    grown = [statistics.mean(part) / 1e6 for part in (held[:third], held[-third:])] if held else [0.0, 0.0]
    best = max((line["accuracy"] for line in told if line["accuracy"] is not None), default=0.0)
    counts = {kind: faults.count(kind) for kind in sorted(set(faults))}
    found_lost = sum(line.get("lost", 0) for line in told)
    result = {"strategy": strategy, "faults": counts, "epochs": len(told), "longest_s": longest, "hung": hung, "lost": found_lost}
    return {**result, "accuracy": best, "memory_mb": grown, "ended_early": ended, "said": said if ended is not None or hung else []}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each strategy (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=STRATEGIES)
    given = parser.parse_args()
    failed = False
    for strategy in STRATEGIES if given.only is None else [given.only]:
        found = soak(strategy, given.minutes, given.seed)
        failed |= found["hung"] or found["ended_early"] is not None
        print(json.dumps(found, indent=1), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
