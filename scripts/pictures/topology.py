"""Topologies: who mixes with whom at each exchange, and how far one worker's value has spread after it.

Nothing is redrawn by hand: unit vectors are mixed through the channel that training uses, so what comes back is the matrix K.
"""

from __future__ import annotations

import math

import torch
from svg import BLUE, INK, ORANGE, Drawing
from torch import Tensor

from hocket.cluster import VirtualCluster
from hocket.compression.base import Context
from hocket.strategy import Strategy

WORKERS, EXCHANGES, CELL, RADIUS = 8, 5, 104, 6.5


def matrices(topology: str, workers: int = WORKERS, exchanges: int = EXCHANGES) -> list[Tensor]:
    """``K`` of each exchange."""
    cluster = VirtualCluster(workers)
    channel = Strategy.parse(f"bulk + {topology}").topology.bind(cluster, cluster.world, 0)
    ids = torch.arange(workers)
    return [channel.mean(torch.eye(workers), Context(0, e, e, 0, ids, workers)).clone() for e in range(exchanges)]


def rows(title: str, topologies: dict[str, str], exchanges: int = EXCHANGES, hosts: int = 1) -> Drawing:
    """A row of circles of workers for each topology: lines join partners, the colour is what each holds of worker 0's value."""
    left = 150
    drawing = Drawing(left + CELL * exchanges + 8, 44 + CELL * len(topologies) + 34, title)
    for e in range(exchanges):
        drawing.text(left + CELL * (e + 0.5), 24, f"exchange {e + 1}", "middle", opacity=0.75)
    for k, (topology, label) in enumerate(topologies.items()):
        middle, spread = 40 + CELL * (k + 0.5), torch.eye(WORKERS)[:, 0]
        drawing.text(8, middle - 4, topology if len(topology) < 21 else label, bold=True)
        drawing.text(8, middle + 13, label if len(topology) < 21 else "", size=11, opacity=0.75)
        for e, mixing in enumerate(matrices(topology, exchanges=exchanges)):
            spread = mixing @ spread
            _circle(drawing, left + CELL * (e + 0.5), middle, mixing, spread, hosts)
    y = drawing.height - 14
    drawing.circle(18, y - 4, 6, ORANGE, 1)
    drawing.text(30, y, "worker 0; the deeper the blue, the more a worker holds of worker 0's value (deepest: an eighth or more)")
    return drawing


def _circle(drawing: Drawing, x: float, y: float, mixing: Tensor, spread: Tensor, hosts: int) -> None:
    places = [_place(worker, hosts) for worker in range(WORKERS)]
    at = [(x + px, y + py) for px, py in places]
    for i in range(WORKERS):
        for j in range(i):
            if share := float(max(mixing[i, j], mixing[j, i])):
                drawing.line(*_between(at[i], at[j]), INK, 1.2 if share > 0.2 else 0.8, 0.75 if share > 0.2 else 0.4)
    for worker in range(WORKERS):
        drawing.circle(*at[worker], RADIUS, BLUE, min(1.0, float(spread[worker]) * WORKERS))
    drawing.circle(*at[0], 3, ORANGE)


def _between(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float, float, float]:
    """From rim to rim."""
    share = RADIUS / math.dist(a, b)
    x, y = (b[0] - a[0]) * share, (b[1] - a[1]) * share
    return a[0] + x, a[1] + y, b[0] - x, b[1] - y


def _place(worker: int, hosts: int) -> tuple[float, float]:
    """On one circle, or on a small one for each of two hosts."""
    each = WORKERS // hosts
    host, k = divmod(worker, each)
    angle = 2 * math.pi * (k / each - 0.25) + (math.pi / each if hosts > 1 else 0)
    radius, shift = (40.0, 0.0) if hosts == 1 else (20.0, (host - 0.5) * 54)
    return shift + radius * math.cos(angle), radius * math.sin(angle)


PICTURES = {
    "allreduce": lambda: rows("All-reduce: after one exchange every worker holds the mean", {"allreduce": "everyone"}),
    "gossip": lambda: rows(
        "Gossip: partners at each exchange, and how far one worker's value has spread",
        {
            "gossip": "rotating, two partners",
            "gossip(ring)": "two neighbours",
            "gossip(exponential)": "one partner",
            "gossip(random)": "one partner, drawn",
        },
    ),
    "hierarchical": lambda: rows(
        "Hierarchical: inside two hosts at each exchange, between them at every second",
        {
            "hierarchical(allreduce, allreduce, size=4)": "every=1",
            "hierarchical(allreduce, allreduce, size=4, every=2)": "every=2",
        },
        hosts=2,
    ),
}
