"""Synchronisation: what each worker does when, as virtual workers did it in a short training on the virtual clock.

The training is real: its clock, its events and its messages are watched, and what they say is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from svg import BLUE, GREEN, INK, ORANGE, Drawing
from torch import nn

import hocket
from hocket.cluster.clock import Clock
from hocket.drivers.links import LinkNetwork
from hocket.train.asynchronous.simulation import AsyncSimulation

UNIT, LEFT, ROW = 56, 86, 38
"""Pixels of a second, of the names on the left, and of a worker."""
LARGE = 2000
"""Messages of fewer bytes are requests and answers without values: they are not drawn."""


@dataclass
class Seen:
    """What was seen, in seconds of the virtual clock."""

    computed: list[tuple[int, float, float]] = field(default_factory=list)
    exchanged: list[tuple[int, float, float]] = field(default_factory=list)
    """By worker: from the launch of an exchange to its end."""
    sent: list[tuple[Any, Any, float, float]] = field(default_factory=list)
    """Messages between processes: from, to, when sent, when there."""


@contextmanager
def watched() -> Iterator[Seen]:
    """While it lasts, virtual workers write down what they do."""
    seen = Seen()
    compute, wait = Clock.compute, Clock.wait
    computed, arrivals = AsyncSimulation._computed, LinkNetwork.arrivals

    def on_compute(self: Clock, *arguments: Any) -> None:
        before = self.now.tolist()
        compute(self, *arguments)
        seen.computed += [(w, a, b) for w, (a, b) in enumerate(zip(before, self.now.tolist(), strict=True))]

    def on_wait(self: Clock) -> None:
        if self._first is not None:
            seen.exchanged += [(w, a, b) for w, (a, b) in enumerate(zip(self._first.tolist(), self.net.tolist(), strict=True))]
        wait(self)

    def on_computed(self: AsyncSimulation, call: Any) -> None:
        seen.computed.append((call.node, self._computing[call.node] or 0.0, self.simulation.now))
        computed(self, call)

    def on_arrivals(self: LinkNetwork, now: float, source: Any, target: Any, message: Any) -> list[float]:
        times = arrivals(self, now, source, target, message)
        if not self.free and sum(t.nbytes for t in message.tensors) > LARGE:
            seen.sent += [(source, target, now, time) for time in times]
        return times

    with (
        mock.patch.object(Clock, "compute", on_compute),
        mock.patch.object(Clock, "wait", on_wait),
        mock.patch.object(AsyncSimulation, "_computed", on_computed),
        mock.patch.object(LinkNetwork, "arrivals", on_arrivals),
    ):
        yield seen


def training(strategy: str, slowdown: tuple[float, ...], bandwidth: float, seconds: float) -> Seen:
    """A small training of as many virtual workers as there are factors."""
    x = torch.randn(4000, 35, generator=torch.Generator().manual_seed(0))
    spec = hocket.ClusterSpec(step_s=1.0, slowdown=slowdown, bandwidth=bandwidth, latency_s=0.01)
    data = (x, (x.sum(1) > 0).long())
    with watched() as seen:
        hocket.simulate(
            lambda: nn.Sequential(nn.Linear(35, 35), nn.Tanh(), nn.Linear(35, 35), nn.Tanh(), nn.Linear(35, 2)),
            nn.functional.cross_entropy, data,
            strategy=strategy, workers=len(slowdown), cluster=spec, batch_size=4, max_steps=int(seconds) + 4, evaluate=False,
            optimizer=lambda p: torch.optim.SGD(p, 0.01),
        )  # fmt: skip
    return seen


def timeline(strategies: dict[str, str], slowdown: tuple[float, ...], bandwidth: float = 20e3, seconds: float = 10.0) -> Drawing:
    """One strategy, with a remark, below the other, with a row for each worker and, where messages go there, for each shard."""
    all_seen = {strategy: training(strategy, slowdown, bandwidth, seconds) for strategy in strategies}
    rows = {s: _rows(seen, len(slowdown), seconds) for s, seen in all_seen.items()}
    height = sum(34 + ROW * len(names) for names in rows.values())
    title = "; ".join(f"{strategy}: {words}" for strategy, words in strategies.items())
    drawing = Drawing(LEFT + UNIT * seconds + 10, height + 58, title)
    y = 8.0
    for strategy, seen in all_seen.items():
        drawing.text(8, y + 14, strategy, bold=True)
        drawing.text(8 + 7.5 * len(strategy) + 12, y + 14, strategies[strategy], opacity=0.75)
        y += 26
        _draw(drawing, seen, rows[strategy], y, seconds)
        y += ROW * len(rows[strategy]) + 8
    for second in range(int(seconds) + 1):
        drawing.text(LEFT + UNIT * second, y + 10, str(second), "middle", 11, opacity=0.75)
    words = [(BLUE, 0.9, "computes a gradient"), (ORANGE, 0.9, "values travel"), (INK, 0.06, "waits")]
    drawing.legend(LEFT, y + 34, *words)
    return drawing


def _rows(seen: Seen, workers: int, seconds: float) -> dict[Any, str]:
    ends = {end for source, target, begin, _ in seen.sent if begin < seconds for end in (source, target)}
    shards = sorted(end for end in ends if end[0] == "shard")
    named = {("shard", s): f"shard {s}" if len(shards) > 1 else "server" for _, s in shards}
    return {("worker", w): f"worker {w}" for w in range(workers)} | named


def _draw(drawing: Drawing, seen: Seen, rows: dict[Any, str], top: float, seconds: float) -> None:
    at = {key: top + ROW * k for k, key in enumerate(rows)}
    right = LEFT + UNIT * seconds
    for key, name in rows.items():
        drawing.text(LEFT - 10, at[key] + 18, name, "end")
        is_worker = key[0] == "worker"
        drawing.rect(LEFT, at[key] + 4, UNIT * seconds, 18, INK if is_worker else GREEN, 0.06 if is_worker else 0.25)
    for worker, begin, end in seen.computed:
        if begin < seconds:
            x = LEFT + UNIT * begin
            drawing.rect(x, at["worker", worker] + 4, max(min(UNIT * (end - begin), right - x) - 1, 0.5), 18, BLUE, 0.9)
    for worker, begin, end in seen.exchanged:
        if begin < seconds and end - begin > 0.005:
            x = LEFT + UNIT * begin
            drawing.rect(x, at["worker", worker] + 23, min(UNIT * (end - begin), right - x), 6, ORANGE, 0.9)
    for source, target, begin, end in seen.sent:
        if end < seconds and source != target:
            down = at[target] > at[source]
            from_y, to_y = at[source] + (22 if down else 4), at[target] + (4 if down else 22)
            drawing.arrow(LEFT + UNIT * begin, from_y, LEFT + UNIT * end, to_y, ORANGE, 1.2, 0.9)


EVEN, UNEVEN = (1.0, 1.1, 1.3), (1.0, 1.3, 2.2)
_BULK = {"bulk": "an exchange in every step"}
_SLOW = {
    "async": {"async": "each pushes its gradient and fetches weights when it is ready"},
    "ssp": {"ssp(1)": "the fastest waits when it is one step ahead of the slowest"},
    "stale": {"stale(3) + server": "the first to use up three steps calls the others; the mean weighs by steps"},
    "aedit": {"aedit(3) + server": "after three seconds the first calls, the others finish the step in hand"},
    "downpour": {"downpour(3, 3)": "pushes the sum of three gradients, fetches weights, never waits"},
    "asyncdiloco": {"asyncdiloco(3)": "each pushes its displacement after three steps of its own"},
    "pairs": {"async + gossip": "callers send their weights to an answerer when they begin a step"},
}
PICTURES = {
    "bulk": lambda: timeline({"bulk": "every step waits for the slowest worker and for the link"}, EVEN),
    "local": lambda: timeline({**_BULK, "local(4)": "one in four, which travels while the next gradient is computed"}, EVEN),
    "postlocal": lambda: timeline({"postlocal(3, 3)": "three steps of bulk, then one exchange in three steps"}, EVEN),
    "diloco": lambda: timeline(
        {
            "diloco(4)": "the whole displacement, after four steps",
            "diloco(4, fragments=2, overlap=1)": "a half every two steps, while the next step is computed",
        },
        EVEN,
    ),
    "acco": lambda: timeline(
        {
            "bulk": "the link waits for gradients, workers wait for the link",
            "acco": "each half travels while the next half is computed",
        },
        (1.0, 1.0, 1.0),
    ),
    "server": lambda: timeline({"bulk + server(shards=2)": "half of each gradient goes to each shard"}, EVEN, 50e3, 8.0),
    **{name: partial(timeline, strategies, UNEVEN, 100e3) for name, strategies in _SLOW.items()},
}
