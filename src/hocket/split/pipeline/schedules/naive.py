"""One process computes, the others wait: a micro-batch goes forward and back through all stages before the next one starts.

The baseline of pipelines: with ``S`` stages each is idle for ``(S−1)/S`` of the time, however many micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.split.pipeline.schedules.base import Action, Method


def order(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Forward and backward of each micro-batch in turn."""
    for j in range(num_microbatches):
        yield Action("F", process, j)
        yield Action("B", process, j)


METHOD = Method("naive", order, "one process computes, the others wait", "")
