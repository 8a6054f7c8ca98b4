"""What the runs of a facet are compared by: accuracy, or the test loss where there is no accuracy or the data are text.

A *score* is larger where a run is better: the accuracy, or minus the test loss. Differences of accuracy are points, differences of
test loss per cent of the baseline's.
"""

import math

from hocket.report.figures import percent, plain, points
from hocket.report.rows import Row

_POINT = 0.01


class Accuracy:
    """Shares of right answers."""

    best, unit_higher = "Most accurate", "points higher"
    axis = "accuracy"

    def gain(self, row: Row, base: Row) -> float:
        """How much better than ``base``."""
        return row.final - base.final

    def spread(self, row: Row, base: Row) -> float:
        """Over seeds, in the unit of a gain."""
        return (row.score.spread if row.score else None) or 0.0

    def show(self, score: float) -> str:
        return percent(score)

    def difference(self, gain: float) -> str:
        """A gain, with its sign."""
        return points(gain)

    def margin(self, within: float) -> str:
        """The loss of quality that may be given up for fewer bytes."""
        return "1 point" if within == 1 else f"{within:g} points"

    def goal(self, threshold: float) -> str:
        """The score that runs are timed to."""
        return percent(threshold, 0 if math.isclose(threshold * 100, round(threshold * 100)) else 1)

    def below(self, score: float, noise: bool = True) -> float:
        """A round score below this one; with ``noise`` at least one point, so that noise in the last epochs does not decide."""
        return round_below(score - _POINT if noise and score > 2 * _POINT else score)


class HeldOutLoss(Accuracy):
    """Mean losses on the test set."""

    best, unit_higher = "Lowest test loss", "% lower"
    axis = "test loss"

    def gain(self, row: Row, base: Row) -> float:
        return (row.final - base.final) / (abs(base.final) or 1.0)

    def spread(self, row: Row, base: Row) -> float:
        return super().spread(row, base) / (abs(base.final) or 1.0)

    def show(self, score: float) -> str:
        return plain(-score)

    def difference(self, gain: float) -> str:
        """A lower loss is a gain, and is shown as a loss: −2.0 %."""
        size = f"{abs(gain) * 100:.1f}"
        return f"{'±' if size == '0.0' else '−' if gain > 0 else '+'}{size} %"

    def margin(self, within: float) -> str:
        return f"{within:g} %"

    def goal(self, threshold: float) -> str:
        return f"a test loss of {-threshold:g}"

    def below(self, score: float, noise: bool = True) -> float:
        """A loss of two digits or three, one per cent above this one."""
        loss = -score * (1 + _POINT * noise)
        return -float(f"{loss:.3g}") if loss else 0.0


ACCURACY, TEST_LOSS = Accuracy(), HeldOutLoss()


def measure_of(row: Row) -> Accuracy:
    """What the facet of a row is compared by."""
    return TEST_LOSS if row.facet.by_loss else ACCURACY


def round_below(accuracy: float) -> float:
    """The largest round accuracy below it: a multiple of five points where one is near, otherwise a full point.

    >>> round_below(0.713), round_below(0.69), round_below(0.9787), round_below(0.003)
    (0.7, 0.69, 0.97, 0.003)
    """
    five = math.floor(accuracy * 20 + 1e-9) / 20
    if accuracy < 0.9 and five and accuracy - five <= 0.03:
        return five
    return math.floor(accuracy * 100 + 1e-9) / 100 or accuracy
