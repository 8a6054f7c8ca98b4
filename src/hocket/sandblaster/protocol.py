"""The messages of a run, and how orders are obeyed once and in sequence on a network that loses, repeats and reorders them.

    coordinator → shard    ORDER {ask: orders} or {orders}: with or without an answer; GOODBYE
    coordinator → worker   ORDER {judged, keep, bundle, again, counted, portion, shards}; GOODBYE
    shard → coordinator    HELLO {address, incarnation}; REPLY {answers, moved} to an ask; PUSH: a bundle is staged here
    worker → coordinator   HELLO {free}; BEAT; ANSWER {loss}: a portion is computed
    worker → shard         FETCH: the point; PUSH: a bundle, that is this shard's slice of the worker's sum
    shard → worker         REPLY: the point's slice, or no tensor when that evaluation is over

A coordinator gives every peer a series of orders, numbered 1, 2, …. ``step`` names the series: to shards the *session* (a new one
begins when the coordinator or a shard was restarted), to workers the *evaluation*, together with ``sender``, the worker's *ticket*.
A peer obeys number n + 1 after number n and a later series after an earlier one, and ignores everything else. Its messages tell how
many orders it has obeyed (``number``). The coordinator keeps an order until then, and sends it again when a peer that has not
obeyed it says hello, which all do every ``BEAT_S``. On a network that loses nothing no order is sent twice.

Sessions and evaluations are numbered upwards, also across restarts, so a message of an earlier one is out of date everywhere.
"""

import json
from collections import deque
from dataclasses import replace

from hocket.transport.frame import Envelope

COORDINATOR = -1
"""The number under which shards and workers reach the coordinator; shard i is number i."""
BEAT_S = 0.5
RETRY_S = 0.4
"""An order without an answer after these seconds is sent again: it may be lost."""
RESEND_S = 5.0
"""The same for tensors; each repetition waits twice as long as the one before, for a link may be slow."""
_HEADER_BYTES, _TENSOR_BYTES = 56, 9


class OrderQueue:
    """A series of orders for one peer; those that it may not have obeyed are kept.

    >>> from hocket.transport.frame import Kind
    >>> order_queue = OrderQueue()
    >>> [order_queue.add(Envelope(Kind.ORDER), now=0.0).number for _ in range(3)]
    [1, 2, 3]
    >>> order_queue.acknowledge(2)
    >>> [order.number for order in order_queue.overdue(now=1.0)], order_queue.overdue(now=1.1)
    ([3], [])
    """

    def __init__(self) -> None:
        self.sent = 0
        self._kept: deque[Envelope] = deque()
        self._at = 0.0

    def add(self, order: Envelope, now: float) -> Envelope:
        """The order with its number, to be sent now."""
        self.sent, self._at = self.sent + 1, now
        self._kept.append(replace(order, number=self.sent))
        return self._kept[-1]

    def acknowledge(self, obeyed: int) -> None:
        """The peer has obeyed so many orders."""
        while self._kept and self._kept[0].number <= obeyed:
            self._kept.popleft()

    def overdue(self, now: float) -> list[Envelope]:
        """Orders to be sent again now."""
        if not self._kept or now - self._at < RETRY_S:
            return []
        self._at = now
        return list(self._kept)


def message_bytes(message: Envelope) -> int:
    metadata = len(json.dumps(message.metadata, separators=(",", ":")))
    return _HEADER_BYTES + _TENSOR_BYTES * len(message.tensors) + metadata + message.tensor_bytes
