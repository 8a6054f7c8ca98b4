"""One fault schedule of a strategy with servers or gossip; the same seed gives the same run."""

from __future__ import annotations

from collections.abc import Callable

from hocket.drivers.fault_gossip import GossipRun
from hocket.drivers.fault_servers import ServerRun
from hocket.drivers.faults import Outcome, Schedule, trace_messages
from hocket.strategy import Strategy


def run_schedule(strategy: str, seed: int, workers: int = 3, steps: int = 5, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run ``strategy`` under the schedule of ``seed``; ``trace`` is told of every message."""
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
