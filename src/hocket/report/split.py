"""The section on split models, as HTML that needs no script: the exchanges along each axis of the mesh, and the measured timeline.

Positions in time are percentages of the width, so that a timeline fits the screen and its text keeps its size.
"""

import html
from collections.abc import Sequence
from itertools import count

from hocket.report.figure import Figure
from hocket.report.figures import NONE, percent, plain
from hocket.report.read import FINISHED, Measured
from hocket.report.rows import Row
from hocket.split.pipeline.timeline import KINDS, Timeline

LOOKS = {"F": ("forward", 0), "B": ("backward", 2), "I": ("backward, inputs", 5), "W": ("backward, weights", 4)}
"""What each kind of action is called, and which of the charts' colours it has (page.css says the same)."""
MOST_TIMELINES = 12
"""How many timelines are drawn; the others are reported in figures only."""
_LANE, _BAR, _FOOT = 26, 20, 20
"""Heights in pixels: of a process, of its bars, and of the axis below."""
_WIDE, _NARROW = 480, 280
"""The least width of a timeline in pixels, on a desktop and on a phone."""
_DIGIT, _AROUND = 6.5, 4
_MANY = 300
"""With more actions than this, no gaps are drawn between them."""


def split_section(rows: Sequence[Row]) -> str:
    """The section; empty where no model is split."""
    split = [row for row in rows if row.mesh]
    if not split:
        return ""
    drawn = [row for row in split if row.measured][:MOST_TIMELINES]
    several = len({row.facet for row in rows}) > 1
    left = sum(row.measured is not None for row in split) - len(drawn)
    more = f" The first {len(drawn)} timelines are drawn." if left else ""
    blocks = "\n".join(_block(row, several, any(row is d for d in drawn)) for row in split)
    return (
        '\n<section id="split" aria-labelledby="split-title">\n<h2 id="split-title">Split models</h2>\n'
        '<p class="note">What the processes that share a model sent along each axis of their mesh, in total, and how long a'
        f" process waited for it, on average.{more}</p>\n{blocks}\n</section>\n"
    )


def _block(row: Row, several: bool, drawn: bool) -> str:
    parts = [str(row.facet)] if several else []
    parts += [] if row.state == FINISHED else [row.state]
    about = f'<p class="note">{html.escape(" · ".join(parts))}</p>' if parts else ""
    figure = _figure(row, row.measured, drawn) if row.measured else ""
    sides = f"{_comm_stats(row)}{figure}"
    return f'<div class="split">\n<h3>{html.escape(row.label)}</h3>{about}\n<div class="sides">{sides}</div>\n</div>'


def _comm_stats(row: Row) -> str:
    """The small table, without axes that are not in the mesh and sent nothing."""
    lines = []
    for axis, figures in row.comm_stats.items():
        if f"{axis}=" in row.mesh or (figures.bytes_sent and figures.bytes_sent.mean > 0):
            figures_text = (_amount(figures.bytes_sent, 1e-6, "MB"), _amount(figures.seconds, 1, "s"))
            cells = "".join(f'<td class="number">{text}</td>' for text in figures_text)
            lines.append(f'<tr><th scope="row">{axis}</th>{cells}</tr>')
    if not lines:
        return '<p class="note">No bytes were recorded by axis.</p>'
    heads = '<th scope="col">axis</th><th scope="col" class="number">sent</th><th scope="col" class="number">waited</th>'
    name = html.escape(f"Axes of {row.label}")
    return f'<table class="comm-stats" aria-label="{name}"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _amount(figure: Figure | None, scale: float, unit: str) -> str:
    return NONE if figure is None else f"{figure.scaled(scale).text()} {unit}"


