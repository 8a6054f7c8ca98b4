"""Summation servers (``role=sum``; BytePS, Jiang 2020): a mean of all workers over ``n`` spare machines and the workers' own.

A row is cut among ``N + n`` summation servers, one in every worker's process and one in every spare one, in the shares that load
all links equally (:func:`shares`), and every share into pieces. A worker sends each piece to its server; a server that has a piece
from all workers adds them up in worker order and sends the mean back to all. Pieces of one share follow each other, so that
pushing and fetching go on at the same time, in both directions of every link.

A connection that breaks loses what is under way on it. So a worker that has got no mean for a while sends the pieces again that it
waits for, and a server keeps the means of a row until all workers have begun with a later one: a piece that comes again is answered
again and counts once, and a mean that comes again is recognised.
"""

from collections.abc import Iterator
from itertools import islice, pairwise

from torch import Tensor

from hocket.errors import HocketError, WorkerLost
from hocket.programs.base import Address, Finished, Program, Rejected, Service, Task, Until, event
from hocket.transport.frame import Envelope, Kind

PIECE_BYTES = 1 << 16
WINDOW = 10
"""Pieces that a worker has on their way: enough to keep both directions busy, few enough not to flood a link."""
QUEUE = 1 << 14
"""Messages that may wait for a link: more than any row has pieces."""
LIVENESS_TIMEOUT_S = 1800.0
"""As long as collectives wait for a worker that lives but does not come; one that is lost is noticed by its heartbeat."""
SILENCE_S = 10.0
"""A server that gives no sign of life for so long, while nothing else comes, is lost; workers watch each other (``Heartbeat``)."""
_BEAT_S = 1.0
_CHECK_S = 0.2
_AGAIN_S = 1.0
"""Without a mean for so long a worker sends its pieces again; each time it waits twice as long, up to ``_AGAIN_MOST_S``: another
worker may only be slow."""
_AGAIN_MOST_S = 10.0


