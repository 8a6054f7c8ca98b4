"""Faults by the thousand: schedules per second, and how many violate an invariant (none should).

    python benchmarks/fault_schedules.py --schedules 100000
    python benchmarks/fault_schedules.py --strategy "async + gossip" --seed 17 --trace

A schedule is a seed. One that violates an invariant is printed, and replays exactly with ``--seed`` and ``--trace``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hocket.drivers.fault_runs import run_schedule
from hocket.drivers.faults import Outcome
from hocket.errors import HocketError
from hocket.sandblaster import fault_run as sandblaster

STRATEGIES = (
    "async + server(2)",
    "ssp(2) + server(2)",
    "bulk + server(2)",
    "downpour(2, 3) + server(2)",
    "stale(2) + server(2)",
    "async + server(2) + topk(0.2)",
    "async + gossip",
    "async + gossip(pushsum)",
    "sandblaster",
)


def run(strategy: str, seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """One schedule."""
    try:
        if strategy == "sandblaster":
            return sandblaster.run_schedule(seed, trace)
        return run_schedule(strategy, seed, trace=trace)
    except HocketError:
        raise
    except Exception as error:  # a program must not fail, whatever happens to it
        return Outcome(seed, violations=[f"{type(error).__name__}: {error}"])


def outcomes(strategy: str, first: int, count: int, progress: Progress) -> Iterator[Outcome]:
    """Those of ``count`` seeds, with a bar."""
    task = progress.add_task(strategy, total=count)
    for seed in range(first, first + count):
        yield run(strategy, seed)
        progress.advance(task)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="in all, shared by the strategies (default 1000)")
    parser.add_argument("--strategy", help="only this one; 'sandblaster' for distributed L-BFGS")
    parser.add_argument("--seed", type=int, help="only this schedule (default: from 0)")
    parser.add_argument("--trace", action="store_true", help="print every message of the schedule --seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = STRATEGIES if options.strategy is None else (options.strategy,)
    if options.trace and (options.seed is None or options.strategy is None):
        parser.error("--trace shows one schedule: give --strategy and --seed.")
    first, each = options.seed or 0, 1 if options.seed is not None else -(-options.schedules // len(chosen))
    violations = 0
    if options.trace:
        outcome = run(chosen[0], first, print)
        print(outcome)
        raise SystemExit(bool(outcome.violations))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    print(f"{'strategy':32} {'schedules':>10} {'per second':>11} {'events':>10} {'violations':>11}")
    for strategy in chosen:
        begun, events, found = time.perf_counter(), 0, []
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for outcome in outcomes(strategy, first, each, progress):
                events += outcome.events
                found += [outcome] if outcome.violations else []
        rate = each / (time.perf_counter() - begun)
        violations += len(found)
        print(f"{strategy:32} {each:10} {rate:11.1f} {events:10} {len(found):11}", flush=True)
        for outcome in found[:5]:
            print(f"    --strategy {strategy!r} --seed {outcome.seed}: {outcome.violations[0]}", flush=True)
    raise SystemExit(bool(violations))


if __name__ == "__main__":
    main()
