"""A worker's own figures: where its seconds went, how many bytes it sent and received. They travel with every push.

*Wait* is how long shards held an answer back while the worker waited; the rest of that time is *transfer*; what moved
while the worker computed is *hidden*. Bytes of both directions count at the worker, so that the sum over workers is what the job
moved; joining, heartbeats and status requests do not count. Without servers a worker also counts the staleness of its gradients.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hocket.cluster.ledger import Entry
from hocket.cluster.step_times import bin_of, described, percentile

MAX_STALENESS = 4095
"""Staler gradients count as this stale, so that the histogram fits into a message."""
STEP_TIMES = ("step_p50_s", "step_p99_s")
"""The percentiles of a worker's computing time per step."""
DATA = ("data_wait_s", "data_bytes", "data_skipped")
"""The keys of what a worker reads while it trains."""


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
    staleness: dict[int, int] = field(default_factory=dict)
    """Without servers: how many gradients had which staleness, the number of contributions of other workers that arrived between
    reading the gradient's weights and applying it."""
    steps: dict[int, int] = field(default_factory=dict)
    """How many steps computed for how long: a histogram of :mod:`hocket.cluster.step_times`."""
    step_ended: float | None = None
    stalled_s: float = 0.0
    """Wait and transfer when the last step ended."""
    data_wait_s: float = 0.0
    """Steps waited for so long for data that are read while training; then bytes of samples read, and samples left out."""
    data_bytes: int = 0
    data_skipped: int = 0
    begun: float | None = None
    paused: float | None = None

    def begin(self, now: float) -> None:
        """Training begins; time before counts as set-up."""
        self.wait_s = self.transfer_s = self.hidden_s = 0.0
        self.bytes_sent = self.exchanges = 0
        self.begun, self.step_ended = now, None

    def pause(self, now: float) -> None:
        """Time stops counting (evaluation, checkpoints)."""
        if self.paused is None:
            self.paused = now

    def resume(self, now: float) -> None:
        """Time counts again."""
        if self.paused is not None and self.begun is not None:
            self.begun += now - self.paused
            self.step_ended = None if self.step_ended is None else self.step_ended + now - self.paused
        self.paused = None

    def stalled(self, blocked_s: float, held_s: float, hidden_s: float) -> None:
        """One exchange has ended: the worker waited for it for ``blocked_s``, shards held the answer back for ``held_s``."""
        wait = min(held_s, blocked_s)
        self.wait_s += wait
        self.transfer_s += blocked_s - wait
        self.hidden_s += hidden_s
        self.exchanges += 1

    def end_step(self, now: float) -> None:
        """A step has ended; the time in which the worker did not wait for exchanges it computed."""
        stalled = self.wait_s + self.transfer_s
        if self.step_ended is not None:
            place = bin_of(now - self.step_ended - (stalled - self.stalled_s))
            self.steps[place] = self.steps.get(place, 0) + 1
        self.step_ended, self.stalled_s = now, stalled

    def add_loss(self, loss: float) -> None:
        self.loss += loss
        self.losses += 1

    def add_data(self, data_wait_s: float = 0.0, data_bytes: float = 0, data_skipped: float = 0) -> None:
        """Count the seconds, bytes and skipped samples of reading a mini-batch."""
        self.data_wait_s += data_wait_s
        self.data_bytes += int(data_bytes)
        self.data_skipped += int(data_skipped)

    def add_staleness(self, age: int) -> None:
        """A gradient of this staleness was applied."""
        age = min(age, MAX_STALENESS)
        self.staleness[age] = self.staleness.get(age, 0) + 1

    def describe(self, now: float) -> dict[str, Any]:
        until = now if self.paused is None else self.paused
        seconds = 0.0 if self.begun is None else until - self.begun
        plain = {name: getattr(self, name) for name in ("bytes_sent", "exchanges", "nonfinite", "lost", "loss", "losses")}
        times = {"seconds": seconds, "wait_s": self.wait_s, "transfer_s": self.transfer_s, "transfer_hidden_s": self.hidden_s}
        staleness = sorted(self.staleness.copy().items())  # another thread may ask
        steps = self.steps.copy()
        times |= {name: float(f"{percentile(steps, share):.3g}") for name, share in zip(STEP_TIMES, (0.5, 0.99), strict=True)}
        times |= {name: getattr(self, name) for name in DATA} if self.data_bytes else {}
        return {**times, **plain, "staleness": {str(age): count for age, count in staleness}}


_COUNTS = ("bytes_sent", "exchanges", "nonfinite", "lost", "losses", "data_bytes", "data_skipped")
_MAX_SECONDS = 1e12