def _figure(row: Row, measured: Measured, drawn: bool) -> str:
    words = _words(row, measured)
    if not drawn:
        return f"<figure><figcaption><p>{html.escape(' '.join(words))}</p></figcaption></figure>"
    timeline = measured.beginning()
    count = sum(map(len, timeline.rows))
    if count < measured.actions:
        words.append(f"The first {count:,} of {measured.actions:,} actions are drawn.")
    kinds = [kind for kind in KINDS if any(span.action.kind == kind for lane in timeline.rows for span in lane)]
    keys = "".join(f'<span><i class="{kind}"></i>{LOOKS[kind][0]}</span>' for kind in kinds)
    processes = range(len(timeline.rows))
    names = "".join(f"<span>process {process}</span>" for process in processes)
    height, look = _LANE * len(processes), "pipe fine" if count > _MANY else "pipe"
    drawing = "".join(_lane(timeline, process) for process in processes) + _axis(timeline, height)
    return (
        f"<figure><figcaption><p>{html.escape(' '.join(words))}</p></figcaption>"
        f'<div class="parts" aria-hidden="true">{keys}<span><i class="idle"></i>idle</span></div>'
        f'<div class="timeline"><div class="lanes" aria-hidden="true">{names}</div>'
        f'<svg class="{look}" role="img" aria-label="Timeline of the processes" width="100%" height="{height + _FOOT}">'
        f"{drawing}</svg></div></figure>"
    )


def _words(row: Row, measured: Measured) -> list[str]:
    pipe, num_microbatches, processes = row.settings.get("pipe"), row.settings.get("micro"), len(measured.timeline.rows)
    parts = [f"schedule {pipe}"] * isinstance(pipe, str) + [f"{num_microbatches} micro-batches"] * (type(num_microbatches) is int)
    how = f" ({', '.join(parts)})" if parts else ""
    scale, unit = _unit(measured.timeline)
    bubble, communication = (percent(s).replace(" ", "\u00a0") for s in (measured.bubble_share, measured.communication_share))
    return [
        f"Measured: {plain(measured.timeline.length * scale)} {unit} of {processes} process{'es' * (processes != 1)}{how}.",
        f"The bubble is {bubble}: the share of time, communication excluded, in which processes were idle.",
        f"Communication is {communication} of all the time.",
    ]


def _unit(timeline: Timeline) -> tuple[float, str]:
    return (1000, "ms") if timeline.length < 1 else (1, "s")


def _lane(timeline: Timeline, process: int) -> str:
    """The bars of one process; those of its later stages are paler, and wide ones bear the number of the micro-batch."""
    top = _LANE * process + (_LANE - _BAR) // 2
    bars, numbers = [], []
    for span in timeline.rows[process]:
        pale = min(2, span.action.stage // len(timeline.rows))
        look = span.action.kind + f" pale{pale}" * (pale > 0)
        left, width = (f"{100 * part / timeline.length:.4g}" for part in (span.start, span.end - span.start))
        bars.append(f'<rect class="{look}" x="{left}%" y="{top}" width="{width}%" height="{_BAR}"/>')
        share, text = (span.end - span.start) / timeline.length, str(span.action.microbatch)
        needed = _DIGIT * len(text) + _AROUND
        if share * _WIDE >= needed:
            names = " ".join(["ink"] * (pale > 0) + ["roomy"] * (share * _NARROW < needed))
            middle = f"{50 * (span.start + span.end) / timeline.length:.4g}"
            look = f' class="{names}"' if names else ""
            numbers.append(f'<text{look} x="{middle}%" y="{top + _BAR // 2 + 4}">{text}</text>')
    idle = f'<rect class="idle" x="0" y="{top}" width="100%" height="{_BAR}"/>'
    return f"<g>{idle}{''.join(bars)}{''.join(numbers)}</g>"


def _axis(timeline: Timeline, height: int) -> str:
    scale, unit = _unit(timeline)
    length = timeline.length * scale
    marks = []
    for tick in _ticks(length):
        anchor = "start" if tick == 0 else "end" if tick > 0.95 * length else "middle"
        place = f'x="{100 * tick / length:.4g}%" y="{height + 14}" text-anchor="{anchor}"'
        marks.append(f'<text class="tick" {place}>{tick:.4g}{f" {unit}" if tick == 0 else ""}</text>')
    return "".join(marks)


def _ticks(length: float) -> list[float]:
    """A few round values from 0 to ``length``.

    >>> _ticks(23.4), _ticks(1.0), _ticks(0.003)
    ([0.0, 5.0, 10.0, 15.0, 20.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 0.001, 0.002, 0.003])
    """
    steps = (factor * 10.0**exponent for exponent in count(-12) for factor in (1, 2, 5))
    step = next(step for step in steps if step * 5.5 >= length)
    return [float(f"{k * step:.10g}") for k in range(int(length / step + 1e-9) + 1)]
