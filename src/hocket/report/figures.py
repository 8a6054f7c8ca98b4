"""Numbers as text, with a few significant digits and a unit."""

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
    if value == 0 or abs(value) >= 1:
        return f"{value:,.{_decimals(value) if value else 0}f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def whole(value: float) -> str:
    """A count, or what lies between two.

    >>> whole(3.0), whole(3.5), whole(1234)
    ('3', '3.5', '1,234')
    """
    return f"{value:,.1f}".removesuffix(".0")


def tokens_per_s(tokens: float | None, seconds: float | None) -> float | None:
    """The tokens of all workers in a second; None where there is no text, or no clock.

    >>> tokens_per_s(600, 2.0), tokens_per_s(None, 2.0), tokens_per_s(600, None)
    (300.0, None, None)
    """
    return tokens / seconds if tokens and seconds else None


def around(mean: float, spread: float | None, digits: int | None = None) -> str:
    """A mean with its spread, both to the same number of decimals.

    >>> around(32.04, 0.5741), around(0.5871, 0.00688), around(90.123, 2.618, 1), around(119, 0.036), around(5.7, None)
    ('32.0 ± 0.6', '0.587 ± 0.007', '90.1 ± 2.6', '119.00 ± 0.04', '5.70')
    """
    if spread is None:
        return plain(mean) if digits is None else f"{mean:.{digits}f}"
    places = _decimals(mean) if digits is None else digits
    if digits is None and 0 < spread < 0.5 * 10**-places:
        places += 2  # a nonzero spread is not rounded to ± 0
    return f"{mean:,.{places}f} ± {spread:,.{places}f}"


def seconds(value: float | None) -> str:
    return NONE if value is None else f"{plain(value)} s"


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


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
