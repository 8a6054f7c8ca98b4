"""Which strategy sends least within a given loss of accuracy: the question that the preset ``frontier`` asks."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.report.rows import Facet, Row, baseline_of


def sends_least(rows: Sequence[Row], within: float) -> dict[Facet, list[str]]:
    """A sentence for each facet (data set × model × workers) that has several finished strategies; ``within`` is in points."""
    answers: dict[Facet, list[str]] = {}
    for facet in dict.fromkeys(row.facet for row in rows):
        known = [row for row in rows if row.facet == facet and row.ranked and row.accuracy and row.bytes_sent]
        if len(known) > 1:
            answers[facet] = [_answer(known, within)]
    return answers


def _answer(rows: Sequence[Row], within: float) -> str:
    plain = baseline_of(rows[0], rows)
    reference = plain or max(rows, key=_accuracy)
    near = [row for row in rows if _accuracy(row) >= _accuracy(reference) - within / 100 - 1e-9]
    least = min(near, key=lambda row: (_bytes(row), -_accuracy(row)))
    against = reference.strategy if plain else f"the most accurate, {reference.strategy}"
    if least is reference:
        return f"Nothing within {within:g} points of {against} ({_accuracy(reference):.1%}) sends less."
    fewer = f", {_bytes(reference) / _bytes(least):,.1f} times less" if _bytes(least) else ""
    return (
        f"Within {within:g} points of {against} ({_accuracy(reference):.1%}), {least.label} sends least: "
        f"{_bytes(least) / 1e6:,.3g} MB{fewer}, at {_accuracy(least):.1%}."
    )


def _accuracy(row: Row) -> float:
    assert row.accuracy is not None
    return row.accuracy.mean


def _bytes(row: Row) -> float:
    assert row.bytes_sent is not None
    return row.bytes_sent.mean
