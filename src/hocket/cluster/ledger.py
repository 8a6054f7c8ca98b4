"""The ledger: seconds of computing, waiting and transfer, and bytes sent.

In one exchange, *wait* = latest start − own start and *transfer* = end − latest start. Only the part that is not hidden behind
computing counts into these; the hidden part is ``transfer_hidden_s``. So compute + wait + transfer add up to ``seconds``.

Time stamps are local; the latest start of each exchange is found once per epoch by gathering the starts of all workers (a barrier
per step would cost milliseconds and inflate what it measures). Virtual workers on a described cluster have a virtual clock
(:mod:`hocket.cluster.clock`), which gives the same figures in virtual seconds; without one their seconds are ``None``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One exchange as one process saw it, in stamps of its clock."""

    first_launch: Any
    last_launch: Any
    blocked: Any
    end: Any


class HostClock:
    """Stamps are seconds of the clock that all processes share."""

    offset_s: float = 0.0

    def stamp(self) -> Any:
        return time.monotonic() + self.offset_s

    def seconds(self, stamp: Any) -> float:
        return float(stamp)


class CudaClock(HostClock):
    """Stamps are events on the current stream: the host runs ahead of the device, so its time would be wrong."""

    def __init__(self) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._begun = time.monotonic()

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Any) -> float:
        stamp.synchronize()
        return self._begun + self.offset_s + self._base.elapsed_time(stamp) / 1000


@dataclass
class Entry:
    """What an epoch (or a whole run) cost: seconds are means over workers, bytes the sum over workers."""

    seconds: float | None = None
    compute_s: float | None = None
    wait_s: float | None = None
    transfer_s: float | None = None
    transfer_hidden_s: float | None = None
    bytes_sent: int = 0
    exchanges: int = 0
    nonfinite: int = 0

    def __add__(self, other: Entry) -> Entry:
        merged = {}
        for name, a in vars(self).items():
            b = getattr(other, name)
            merged[name] = b if a is None else a if b is None else a + b
        return Entry(**merged)


def split(spans: list[Span], latest: Tensor) -> tuple[float, float, float]:
    """Exposed wait, exposed transfer and hidden transfer of ``spans``, given the latest start of each among all workers.

    >>> split([Span(0.0, 1.0, 2.0, 5.0)], torch.tensor([3.0]))  # the last worker started at 3; we blocked from 2 to 5
    (1.0, 2.0, 0.0)
    """
    first, blocked, end = torch.tensor([[s.first_launch, s.blocked, s.end] for s in spans], dtype=torch.float64).view(-1, 3).T
    wait, transfer, hidden = torch.stack(parts(first, latest, blocked, end)).sum(1).tolist()
    return wait, transfer, hidden


