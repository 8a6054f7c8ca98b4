"""The conclusions from the runs of one facet, in sentences: fastest, fewest bytes, most accurate, or none of these.

Where no strategy is faster, sends fewer bytes or is more accurate than ``bulk + allreduce`` (what DDP does) by more than the
margins below, the report says that first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.report.figures import plain, seconds, times
from hocket.report.measure import measure_of
from hocket.report.rows import BASELINE, Facet, Row, baseline_of

WITHIN = 1.0
"""Points of accuracy (per cent of a test loss) that may be given up for fewer bytes, unless the study names another number."""
_MORE_ACCURATE = 0.005
_FASTER = 1.05
_LEANER = 1.05


@dataclass(frozen=True)
class Answer:
    """One sentence in its parts: ``question: strategy, figure (detail)``, or only a ``detail``."""

    question: str
    strategy: str = ""
    figure: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if not self.strategy:
            return f"{self.question}: {self.detail}" if self.question else self.detail
        ending = f" ({self.detail})" if self.detail else ""
        return f"{self.question}: {self.strategy}, {self.figure}{ending}"


def basis(rows: Sequence[Row], facet: Facet) -> str:
    """Where a facet's figures come from."""
    if not facet.virtual:
        return "measured"
    if not any(r.seconds for r in rows if r.facet == facet):
        return "virtual: counted, not timed"
    return f"virtual: bytes counted, seconds {'predicted' if facet.cluster else 'by a virtual clock'}"


def answers_of(facet: Facet, rows: Sequence[Row], within: float = WITHIN) -> list[Answer]:
    """The answers for one facet; ``within`` points of accuracy, or per cent of the test loss, may be given up for fewer bytes."""
    ranked = [r for r in rows if r.facet == facet and r.ranked]
    if not ranked:
        finished = any(r.facet == facet and r.state == "finished" for r in rows)
        why = "no accuracy was recorded, and no test loss" if finished else "no run has finished"
        return [Answer("", detail=f"There is nothing to rank here: {why}.")]
    base, found = baseline_of(ranked[0], ranked), list[Answer]()
    threshold, several = _threshold(ranked, base), len(ranked) > 1
    if base is None:
        found.append(Answer("", detail=f"There is no finished {BASELINE} here, so nothing can be compared with plain training."))
    elif not several:
        found.append(Answer("", detail=f"Only {_called(base)} has finished here; there is nothing to compare it with."))
    elif why := _plain_is_enough(ranked, base, threshold, within):
        found.append(Answer("", detail=f"Plain {_called(base)} is as good as anything here: {why}."))
    found.append(_fastest(ranked, base, threshold))
    if base is not None and several:
        found.append(_least_traffic(ranked, base, within))
    return [*found, _most_accurate(ranked, base)]


def time_to(row: Row, threshold: float) -> float | None:
    """Seconds until the end of the first epoch that reached a score; None if none did or without a clock."""
    return next((p.seconds for p in row.curve if (s := row.score_of(p)) and s.mean >= threshold - 1e-9), None)


