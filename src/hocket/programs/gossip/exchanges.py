"""How gossip workers mix: in pairs (AD-PSGD), or by push-sum (SGP).

*Pairs* cannot deadlock. Workers with an even number call, those with an odd number answer. An answerer answers whatever it is
doing, and waits for nobody; only callers wait, each for one answerer. So no chain of waiting is longer than one, and every wait
ends with the answer or with the liveness timeout. A caller sends its weights after a step; the answerer takes the mean at once and
answers with its own weights from before; with them the caller takes the mean too. Both changes add up to zero, also where the
answer comes so late that the caller has gone on: it then adds half of the difference between the weights that were exchanged.

*Push-sum* waits for nobody. After a step a worker keeps half of its weights and of its push-sum weight and sends the other half on.
A half that the receiver refused is taken back. To each worker it has one half under way at a time; a worker with less than half of
its first push-sum weight keeps it until others have sent some (:func:`receiver`).

Why an exchange counts exactly once is told in :mod:`hocket.programs.gossip.server`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from hocket.cluster.message import framed
from hocket.errors import HocketError
from hocket.programs.gossip.links import Request
from hocket.programs.gossip.server import PeerServer
from hocket.programs.gossip.state import weight_of, weight_tensor
from hocket.topology.partners import answerer, target
from hocket.transport.frame import Envelope, Kind

_MIN_WEIGHT = 0.5
"""An update counts ``1/ω`` at the weights that gradients are computed at: with a small ω, steps would be far too large."""


class Exchanges(ABC):
    """One worker's exchanges with others."""

    def __init__(self, node: PeerServer) -> None:
        self.node = node
        self.turn = 0

    @abstractmethod
    def begin(self) -> None:
        """Begin the next exchange, if there is a partner for it."""

    @abstractmethod
    def landed(self) -> bool:
        """Whether the next update need not wait."""

    @abstractmethod
    def settled(self, request: Request, message: Envelope) -> None:
        """The partner took an exchange, or refused it."""

    @abstractmethod
    def lost(self, request: Request, taken: bool) -> None:
        """The partner is gone."""

    def drained(self) -> bool:
        """Whether nothing is under way to a worker that can be reached."""
        return not any(self.node.reachable(request.peer) for request in self.node.exchanges_open)

    def _partners_under_way(self) -> set[int]:
        return {request.peer for request in self.node.exchanges_open}


class Calls(Exchanges):
    """Pairs, as a caller; answerers begin nothing."""

    def begin(self) -> None:
        node = self.node
        if node.worker % 2 or node.world == 1:
            return
        config, under_way = node.config, self._partners_under_way()
        peer, self.turn = in_turn(
            lambda turn: answerer(config.kind, config.worker, turn, config.world, config.seed),
            self.turn,
            config.world,
            lambda other: other not in under_way and node.reachable(other),
        )
        if peer is None:
            return
        rows = node.state.x
        size = sum(row.nbytes for row in rows)
        number = node.ask(peer, Kind.PUSH, tensors=rows, expects=size)
        node.requests[number].version = node.state.version
        node.account.bytes_sent += framed(size)

    def landed(self) -> bool:
        return self.drained()

    def settled(self, request: Request, message: Envelope) -> None:
        node = self.node
        if message.kind == Kind.REFUSAL:
            node.account.lost += 1
            return
        try:
            theirs = node.state.fitting(message.tensors)
        except ValueError as error:
            raise HocketError(f"The weights of worker {request.peer} are of another model ({error}).") from None
        node.state.complete(theirs, request.message.tensors, request.version)
        node.account.stalled(0.0, 0.0, 0.0)
        metadata = {"incarnation": node.config.incarnation, "settled": request.message.number}
        node._send(request.peer, Envelope(Kind.BEAT, node.worker, request.peer, metadata=metadata))

    def lost(self, request: Request, taken: bool) -> None:
        self.node.account.lost += 1


class Halves(Exchanges):
    """Push-sum."""

    def begin(self) -> None:
        node, state = self.node, self.node.state
        under_way = self._partners_under_way()
        peer, self.turn = receiver(node.worker, node.world, self.turn, state.push_sum_weight, under_way, node.reachable)
        if peer is None:
            return
        part, weight = state.halve()
        tensors = [*part, weight_tensor(weight)]
        node.ask(peer, Kind.PUSH, tensors=tensors)
        node.account.bytes_sent += framed(sum(t.nbytes for t in tensors))

    def landed(self) -> bool:
        return True

    def settled(self, request: Request, message: Envelope) -> None:
        if message.kind == Kind.REFUSAL:
            *part, weight = request.message.tensors
            self.node.state.take_in(part, weight_of(weight), own=True)
            self.node.account.lost += 1
        else:
            self.node.account.stalled(0.0, 0.0, 0.0)

    def lost(self, request: Request, taken: bool) -> None:
        if taken:
            self.node.account.stalled(0.0, 0.0, 0.0)
        else:
            self.node.account.lost += 1
            self.node.state.lost_weight += weight_of(request.message.tensors[-1])


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
