"""Interleaved 1F1B: each process holds ``v`` stages that are not adjacent (Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021).

The pipe fills in pieces ``v`` times smaller: bubble share ``(S−1)/(v·m+S−1)`` on ``S`` processes, for ``v`` times the messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.split.pipeline.schedules.base import Action, Method, alternating, per_round


def order(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B over the process's stages, a round of micro-batches on each."""
    warm = (stages_per_rank - 1) * per_round(num_microbatches, processes) + 2 * (processes - 1 - process)
    return alternating(process, processes, num_microbatches, stages_per_rank, warm)


METHOD = Method(
    "interleaved",
    order,
    "1f1b with several stages on each process",
    "Narayanan 2021",
    stages_per_rank=2,
    several=True,
    fills=True,
    rounds=True,
)
