"""A drawing: shapes and texts, written as SVG that is legible on light and on dark pages.

Texts and thin lines have ``currentColor``: the page's own text colour where the documentation includes the drawing, and black or
light grey, as the viewer prefers, where it is shown as a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from xml.sax.saxutils import escape

INK, BLUE, ORANGE, GREEN, RED = "currentColor", "#4a7fd6", "#e08a1e", "#3d9a6a", "#c2504a"
_STYLE = "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#d5dae1}}"


class Drawing:
    """Shapes in the order in which they are drawn; ``title`` says in words what is seen."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[tuple[str, str]] = []
        """Each with its style; neighbours of one style are written as a group."""

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str = BLUE, opacity: float = 1.0, line: bool = False
    ) -> None:
        style = f'fill="{fill}" fill-opacity="{_n(opacity)}"' + (f' stroke="{INK}" stroke-opacity="0.45"' if line else "")
        self.shapes.append((style, f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"/>'))

    def circle(self, x: float, y: float, radius: float, fill: str = BLUE, opacity: float = 1.0) -> None:
        style = f'fill="{fill}" fill-opacity="{_n(opacity)}" stroke="{INK}" stroke-opacity="0.6"'
        self.shapes.append((style, f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'))

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        colour: str = INK,
        width: float = 1.0,
        opacity: float = 1.0,
        dash: str = "",
    ) -> None:
        style = (
            f'stroke="{colour}" stroke-width="{_n(width)}" stroke-opacity="{_n(opacity)}"'
            + f' stroke-dasharray="{dash}"' * bool(dash)
        )
        self.shapes.append((style, f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(to_x)}" y2="{_n(to_y)}"/>'))

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, colour: str = INK, width: float = 1.2, opacity: float = 1.0
    ) -> None:
        """A line with a head at its end."""
        self.line(x, y, to_x, to_y, colour, width, opacity)
        angle, head = math.atan2(to_y - y, to_x - x), 3.5 + 1.5 * width
        corners = [(to_x - head * math.cos(angle + side), to_y - head * math.sin(angle + side)) for side in (0.4, -0.4)]
        points = " ".join(f"{_n(a)},{_n(b)}" for a, b in [(to_x, to_y), *corners])
        self.shapes.append((f'fill="{colour}" fill-opacity="{_n(opacity)}"', f'<polygon points="{points}"/>'))

    def curve(self, points: Iterable[tuple[float, float]], colour: str = BLUE, width: float = 2.0) -> None:
        """A line through points."""
        through = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.shapes.append((f'fill="none" stroke="{colour}" stroke-width="{_n(width)}"', f'<polyline points="{through}"/>'))

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: float = 12, bold: bool = False, opacity: float = 1.0
    ) -> None:
        style = f'text-anchor="{anchor}" font-size="{_n(size)}"' + ' font-weight="600"' * bold
        style += f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
        self.shapes.append((style, f'<text x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'))

    def turned(self, x: float, y: float, text: str, degrees: float, size: float = 12) -> None:
        """A text that begins at a point and goes up or down from there."""
        self.shapes.append(
            (f'font-size="{_n(size)}"', f'<text transform="translate({_n(x)} {_n(y)}) rotate({_n(degrees)})">{escape(text)}</text>')
        )

    def legend(self, x: float, y: float, *entries: tuple[str, float, str]) -> None:
        """Colours (with their opacity) and what they mean, side by side."""
        for colour, opacity, words in entries:
            self.rect(x, y - 9, 14, 10, colour, opacity)
            self.text(x + 20, y, words)
            x += 44 + 6.2 * len(words)

    def __str__(self) -> str:
        wide, high = _n(self.width), _n(self.height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" role="img"'
        body = [
            f'{head} font-family="system-ui, sans-serif" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{_STYLE}</style>",
        ]
        for style, shapes in groupby(self.shapes, key=lambda shape: shape[0]):
            body += [f"<g {style}>", *(shape for _, shape in shapes), "</g>"]
        return "\n".join([*body, "</svg>", ""])


def _n(value: float) -> str:
    """A number with at most one digit behind the point (two below 1): the same on every machine."""
    text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
    text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
