"""The partners of asynchronous workers: pure functions, the same for virtual workers and for real ones.

In pairs (``async + gossip``) workers with an even number *call*, those with an odd number *answer*; a caller calls the workers at
distance 1, 3, 5, … in turn; ``ring``: its two neighbours in turn; ``random``: any odd worker. Under push-sum a worker sends to the
workers at distance 1, 2, 4, … in turn.
"""

from __future__ import annotations

from hocket.noise import fold


def answerer(kind: str, worker: int, call: int, workers: int, seed: int) -> int:
    """The worker that caller ``worker`` of ``workers`` calls at its ``call``-th call (from 0); its number is odd.

    >>> [answerer("rotating", 0, call, 6, 0) for call in range(4)], [answerer("ring", 2, call, 6, 0) for call in range(3)]
    ([1, 3, 5, 1], [3, 1, 3])
    """
    answerers = workers // 2
    if kind == "ring":
        return 2 * ((worker // 2 - call % 2) % answerers) + 1
    if kind == "random":
        return 2 * (fold(seed, worker, call, 0xAD) % answerers) + 1
    return 2 * ((worker // 2 + call) % answerers) + 1


def target(worker: int, sending: int, workers: int) -> int:
    """The worker that receives the ``sending``-th half (from 0) of ``worker``.

    >>> [target(3, sending, 6) for sending in range(4)]
    [4, 5, 1, 4]
    """
    rounds = max(1, (workers - 1).bit_length())
    return (worker + 2 ** (sending % rounds)) % workers