def parts(first: Tensor, late: Tensor, blocked: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exposed wait, exposed transfer and hidden transfer of each exchange."""
    exposed = (end - blocked).clamp(min=0)
    wait = torch.minimum((late - blocked).clamp(min=0), exposed)
    transfer = exposed - wait
    moving = (end - torch.maximum(late, first)).clamp(min=0)
    return wait, transfer, (moving - transfer).clamp(min=0)


@dataclass
class Ledger:
    """Written by the cluster alone; read it with :meth:`summary`."""

    sent: Tensor
    """Bytes sent by each worker hosted here since the last :meth:`close`, as far as known on the CPU; int64 ``[rows]``."""
    sent_varying: Tensor
    """The same for messages whose size depends on the data, on the cluster's device (reading it at once would stall the device)."""
    timed: bool
    spans: list[Span] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    own_entries: list[Entry] = field(default_factory=list)
    """The same epochs as the workers hosted here alone spent them."""
    nonfinite: int = 0
    exchanges: int = 0
    computed: list[float] = field(default_factory=list)
    """Seconds that each of all workers computed in the epoch closed last, in all processes; empty without time stamps."""
    clock: HostClock = field(default_factory=HostClock)
    latest: list[float] | None = None
    """The latest start of each exchange among all workers, where exchanges tell it; otherwise :meth:`close` gathers all starts."""
    predict: Callable[[], Tensor] | None = None
    """Seconds, wait, transfer and hidden transfer ``[rows, 4]`` since the last call, from the virtual clock if there is one."""
    _seconds: float = 0.0
    _since: float | None = None

    @property
    def bytes_sent(self) -> Tensor:
        """All bytes sent by each worker hosted here since the last :meth:`close`."""
        return self.sent + self.sent_varying.cpu()

    @property
    def running(self) -> bool:
        """Whether time counts now."""
        return self._since is not None

    def resume(self) -> None:
        """Time counts from here (evaluation and checkpoints are outside)."""
        if self._since is None:
            self._since = time.monotonic()

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    def record(self, span: Span | None) -> None:
        self.exchanges += 1
        if span is not None:
            self.spans.append(span)

    def close(self, collect: Callable[[Tensor], Tensor]) -> Entry:
        """End an epoch: combine all workers' figures (a collective) and start the next."""
        running = self.running
        self.pause()
        rows = self.sent.shape[0]
        figures = torch.zeros(rows, 6, dtype=torch.float64)
        if self.timed:
            spans = [Span(*(self.clock.seconds(stamp) for stamp in vars(span).values())) for span in self.spans]
            starts = torch.tensor([s.last_launch for s in spans], dtype=torch.float64).expand(rows, -1)
            if self.latest is not None:
                latest, self.latest = torch.tensor(self.latest, dtype=torch.float64), []
            else:
                latest = collect(starts).amax(0) if spans else starts.new_zeros(0)
            wait, transfer, hidden = split(spans, latest)
            figures[:, :4] = torch.tensor([self._seconds, wait, transfer, hidden], dtype=torch.float64)
        elif self.predict is not None:
            figures[:, :4] = self.predict()
        figures[:, 4] = self.bytes_sent.to(torch.float64)
        figures[0, 5] = self.nonfinite
        everyone = collect(figures)
        entry = self._entry(everyone)
        if entry.seconds is not None:
            self.computed = (everyone[:, 0] - everyone[:, 1] - everyone[:, 2]).tolist()
        self.entries.append(entry)
        self.own_entries.append(self._entry(figures))
        self.sent.zero_()
        self.sent_varying.zero_()
        self.spans, self.nonfinite, self.exchanges, self._seconds = [], 0, 0, 0.0
        if running:
            self.resume()
        return entry

    def open(self) -> tuple[Entry, float | None]:
        """Since the last :meth:`close`, what the workers hosted here know without asking others, and the seconds of wait and
        transfer together: which of them were wait is known only once everyone's starts are gathered, at the next close."""
        figures = torch.zeros(self.sent.shape[0], 6, dtype=torch.float64)
        figures[:, 4] = self.bytes_sent.to(torch.float64)
        figures[0, 5] = self.nonfinite
        entry = self._entry(figures)
        if not self.timed:
            entry.seconds = entry.compute_s = entry.wait_s = entry.transfer_s = entry.transfer_hidden_s = None
            return entry, None
        entry.seconds = self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)
        exposed = sum(max(self.clock.seconds(s.end) - self.clock.seconds(s.blocked), 0.0) for s in self.spans)
        entry.compute_s = max(entry.seconds - exposed, 0.0)
        if self.spans:
            entry.wait_s = entry.transfer_s = entry.transfer_hidden_s = None
        return entry, exposed

    def _entry(self, figures: Tensor) -> Entry:
        """The figures of some workers ``[workers, 6]`` as an entry."""
        seconds, wait, transfer, hidden = figures[:, :4].mean(0).tolist()
        sent, nonfinite = figures[:, 4:].sum(0).tolist()
        entry = Entry(bytes_sent=int(sent), exchanges=self.exchanges, nonfinite=int(nonfinite))
        if self.timed or self.predict is not None:
            entry.seconds, entry.wait_s, entry.transfer_s, entry.transfer_hidden_s = seconds, wait, transfer, hidden
            entry.compute_s = max(seconds - wait - transfer, 0.0)
        return entry

    def total(self) -> Entry:
        """All closed epochs together."""
        return sum(self.entries, Entry())
