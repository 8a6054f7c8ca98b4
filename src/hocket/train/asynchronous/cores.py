"""Workers that share the cores of a machine: the fewer of them compute, the sooner each has done its step.

What takes ``t`` seconds while all workers of the machine compute goes on ``1 / crowding(k, n)`` times as fast while ``k`` of ``n``
do (:meth:`ClusterSpec.crowding`). Whoever begins or ends changes when the others will be done; calls scheduled for another time
are ignored.
"""

from __future__ import annotations

from typing import Any

from hocket.cluster.spec import ClusterSpec
from hocket.drivers.simulation import Call, Simulation


class SharedCores:
    """The cores of ``workers`` workers on the hosts of ``spec``, or all on one machine; ``name`` is that of the simulation's
    calls."""

    def __init__(self, spec: ClusterSpec, workers: int, simulation: Simulation, name: str) -> None:
        self._spec, self._simulation, self._name = spec, simulation, name
        size = min(spec.host_size or workers, workers)
        self._host = [range(w // size * size, min(w // size * size + size, workers)) for w in range(workers)]
        self._left: list[float | None] = [None] * workers  # of a step under way, in seconds while all compute
        self._since, self._due = [0.0] * workers, [0.0] * workers

    def begin(self, worker: int, seconds: float) -> None:
        """A worker begins work that takes ``seconds`` while all compute."""
        self._elapse(worker)
        self._left[worker], self._since[worker] = seconds, self._simulation.now
        self._reckon(worker)

    def ended(self, worker: int) -> bool:
        """Whether the worker is done now; False where others have begun or ended since this call was scheduled."""
        if self._left[worker] is None or self._simulation.now < self._due[worker]:
            return False
        self._elapse(worker)
        self._left[worker] = None
        self._reckon(worker)
        return True

    def _computing(self, worker: int) -> list[int]:
        return [w for w in self._host[worker] if self._left[w] is not None]

    def _elapse(self, worker: int) -> None:
        """Subtract the work that the machine's workers have done since the last call."""
        computing, now = self._computing(worker), self._simulation.now
        crowding = self._spec.crowding(len(computing), len(self._host[worker]))
        for w in computing:
            left = self._left[w]
            assert left is not None
            self._left[w], self._since[w] = left - (now - self._since[w]) / crowding, now

    def _reckon(self, worker: int) -> None:
        """Schedule the ends of the machine's workers."""
        computing = self._computing(worker)
        crowding = self._spec.crowding(len(computing), len(self._host[worker]))
        for w in computing:
            left = self._left[w]
            assert left is not None
            due = self._simulation.now + max(left, 0.0) * crowding
            if w == worker or self._spec.alone_s is not None:
                self._due[w] = due
                self._simulation.put(due, Call(self._name, w))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self._left), "since": list(self._since), "due": list(self._due)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left, self._since, self._due = (list(state[name]) for name in ("left", "since", "due"))
