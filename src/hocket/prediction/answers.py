"""What the predictions say, in sentences: where communication overtakes computing, where more workers stop paying, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hocket.cluster.spec import ClusterSpec
from hocket.prediction.steps import Prediction

PAYS = 1.1
"""More workers pay if samples per second grow at least by this factor."""
IDEAL: dict[str, dict[str, object]] = {
    "the bandwidth of the links": {"bandwidth": math.inf},
    "the latency of the links and the cost of messages": {"latency_s": 0.0, "message_s": 0.0, "exchange_s": 0.0},
    "half-duplex links": {"half_duplex": 0.0, "pairs_half_duplex": 0.0, "pieces_half_duplex": 0.0},
    "the links inside hosts": {"host_bandwidth": math.inf, "host_latency_s": 0.0},
    "the trunks between switches": {"trunk_bandwidth": math.inf, "trunk_latency_s": 0.0},
    "encoding and decoding": {"coding": {"other": (0.0, 0.0)}},
    "slow and uneven workers": {"slowdown": (1.0,), "jitter": 0.0, "stragglers": 0.0},
}
"""What could be the bottleneck, and the cluster without it."""


def answers(rows: Sequence[Prediction], spec: ClusterSpec, again: Callable[[Prediction, ClusterSpec], Prediction]) -> list[str]:
    """A sentence for each strategy and mesh."""
    found = []
    for key in dict.fromkeys((row.strategy, row.mesh) for row in rows):
        own = [row for row in rows if (row.strategy, row.mesh) == key and row.refused is None]
        if own:
            label = f"{key[0]} ({key[1]})" if key[1] else key[0]
            found.append(f"{label}: {_overtakes(own)}; {_pays(own)}{_because(own[-1], spec, again)}{_stands_still(own)}.")
    return found


def _overtakes(rows: Sequence[Prediction]) -> str:
    """From how many workers on they wait and transfer for longer than they compute."""
    first = next((row.workers for row in rows if row.exchange_s > row.compute_s), None)
    if first is None:
        return f"computing outweighs communication up to {rows[-1].workers} workers"
    return f"communication outweighs computing from {first} workers on"


def _pays(rows: Sequence[Prediction]) -> str:
    """The number of workers beyond which no other gives much more samples per second."""
    for k, row in enumerate(rows[:-1]):
        if max(more.samples_per_s for more in rows[k + 1 :]) < PAYS * row.samples_per_s:
            who = "one worker" if row.workers == 1 else f"{row.workers} workers"
            return f"more than {who} bring less than {PAYS - 1:.0%} more samples per second"
    return f"{rows[-1].workers} workers still pay"


def _stands_still(rows: Sequence[Prediction]) -> str:
    """From how many workers on failures leave no time to train."""
    first = next((row.workers for row in rows if row.samples_per_s == 0), None)
    return "" if first is None else f"; with {first} workers failures come so often that a run that stops at each gets nowhere"


def _because(row: Prediction, spec: ClusterSpec, again: Callable[[Prediction, ClusterSpec], Prediction]) -> str:
    """What would help most: the same prediction on clusters without one cause each."""
    if row.exchange_s < 0.05 * row.step_s:
        return ""
    steps = {what: again(row, replace(spec, **ideal)).step_s for what, ideal in IDEAL.items() if _differs(spec, ideal)}  # type: ignore[arg-type]
    if not steps or not min(steps.values()) < 0.95 * row.step_s:
        return ""
    what = min(steps, key=lambda name: steps[name])
    took, without = _time(row.step_s), _time(steps[what])
    return f"; with {row.workers} workers the bottleneck is {what} (a step of {took} would take {without} without)"


def _differs(spec: ClusterSpec, ideal: dict[str, object]) -> bool:
    return "coding" in ideal or any(getattr(spec, name) != value for name, value in ideal.items())


def _time(seconds: float) -> str:
    """
    >>> _time(0.0123), _time(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
