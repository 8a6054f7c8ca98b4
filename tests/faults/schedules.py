"""One fault schedule of a strategy that talks by messages; the same seed gives the same run."""

from __future__ import annotations

from collections.abc import Callable

from faults import elastic_run, sandblaster_run
from faults.gossip_run import GossipRun
from faults.server_run import ServerRun
from faults.simulated import Outcome, Schedule, trace_messages
from hocket.strategy import Strategy

STRATEGIES = (
    "async + server(2)",
    "ssp(2) + server(2)",
    "bulk + server(2)",
    "downpour(2, 3) + server(2)",
    "asyncdiloco(2, 1, 0, 1) + server(2)",
    "asyncdiloco(2, 1, 0, 1, quorum=2) + server(2)",
    "asyncdiloco(2, 1, 0, 1, grace=0.5, weights=steps) + server(2)",
    "stale(2) + server(2)",
    "async + server(2) + topk(0.2)",
    "async + gossip",
    "async + gossip(pushsum)",
    "sandblaster",
    "elastic",
    "elastic, all leave",
    "elastic, split",
)


def run_schedule(strategy: str, seed: int, workers: int = 3, steps: int = 5, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run ``strategy`` under the schedule of ``seed``; ``trace`` is told of every message."""
    if strategy == "sandblaster":
        return sandblaster_run.run_schedule(seed, trace)
    if strategy == "elastic":  # the members of any collective strategy
        return elastic_run.run_schedule(seed, trace)
    if strategy == "elastic, all leave":
        return elastic_run.run_schedule(seed, trace, leave=True)
    if strategy == "elastic, split":  # replicas of two or three processes
        return elastic_run.run_schedule(seed, trace, workers=6, least=1 + seed % 2, parts=3 - seed % 2)
    parsed = Strategy.parse(strategy)
    run: ServerRun | GossipRun
    if parsed.runtime == "peers":
        schedule = Schedule.draw(seed, workers, 0)
        run = GossipRun(parsed.topology.partner_rule, schedule, workers, steps)
    else:
        schedule = Schedule.draw(seed, workers, parsed.topology.num_shards(workers))
        run = ServerRun(strategy, schedule, workers, steps)
    if trace is not None:
        trace(str(schedule))
        trace_messages(run.simulation, trace)
    return run.run()
