"""Schedules by name: who works on what, in which order. A method is a file with its ``METHOD``; the table is below."""

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


def make(name: str, stages: int, micro: int, virtual: int | None = None) -> Schedule:
    """The schedule of that name for ``stages`` processes with ``virtual`` stages each, and ``micro`` micro-batches.

    >>> for row in make("1f1b", stages=2, micro=3):
    ...     print(*row)
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    method = find(name)
    virtual = method.virtual if virtual is None else virtual
    _check(method, stages, micro, virtual)
    return tuple(tuple(method.order(process, stages, micro, virtual)) for process in range(stages))


def _check(method: Method, stages: int, micro: int, virtual: int) -> None:
    for what, value in (("stages", stages), ("micro-batches", micro), ("stages on each process", virtual)):
        if value < 1:
            raise HocketError(f"{method.name}: the number of {what} is a whole number of at least 1; got {value}.")
    if virtual > 1 and not method.several:
        able = " or ".join(m.name for m in SCHEDULES.values() if m.several)
        raise HocketError(f"{method.name} has one stage on each process; got {virtual}: use {able}.")
    if method.fills and micro < stages:
        what = "mini-batches" if method.name == "pipedream" else "micro-batches"
        raise HocketError(
            f"{method.name} cannot fill {stages} stages with {micro} {what}: give it at least {stages}, or use gpipe."
        )
    size = per_round(micro, stages)
    if method.rounds and micro % size:
        rounds = micro // stages
        raise HocketError(
            f"{method.name} takes micro-batches in {rounds} equal rounds for {stages} processes, which {micro} do not fill: "
            f"use {rounds * size} or {rounds * (size + 1)}."
        )
