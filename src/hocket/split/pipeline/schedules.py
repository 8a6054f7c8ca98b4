"""Schedules: the actions of each process, in order. Plain data that can be printed, compared and drawn; the table is below."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hocket.errors import HocketError, nearest

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work: forward (F), whole backward (B), or its halves, for the inputs (I) and for the weights (W).

    >>> print(Action("F", 2, 0), Action("B", 0, 11))
    2F0 0B11
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each process. Process ``p`` of ``P`` holds the stages ``p``, ``p + P``, ``p + 2P``, …"""


@dataclass(frozen=True)
class Method:
    """A method to order the actions, with its name and its purpose."""

    name: str
    order: Callable[[int, int, int, int], Iterator[Action]]
    """The actions of one process: from its number, the number of processes, of micro-batches, and of stages on each process."""
    about: str
    paper: str
    stages_per_rank: int = 1
    """The default number of stages on each process."""
    several: bool = False
    """Whether a process may hold several stages."""
    fills: bool = False
    """Whether it needs at least as many micro-batches as processes."""
    rounds: bool = False
    """Whether micro-batches go in rounds of equal length, about one per process."""


def before(action: Action, known: Collection[Action]) -> list[Action]:
    """What must be done before ``action``, among the ``known`` actions of a schedule."""
    kind, stage, microbatch = action
    wanted = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("F", stage), ("B", stage + 1), ("I", stage + 1)])
    return [a for k, s in wanted if (a := Action(k, s, microbatch)) in known]  # type: ignore[arg-type]


def find(name: str) -> Method:
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
    size = _per_round(num_microbatches, stages)
    if method.rounds and num_microbatches % size:
        rounds = num_microbatches // stages
        raise HocketError(
            f"{method.name} takes micro-batches in {rounds} equal rounds for {stages} processes, which {num_microbatches} do not "
            f"fill: use {rounds * size} or {rounds * (size + 1)}."
        )


# --- the methods -----------------------------------------------------------------------------------------------------------


def _naive(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """A micro-batch goes forward and back through all stages before the next one starts; bubble share ``(S−1)/S``."""
    for j in range(num_microbatches):
        yield Action("F", process, j)
        yield Action("B", process, j)


def _gpipe(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.

    Bubble share ``(S−1)/(m+S−1)``; each stage holds the activations of all ``m`` micro-batches.
    """
    yield from (Action("F", process, j) for j in range(num_microbatches))
    yield from (Action("B", process, j) for j in range(num_microbatches))


def _one_f_one_b(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """PipeDream-Flush, Narayanan et al. 2019 and 2021.

    GPipe's bubble, but stage ``s`` holds the activations of at most ``S−s`` micro-batches, not of all ``m``.
    """
    return _alternating(process, processes, num_microbatches, 1, warm=processes - 1 - process)


def _interleaved(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """1F1B over ``v`` stages of a process that are not adjacent, a round of micro-batches on each (Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021).

    The pipe fills in pieces ``v`` times smaller: bubble share ``(S−1)/(v·m+S−1)`` on ``S`` processes, for ``v`` times the messages.
    """
    warm = (stages_per_rank - 1) * _per_round(num_microbatches, processes) + 2 * (processes - 1 - process)
    return _alternating(process, processes, num_microbatches, stages_per_rank, warm)


def _zero_bubble(process: int, processes: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): backwards in two halves. Only the gradient of a stage's *inputs*
    delays other stages; that of its *weights* fills the bubble.

    With equal costs of F, I and W the idle time is a third of 1F1B's, at the same number of micro-batches in flight. The order is
    that of PyTorch's ``ScheduleInterleavedZeroBubble``, for one or several stages on each process.
    """
    warm = (stages_per_rank - 1) * _per_round(num_microbatches, processes) + processes - 1 - process
    return _alternating(process, processes, num_microbatches, stages_per_rank, warm, split=True)


def _per_round(num_microbatches: int, processes: int) -> int:
    """How many micro-batches a process computes on one of its stages before it continues with the next stage."""
    return num_microbatches // max(1, num_microbatches // processes)


def _alternating(
    process: int, processes: int, num_microbatches: int, stages_per_rank: int, warm: int, split: bool = False
) -> Iterator[Action]:
    """``warm`` forwards, then one forward and one backward in turn, then the remaining backwards.

    With ``split`` backwards are halved: the halves for the weights come ``process`` halves later, and fill the end.
    """
    size, total = _per_round(num_microbatches, processes), num_microbatches * stages_per_rank
    warm = min(warm, total)

    def act(kind: Kind, turn: int) -> Action:
        stage = turn // size % stages_per_rank
        stage = stage if kind == "F" else stages_per_rank - 1 - stage
        return Action(kind, stage * processes + process, turn // (size * stages_per_rank) * size + turn % size)

    for turn in range(warm):
        yield act("F", turn)
    for turn in range(total):
        if warm + turn < total:
            yield act("F", warm + turn)
        yield act("I" if split else "B", turn)
        if split and turn >= process:
            yield act("W", turn - process)
    for turn in range(max(0, total - process), total if split else 0):
        yield act("W", turn)


_METHODS = (
    Method("naive", _naive, "one process computes, the others wait", ""),
    Method("gpipe", _gpipe, "all forward, then all backward", "Huang 2019"),
    Method("1f1b", _one_f_one_b, "one forward, one backward in turn", "Narayanan 2019", fills=True),
    Method("interleaved", _interleaved, "1f1b with several stages on each process", "Narayanan 2021", 2, True, True, True),
    Method("zero-bubble", _zero_bubble, "weight gradients fill the bubble", "Qi 2023", several=True, fills=True, rounds=True),
    # Its numbers are whole mini-batches: 1F1B without an end, idle only while the pipe fills and drains (:mod:`.pipedream`).
    Method("pipedream", _one_f_one_b, "1f1b without a flush: each mini-batch updates at once", "Narayanan 2019", fills=True),
)
SCHEDULES: dict[str, Method] = {method.name: method for method in _METHODS}
