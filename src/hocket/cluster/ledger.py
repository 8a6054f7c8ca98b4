"""The ledger: seconds of computing, waiting and transfer, and bytes sent.

In one exchange, *wait* = latest start − own start and *transfer* = end − latest start. Only the part that is not hidden behind
computing counts into these; the hidden part is ``transfer_hidden_s``. So compute + wait + transfer add up to ``seconds``.

Time stamps are local; the latest start of each exchange is found once per epoch by gathering the starts of all workers (a barrier
per step would cost milliseconds and inflate what it measures). Virtual workers on a described cluster have a virtual clock
(:mod:`hocket.cluster.clock`), which gives the same figures in virtual seconds; without one their seconds are ``None``.

The ledger does not grow with the number of exchanges: of more than ``MOST_SPANS`` it keeps a sample, the same on all workers (by a
hash of the exchange's number). Seconds of wait and transfer together stay exact; how they part is then the sample's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.step_times import StepTimes
from hocket.noise import fold

MOST_SPANS = 2048
"""The most exchanges of an epoch that are kept."""
_OPEN = 64
"""So many stamps wait to be read: events of a device are read long after they happened, so that nobody waits for it."""


@dataclass(frozen=True)
class Span:
    """One exchange as one process saw it, in stamps of its clock."""

    first_launch: Any
    last_launch: Any
    blocked: Any
    end: Any
    latest: float | None = None
    """The latest start among all workers, in seconds, where the exchange tells it; otherwise :meth:`Ledger.close` gathers all."""


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


@dataclass(frozen=True)
class StepEnd:
    """When a step ended, in a stamp; None: time stopped counting."""

    stamp: Any


@dataclass
class _Sample:
    """Exchanges of which at most ``MOST_SPANS`` are kept; all of them count in the sums."""

    kept: list[tuple[int, Span]] = field(default_factory=list)
    """By the number of the exchange."""
    count: int = 0
    exposed_s: float = 0.0
    halvings: int = 0

    def add(self, span: Span) -> float:
        """One more exchange; the seconds that it took of the worker's time."""
        exposed = max(span.end - span.blocked, 0.0)
        self.exposed_s += exposed
        if self._keeps(self.count):
            self.kept.append((self.count, span))
        self.count += 1
        if len(self.kept) >= MOST_SPANS:
            self.halvings += 1
            self.kept = [(number, span) for number, span in self.kept if self._keeps(number)]
        return exposed

    def split(self, latest: Tensor) -> tuple[float, float, float]:
        """Exposed wait, exposed transfer and hidden transfer of all, given the latest start of each that is kept."""
        wait, transfer, hidden = split([span for _, span in self.kept], latest)
        if not self.halvings:
            return wait, transfer, hidden
        scale = self.exposed_s / (wait + transfer) if wait + transfer else 0.0
        return wait * scale, transfer * scale, hidden * self.count / max(len(self.kept), 1)

    def _keeps(self, number: int) -> bool:
        return self.halvings == 0 or fold(number) >> (32 - self.halvings) == 0


