"""Schedules by name: the actions of each process, in order. A method is a file with its ``METHOD``; the table is below."""

from __future__ import annotations

from hocket.errors import HocketError, nearest
from hocket.split.pipeline.schedules import gpipe, interleaved, naive, one_f_one_b, pipedream, zero_bubble
from hocket.split.pipeline.schedules.base import Action, Kind, Method, Schedule, before, per_round

SCHEDULES: dict[str, Method] = {
    module.METHOD.name: module.METHOD for module in (naive, gpipe, one_f_one_b, interleaved, zero_bubble, pipedream)
}

__all__ = ["Action", "Kind", "Method", "SCHEDULES", "Schedule", "before", "find", "make"]


def find(name: str) -> Method:
    """The method of that name."""
    if name not in SCHEDULES:
        hint = nearest(name, SCHEDULES) or ": choose one of these."
        raise HocketError(f"There is no schedule '{name}' among {', '.join(SCHEDULES)}{hint}")
    return SCHEDULES[name]


def make(name: str, stages: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of that name for ``stages`` processes with ``stages_per_rank`` stages each.

    >>> for row in make("1f1b", stages=2, num_microbatches=3):
    ...     print(*row)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    method = find(name)
    stages_per_rank = method.stages_per_rank if stages_per_rank is None else stages_per_rank
    _check(method, stages, num_microbatches, stages_per_rank)
    return tuple(tuple(method.order(process, stages, num_microbatches, stages_per_rank)) for process in range(stages))


def _check(method: Method, stages: int, num_microbatches: int, stages_per_rank: int) -> None:
    for what, value in (("stages", stages), ("micro-batches", num_microbatches), ("stages on each process", stages_per_rank)):
        if value < 1:
            raise HocketError(f"{method.name}: the number of {what} is a whole number of at least 1; got {value}.")
    if stages_per_rank > 1 and not method.several:
        able = " or ".join(m.name for m in SCHEDULES.values() if m.several)
        raise HocketError(f"{method.name} has one stage on each process; got {stages_per_rank}: use {able}.")
    if method.fills and num_microbatches < stages:
        what = "mini-batches" if method.name == "pipedream" else "micro-batches"
        raise HocketError(
            f"{method.name} cannot fill {stages} stages with {num_microbatches} {what}: give it at least {stages}, or use gpipe."
        )
    size = per_round(num_microbatches, stages)
    if method.rounds and num_microbatches % size:
        rounds = num_microbatches // stages
        raise HocketError(
            f"{method.name} takes micro-batches in {rounds} equal rounds for {stages} processes, which {num_microbatches} do not "
            f"fill: use {rounds * size} or {rounds * (size + 1)}."
        )
