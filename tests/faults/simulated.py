"""Deterministic fault simulation: programs under a network that drops, duplicates, reorders, delays and partitions, on processes
that crash, restart from snapshots, stop, or jump in time; all of it from one seed.

A *schedule* is one seed: the faults, their times and the workers' speeds. It runs the very programs that real processes run, on
tiny tensors, and checks invariants instead of examples (tests/faults). A schedule that violates one replays exactly from its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hocket.drivers.simulation import Key, Node, Simulation
from hocket.programs.base import Send
from hocket.transport.frame import Envelope

QUIET_S = 60.0
"""No fault begins after this time, so that a run can end."""


@dataclass
class Outcome:
    """What became of a schedule."""

    seed: int
    events: int = 0
    faults: int = 0
    violations: list[str] = field(default_factory=list)
    end_s: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process at a time."""

    kind: str
    """``crash`` (it comes back after ``seconds``), ``die`` (it does not), ``stop`` (for ``seconds``), ``jump`` (of its clock)."""
    node: Key
    at: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The faults of one run, drawn from ``seed``."""

    seed: int
    drop: float
    duplicate: float
    delay: float
    """The share of messages that take long, so that others overtake them."""
    partitions: tuple[tuple[float, float, frozenset[Key]], ...]
    """From when to when which nodes cannot reach the others."""
    faults: tuple[Fault, ...]
    speeds: tuple[float, ...] = field(default=())

    @classmethod
    def draw(cls, seed: int, workers: int, shards: int, servers_crash: bool = True) -> Schedule:
        """Between no fault at all and many of every kind."""
        rng = random.Random(seed)
        severity, end = rng.choice((0.0, 0.3, 1.0)), rng.choice((4.0, 15.0, QUIET_S))
        nodes: list[Key] = [("worker", w) for w in range(workers)] + [("shard", s) for s in range(shards)]
        partitions = []
        for _ in range(rng.choice((0, 0, 1, 2)) if severity else 0):
            begin, apart = rng.uniform(0, end), rng.sample(nodes, rng.randint(1, len(nodes) - 1))
            partitions.append((begin, begin + rng.choice((0.5, 3.0, 15.0)), frozenset(apart)))
        faults = [_draw_fault(rng, workers, shards, servers_crash, end) for _ in range(rng.choice((0, 1, 2, 4)) if severity else 0)]
        return cls(
            seed,
            drop=severity * rng.choice((0.0, 0.02, 0.2)),
            duplicate=severity * rng.choice((0.0, 0.02, 0.2)),
            delay=severity * rng.choice((0.0, 0.05, 0.2)),
            partitions=tuple(partitions),
            faults=tuple(sorted(faults, key=lambda f: f.at)),
            speeds=tuple(rng.choice((0.1, 0.2, 1.0, 4.0)) for _ in range(workers)),
        )


def _draw_fault(rng: random.Random, workers: int, shards: int, servers_crash: bool, end: float) -> Fault:
    on_shard = shards > 0 and rng.random() < 0.3
    node: Key = ("shard", rng.randrange(shards)) if on_shard else ("worker", rng.randrange(workers))
    kinds = ["stop", "jump"] + ["crash"] * (servers_crash or not on_shard) + ["die"] * (not on_shard)
    return Fault(rng.choice(kinds), node, rng.uniform(0, end), rng.choice((0.3, 2.0, 12.0, 40.0)))


class FaultyNetwork:
    """A network that follows a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self._rng = schedule, random.Random(schedule.seed ^ 0x5EED)
        self.healed = False
        """From now on nothing is lost: the run must come to its end."""

    def apart(self, now: float, source: Key, target: Key) -> bool:
        """Whether a partition lies between two nodes."""
        return any(begin <= now < end and (source in cut) != (target in cut) for begin, end, cut in self.schedule.partitions)

    def arrivals(self, now: float, source: Key, target: Key, message: Envelope) -> list[float]:
        """When the message arrives."""
        rng, schedule = self._rng, self.schedule
        latency = rng.uniform(0.001, 0.02)
        chance, again, late = rng.random(), rng.random(), rng.random()
        if self.healed or now > QUIET_S:
            return [now + latency]
        if self.apart(now, source, target) or chance < schedule.drop:
            return []
        if late < schedule.delay:
            latency *= rng.choice((10, 100, 300))
        times = [now + latency]
        if again < schedule.duplicate:
            times.append(now + latency * rng.uniform(1, 50))
        return times


def trace_messages(simulation: Simulation, say: Callable[[str], None]) -> None:
    """Tell ``say`` of every message that is sent."""
    carry_out = simulation._send

    def traced(key: Key, node: Node, send: Send) -> None:
        message = send.message
        metadata = {
            name: value for name, value in message.metadata.items() if name not in ("job_config", "optimizer", "figures", "ledger")
        }
        say(
            f"{simulation.now:9.3f} {key} -> {send.to!r} {message.kind.name} number={message.number} step={message.step} {metadata}"
        )
        carry_out(key, node, send)

    simulation._send = traced  # type: ignore[method-assign]