@dataclass
class Ledger:
    """Written by the cluster alone; read it with :meth:`summary`."""

    sent: Tensor
    """Bytes sent by each worker hosted here since the last :meth:`close`, as far as known on the CPU; int64 ``[rows]``."""
    sent_varying: Tensor
    """The same for messages whose size depends on the data, on the cluster's device (reading it at once would stall the device)."""
    timed: bool
    entries: list[Entry] = field(default_factory=list)
    own_entries: list[Entry] = field(default_factory=list)
    """The same epochs as the workers hosted here alone spent them."""
    nonfinite: int = 0
    exchanges: int = 0
    computed: list[float] = field(default_factory=list)
    """Seconds that each of all workers computed in the epoch closed last, in all processes; empty without time stamps."""
    clock: HostClock = field(default_factory=HostClock)
    predict: Callable[[], Tensor] | None = None
    """Seconds, wait, transfer and hidden transfer ``[rows, 4]`` since the last call, from the virtual clock if there is one."""
    counting: bool = True
    """Whether exchanges count; False inside :meth:`Cluster.uncounted`."""
    steps: StepTimes | None = None
    """How long the steps of the workers hosted here took, since the beginning."""
    step_s: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))
    """p50 and p99 of each of all workers by the last :meth:`close`; zeros where steps were not timed."""
    _seconds: float = 0.0
    _since: float | None = None
    _open: deque[Span | StepEnd] = field(default_factory=deque)
    _sample: _Sample = field(default_factory=lambda: _Sample())
    _step_ended: float | None = None
    _exposed_in_step: float = 0.0

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
            self._open.append(StepEnd(None))  # what comes before the next step ends is not a step

    def record(self, span: Span | None) -> None:
        if self.counting:
            self.exchanges += 1
            if span is not None:
                self._append(span)

    def end_step(self) -> None:
        """The workers hosted here have ended a step; what they computed since the last one is its time."""
        if self.timed:
            self._append(StepEnd(self.clock.stamp()))

    @property
    def spans(self) -> list[Span]:
        """The exchanges since the last :meth:`close` that are kept, in seconds."""
        self._settle(0)
        return [span for _, span in self._sample.kept]

    def _append(self, happened: Span | StepEnd) -> None:
        self._open.append(happened)
        if len(self._open) > 2 * _OPEN:
            self._settle(_OPEN)

    def _settle(self, left: int) -> None:
        """Read all stamps but the last ``left``."""
        while len(self._open) > left:
            happened = self._open.popleft()
            if isinstance(happened, Span):
                first, last, blocked, end, latest = vars(happened).values()
                span = Span(*(self.clock.seconds(stamp) for stamp in (first, last, blocked, end)))
                span = replace(span, latest=latest)
                self._exposed_in_step += self._sample.add(span)
                continue
            ended = None if happened.stamp is None else self.clock.seconds(happened.stamp)
            if ended is not None and self._step_ended is not None:
                self.steps = self.steps or StepTimes(self.sent.shape[0])
                took = max(ended - self._step_ended - self._exposed_in_step, 0.0)
                self.steps.add(torch.full((self.sent.shape[0],), took, dtype=torch.float64))
            self._step_ended, self._exposed_in_step = ended, 0.0

    def close(self, collect: Callable[[Tensor], Tensor]) -> Entry:
        """End an epoch: combine all workers' figures (a collective) and start the next."""
        running = self.running
        self.pause()
        rows = self.sent.shape[0]
        figures = torch.zeros(rows, 8, dtype=torch.float64)
        if self.timed:
            spans = self.spans
            starts = torch.tensor([s.last_launch for s in spans], dtype=torch.float64).expand(rows, -1)
            if spans and spans[0].latest is not None:
                latest = torch.tensor([s.latest for s in spans], dtype=torch.float64)
            else:
                latest = collect(starts).amax(0) if spans else starts.new_zeros(0)
            figures[:, :4] = torch.tensor([self._seconds, *self._sample.split(latest)], dtype=torch.float64)
        elif self.predict is not None:
            figures[:, :4] = self.predict()
        figures[:, 4] = self.bytes_sent.to(torch.float64)
        figures[0, 5] = self.nonfinite
        if self.steps is not None:
            figures[:, 6:] = self.steps.percentiles()
        everyone = collect(figures)
        entry = self._entry(everyone)
        self.step_s = everyone[:, 6:]
        if entry.seconds is not None:
            self.computed = (everyone[:, 0] - everyone[:, 1] - everyone[:, 2]).tolist()
        self.entries.append(entry)
        self.own_entries.append(self._entry(figures))
        self.sent.zero_()
        self.sent_varying.zero_()
        self._sample, self.nonfinite, self.exchanges, self._seconds = _Sample(), 0, 0, 0.0
        if running:
            self.resume()
        return entry

    def open(self) -> tuple[Entry, float | None]:
        """Since the last :meth:`close`, what the workers hosted here know without asking others, and the seconds of wait and
        transfer together: which of them were wait is known only once everyone's starts are gathered, at the next close."""
        figures = torch.zeros(self.sent.shape[0], 6, dtype=torch.float64)
        figures[:, 4] = self.bytes_sent.to(torch.float64)
        figures[0, 5] = self.nonfinite
        self._settle(0)
        entry = self._entry(figures)
        if not self.timed:
            entry.seconds = entry.compute_s = entry.wait_s = entry.transfer_s = entry.transfer_hidden_s = None
            return entry, None
        entry.seconds = self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)
        exposed = self._sample.exposed_s
        entry.compute_s = max(entry.seconds - exposed, 0.0)
        if self._sample.count:
            entry.wait_s = entry.transfer_s = entry.transfer_hidden_s = None
        return entry, exposed

    def _entry(self, figures: Tensor) -> Entry:
        """The figures of some workers, one each, as an entry."""
        seconds, wait, transfer, hidden = figures[:, :4].mean(0).tolist()
        sent, nonfinite = figures[:, 4:6].sum(0).tolist()
        entry = Entry(bytes_sent=int(sent), exchanges=self.exchanges, nonfinite=int(nonfinite))
        if self.timed or self.predict is not None:
            entry.seconds, entry.wait_s, entry.transfer_s, entry.transfer_hidden_s = seconds, wait, transfer, hidden
            entry.compute_s = max(seconds - wait - transfer, 0.0)
        return entry

    def total(self) -> Entry:
        """All closed epochs together."""
        return sum(self.entries, Entry())
