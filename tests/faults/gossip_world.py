"""Gossip workers in the simulation, with random updates: what they hold, and what is on its way, add up at every moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hocket.drivers.simulation import Call, Simulation
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.gossip.peer import GossipPeer
from hocket.programs.gossip.state import weight_of
from hocket.transport.frame import Envelope

LIVENESS_TIMEOUT_S = 5.0


class PerfectNetwork:
    """Every message arrives once; from each worker with a latency of its own."""

    def arrivals(self, now: float, source: Any, target: Any, message: Envelope) -> list[float]:
        return [now + 0.01 * (1 + source[1])]


@dataclass
class GossipWorker:
    """One worker of a run, as a driver sees it."""

    number: int
    rows: list[Tensor]
    state: str = "starting"
    steps: int = 0
    updates: list[Tensor] = field(default_factory=list)
    incarnation: int = 0


class GossipWorld:
    """Workers that step ``steps`` times with random updates and then agree."""

    def __init__(
        self,
        kind: str,
        workers: int,
        steps: int,
        network: Any = None,
        timers: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        step_s: Callable[[int], float] = lambda worker: 0.1 * (1 + worker),
    ) -> None:
        self.kind, self.steps, self.step_s, self.seed = kind, steps, step_s, seed
        self.simulation = Simulation(PerfectNetwork() if network is None else network, timers)
        self.simulation.on_idle, self.simulation.on_call = self._idle, self._call
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(1, 3, generator=generator, dtype=dtype), torch.randn(1, 2, generator=generator, dtype=dtype)]
        self.start = [row.clone() for row in start]
        self.workers = {w: GossipWorker(w, [row.clone() for row in start]) for w in range(workers)}
        self.generators = {w: torch.Generator().manual_seed(1000 * seed + w) for w in range(workers)}
        self.events, self.check_every = 0, 1
        self.check: Callable[[], None] = lambda: None
        for worker in range(workers):
            self._add(worker, PeerConfig(worker, workers, kind, seed, LIVENESS_TIMEOUT_S, greets=False))
        for worker in range(workers):
            self._carry(worker, self.peer(worker).start(self.workers[worker].rows, 0.0))
            self._idle(("worker", worker))

    def peer(self, worker: int) -> GossipPeer:
        program = self.simulation.nodes["worker", worker].program
        assert isinstance(program, GossipPeer)
        return program

    @property
    def peers(self) -> dict[int, GossipPeer]:
        return {key[1]: node.program for key, node in self.simulation.nodes.items()}  # type: ignore[misc]

    def _add(self, worker: int, config: PeerConfig) -> None:
        routes = {w: ("worker", w) for w in range(len(self.workers)) if w != worker}
        self.simulation.add(("worker", worker), GossipPeer(config), b"w%d.%d" % (worker, config.incarnation), routes)

    def crash(self, worker: int) -> GossipPeer:
        """The process is gone; what it was."""
        gone = self.peer(worker)
        self.simulation.remove(("worker", worker))
        self.workers[worker].state = "dead"
        return gone

    def replace(self, worker: int) -> None:
        """Another process takes its place."""
        own = self.workers[worker]
        own.incarnation += 1
        own.state, own.rows = "starting", [torch.zeros_like(row) for row in self.start]
        address = f"tcp://127.0.0.1:{1000 + worker}"
        config = PeerConfig(
            worker, len(self.workers), self.kind, self.seed, LIVENESS_TIMEOUT_S, own.incarnation, joins=True, address=address
        )
        self._add(worker, config)
        self._carry(worker, self.peer(worker).start(own.rows, self.simulation.now))
        self._idle(("worker", worker))

    def _carry(self, worker: int, effects: Any) -> None:
        self.simulation.carry_out(("worker", worker), effects)

    def _idle(self, key: Any) -> None:
        own, peer = self.workers[key[1]], self.peer(key[1])
        while not peer.busy:
            if own.state == "before":
                for row in own.rows:
                    update = torch.randn(row.shape, generator=self.generators[own.number], dtype=row.dtype)
                    row += update
                    own.updates.append(update)
                own.steps += 1
                own.state = "computing" if own.steps < self.steps else "ending"
                self._carry(own.number, peer.after_update(None, self.simulation.time(key)))
            elif own.state in ("starting", "computing"):
                own.state = "computed"
                if peer.mean is not None:
                    own.steps = self.steps  # it joined when all was over
                if own.steps < self.steps:
                    self.simulation.put(self.simulation.now + self.step_s(own.number), Call("computed", key))
                    return
                own.state = "ending"
            elif own.state == "ending":
                own.state = "agreeing"
                self._carry(own.number, peer.finish(self.simulation.time(key)))
            elif own.state == "agreeing":
                own.state = "done"
                return
            else:
                return

    def _call(self, call: Call) -> None:
        if call.name == "computed" and call.node in self.simulation.nodes and self.workers[call.node[1]].state == "computed":
            own = self.workers[call.node[1]]
            own.state = "before"
            self._carry(own.number, self.peer(own.number).before_update(self.simulation.time(call.node)))
            self._idle(call.node)
        elif call.name != "computed":
            getattr(self, call.name)(call.node[1])

    def go(self, until: Callable[[], bool] | None = None, max_events: int = 200_000) -> None:
        done = until or (lambda: all(own.state in ("done", "dead") for own in self.workers.values()))
        while not done():
            self.events += 1
            assert self.events < max_events, (
                f"it hangs at {self.simulation.now:.0f} s: {[own.state for own in self.workers.values()]}"
            )
            assert self.simulation.step(), f"nothing happens any more: {[own.state for own in self.workers.values()]}"
            if self.events % self.check_every == 0:
                self.check()

    # --- sums ----------------------------------------------------------------------------------------------------------------

    def on_the_way(self, worker: int) -> list[tuple[Tensor, ...]]:
        """Halves that a worker has sent and their receivers have not taken."""
        found = []
        for request in self.peer(worker).exchanges_open:
            there = self.peers.get(request.peer)
            decision = None if there is None else there.decisions.get(worker)
            if decision is None or decision.number != request.message.number or not decision.taken:
                found.append(request.message.tensors)
        return found

    def weight(self) -> float:
        return sum(p.state.push_sum_weight + sum(weight_of(half[-1]) for half in self.on_the_way(w)) for w, p in self.peers.items())

    def sums(self) -> list[Tensor]:
        """Σ x per bucket, with what is on its way, less all updates."""
        sums = []
        for bucket in range(2):
            total: Any = sum(p.state.x[bucket] for p in self.peers.values())
            for worker, peer in self.peers.items():
                if self.kind == "pushsum":
                    total = total + sum(half[bucket] for half in self.on_the_way(worker))
                else:
                    total = total + sum(self._other_side(worker, peer, bucket))
                total = total - sum((u.flatten() for u in self.workers[worker].updates[bucket::2]), torch.zeros(1))
            sums.append(total)
        return sums

    def _other_side(self, worker: int, peer: GossipPeer, bucket: int) -> list[Tensor]:
        """What a caller has still to add for exchanges that only its partner has taken."""
        found = [torch.zeros(1, dtype=torch.float64)]
        for request in peer.exchanges_open:
            decision = self.peer(request.peer).decisions.get(worker)
            if decision is not None and decision.number == request.message.number and decision.taken:
                assert decision.reply is not None, "it is kept until the caller has it"
                found.append((decision.reply.tensors[bucket] - request.message.tensors[bucket]) / 2)
        return found

    def assert_kept(self) -> None:
        if self.kind == "pushsum":
            assert abs(self.weight() - len(self.workers)) < 1e-9, f"the push-sum weights add up to {self.weight()}"
        else:
            assert all(p.state.push_sum_weight == 1.0 for p in self.peers.values())
        for total, first in zip(self.sums(), self.start, strict=True):
            torch.testing.assert_close(total, len(self.workers) * first.flatten(), rtol=0, atol=1e-9)

    def assert_agreed(self) -> None:
        means = {w: p.mean for w, p in self.peers.items() if self.workers[w].state == "done"}
        first = next(iter(means.values()))
        assert first is not None
        for worker, mean in means.items():
            assert mean is not None
            assert all(torch.equal(a, b) for a, b in zip(mean.rows, first.rows, strict=True))
            assert all(torch.equal(a.flatten(), b) for a, b in zip(self.workers[worker].rows, mean.rows, strict=True))
            assert mean.here == first.here
