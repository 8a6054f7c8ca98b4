"""Error feedback: what was not sent is added next time (Seide 2014; Karimireddy 2019, arXiv:1901.09847).

``a = x + β·e;  result, sent = send(a);  e ← a − sent``. The formula stands here alone. The decay ``β`` is 1 unless the method says
otherwise (``feedback=0.95``): below 1, what waits long counts less and less (Sarfi 2025, arXiv:2508.15706). It wraps any
compressor and depends on none.

EF21 (``feedback=ef21``; Richtárik 2021, arXiv:2106.05203) sends differences instead: ``g_i ← g_i + C(x_i − g_i)``, and all take
the mean of the ``g_i`` for that of the ``x_i``. Nothing waits to be delivered at once, so there are no spikes; where ``x_i``
changes slowly, ``g_i`` follows it. A slice owner, who codes a mean of differences again, adds what it held back: to sums of
differences that is EF21, too.
Unbiased methods refuse it: their error is noise, which feedback would accumulate (2-bit QSGD with it diverged).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from hocket.compression.base import Compressor, Context, MeanChannel, Mixed, State

T = TypeVar("T")


def with_residual(rows: Tensor, residual: Tensor | None, decay: float) -> Tensor:
    """``rows`` plus what earlier exchanges held back."""
    if residual is None:
        return rows
    return rows + (residual if decay == 1 else residual * decay)


def with_feedback(
    rows: Tensor, residual: Tensor | None, decay: float, send: Callable[[Tensor], tuple[T, Tensor]]
) -> tuple[T, Tensor]:
    """Send ``rows`` plus the ``residual`` of earlier exchanges, times ``decay``: the result of ``send``, and the new residual.

    ``send`` returns its result and the values that the receivers decode.

    >>> import torch
    >>> round_down = lambda values: ("a message", values.floor())
    >>> with_feedback(torch.tensor([1.75, 2.5]), torch.tensor([0.5, 0.25]), 1.0, round_down)
    ('a message', tensor([0.2500, 0.7500]))
    >>> with_feedback(torch.tensor([1.75, 2.5]), torch.tensor([0.5, 0.25]), 0.5, round_down)
    ('a message', tensor([0.0000, 0.6250]))
    """
    wanted = with_residual(rows, residual, decay)
    result, sent = send(wanted)
    return result, wanted - sent


def mean_with_feedback(compressor: Compressor, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Mixed:
    """The compressor's mean of ``rows``, with error feedback where the compressor uses it."""
    if not compressor.uses_error_feedback:
        if compressor.codec is None:
            return compressor.mean(rows, channel, state, context)
        return channel.coded(compressor.codec, rows, state, context, wants_sent=False)  # nobody keeps a residual

    if compressor.sends_differences:
        own, common = state.get("own", 0.0), state.get("common", 0.0)
        mixed, sent, inner = compressor.mean(rows - own, channel, state.get("inner", {}), context)
        own, common = own + sent, common + mixed
        return Mixed(common, own, {"own": own, "common": common, "inner": inner})

    def send(wanted: Tensor) -> tuple[Mixed, Tensor]:
        found = compressor.mean(wanted, channel, state.get("inner", {}), context)
        return found, found.sent

    (mixed, sent, inner), error = with_feedback(rows, state.get("error"), compressor.feedback_decay, send)
    return Mixed(mixed, sent, {"error": error, "inner": inner})
