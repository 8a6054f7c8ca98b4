"""Faults by the thousand: schedules per second, and how many violate an invariant (none should).

    python benchmarks/fault_schedules.py --schedules 100000 --processes 2
    python benchmarks/fault_schedules.py --strategy "async + gossip" --seed 17 --trace

A schedule is a seed. One that violates an invariant is printed, and replays exactly with ``--seed`` and ``--trace``. The runs and
their invariants are those of tests/faults.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hocket.errors import HocketError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.schedules import STRATEGIES, run_schedule
from faults.simulated import Outcome


def run(strategy: str, seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """One schedule."""
    try:
        return run_schedule(strategy, seed, trace=trace)
    except HocketError:
        raise
    except Exception as error:  # a program must not fail, whatever happens to it
        return Outcome(seed, violations=[f"{type(error).__name__}: {error}"])


def table(chosen: tuple[str, ...], seeds: range, processes: int) -> int:
    """Print a line for each strategy; how many schedules violate an invariant."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    violations = total = 0
    started = time.perf_counter()
    print(f"{'strategy':32} {'schedules':>10} {'per second':>11} {'events':>10} {'faults':>10} {'violations':>11}")
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for strategy in chosen:
            begun, events, faults, found = time.perf_counter(), 0, 0, list[Outcome]()
            with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
                task = progress.add_task(strategy, total=len(seeds))
                for outcome in pool.imap(partial(run, strategy), seeds, chunksize=20):
                    events, faults = events + outcome.events, faults + outcome.faults
                    found += [outcome] if outcome.violations else []
                    progress.advance(task)
            per_s = len(seeds) / (time.perf_counter() - begun)
            violations, total = violations + len(found), total + len(seeds)
            print(f"{strategy:32} {len(seeds):10} {per_s:11.1f} {events:10} {faults:10} {len(found):11}", flush=True)
            for outcome in found[:5]:
                print(f"    --strategy {strategy!r} --seed {outcome.seed}: {outcome.violations[0]}", flush=True)
    per_s = total / (time.perf_counter() - started)
    print(f"{'all':32} {total:10} {per_s:11.1f} {'':10} {'':10} {violations:11}")
    return violations


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="in all, shared by the strategies (default 1000)")
    parser.add_argument("--strategy", help="only this one; 'sandblaster' for distributed L-BFGS")
    parser.add_argument("--seed", type=int, help="only this schedule (default: from 0)")
    parser.add_argument("--processes", type=int, default=1, help="so many run schedules side by side (default 1)")
    parser.add_argument("--trace", action="store_true", help="print every message of the schedule --seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = STRATEGIES if options.strategy is None else (options.strategy,)
    if options.trace and (options.seed is None or options.strategy is None):
        parser.error("--trace shows one schedule: give --strategy and --seed.")
    first, each = options.seed or 0, 1 if options.seed is not None else -(-options.schedules // len(chosen))
    if options.trace:
        outcome = run(chosen[0], first, print)
        print(outcome)
        raise SystemExit(bool(outcome.violations))
    raise SystemExit(bool(table(chosen, range(first, first + each), options.processes)))


if __name__ == "__main__":
    main()
