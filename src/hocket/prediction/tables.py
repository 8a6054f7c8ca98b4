"""Predictions and advice as rows of text, for terminals and notebooks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hocket.cluster.spec import ClusterSpec
from hocket.errors import bytes_text
from hocket.notebook import table
from hocket.prediction.steps import Prediction
from hocket.report.figures import plain

if TYPE_CHECKING:
    from hocket.prediction.advise import Advice, Contender, Interval
    from hocket.prediction.api import Predictions

LEGEND = (
    "ms: of one worker's step; wait and transfer as far as computing does not hide them. sent, memory: of one worker; memory "
    "without activations that are not known, '!' where a worker has less. samples/s: of all workers, failures included. "
    "USD/1000, or another currency: the price of 1,000 mini-batches. Predicted, not measured."
)
_MOST_ROWS = 200


def columns(spec: ClusterSpec) -> list[str]:
    """The heads of :func:`cells`, in two lines where a terminal needs them."""
    heads = ["work-\ners", "ms\n/step", "com-\npute", "wait", "trans-\nfer", "effi-\nciency", "samples\n/s", "sent", "memory"]
    return heads + [f"{spec.currency}\n/1000"] * (spec.price > 0)


def cells(row: Prediction, spec: ClusterSpec) -> list[str]:
    """One prediction."""
    seconds = [plain(1000 * s) for s in (row.step_s, row.compute_s, row.wait_s, row.transfer_s)]
    memory = bytes_text(row.memory_bytes) + (" !" if row.memory_bytes > spec.memory_bytes else "")
    cost = [] if row.cost is None else [f"{row.cost:.3g}" if math.isfinite(row.cost) else "–"]
    figures = [f"{row.efficiency:.0%}", plain(row.samples_per_s), bytes_text(row.bytes_sent)]
    return [str(row.workers), *seconds, *figures, memory, *cost]


def predictions_html(found: Predictions) -> str:
    """All predictions as one table, with what they say."""
    spec, size = found.cluster, found.model
    title = f"{size.name} ({size.parameters / 1e6:,.1f} million parameters), batch {size.batch_size}, predicted for {spec.name}"
    can = [row for row in found.rows if row.refused is None]
    rows = [[f"{row.strategy} ({row.mesh})" if row.mesh else row.strategy, *cells(row, spec)] for row in can[:_MOST_ROWS]]
    refused = dict.fromkeys(f"{row.strategy}: {row.refused}" for row in found.rows if row.refused is not None)
    left = [f"{len(can) - _MOST_ROWS} more rows are in .csv()."] if len(can) > _MOST_ROWS else []
    return table(
        title,
        ["strategy", *(head.replace("-\n", "").replace("\n", "") for head in columns(spec))],
        rows,
        [*left, *refused, *(f"• {said}" for said in found.answers()), LEGEND],
    )


def contender_columns(found: Advice) -> list[str]:
    """The heads of :func:`contender_cells`."""
    loss = any(c.quality is not None and c.quality.mean < 0 for c in found.contenders)
    priced = [found.cluster.currency] * (found.cluster.price > 0)
    return ["strategy", "rate", "test loss" if loss else "accuracy", "seconds", *priced, "exchange"]


def contender_cells(one: Contender, found: Advice) -> list[str]:
    """One strategy of an advice."""
    cost = [] if not found.cluster.price > 0 else ["–" if one.cost is None else f"{one.cost:.3g}"]
    share = f"{one.exchange_share:.0%}" if math.isfinite(one.exchange_share) else "–"
    return [one.strategy, f"{one.lr:g}", shown(one.quality).removeprefix("test loss "), _seconds(one), *cost, share]


def _seconds(one: Contender) -> str:
    if one.seconds is None:
        return "–"
    if not math.isfinite(one.seconds.mean):
        return "never"
    return f"{plain(one.seconds.low)}–{plain(one.seconds.high)}"


def shown(quality: Interval | None) -> str:
    """Accuracy in percent, or a test loss, with its range."""
    if quality is None:
        return "–"
    if quality.mean < 0:
        low, high = sorted((-quality.low, -quality.high))
        return f"test loss {-quality.mean:.3f}" + (f" ({low:.3f}–{high:.3f})" if high > low else "")
    return f"{quality.mean:.1%}" + (f" ({quality.low:.1%}–{quality.high:.1%})" if quality.high > quality.low else "")


def advice_html(found: Advice) -> str:
    """The answer, why, the strategies that were tried, and the command."""
    rows = [[*contender_cells(one, found), one.why] for one in found.contenders]
    notes = [*found.reasons, *(f"{look}." for look in found.outlooks), found.legend, *([found.command] * bool(found.command))]
    return table(found.answer, [*contender_columns(found), "why"], rows, notes)