def shares(size: int, workers: int, servers: int) -> list[range]:
    """Which values each server adds up, workers' own first: ``(N−n)/d`` of all, then the servers' ``2(N−1)/d``.

    >>> [len(r) for r in shares(1800, 4, 2)], [len(r) for r in shares(10, 2, 0)]
    ([180, 180, 180, 180, 540, 540], [5, 5])
    """
    d = workers**2 + servers * workers - 2 * servers
    parts = [workers - servers] * workers + [2 * (workers - 1)] * servers
    ends, total = [0], 0
    for part in parts:
        total += part
        ends.append(size * total // d)
    return [range(a, b) for a, b in pairwise(ends)]


class SummationServer(Service):
    """Adds up pieces from ``workers`` workers; it has finished when one of them says goodbye."""

    role = "A server that sums"

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self._pieces: dict[tuple[int, int], dict[int, tuple[bytes, Tensor]]] = {}
        self._means: dict[tuple[int, int], Tensor] = {}
        """By row and piece; those of rows that every worker has left behind are forgotten."""
        self._rows = dict.fromkeys(range(workers), 0)
        """The last row that each worker has begun with."""

    def on_message(self, sender: Address, message: Envelope) -> None:
        self._serve(sender, message, {Kind.PUSH: self._push, Kind.BEAT: self._beat, Kind.GOODBYE: self._goodbye})

    def _admit(self, message: Envelope) -> None:
        if message.kind is not Kind.BEAT and message.sender not in self._rows:
            raise Rejected("worker", f"There is no worker {message.sender} in a job of {self.workers}.")

    def _beat(self, peer: bytes, message: Envelope) -> None:
        self._answer(peer, Kind.ANSWER, 0, {})

    def _goodbye(self, peer: bytes, message: Envelope) -> None:
        self._effects.append(Finished())

    def _push(self, peer: bytes, message: Envelope) -> None:
        key, worker = (message.number, message.step), message.sender
        (values,) = message.tensors
        if not values.is_floating_point():
            raise ValueError(f"values of {values.dtype}")
        self._begin(worker, message.number)
        if key in self._means:
            self._send(peer, self._reply(key))
            return
        if key[0] < min(self._rows.values()):
            return  # long answered, or it would not have gone on
        held = self._pieces.get(key, {})
        others = [other for by, (_, other) in held.items() if by != worker]
        if any(other.shape != values.shape or other.dtype != values.dtype for other in others):
            raise Rejected("model", "Other workers' rows have another size or dtype: build the same model everywhere.")
        if not held and len(self._pieces) >= QUEUE:
            raise Rejected("size", "Too many pieces of rows wait for other workers.")
        self._pieces[key] = {**held, worker: (peer, values)}
        if len(self._pieces[key]) == self.workers:
            self._add_up(key)

    def _begin(self, worker: int, row: int) -> None:
        before, self._rows[worker] = min(self._rows.values()), max(row, self._rows[worker])
        if (slowest := min(self._rows.values())) > before:
            self._means = {key: mean for key, mean in self._means.items() if key[0] >= slowest}
            self._pieces = {key: held for key, held in self._pieces.items() if key[0] >= slowest}

    def _add_up(self, key: tuple[int, int]) -> None:
        held = self._pieces.pop(key)
        total = held[0][1].clone()
        for worker in range(1, self.workers):
            total += held[worker][1]
        total /= self.workers
        self._means[key] = total
        for peer, _ in held.values():
            self._send(peer, self._reply(key))

    def _reply(self, key: tuple[int, int]) -> Envelope:
        return Envelope(Kind.REPLY, number=key[0], step=key[1], tensors=(self._means[key],))


class SummationWorker(Program):
    """Worker ``worker`` of ``workers``; its peers are the ``servers`` summation servers, the workers' own first."""

    peer_kind = "Summation server"

    def __init__(
        self, worker: int, workers: int, servers: int, liveness_timeout_s: float = LIVENESS_TIMEOUT_S, silence_s: float = SILENCE_S
    ) -> None:
        super().__init__()
        self.worker, self.workers, self.servers = worker, workers, servers
        self.liveness_timeout_s, self.silence_s = liveness_timeout_s, silence_s
        self._number = 0
        self._flat: Tensor | None = None
        self._pieces: list[list[range]] = []
        self._order: Iterator[tuple[int, int]] = iter(())
        self._missing = 0
        self._under_way: dict[tuple[int, int], None] = {}
        """Pieces that were sent and not answered, as ``(server, piece)``, in order."""
        self._heard = self._looked = self._asked = 0.0
        self._again_at = self._again_s = 0.0
        self._quiet: dict[int, float] = {}
        """For how long each spare server has been silent; time in which this worker did not look does not count."""

    @event
    def mean(self, flat: Tensor, now: float) -> Task:
        """Replace ``flat``, on the CPU, by the mean of all workers'; forgets a mean that was given up."""
        self._task = None
        return self._mean(flat)

    @event
    def dismiss(self, now: float) -> None:
        for server in range(self.workers, self.servers):
            self._send(server, Envelope(Kind.GOODBYE, sender=self.worker))

    def _mean(self, flat: Tensor) -> Task:
        self._number += 1
        step = max(1, PIECE_BYTES // flat.element_size())
        parts = shares(len(flat), self.workers, self.servers - self.workers)
        self._flat, self._pieces = flat, [[part[a : a + step] for a in range(0, len(part), step)] for part in parts]
        self._missing = sum(map(len, self._pieces))
        self._order, self._under_way = iter(self._ordered()), {}
        self._heard, self._looked, self._asked = self.now, self.now, 0.0
        self._again_at, self._again_s = self.now + _AGAIN_S, _AGAIN_S
        self._quiet = dict.fromkeys(range(self.workers, self.servers), 0.0)
        self._push(WINDOW)
        while self._missing:
            yield Until(lambda: not self._missing, self.now + _CHECK_S)
            if self._missing and self.now - self._looked >= _CHECK_S:
                self._check()
        self._flat = None

    def _ordered(self) -> list[tuple[int, int]]:
        """All pieces, as ``(server, piece)``: every server gets its share at the same pace, so that no link is idle before another.

        Every worker begins with another server.
        """
        pieces = [(server, k) for server, own in enumerate(self._pieces) for k in range(len(own))]
        return sorted(pieces, key=lambda p: ((p[1] + 0.5) / len(self._pieces[p[0]]), (p[0] - self.worker) % self.servers))

    def _push(self, count: int) -> None:
        for piece in islice(self._order, count):
            self._under_way[piece] = None
            self._push_piece(*piece)

    def _push_piece(self, server: int, k: int) -> None:
        assert self._flat is not None
        place = self._pieces[server][k]
        values = self._flat[place.start : place.stop]
        self._send(server, Envelope(Kind.PUSH, sender=self.worker, step=k, number=self._number, tensors=(values,)))

    def on_message(self, sender: Address, message: Envelope) -> None:
        assert isinstance(sender, int)
        if sender in self._quiet:
            self._quiet[sender] = 0.0
        if message.kind is Kind.REFUSAL and message.number in (0, self._number):
            raise HocketError(f"{self.describe_peer(sender)}: {message.metadata.get('sentence')}")
        piece = (sender, message.step)
        if self._flat is None or message.kind is not Kind.REPLY or message.number != self._number or piece not in self._under_way:
            return  # of an earlier row, or a mean that has come before
        place, (mean,) = self._pieces[sender][message.step], message.tensors
        self._flat[place.start : place.stop] = mean
        del self._under_way[piece]
        self._heard, self._again_at, self._again_s = self.now, self.now + _AGAIN_S, _AGAIN_S
        self._missing -= 1
        self._push(1)

    def _check(self) -> None:
        """Notice servers that are lost, and ask for signs of life, once a second while no mean comes."""
        gap, self._looked = min(self.now - self._looked, _BEAT_S), self.now
        if self._heard > self.now - _CHECK_S:
            return
        if self.now >= self._again_at:
            self._again_s = min(2 * self._again_s, _AGAIN_MOST_S)
            self._again_at = self.now + self._again_s
            for piece in self._under_way:
                self._push_piece(*piece)
        for server in self._quiet:
            self._quiet[server] += gap
            if self._quiet[server] > self.silence_s:
                where = self.addresses[server]
                raise WorkerLost(f"The summation server at {where} has not answered for {self.silence_s:g} s; see its own output.")
        if self.now - self._heard > self.liveness_timeout_s:
            raise WorkerLost(
                f"A summation server has not answered for {self.liveness_timeout_s:g} s; a worker or a server has ended; see "
                "their own output."
            )
        if self.now - self._asked >= _BEAT_S:
            self._asked = self.now
            for server in self._quiet:
                self._send(server, Envelope(Kind.BEAT))