def checked(fields: Any) -> dict[str, Any]:
    """The account in a message; ValueError where it is not one.

    >>> checked({"seconds": 3.0, "bytes_sent": 5, "staleness": {"0": 1}})
    {'seconds': 3.0, 'bytes_sent': 5, 'staleness': {'0': 1}}
    """
    if not isinstance(fields, Mapping):
        raise ValueError("an account is a mapping")
    for name, value in fields.items():
        if name == "staleness":
            right = isinstance(value, Mapping) and len(value) <= MAX_STALENESS + 1
            right = right and all(age.isdecimal() and type(count) is int for age, count in value.items())
        elif name in _COUNTS:
            right = type(value) is int and 0 <= value < 1 << 62
        elif name in (*_SECONDS, *STEP_TIMES, "data_wait_s"):
            right = isinstance(value, int | float) and abs(value) < _MAX_SECONDS
        else:
            right = name == "loss" and isinstance(value, float | int) and (isinstance(value, float) or abs(value) < 1 << 62)
        if not right:
            raise ValueError(f"an account has no such {name[:50]}")
    return dict(fields)


_SECONDS = ("seconds", "wait_s", "transfer_s", "transfer_hidden_s")


def entry_of(accounts: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]] | None = None) -> tuple[Entry, float | None]:
    """The accounts of all workers as an entry of the ledger, and the mean loss, since those of ``before``.

    >>> one, other = {"seconds": 3.0, "wait_s": 1.0, "bytes_sent": 5, "loss": 4.0, "losses": 2}, {"seconds": 5.0}
    >>> entry, loss = entry_of({"0": one, "1": other})
    >>> entry.seconds, entry.compute_s, entry.bytes_sent, loss
    (4.0, 3.5, 5, 2.0)
    """
    total, count = partial(_total, accounts, before or {}), max(len(accounts), 1)
    seconds, wait, transfer, hidden = (total(name) / count for name in _SECONDS)
    counts = {name: int(total(name)) for name in ("bytes_sent", "exchanges", "nonfinite")}
    entry = Entry(seconds, max(seconds - wait - transfer, 0.0), wait, transfer, hidden, **counts)
    losses = total("losses")
    return entry, total("loss") / losses if losses else None


def data_of(accounts: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]] | None = None) -> dict[str, float]:
    """The costs of reading data since ``before``: mean seconds, sums of bytes and of skipped samples; empty where nobody read.

    >>> data_of({"0": {"data_wait_s": 1.0, "data_bytes": 5}, "1": {"data_wait_s": 2.0, "data_bytes": 6}}), data_of({"0": {}})
    ({'data_wait_s': 1.5, 'data_bytes': 11, 'data_skipped': 0}, {})
    """
    if not any("data_bytes" in account for account in accounts.values()):
        return {}
    wait, read, skipped = (_total(accounts, before or {}, name) for name in DATA)
    return dict(zip(DATA, (wait / len(accounts), int(read), int(skipped)), strict=True))


def _total(accounts: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]], name: str) -> float:
    """A figure summed over all workers since ``before``; a replacement starts its account anew."""
    pairs = [(account.get(name, 0), before.get(worker, {}).get(name, 0)) for worker, account in accounts.items()]
    return float(sum(new - old if new >= old else new for new, old in pairs))


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The account of a worker added to that of the process that it replaced.

    >>> added({"bytes_sent": 5, "staleness": {"0": 1}}, {"bytes_sent": 2, "staleness": {"0": 2, "1": 1}})
    {'bytes_sent': 7, 'staleness': {'0': 3, '1': 1}}
    """
    names = dict.fromkeys((*one, *other))
    sums = {name: one.get(name, 0) + other.get(name, 0) for name in names if name not in ("staleness", *STEP_TIMES)}
    steps = {name: other.get(name) or one.get(name, 0.0) for name in STEP_TIMES if name in names}  # of the present process
    return {**sums, **steps, "staleness": staleness_of([one, other])}


def steps_of(accounts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The known step times of all workers."""
    workers = range(max(map(int, accounts), default=-1) + 1)
    p50_s, p99_s = ([float(accounts.get(str(worker), {}).get(name, 0.0)) for worker in workers] for name in STEP_TIMES)
    return described(p50_s, p99_s)


def staleness_of(accounts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """All workers' staleness in one histogram, the freshest first.

    >>> staleness_of([{"staleness": {"0": 2, "10": 1}}, {"staleness": {"2": 3, "0": 1}}, {}])
    {'0': 3, '2': 3, '10': 1}
    """
    sums: Counter[int] = Counter()
    for account in accounts:
        sums.update({int(age): int(count) for age, count in account.get("staleness", {}).items()})
    return {str(age): sums[age] for age in sorted(sums)}


def staleness_since(found: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The histogram of the gradients since ``before``.

    >>> staleness_since({"0": 3, "1": 5}, {"0": 3, "1": 4})
    {'1': 1}
    """
    return {age: count - before.get(age, 0) for age, count in found.items() if count > before.get(age, 0)}
