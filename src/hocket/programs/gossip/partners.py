"""Which worker the next exchange goes to: pure functions of the turn, of the weight that is left, and of who can be reached."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hocket.topology.partners import target

_MIN_WEIGHT = 0.5
"""An update counts ``1/ω`` at the weights that gradients are computed at: a worker with a small ω would take wild steps."""


def in_turn(partner: Callable[[int], int], turn: int, workers: int, free: Callable[[int], bool]) -> tuple[int | None, int]:
    """The next partner in turn that is free (None: none is), and the turn after it.

    >>> in_turn(lambda turn: turn % 3, 4, 3, lambda other: other != 1), in_turn(lambda turn: turn % 3, 4, 3, lambda other: False)
    ((2, 6), (None, 10))
    """
    last = turn + 2 * workers
    found = next((at for at in range(turn, last) if free(partner(at))), None)
    return (None, last) if found is None else (partner(found), found + 1)


def receiver(
    worker: int,
    workers: int,
    turn: int,
    weight: float,
    under_way: Collection[int],
    reachable: Callable[[int], bool] = lambda _: True,
) -> tuple[int | None, int]:
    """The worker that gets half of ``worker``'s push-sum weight (None: it keeps all), and the turn after it.

    ``under_way``: workers that have not acknowledged the last half sent to them.

    >>> receiver(0, 4, 0, 1.0, ()), receiver(0, 4, 0, 1.0, {1}), receiver(0, 4, 0, 0.49, ()), receiver(0, 1, 0, 1.0, ())
    ((1, 1), (2, 2), (None, 0), (None, 0))
    """
    if weight < _MIN_WEIGHT or workers == 1:
        return None, turn
    return in_turn(lambda at: target(worker, at, workers), turn, workers, lambda other: other not in under_way and reachable(other))
