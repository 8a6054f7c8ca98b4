"""How real workers mix without servers and without waiting for a third: in pairs (AD-PSGD) or by push-sum (SGP).

*Pairs* cannot deadlock. Workers with an even number call, those with an odd number answer. An answerer's door answers whatever the
worker itself is doing, and waits for nobody; only callers wait, each for one answerer. So no chain of waiting is longer than one,
and every wait ends with the answer, or after the patience. A caller sends its weights after a step; both take the mean of what both
had, the answerer at once, the caller before its next update. Nobody but itself changes a caller's weights, so the mean is kept.
An answer that is lost, or comes after the patience, leaves the mean taken on one side only.

*Push-sum* waits for nobody. After a step a worker keeps half of its weights and of its mass and sends the other half on. A half
that is refused, or not acknowledged in time, is taken back, so nothing is lost. It counts twice if it arrives all the same, or if
only its acknowledgement was lost: so mass is created where a link between two that live is cut for longer than the patience (a
worker that is stopped refuses what it finds when it is back). Mean and mass are then off by that half. To one worker it has one
half under way at a time; one with less than half of its first mass keeps it until others have sent some. Whether a half goes out,
and to whom, is said by :func:`receiver`, for virtual workers too (:mod:`hocket.train.free.pushsum`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from hocket.cluster.message import framed
from hocket.messages import Kind
from hocket.server.holding import Holding, Rows
from hocket.server.peers import Peers
from hocket.topology.partners import answerer, target

_LEAST_MASS = 0.5
"""An update weighs ``1/ω`` on the weights that are computed at: who gave away far more than it got would take wild steps."""


def in_turn(whom: Callable[[int], int], turn: int, workers: int, free: Callable[[int], bool]) -> tuple[int | None, int]:
    """The next one in turn who is free (None: nobody is), and the turn after it.

    >>> in_turn(lambda turn: turn % 3, 4, 3, lambda other: other != 1), in_turn(lambda turn: turn % 3, 4, 3, lambda other: False)
    ((2, 6), (None, 10))
    """
    last = turn + 2 * workers
    found = next((at for at in range(turn, last) if free(whom(at))), None)
    return (None, last) if found is None else (whom(found), found + 1)


def receiver(
    worker: int, workers: int, turn: int, mass: float, under_way: Collection[int], reachable: Callable[[int], bool] = lambda _: True
) -> tuple[int | None, int]:
    """Whom ``worker`` gives half of its ``mass`` to by push-sum (None: it keeps all), and the turn after it.

    ``under_way``: to whom a half is on its way that has not been acknowledged.

    >>> receiver(0, 4, 0, 1.0, ()), receiver(0, 4, 0, 1.0, {1}), receiver(0, 4, 0, 0.49, ())
    ((1, 1), (2, 2), (None, 0))
    """
    if mass < _LEAST_MASS:
        return None, turn
    return in_turn(lambda at: target(worker, at, workers), turn, workers, lambda other: other not in under_way and reachable(other))


class Exchanges(ABC):
    """One worker's exchanges with others."""

    def __init__(self, peers: Peers, holding: Holding, kind: str, seed: int) -> None:
        self.peers, self.holding, self.kind, self.seed = peers, holding, kind, seed
        self.worker, self.workers = peers.worker, len(peers.addresses)
        self._turns = 0

    @abstractmethod
    def land(self) -> None:
        """Before an update: take in what comes of the exchange under way."""

    @abstractmethod
    def start(self) -> None:
        """After an update: start the next exchange."""

    @abstractmethod
    def drain(self) -> None:
        """Nothing is under way after this."""


class Calls(Exchanges):
    """Pairs, as a caller; answerers have nothing to do but to let their door answer."""

    _open: int | None = None

    def start(self) -> None:
        self.peers.turn(0.0)  # answerers too: so they hear who is back, and who has left
        if self.worker % 2:
            return
        whom, self._turns = in_turn(self._whom, self._turns, self.workers, self.peers.reachable)
        if whom is None:
            return
        rows = self.holding.x
        size = sum(row.nbytes for row in rows)
        self._open = self.peers.ask(whom, Kind.PUSH, tensors=rows, expects=size)
        self.holding.sent(framed(size))

    def land(self) -> None:
        if self._open is None:
            return
        begun = time.monotonic()
        self.peers.wait([self._open])
        answer, self._open = self.peers.take(self._open), None
        if answer is None:
            self.holding.account.lost += 1
        else:
            self.holding.average(self.holding.fitting(answer.tensors))
        self.holding.account.stood(time.monotonic() - begun, 0.0, 0.0)

    def drain(self) -> None:
        self.land()

    def _whom(self, turn: int) -> int:
        return answerer(self.kind, self.worker, turn, self.workers, self.seed)


@dataclass(frozen=True)
class _Half:
    whom: int
    part: Rows
    mass: float


class Halves(Exchanges):
    """Push-sum."""

    def __init__(self, peers: Peers, holding: Holding, kind: str, seed: int) -> None:
        super().__init__(peers, holding, kind, seed)
        self._open: dict[int, _Half] = {}

    def start(self) -> None:
        self.land()
        under_way, mass = {half.whom for half in self._open.values()}, self.holding.mass
        whom, self._turns = receiver(self.worker, self.workers, self._turns, mass, under_way, self.peers.reachable)
        if whom is None:
            return
        part, mass = self.holding.halve()
        tensors = [*part, torch.tensor([mass], dtype=torch.float64)]
        self._open[self.peers.ask(whom, Kind.PUSH, tensors=tensors)] = _Half(whom, part, mass)
        self.holding.sent(framed(sum(t.nbytes for t in tensors)))

    def land(self) -> None:
        self.peers.turn(0.0)
        for number in [n for n in self._open if self.peers.answered(n)]:
            half = self._open.pop(number)
            if self.peers.take(number) is None:
                self.holding.take_in(half.part, half.mass, own=True)
                self.holding.account.lost += 1
            self.holding.account.stood(0.0, 0.0, 0.0)

    def drain(self) -> None:
        begun = time.monotonic()
        self.peers.wait(self._open)
        self.land()
        self.holding.account.transfer_s += time.monotonic() - begun
