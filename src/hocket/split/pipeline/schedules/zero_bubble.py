"""Zero bubble (ZB-H1): backwards in two halves. Only the gradient of a stage's *inputs* delays other stages; that of its *weights*
fills the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

With equal costs of F, I and W the idle time is a third of 1F1B's, at the same number of micro-batches in flight. The order is that
of PyTorch's ``ScheduleInterleavedZeroBubble``, for one or several stages on each process.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.split.pipeline.schedules.base import Action, Method, alternating, per_round


def order(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B with halved backwards; the weights' halves come ``process`` backwards later."""
    warm = (stages_per_rank - 1) * per_round(num_microbatches, processes) + processes - 1 - process
    return alternating(process, processes, num_microbatches, stages_per_rank, warm, split=True)


METHOD = Method("zero-bubble", order, "weight gradients fill the bubble", "Qi 2023", several=True, fills=True, rounds=True)
