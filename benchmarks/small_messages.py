"""Coded all-reduce with small messages: bytes and seconds, directly to everyone and by way of others.

    python benchmarks/small_messages.py                                   # predicted, for 32, 256 and 1024 workers
    python benchmarks/small_messages.py --picture small-messages.png
    python benchmarks/small_messages.py --hosts 6 --rate 100mbit          # real processes in a lab (see netlab.py)

*Before*: each worker sends its slices to all others, and flags of used parameters go round in a ring of their own. *Now* is what
Hocket does: slices by way of others where that is cheaper (hocket/cluster/relay.py), flags inside them.

In a lab both ways take turns in the same processes. Bytes are those of the hosts' interfaces, headers and acknowledgements
included; seconds mean something only as a ratio within one run, since the hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import _gather, _interface_bytes, machine, on_hosts
from torch import Tensor, nn

from hocket import ClusterSpec, Strategy
from hocket.cluster.base import Cluster
from hocket.cluster.layout import layout_of
from hocket.cluster.message import ring_bytes
from hocket.cluster.one_row import OneRowCluster
from hocket.cluster.processes import ProcessCluster
from hocket.programs.two_stage import program_for

WORKERS = (32, 256, 1024)
STRATEGIES = ("bulk + dgc(0.001)", "bulk + topk(0.01) | qsgd(4)", "bulk + qsgd(4)")
FLAGS = 21
LINKS = {
    "100 Mbit/s, 0.2 ms": ClusterSpec(step_s=1.0, bandwidth=12.5e6, latency_s=2e-4, message_s=2e-5),
    "1 Gbit/s, 0.1 ms": ClusterSpec(step_s=1.0, bandwidth=125e6, latency_s=1e-4, message_s=2e-5),
    "100 Mbit/s, 50 ms": ClusterSpec(step_s=1.0, bandwidth=12.5e6, latency_s=5e-2, message_s=2e-5),
}
"""Described links, with 20 µs for a message beside its bytes."""


def as_before(cluster: Cluster) -> Cluster:
    """The cluster with messages as they were."""
    cluster._radix = lambda *_: None  # type: ignore[method-assign]
    cluster.all_gather_flagged = cluster.all_gather  # type: ignore[method-assign]
    cluster.all_reduce_any = partial(_ring_of_flags, cluster)  # type: ignore[method-assign]
    return cluster


def _ring_of_flags(cluster: Any, flags: Tensor) -> Tensor:
    cluster.ledger.sent += ring_bytes(flags.shape[1], cluster.size)
    if isinstance(cluster, OneRowCluster):
        cluster._on_clock("ring", ring_bytes(flags.shape[1], cluster.size), cluster.world)
        return flags.any(0)
    mine = flags.any(0).to(torch.uint8)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=cluster.group)
    return mine.to(torch.bool)


class Exchange:
    """Exchanges of gradients of ``values`` values, and of flags."""

    def __init__(self, strategy: str, cluster: Cluster, values: int) -> None:
        self.cluster, layout = cluster, layout_of(nn.Linear(values - 1, 1).named_parameters())
        like: dict[str, Any] = {"device": cluster.device}
        self._rows = torch.randn(cluster.rows, values, generator=torch.Generator().manual_seed(cluster.rank))
        self._rows = torch.empty(cluster.rows, values, **like) if cluster.device.type == "meta" else self._rows
        self._flags = torch.zeros(cluster.rows, FLAGS, dtype=torch.bool, **like)
        weights = [torch.zeros(cluster.rows, values, **like) for _ in layout.buckets]
        self._program = program_for(Strategy.parse(strategy), layout, cluster, weights)

    def step(self) -> None:
        self._program.gradient_ready(0, self._rows.clone())
        self._program.flags_ready(self._flags)
        self._program.gradients_done()


def predicted(strategy: str, workers: int, values: int, way: str) -> dict[str, Any]:
    """What one worker sends in an exchange, and how long it takes on each of the links."""
    found: dict[str, Any] = {"strategy": strategy, "workers": workers, "way": way}
    for name, spec in LINKS.items():
        cluster = OneRowCluster(workers, spec=spec)
        exchange = Exchange(strategy, as_before(cluster) if way == "before" else cluster, values)
        exchange.step()  # the first may differ
        assert cluster.clock is not None
        cluster.clock.take()
        cluster.ledger.sent.zero_()
        cluster.ledger.sent_varying.zero_()
        exchange.step()
        found[name] = float(cluster.clock.take()[0, 0])
        found["bytes"] = int(cluster.ledger.bytes_sent[0])
    return found


def worker(options: argparse.Namespace) -> None:
    """One host's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster, results = ProcessCluster(), []
    for turn in range(options.rounds):
        for strategy in options.strategies:
            for way in ("before", "now"):
                own = cluster.for_job()
                exchange = Exchange(strategy, as_before(own) if way == "before" else own, options.values)
                for _ in range(3):
                    exchange.step()
                dist.barrier()
                ledger, sent, start = own.ledger.bytes_sent.sum(), _interface_bytes(), time.perf_counter()
                for _ in range(options.steps):
                    exchange.step()
                seconds = time.perf_counter() - start
                dist.barrier()
                counted = (_interface_bytes() - sent) / options.steps
                measured = _gather((seconds / options.steps, counted, float(own.ledger.bytes_sent.sum() - ledger) / options.steps))
                seconds_each, bytes_each, ledger_each = zip(*measured, strict=True)
                figures = {"s": max(seconds_each), "bytes": statistics.fmean(bytes_each), "ledger": statistics.fmean(ledger_each)}
                results.append({"round": turn, "strategy": strategy, "way": way, **figures})
                own.release()
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps(results))
    dist.barrier()
    cluster.close()
    dist.destroy_process_group()


