"""Numbers as text, with a few significant digits and a unit."""

from __future__ import annotations

NONE = "–"


def percent(value: float | None, digits: int = 1) -> str:
    """An accuracy.

    >>> percent(0.8833), percent(None)
    ('88.3 %', '–')
    """
    return NONE if value is None else f"{value * 100:.{digits}f} %"


def points(value: float) -> str:
    """A difference between two accuracies.

    >>> points(-0.0042), points(0.013), points(0.00001)
    ('−0.4 points', '+1.3 points', '±0.0 points')
    """
    size = f"{abs(value) * 100:.1f}"
    sign = "±" if size == "0.0" else "+" if value > 0 else "−"
    return f"{sign}{size} points"


def plain(value: float | None) -> str:
    """Three digits or so, with separators.

    >>> [plain(v) for v in (12345.6, 123.4, 12.34, 1.234, 0.01234, 0)]
    ['12,346', '123', '12.3', '1.23', '0.0123', '0']
    """
    if value is None:
        return NONE
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.1e}"


def whole(value: float) -> str:
    """A count, or what lies between two.

    >>> whole(3.0), whole(3.5), whole(1234)
    ('3', '3.5', '1,234')
    """
    return f"{value:,.1f}".removesuffix(".0")


def around(mean: float, spread: float | None, digits: int | None = None) -> str:
    """A mean with its spread, both to the same number of decimals.

    >>> around(32.04, 0.5741), around(0.5871, 0.00688), around(90.123, 2.618, 1), around(119, 0.036), around(5.7, None)
    ('32.0 ± 0.6', '0.587 ± 0.007', '90.1 ± 2.6', '119.00 ± 0.04', '5.70')
    """
    if spread is None:
        return plain(mean) if digits is None else f"{mean:.{digits}f}"
    size = abs(mean)
    places = digits if digits is not None else 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    if digits is None and 0 < spread < 0.5 * 10**-places:
        places += 2  # a nonzero spread is not rounded to ± 0
    return f"{mean:,.{places}f} ± {spread:,.{places}f}"


def seconds(value: float | None) -> str:
    """Seconds.

    >>> seconds(12.34), seconds(None)
    ('12.3 s', '–')
    """
    return NONE if value is None else f"{plain(value)} s"


def megabytes(count: float | None) -> str:
    """Bytes as MB.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return NONE if count is None else f"{plain(count / 1e6)} MB"


def times(value: float | None) -> str:
    """A ratio.

    >>> times(3.333), times(185.2), times(1)
    ('3.3×', '185×', '1.0×')
    """
    return NONE if value is None else f"{value:,.0f}×" if value >= 10 else f"{value:.1f}×" if value >= 0.1 else f"{value:.2g}×"


def lr_text(value: float | None) -> str:
    """A learning rate.

    >>> lr_text(0.05), lr_text(0.1 * 3)
    ('0.05', '0.3')
    """
    return NONE if value is None else f"{value:.4g}"
