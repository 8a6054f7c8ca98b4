"""Gossip workers under a fault schedule, and the invariants that they must keep.

As long as no process has died or left, ``Σ x`` (and ``Σ ω``) with what is on its way are those of the start and of all updates.
Always: a PUSH is taken at most once; what a push-sum worker gave away is in another worker's ``x`` and ``ω``, or its own again, or
counted as lost; both sides of a pair take the mean, or neither, or the exchange is counted as lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faults.gossip_world import GossipWorld
from faults.simulated import Fault, FaultyNetwork, Outcome, Schedule
from hocket.drivers.simulation import Call
from hocket.errors import HocketError
from hocket.programs.gossip.links import Request
from hocket.programs.gossip.peer import GossipPeer

MAX_TIME_S, MAX_EVENTS = 1000.0, 50_000
"""A run that has not ended by then hangs."""
_CHECK_EVERY = 17


@dataclass
class _Push:
    """What became of a PUSH: a half of push-sum, or a caller's weights."""

    tensors: Sequence[Tensor]
    weight: float = 0.0
    taken: int = 0
    completed: int = 0
    lost: int = 0


class GossipRun:
    """Gossip of a kind (rotating, ring, random or pushsum); crashed workers are replaced, and all that live agree at the end."""

    def __init__(self, kind: str, schedule: Schedule, workers: int = 3, steps: int = 5) -> None:
        self.schedule, self.steps = schedule, steps
        self.outcome = Outcome(schedule.seed, faults=len(schedule.faults) + len(schedule.partitions))
        self.pushes: dict[int, _Push] = {}
        """By the identity of their first tensor: messages are not copied here."""
        self.processes: list[GossipPeer] = []
        self.crashed: list[GossipPeer] = []
        self.world = GossipWorld(
            kind, workers, steps, FaultyNetwork(schedule), seed=schedule.seed, step_s=lambda worker: schedule.speeds[worker]
        )
        self.push_sum = kind == "pushsum"
        self.simulation = self.world.simulation
        self._call, self.simulation.on_call = self.simulation.on_call, self._called
        for worker in range(workers):
            self._watch(self.world.peer(worker))
        for fault in schedule.faults:
            self.simulation.put(fault.at, Call("fault", fault))

    # --- faults --------------------------------------------------------------------------------------------------------------

    def _called(self, call: Call) -> None:
        if call.name == "fault":
            self._fault(call.node)
        elif call.name == "restart":
            self.world.replace(call.node[0])
            self._watch(self.world.peer(call.node[0]))
        else:
            self._call(call)

    def _fault(self, fault: Fault) -> None:
        worker, node = fault.node[1], self.simulation.nodes.get(fault.node)
        if node is None or self.world.workers[worker].state in ("done", "left"):
            return
        if fault.kind == "stop":
            node.stopped_until = self.simulation.now + fault.seconds
        elif fault.kind == "jump":
            node.clock_offset_s += fault.seconds
        elif sum(own.state not in ("dead", "left") for own in self.world.workers.values()) > 2:  # somebody has the weights
            self.crashed.append(self.world.crash(worker))
            if fault.kind == "crash":
                self.simulation.put(self.simulation.now + fault.seconds, Call("restart", (worker,)))

    # --- what becomes of pushes ----------------------------------------------------------------------------------------------

    def _watch(self, peer: GossipPeer) -> None:
        """Follow all that changes this process's weights."""
        self.processes.append(peer)
        state: Any = peer.state
        halve, take_in, average, complete, lose = state.halve, state.take_in, state.average, state.complete, peer.exchanges.lost

        def halved() -> Any:
            part, weight = halve()
            self._push(part).weight = weight
            return part, weight

        def taken_in(part: Any, weight: float, own: bool = False) -> None:
            self._taken(part)
            take_in(part, weight, own)

        def averaged(theirs: Any) -> Any:
            self._taken(theirs)
            return average(theirs)

        def completed(theirs: Any, sent: Any, version: int) -> None:
            push = self._push(sent)
            push.completed += 1
            if push.completed > 1:
                self.violate(f"worker {peer.worker} took the mean of one exchange twice")
            complete(theirs, sent, version)

        def lost(request: Request, taken: bool) -> None:
            self._push(request.message.tensors).lost += 1
            lose(request, taken)

        state.halve, state.take_in, state.average, state.complete = halved, taken_in, averaged, completed
        peer.exchanges.lost = lost  # type: ignore[method-assign]

    def _push(self, tensors: Sequence[Tensor]) -> _Push:
        return self.pushes.setdefault(id(tensors[0]), _Push(tensors))

    def _taken(self, tensors: Sequence[Tensor]) -> None:
        push = self._push(tensors)
        push.taken += 1
        if push.taken > 1:
            self.violate(f"an exchange was taken {push.taken} times")

    # --- invariants ----------------------------------------------------------------------------------------------------------

    def violate(self, sentence: str) -> None:
        """An invariant does not hold."""
        self.outcome.violations.append(f"{self.simulation.now:.3f} s: {sentence}")

    def run(self) -> Outcome:
        """Until all workers that live have finished and left; the outcome."""
        outcome, world = self.outcome, self.world
        calm = True
        while any(own.state not in ("left", "dead") for own in world.workers.values()) and not outcome.violations:
            if outcome.events > MAX_EVENTS or self.simulation.now > MAX_TIME_S or not self._step():
                self.violate(f"the run hangs: { ({w: own.state for w, own in world.workers.items()}) }")
                break
            outcome.events += 1
            calm = calm and not self.crashed and not any(own.state in ("done", "left") for own in world.workers.values())
            if calm and outcome.events % _CHECK_EVERY == 0:
                self._check_sums()
            for worker, own in world.workers.items():
                if own.state == "done":
                    own.state = "left"
                    key = ("worker", worker)
                    self.simulation.carry_out(key, world.peer(worker).leave(self.simulation.time(key)))
        outcome.end_s = self.simulation.now
        if not outcome.violations:
            self._check_end()
        return outcome

    def _step(self) -> bool:
        try:
            return self.simulation.step()
        except HocketError as error:  # a replacement finds nobody, where all others have left
            states = {worker: own.state for worker, own in self.world.workers.items()}
            alone = [w for w, state in states.items() if state == "starting" and f"Worker {w} replaces" in str(error)]
            if not alone or any(state not in ("left", "dead", "starting") for state in states.values()):
                self.violate(f"{error}; the others: {states}")
            for worker in alone:
                self.crashed.append(self.world.crash(worker))
            return True

    def _check_sums(self) -> None:
        try:
            self.world.assert_kept()
        except AssertionError as error:
            self.violate(f"the sums over all workers have changed: {str(error).splitlines()[:3]}")

    def _check_end(self) -> None:
        living = {worker: own for worker, own in self.world.workers.items() if own.state == "left"}
        for worker, own in living.items():
            if own.steps < self.steps:
                self.violate(f"worker {worker} has finished after {own.steps} of {self.steps} steps")
        means: dict[tuple[int, ...], list[Tensor]] = {}
        for worker in living:
            mean = self.world.peer(worker).mean
            assert mean is not None
            rows = means.setdefault(tuple(mean.here), mean.rows)
            if not all(torch.equal(a, b) for a, b in zip(rows, mean.rows, strict=True)):
                self.violate(f"worker {worker} has another mean of the workers {mean.here}")
        calm = not self.schedule.faults and not self.schedule.partitions and self.schedule.drop == 0
        if calm and list(means) != [tuple(self.world.workers)]:
            self.violate(f"nothing was cut off or lost, but the means are of {list(means)}")
        self._check_pushes()
        if self.push_sum:
            self._check_weight()

    def _check_pushes(self) -> None:
        """None has vanished: of those that were not completed a process knows, or it has counted them, or it is dead."""
        open_ = {id(request.message.tensors[0]) for peer in self.processes for request in peer.exchanges_open}
        for key, push in self.pushes.items():
            whole = push.taken == 1 if self.push_sum else push.taken == push.completed
            if not whole and not push.lost and key not in open_:
                self.violate(f"an exchange was taken {push.taken} and completed {push.completed} times, and not counted as lost")

    def _check_weight(self) -> None:
        """``Σ ω`` is 1 for every process that has begun, less what died with a process or was on its way and lost."""
        begun = sum(peer.state.joined for peer in self.processes)
        died = sum(peer.state.push_sum_weight for peer in self.crashed if peer.state.joined)
        lost = sum(push.weight for push in self.pushes.values() if not push.taken)
        living = sum(peer.state.push_sum_weight for peer in self.processes if peer.state.joined and peer not in self.crashed)
        if abs(living + died + lost - begun) > 1e-9:
            self.violate(f"push-sum weights add up to {living} + {died} (died) + {lost} (lost) instead of {begun}")