def show_predicted(found: Sequence[dict[str, Any]], values: int) -> None:
    """The table of predictions: before → now."""
    print(f"predicted, {values:,} values, {FLAGS} flags, 20 µs a message; an exchange of one worker, before → now")
    print("| strategy | workers | kB sent | " + " | ".join(f"ms at {name}" for name in LINKS) + " |")
    print("|---|---|---|" + "---|" * len(LINKS))
    for one, other in zip(found[::2], found[1::2], strict=True):
        cells = [f"{one['bytes'] / 1e3:,.1f} → {other['bytes'] / 1e3:,.1f}"]
        cells += [f"{1e3 * one[name]:,.1f} → {1e3 * other[name]:,.1f}" for name in LINKS]
        print(f"| `{one['strategy']}` | {one['workers']} | " + " | ".join(cells) + " |")


def show_measured(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table of a lab."""
    print(f"{options.hosts} hosts, {options.rate or 'unlimited'} links, {options.values:,} values, {options.rounds} rounds")
    print(machine())
    print("| strategy | bytes of a host, before → now | ledger / interface | time, now / before: median (least, largest) |")
    print("|---|---|---|---|")
    for strategy in options.strategies:
        ways = {way: [f for f in found if (f["strategy"], f["way"]) == (strategy, way)] for way in ("before", "now")}
        sent = {way: statistics.median(f["bytes"] for f in each) for way, each in ways.items()}
        told = {way: statistics.median(f["ledger"] / f["bytes"] for f in each) for way, each in ways.items()}
        ratios = sorted(now["s"] / before["s"] for before, now in zip(ways["before"], ways["now"], strict=True))
        print(
            f"| `{strategy}` | {sent['before']:,.0f} → {sent['now']:,.0f} | {told['before']:.2f}, {told['now']:.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f}) |"
        )


def draw(path: Path, values: int) -> None:
    """Bytes and predicted seconds by the number of workers, both ways."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    strategy, counts = STRATEGIES[0], (2, 4, 8, 11, 16, 32, 64, 128, 256, 512, 1024)
    found = {way: [predicted(strategy, n, values, way) for n in counts] for way in ("before", "now")}
    figure, axes = pyplot.subplots(1, 1 + len(LINKS), figsize=(4 * (1 + len(LINKS)), 3.6), layout="constrained")
    for axis, name in zip(axes, ("bytes", *LINKS), strict=True):
        scale = 1e-3 if name == "bytes" else 1e3
        for way, look in (("before", "o--"), ("now", "s-")):
            axis.loglog(counts, [scale * f[name] for f in found[way]], look, label=way, markersize=4)
        axis.set(title="kB sent by a worker" if name == "bytes" else f"ms, {name}", xlabel="workers", xlim=(1.8, 1200))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"One exchange of {values:,} values, {strategy}: predicted")
    figure.savefig(path, dpi=130)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Coded all-reduce with small messages: bytes and seconds, before and now.")
    parser.add_argument("--values", type=int, default=100_000, help="parameters of the model (default 100,000)")
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS), help="predicted for so many (default 32 256 1024)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the first strategy, predicted for 2 to 1024 workers")
    parser.add_argument("--hosts", type=int, help="measure in a lab of so many hosts")
    parser.add_argument("--rate", help="of the lab's links, such as 100mbit (default: unlimited)")
    parser.add_argument("--steps", type=int, default=30, help="exchanges per block (default 30)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks per way (default 5)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="seconds for the lab at most (default 1800)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.values < 2 or min(options.workers) < 2 or options.steps < 1 or options.rounds < 1 or (options.hosts or 2) < 2:
        parser.error("--values, --workers and --hosts must be at least 2, --steps and --rounds at least 1")
    return options


def main() -> None:
    """The command."""
    options = parse()
    if options.worker:
        return worker(options)
    try:
        if options.hosts:
            given = [f"--{name}={getattr(options, name)}" for name in ("values", "steps", "rounds")]
            show_measured(on_hosts(__file__, [*given, "--strategies", *options.strategies], options), options)
        elif options.picture:
            draw(options.picture, options.values)
        else:
            ways = ("before", "now")
            found = [predicted(s, n, options.values, way) for s in options.strategies for n in options.workers for way in ways]
            show_predicted(found, options.values)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise SystemExit(f"small_messages: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
