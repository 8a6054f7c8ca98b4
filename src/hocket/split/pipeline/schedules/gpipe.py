"""GPipe: all micro-batches forward, then all backward (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", 2019).

Bubble share ``(S−1)/(m+S−1)``; each stage holds the activations of all ``m`` micro-batches at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.split.pipeline.schedules.base import Action, Method


def order(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    yield from (Action("F", process, j) for j in range(num_microbatches))
    yield from (Action("B", process, j) for j in range(num_microbatches))


METHOD = Method("gpipe", order, "all forward, then all backward", "Huang 2019")
