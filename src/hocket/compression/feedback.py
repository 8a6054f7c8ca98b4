"""Error feedback: what was not sent is added next time (Seide 2014; Karimireddy 2019, arXiv:1901.09847).

``a = x + e;  heard, sent = mean(a);  e ← a − sent``. It wraps any compressor and knows nothing of it. Unbiased codes refuse it:
their error is noise that feedback would pile up (2-bit QSGD with it diverged).
"""

from __future__ import annotations

from torch import Tensor

from hocket.compression.base import Compressor, Context, Heard, MeanChannel, State


def mean_with_feedback(compressor: Compressor, rows: Tensor, channel: MeanChannel, state: State, context: Context) -> Heard:
    """The compressor's mean of ``rows``, with the error of earlier exchanges added where the compressor asks for it."""
    if not compressor.uses_error_feedback:
        return compressor.mean(rows, channel, state, context)
    error = state.get("error")
    wanted = rows if error is None else rows + error
    heard, sent, inner = compressor.mean(wanted, channel, state.get("inner", {}), context)
    return Heard(heard, sent, {"error": wanted - sent, "inner": inner})
