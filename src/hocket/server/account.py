"""A worker's own account: where its seconds went and how many bytes it sent and was sent. It travels with every push.

*Wait* is how long shards held it back, as far as it stood still for it; the rest of standing still is *transfer*; what moved while
it computed is *hidden*. Bytes of both ways count here, so that those of all workers add up to what the job moved; setting up,
beats and orders do not count. Where there are no servers a worker also counts how old its own gradients were (``ages``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.cluster.ledger import Entry

_OLDEST = 4095
"""Older gradients count as this old, so that all ages fit into a note."""


@dataclass
class Account:
    """Since :meth:`begin`."""

    wait_s: float = 0.0
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    bytes_sent: int = 0
    exchanges: int = 0
    nonfinite: int = 0
    lost: int = 0
    """Exchanges with partners that came to nothing, where there are no servers."""
    loss: float = 0.0
    """The sum of the losses of ``losses`` mini-batches."""
    losses: int = 0
    ages: dict[int, int] = field(default_factory=dict)
    """How many gradients had which age, where there are no servers: that many contributions of others came to what this worker
    holds between the moment when the gradient's weights were read and the moment when it was applied."""
    begun: float | None = None
    paused: float | None = None

    def begin(self) -> None:
        """Training begins: what came before was setting up."""
        self.wait_s = self.transfer_s = self.hidden_s = 0.0
        self.bytes_sent = self.exchanges = 0
        self.begun = time.monotonic()

    def pause(self) -> None:
        """Time stops counting (evaluation, checkpoints)."""
        if self.paused is None:
            self.paused = time.monotonic()

    def resume(self) -> None:
        """Time counts again."""
        if self.paused is not None and self.begun is not None:
            self.begun += time.monotonic() - self.paused
        self.paused = None

    def stood(self, blocked_s: float, held_s: float, hidden_s: float) -> None:
        """One exchange has ended."""
        wait = min(held_s, blocked_s)
        self.wait_s += wait
        self.transfer_s += blocked_s - wait
        self.hidden_s += hidden_s
        self.exchanges += 1

    def add_loss(self, loss: float) -> None:
        """The loss of a mini-batch."""
        self.loss += loss
        self.losses += 1

    def add_age(self, age: int) -> None:
        """A gradient of this age was applied."""
        age = min(age, _OLDEST)
        self.ages[age] = self.ages.get(age, 0) + 1

    def describe(self) -> dict[str, Any]:
        """Plain data for a message."""
        now = time.monotonic() if self.paused is None else self.paused
        seconds = 0.0 if self.begun is None else now - self.begun
        return {
            "seconds": seconds,
            "wait_s": self.wait_s,
            "transfer_s": self.transfer_s,
            "transfer_hidden_s": self.hidden_s,
            "bytes_sent": self.bytes_sent,
            "exchanges": self.exchanges,
            "nonfinite": self.nonfinite,
            "lost": self.lost,
            "loss": self.loss,
            "losses": self.losses,
            "ages": {str(age): count for age, count in sorted(self.ages.copy().items())},  # a copy: another thread may ask
        }


_SECONDS = ("seconds", "wait_s", "transfer_s", "transfer_hidden_s")


def entry_of(accounts: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]] | None = None) -> tuple[Entry, float | None]:
    """Everybody's accounts as an entry of the ledger, and the mean loss, since those of ``before``.

    >>> one, other = {"seconds": 3.0, "wait_s": 1.0, "bytes_sent": 5, "loss": 4.0, "losses": 2}, {"seconds": 5.0}
    >>> entry, loss = entry_of({"0": one, "1": other})
    >>> entry.seconds, entry.compute_s, entry.bytes_sent, loss
    (4.0, 3.5, 5, 2.0)
    """
    before = before or {}

    def since(worker: str, name: str) -> float:
        # A replacement starts its account anew.
        new, old = accounts[worker].get(name, 0), before.get(worker, {}).get(name, 0)
        return float(new - old if new >= old else new)

    def total(name: str) -> float:
        return sum(since(worker, name) for worker in accounts)

    count = max(len(accounts), 1)
    seconds, wait, transfer, hidden = (total(name) / count for name in _SECONDS)
    entry = Entry(
        seconds=seconds,
        compute_s=max(seconds - wait - transfer, 0.0),
        wait_s=wait,
        transfer_s=transfer,
        transfer_hidden_s=hidden,
        bytes_sent=int(total("bytes_sent")),
        exchanges=int(total("exchanges")),
        nonfinite=int(total("nonfinite")),
    )
    losses = total("losses")
    return entry, total("loss") / losses if losses else None


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two accounts as one: that of a worker and of the one whose place it took.

    >>> added({"bytes_sent": 5, "ages": {"0": 1}}, {"bytes_sent": 2, "ages": {"0": 2, "1": 1}})
    {'bytes_sent': 7, 'ages': {'0': 3, '1': 1}}
    """
    names = dict.fromkeys((*one, *other))
    sums = {name: one.get(name, 0) + other.get(name, 0) for name in names if name != "ages"}
    return {**sums, "ages": ages_of([one, other])}


def ages_of(accounts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Everybody's ages in one histogram, the youngest first.

    >>> ages_of([{"ages": {"0": 2, "10": 1}}, {"ages": {"2": 3, "0": 1}}, {}])
    {'0': 3, '2': 3, '10': 1}
    """
    sums: Counter[int] = Counter()
    for account in accounts:
        sums.update({int(age): int(count) for age, count in account.get("ages", {}).items()})
    return {str(age): sums[age] for age in sorted(sums)}


def ages_since(ages: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What has come to a histogram.

    >>> ages_since({"0": 3, "1": 5}, {"0": 3, "1": 4})
    {'1': 1}
    """
    return {age: count - before.get(age, 0) for age, count in ages.items() if count > before.get(age, 0)}
