"""1F1B: once the pipe is full, one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2019 and 2021).

GPipe's bubble, ``(S−1)/(m+S−1)``, but stage ``s`` holds the activations of at most ``S−s`` micro-batches, not of all ``m``.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.split.pipeline.schedules.base import Action, Method, alternating


def order(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """``S − 1 − s`` forwards, then one forward and one backward in turn."""
    return alternating(process, processes, num_microbatches, 1, warm=processes - 1 - process)


METHOD = Method("1f1b", order, "one forward, one backward in turn", "Narayanan 2019", fills=True)
