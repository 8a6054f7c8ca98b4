"""The ledger: where the seconds went and how many bytes were sent.

In one exchange, *wait* = latest start − own start and *transfer* = end − latest start. Only the part that is not hidden behind
computing counts into these; the hidden part is ``transfer_hidden_s``. So compute + wait + transfer add up to ``seconds``.

Time stamps are local; the latest start of each exchange is found once per epoch by gathering everyone's starts (a barrier per
step would cost milliseconds and inflate what it measures). Virtual workers have no clocks yet: their seconds are ``None``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One exchange as one process saw it, in seconds of the shared clock."""

    first_launch: float
    last_launch: float
    blocked: float
    end: float


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
    """Exposed wait, exposed transfer and hidden transfer of ``spans``, given everyone's latest start of each.

    >>> split([Span(0.0, 1.0, 2.0, 5.0)], torch.tensor([3.0]))  # the last worker started at 3; we blocked from 2 to 5
    (1.0, 2.0, 0.0)
    """
    wait = transfer = hidden = 0.0
    for span, late in zip(spans, latest.tolist(), strict=True):
        exposed = max(span.end - span.blocked, 0.0)
        waited = min(max(late - span.blocked, 0.0), exposed)
        moving = max(span.end - max(late, span.first_launch), 0.0)
        wait += waited
        transfer += exposed - waited
        hidden += max(moving - (exposed - waited), 0.0)
    return wait, transfer, hidden


@dataclass
class Ledger:
    """Written by the cluster alone; read it with :meth:`summary`."""

    sent: Tensor
    """Bytes sent by each worker hosted here since the last :meth:`close`, where their number is known on the CPU; int64 ``[rows]``."""
    sent_varying: Tensor
    """The same for messages whose size depends on the data, on the cluster's device (reading it at once would stall the device)."""
    timed: bool
    spans: list[Span] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    nonfinite: int = 0
    exchanges: int = 0
    offset_s: float = 0.0
    _seconds: float = 0.0
    _since: float | None = None

    @property
    def bytes_sent(self) -> Tensor:
        """All bytes sent by each worker hosted here since the last :meth:`close`."""
        return self.sent + self.sent_varying.cpu()

    def now(self) -> float:
        """This process's time on the clock that all share."""
        return time.monotonic() + self.offset_s

    @property
    def running(self) -> bool:
        """Whether time counts now."""
        return self._since is not None

    def resume(self) -> None:
        """Time counts from here (evaluation and checkpoints are outside)."""
        if self._since is None:
            self._since = time.monotonic()

    def pause(self) -> None:
        """Time stops counting."""
        if self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    def record(self, span: Span | None) -> None:
        """One exchange has ended."""
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
            starts = torch.tensor([s.last_launch for s in self.spans], dtype=torch.float64).expand(rows, -1)
            latest = collect(starts).amax(0) if self.spans else starts.new_zeros(0)
            wait, transfer, hidden = split(self.spans, latest)
            figures[:, :4] = torch.tensor([self._seconds, wait, transfer, hidden], dtype=torch.float64)
        figures[:, 4] = self.bytes_sent.to(torch.float64)
        figures[0, 5] = self.nonfinite
        everyone = collect(figures)
        seconds, wait, transfer, hidden = everyone[:, :4].mean(0).tolist()
        sent, nonfinite = everyone[:, 4:].sum(0).tolist()
        entry = Entry(bytes_sent=int(sent), exchanges=self.exchanges, nonfinite=int(nonfinite))
        if self.timed:
            entry.seconds, entry.wait_s, entry.transfer_s, entry.transfer_hidden_s = seconds, wait, transfer, hidden
            entry.compute_s = max(seconds - wait - transfer, 0.0)
        self.entries.append(entry)
        self.sent.zero_()
        self.sent_varying.zero_()
        self.spans, self.nonfinite, self.exchanges, self._seconds = [], 0, 0, 0.0
        if running:
            self.resume()
        return entry

    def total(self) -> Entry:
        """All closed epochs together."""
        return sum(self.entries, Entry())