def _threshold(ranked: list[Row], base: Row | None) -> float:
    """A round score a little below the baseline's, or below the median's."""
    measure = measure_of(ranked[0])
    if base is not None:
        return measure.below(max(s.mean for p in base.curve if (s := base.score_of(p))))
    return measure.below(sorted(r.final for r in ranked)[len(ranked) // 2], noise=False)


def _fastest(ranked: list[Row], base: Row | None, threshold: float) -> Answer:
    if not any(r.seconds for r in ranked):
        clock = "virtual workers have no clock without a described cluster, so seconds are not known; bytes are"
        why = clock if ranked[0].facet.virtual else "no seconds were recorded"
        return Answer("Fastest", detail=f"cannot be said here: {why}.")
    question = f"Fastest to {measure_of(ranked[0]).goal(threshold)}{_predicted(ranked[0].facet)}"
    timed = [(t, r) for r in ranked if (t := time_to(r, threshold)) is not None]
    if not timed:
        return Answer(question, detail="no run with a clock reached it.")
    timed.sort(key=lambda found: (found[0], found[1] is not base, found[1].label))
    (first, row), detail = timed[0], ""
    if row is base:
        detail = f"next: {timed[1][1].label}, {seconds(timed[1][0])}" if len(timed) > 1 else "nothing else got there"
    elif base is not None and (plain := time_to(base, threshold)) is not None:
        detail = f"{_called(base)}: {seconds(plain)}" + (f", {times(plain / first)} slower" if first > 0 else "")
    return Answer(question, row.label, seconds(first), detail)


def _least_traffic(ranked: list[Row], base: Row, within: float) -> Answer:
    measure = measure_of(base)
    question = f"Least traffic within {measure.margin(within)} of {_called(base)}"
    if not base.bytes_sent or base.bytes_sent.mean == 0:
        return Answer(question, detail="one worker sends nothing.")
    ranked = [r for r in ranked if baseline_of(r, ranked) is base]  # runs of another length have a baseline of their own
    near = [r for r in ranked if r.bytes_sent and _near(r, base, within)]
    row = min(near, key=lambda r: (r.bytes_sent.mean if r.bytes_sent else math.inf, r is not base), default=base)
    if row is base:
        lean = [r for r in ranked if r.bytes_sent and r.bytes_sent.mean < base.bytes_sent.mean]
        nearest = max(lean, key=lambda r: _gain(r, base), default=None)
        if nearest is None:
            return Answer(question, detail=f"nothing here sends less than {_called(base)}.")
        cost = f"{_fewer(nearest, base)}, {measure.difference(_gain(nearest, base))}"
        return Answer(question, detail=f"nothing here; nearest is {nearest.label}, {cost}.")
    return Answer(question, row.label, _fewer(row, base), measure.difference(_gain(row, base)))


def _most_accurate(ranked: list[Row], base: Row | None) -> Answer:
    measure = measure_of(ranked[0])
    row = max(ranked, key=lambda r: (r.final, r is base, -(r.bytes_sent.mean if r.bytes_sent else 0.0)))
    if base is None or row is base:
        other = max((r for r in ranked if r is not row), key=lambda r: r.final, default=None)
        detail = f"next: {other.label}, {measure.show(other.final)}" if other else ""
    else:
        detail = f"{_called(base)}: {measure.show(base.final)}, {measure.difference(_gain(base, row))}"
        if _gain(row, base) <= max(_spreads(row, base)) > 0:
            detail += ", within the seeds' spread"
    figure = measure.show(row.final) + (f" (perplexity {plain(row.perplexity.mean)})" if row.perplexity else "")
    return Answer(measure.best, row.label, figure if row.facet.by_loss else measure.show(row.final), detail)


def _plain_is_enough(ranked: list[Row], base: Row, threshold: float, within: float) -> str:
    """Why ``bulk + allreduce`` is as good as the other strategies, or an empty string if one beats it."""
    others, measure = [r for r in ranked if r is not base], measure_of(base)
    if any(_gain(r, base) > max(_MORE_ACCURATE, *_spreads(r, base)) for r in others):  # a smaller gain is noise
        return ""
    plain = time_to(base, threshold)
    lean = any(_near(r, base, within) and _ratio(r, base) > _LEANER for r in others)
    if plain is not None:
        if any(t is not None and t * _FASTER < plain for t in (time_to(r, threshold) for r in others)):
            return ""
        saved = "; what others save is traffic, not time" if lean else ""
        sooner = f"nothing reaches {measure.goal(threshold)} more than 5 % sooner{_predicted(base.facet)}"
        return f"{sooner} or ends more than 0.5 {measure.unit_higher}{saved}"
    return "" if lean else f"nothing sends less within {measure.margin(within)} of it or ends more than 0.5 {measure.unit_higher}"


def _called(base: Row) -> str:
    """``bulk + allreduce``, with its mesh where all models are split, and with what sets it apart from others of the name."""
    return base.label


def _predicted(facet: Facet) -> str:
    return f" ({facet.predicted})" if facet.cluster else ""


def _fewer(row: Row, base: Row) -> str:
    ratio = _ratio(row, base)
    return "nothing sent" if math.isinf(ratio) else f"{times(ratio)} fewer bytes"


def _gain(row: Row, base: Row) -> float:
    return measure_of(base).gain(row, base)


def _near(row: Row, base: Row, within: float) -> bool:
    return _gain(row, base) >= -within / 100 - 1e-9


def _spreads(row: Row, base: Row) -> list[float]:
    return [measure_of(base).spread(r, base) for r in (row, base)]


def _ratio(row: Row, base: Row) -> float:
    if not row.bytes_sent or not base.bytes_sent:
        return 1.0
    return base.bytes_sent.mean / row.bytes_sent.mean if row.bytes_sent.mean else math.inf
