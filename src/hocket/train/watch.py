"""NaN and Inf in gradients: counted, named, and raised or left out; in weights: named and raised.

A sum that is finite clears a bucket cheaply; only a bad one is looked at closely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hocket.cluster.dtensor import local
from hocket.cluster.layout import Layout
from hocket.errors import HocketError, NonFiniteGradient


def check_nonfinite(policy: str) -> None:
    """Refuse an unknown policy for NaN and Inf."""
    if policy not in ("raise", "skip"):
        raise HocketError(f"nonfinite={policy!r}: use 'raise' (end with the parameter's name) or 'skip' (leave that gradient out).")


def first_nonfinite(layout: Layout, weights: Sequence[Tensor]) -> tuple[int, str] | None:
    """The first row and parameter of ``weights`` (rows ``[rows, values]`` per bucket) that hold NaN or Inf."""
    for bucket, rows in zip(layout.buckets, weights, strict=True):
        if not bool(torch.isfinite(rows.sum())) and bool((bad := ~torch.isfinite(rows)).any()):
            row, place = (int(k) for k in bad.nonzero()[0])
            return row, next(s.name for s in bucket.slots if s.offset <= place < s.offset + s.size)
    return None


def check_weights(layout: Layout, rows: Sequence[Tensor], epoch: int) -> None:
    """Refuse to go on where weights (rows ``[1, values]`` per bucket) of workers that do not step together hold NaN or Inf."""
    if (found := first_nonfinite(layout, rows)) is not None:
        raise NonFiniteGradient(
            f"The weights of {found[1]} hold NaN or Inf after epoch {epoch}; lower the rate (asynchronous updates add up: "
            "N workers make N times as many), clip gradients, or use compensation=rate."
        )


def _seem_finite(grads: list[Tensor]) -> bool:
    """Whether a few cheap operations show that all gradients are finite; True is certain."""
    if grads[0].is_cuda and not any(g.is_sparse or not g.numel() for g in grads):  # a handful of kernels, instead of some for each
        return bool(torch.isfinite(nn.utils.get_total_norm(grads, math.inf)))
    return bool(torch.isfinite(torch.stack([g.sum().float() for g in grads]).sum()))


class Count(Protocol):
    """Counts gradients that are not finite."""

    nonfinite: int


class Where(Protocol):
    """The owner of the gradients: a cluster, or a single worker."""

    @property
    def ledger(self) -> Count: ...

    @property
    def workers(self) -> range: ...


class NonFinite:
    """Looks at gradients before they travel; ``policy`` is ``"raise"`` or ``"skip"``."""

    def __init__(self, policy: str, layout: Layout, cluster: Where) -> None:
        self.policy, self.layout, self.cluster = policy, layout, cluster
        self._found = False
        self._unread: list[tuple[int, Tensor, int]] = []
        """Buckets that were looked at on a device: per row the place of the first value that is not finite, or −1; the step."""
        self.sentence = ""

    @property
    def found(self) -> bool:
        """Whether any gradient since the last judgement was not finite; reads what was left on the device."""
        unread, self._unread = self._unread, []
        if unread:
            places = torch.stack([first for _, first, _ in unread]).tolist()  # the only wait for the device
            for (bucket, _, step), rows in zip(unread, places, strict=True):
                for row, place in enumerate(rows):
                    if place >= 0:
                        self._describe([s.name for s in self.layout.buckets[bucket].slots if s.offset <= place][-1:], row, step)
        return self._found

    def look(self, bucket: int, rows: Tensor, step: int) -> None:
        """Rows that hold NaN or Inf are zeroed (so nobody else catches it), counted, and described."""
        if rows.device.type == "cpu":
            self._look_now(bucket, rows, step)
        else:
            self._look_later(bucket, rows, step)

    def _look_later(self, bucket: int, rows: Tensor, step: int) -> None:
        """Without a wait for the device, which still computes the gradients of other buckets."""
        finite = torch.isfinite(rows)
        sound = finite.all(1)
        self._unread.append((bucket, torch.where(sound, -1, finite.view(torch.uint8).argmin(1)), step))
        rows.masked_fill_(~sound.unsqueeze(1), 0.0)

    def _look_now(self, bucket: int, rows: Tensor, step: int) -> None:
        if bool(torch.isfinite(rows.sum())):
            return
        bad = ~torch.isfinite(rows)
        if not bool(bad.any()):
            return
        for row in bad.any(1).nonzero().flatten().tolist():
            self._describe(self._names(bucket, bad[row]), row, step)
            rows[row].zero_()

    def check_local(self, params: list[list[nn.Parameter]], step: int) -> None:
        """The same for gradients that do not travel this step: this worker's own."""
        held = [[None if p.grad is None else local(p.grad) for p in group] for group in params]
        grads = [g for group in held for g in group if g is not None]
        if not grads or _seem_finite(grads):
            return
        for bucket, group in zip(self.layout.buckets, held, strict=True):
            bad = [s.name for s, g in zip(bucket.slots, group, strict=True) if g is not None and not bool(torch.isfinite(g).all())]
            if bad:
                self._describe(bad, 0, step)
                for g in group:  # the whole bucket, as when it travels
                    if g is not None:
                        g.zero_()
        self.judge(self.found)

    def judge(self, found_by_any: bool) -> None:
        """Raise, if any worker found NaN or Inf and the policy is ``"raise"``."""
        self._found, self._unread = False, []  # where gradients travel during the next step, the sentence is of the last one
        if found_by_any and self.policy == "raise":
            own, self.sentence = self.sentence, ""
            raise NonFiniteGradient(own or "Another worker's gradient holds NaN or Inf; its message names the parameter.")

    def _names(self, bucket: int, bad: Tensor) -> list[str]:
        return [s.name for s in self.layout.buckets[bucket].slots if bool(bad[s.offset : s.offset + s.size].any())]

    def _describe(self, names: list[str], row: int, step: int) -> None:
        self.cluster.ledger.nonfinite += 1
        self._found = True
        which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self.sentence = (
            f"The gradient of {which} holds NaN or Inf at step {step} on worker {self.cluster.workers.start + row}; "
            "lower the rate, clip gradients, or leave such gradients out (hocket.Checks(nonfinite='skip'), or --nonfinite skip)."
        )
