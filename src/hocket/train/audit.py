"""``check="audit"``: workers compare what they do while they train, and the first difference is named.

Every exchange that a worker submits makes a record (what is exchanged, of which bucket, how many values). Where all replicas must
stay equal, every step makes one, too (a checksum of the weights' bits). The k-th records of all workers are gathered while the
training goes on. They have process groups of their own, so that an exchange out of order, which may wait for ever, does not hold
them up. A difference is raised at the next exchange or step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.train.runtimes.base import Binding, Runtime
from hocket.train.watch import check_nonfinite

AUDIT = "audit"
_TEXT_BYTES = 96
_WORDS = _TEXT_BYTES // 8
_WAIT_S = 10.0
"""How long a step waits for the records of others: they may be blocked in an exchange out of order."""


@dataclass(frozen=True)
class Checks:
    """What a job checks in every step.

    ``check=True`` makes workers agree, in each exchange, on unused parameters and on gradients with NaN or Inf; ``False`` leaves
    this out. ``"audit"`` also compares the workers' exchanges and, under ``bulk``, their weights, and names the first difference.
    A gradient with NaN or Inf ends the run (``nonfinite="raise"``) or is left out (``"skip"``).

    >>> Checks(nonfinite="skip")
    Checks(check=True, nonfinite='skip')
    """

    check: bool | str = True
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        if self.check not in (True, False, AUDIT):
            raise HocketError(f"check={self.check!r}: use True, False, 'audit' or a hocket.Checks.")
        check_nonfinite(self.nonfinite)

    @classmethod
    def parse(cls, given: Checks | bool | str) -> Checks:
        """The object itself, or the one of a short form: ``True``, ``False`` or ``"audit"``."""
        return given if isinstance(given, Checks) else cls(given)


class Audit:
    """Compares the workers of one job; a handle, whose :meth:`remove` ends it."""

    def __init__(self, binding: Binding, runtime: Runtime) -> None:
        strategy = binding.strategy
        self.binding, self.runtime, self.strategy = binding, runtime, strategy
        self.equal = strategy.keeps_replicas_equal
        self.cluster = runtime.cluster.for_job()
        self._open: deque[tuple[int, Callable[[], Tensor], Any]] = deque()
        self._before = self._checksum()
        self._touched = False
        self._unequal: tuple[int, Tensor] | None = None
        runtime.cluster.on_submit = self.submitted
        self._handles = [binding.optimizer.register_step_pre_hook(lambda *_: self._before_step())]

    def follow(self) -> Audit:
        """Check weights after each step; call this after the job has set its own hook."""
        self._handles.append(self.binding.optimizer.register_step_post_hook(lambda *_: self._after_step()))
        return self

    def submitted(self, what: str) -> None:
        """An exchange begins."""
        self._look(0.0)
        self._record(what, torch.zeros_like(self._before))

    def remove(self) -> None:
        """Compare the last records and end the audit."""
        for handle in self._handles:
            handle.remove()
        self.runtime.cluster.on_submit = None
        try:
            self._judge()
        finally:
            self.cluster.release()

    # --- records -------------------------------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        self._judge()
        self._touched = self.equal and bool((self._checksum() != self._before).any())

    def _after_step(self) -> None:
        if self.equal:
            self._before = self._checksum()
            self._record(f"weights after step {self.runtime.step}", self._before)

    def _record(self, what: str, checksum: Tensor) -> None:
        text = torch.frombuffer(bytearray(what.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.int64)
        record = torch.cat([text, torch.tensor([int(self._touched)]), checksum]).unsqueeze(0)
        ticket = self.cluster.start(lambda: self.cluster.all_gather_metrics(record))
        self._open.append((self.runtime.step, ticket, getattr(ticket, "done", None)))

    def _look(self, wait_s: float) -> None:
        """Compare the records that have arrived."""
        while self._open:
            step, ticket, done = self._open[0]
            if done is not None and not done.wait(wait_s):
                return
            self._open.popleft()
            self._compare(ticket(), step)

    def _compare(self, records: Tensor, step: int) -> None:
        whats = [row.numpy().tobytes().decode(errors="replace").strip() for row in records[:, :_WORDS]]
        if (odd := _odd_one(whats)) is not None:
            other = 0 if odd else 1
            raise HocketError(
                f"After step {step} worker {odd} exchanges {whats[odd]}, but worker {other} {whats[other]}: workers must call "
                "backward, step, averaged and finish equally often and in the same order."
            )
        if self._unequal is None and bool((records[:, _WORDS + 1 :] != records[0, _WORDS + 1 :]).any()):
            self._unequal = step, records

    def _judge(self) -> None:
        """Raise where weights differ; all workers have made the same records when they come here, so they may gather more."""
        self._look(_WAIT_S)
        if self._unequal is None:
            return
        (step, records), self._unequal = self._unequal, None
        sums = [tuple(row) for row in records[:, _WORDS + 1 :].tolist()]
        odd = _odd_one(sums) or 0
        touched = records[:, _WORDS].nonzero().flatten().tolist()
        if touched and len(touched) < len(sums):
            odd = touched[0]
        other = next(k for k in range(len(sums)) if sums[k] != sums[odd])
        why = f"worker {odd} changed it outside the optimiser's step" if odd in touched else "the update was not the same"
        raise HocketError(
            f"Parameter {self._parameter(odd, other)} of worker {odd} differs from worker {other}'s after step {step}: {why}; "
            f"under {self.strategy} all replicas must stay equal."
        )

    def _parameter(self, odd: int, other: int) -> str:
        """The first parameter of which two workers have other bits; a collective, for which all have seen the difference."""
        slots = [(s.name, view) for b, rows in zip(self.binding.layout.buckets, self.binding.weights, strict=True)
                 for s, view in zip(b.slots, b.views(rows, 0), strict=True)]  # fmt: skip
        ours = torch.stack([_bits(view) for _, view in slots]).unsqueeze(0)
        everyone = self.cluster.start(lambda: self.cluster.all_gather_metrics(ours))()
        differs = (everyone[odd] != everyone[other]).nonzero().flatten().tolist()
        return slots[differs[0]][0] if differs else "(equal again)"

    def _checksum(self) -> Tensor:
        """One number per bucket; none where replicas may differ."""
        return torch.stack([_bits(rows) for rows in self.binding.weights]) if self.equal else torch.zeros(0, dtype=torch.int64)


def refuse_audit(check: bool | str, runtime: Runtime, whole: bool) -> None:
    """Refuse an audit of workers that cannot be compared step by step."""
    if check == AUDIT and not (runtime.synchronous and runtime.in_rows and whole):
        raise HocketError(
            "check='audit' compares workers that step together and hold the whole model; leave mesh=, fully_shard(…) and "
            "sharding='fsdp' out, use a strategy without servers and async, or use check=True."
        )


def audited(binding: Binding, runtime: Runtime, hook: Callable[[], list[Any]]) -> list[Any]:
    """The handles of a job's hooks, which ``hook`` makes, and of an audit around them, where the job asks for one."""
    audit = Audit(binding, runtime) if binding.check == AUDIT and not runtime.alone else None
    handles = hook()
    runtime.hooked()  # its own hooks may change weights after a step, so the audit's come last
    return handles if audit is None else [*handles, audit.follow()]


def _bits(values: Tensor) -> Tensor:
    """A checksum of a tensor's bits: the sum of its 8-byte words, and of the bytes left over."""
    raw = values.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole]
    words = words if words.storage_offset() % 8 == 0 else words.clone()
    return (words.view(torch.int64).sum() + raw[whole:].sum()).cpu()


def _odd_one(values: list[Any]) -> int | None:
    """The first that differs from what most have; of two the second. None: all are equal."""
    if len(set(values)) < 2:
        return None
    usual = Counter(values).most_common(1)[0][0]
    return next(k for k, value in enumerate(values) if value != usual)
