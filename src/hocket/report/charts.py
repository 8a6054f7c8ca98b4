"""The charts as PNG files, drawn with matplotlib (the extra ``hocket[plot]``): one set per facet, legends outside the plots.

The style of a strategy is the same in every chart, here and on the page: a number, a colour, and a mark (dash and marker) for its
sync axis. Colour is never the only difference: the mark shows the sync axis, and the number is in the legend. The baseline has the
colour of the text.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hocket.picture import COLOURS, DASHES, INK, LEGEND, QUIET, png, style
from hocket.report.answers import basis
from hocket.report.figures import percent, seconds
from hocket.report.measure import measure_of
from hocket.report.rows import Facet, Row, frontier
from hocket.report.split import LOOKS, MOST_TIMELINES
from hocket.report.staleness import column_edges, column_of, place_of
from hocket.split.pipeline.timeline import KINDS

_MARKERS = ("o", "s", "^", "D", "v", "P")
_LEGEND: dict[str, Any] = {**LEGEND, "loc": "upper left", "borderaxespad": 0, "title_fontsize": 8, "alignment": "left"}
_MOST_BARS = 24
_LONG = 62
"""Names longer than this take a whole row of the legend."""
_MOST_NAMED = 16
"""Series with a colour and a place in the legend; the others are drawn grey behind them."""


@dataclass(frozen=True)
class Style:
    """The look of one label."""

    number: int
    colour: int
    mark: int
    sync: str
    baseline: bool


def styles(rows: Sequence[Row]) -> dict[str, Style]:
    """A style per label. Labels are ordered by sync axis and colours repeat in order, so neighbours of one axis differ."""
    kinds = {row.label: (not row.plain, row.sync != "bulk", row.sync) for row in rows}
    labels = sorted(kinds, key=lambda label: (kinds[label], _natural(label)))
    syncs = list(dict.fromkeys(kinds[label][2] for label in labels))
    found = {}
    colour = 0
    for place, label in enumerate(labels):
        other, _, sync = kinds[label]
        found[label] = Style(place + 1, colour % len(COLOURS), syncs.index(sync), sync, not other)
        colour += other
    return found


def _natural(text: str) -> list[str | int]:
    """Sorts local(4) before local(16): text and numbers alternate, so that equal kinds are compared."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d{1,18})", text))]


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    looks, pictures = styles(rows), list[tuple[str, bytes | None]]()
    for facet in sorted({r.facet for r in rows}):
        inside = [r for r in rows if r.facet == facet]
        for name, chart in _CHARTS.items():
            name = "loss" if facet.by_loss and name == "accuracy" else name
            pictures.append((f"{_stem(facet)}-{name}", chart(inside, looks)))
    for facet in sorted({replace(r.facet, workers=0) for r in rows}):
        inside = [r for r in rows if replace(r.facet, workers=0) == facet]
        pictures.append((f"{_stem(facet)}-workers", _workers(inside, looks)))
    for row in [r for r in rows if r.measured][:MOST_TIMELINES]:
        pictures.append((f"{_stem(row.facet)}-{row.mesh[:40]}-timeline", _timeline(row)))
    files: dict[str, bytes] = {}
    for name, picture in pictures:
        if picture is not None:
            files[_unused(name, files)] = picture
    return files


def one(rows: Sequence[Row], facet: Facet, name: str) -> bytes | None:
    """One chart of a facet, by the name that :data:`NAMES` has; None where there is nothing to draw."""
    looks = styles(rows)
    if name == "workers":
        return _workers([r for r in rows if replace(r.facet, workers=0) == replace(facet, workers=0)], looks)
    return _CHARTS[name]([r for r in rows if r.facet == facet], looks)


def _stem(facet: Facet) -> str:
    parts = (facet.data, facet.model, facet.workers, facet.kind, facet.study, facet.cluster)
    return "-".join(str(part) for part in parts if part)


def ours(name: str) -> bool:
    """Whether a file of this name is one of our charts.

    >>> [ours(n) for n in ("digits-cnn-4-virtual-frontier.png", "mlp-workers-2.png", "x-timeline.png", "holiday.png")]
    [True, True, True, False]
    """
    return re.search(r"-(accuracy|loss|frontier|bars|staleness|workers|timeline)(-\d+)?\.png$", name) is not None


def safe(name: str) -> str:
    """A file name of any text.

    >>> safe("my.data:load/../x <b>")
    'my.data-load-..-x-b'
    """
    return re.sub(r"[^\w.]+", "-", name, flags=re.ASCII).strip("-.")[:100] or "chart"


def _unused(name: str, files: dict[str, bytes]) -> str:
    stem, count = safe(name), 1
    while (path := f"{stem}.png" if count == 1 else f"{stem}-{count}.png") in files:
        count += 1
    return path


def _epochs(rows: list[Row], looks: dict[str, Style]) -> bytes | None:
    drawn = [r for r in rows if any(r.score_of(p) for p in r.curve)]
    if not drawn:
        return None
    measure = measure_of(rows[0])
    figure, axes = _canvas(f"{measure.axis.capitalize()} per epoch", rows, _axis(rows, "of the mean model"), "epoch")
    named = _named(drawn, drawn[:_MOST_NAMED])
    for row in sorted(drawn, key=lambda r: (r in named, r.plain)):
        marked = [(p.epoch, s.mean) for p in row.curve if (s := row.score_of(p))]
        axes.plot(
            [epoch for epoch, _ in marked],
            [_height(row, score) for _, score in marked],
            label=_legend(row, looks, named),
            markersize=4,
            marker="" if len(marked) > 1 else "o",
            linewidth=2.4 if row.plain else 1.4 if row in named else 0.7,
            **_look(looks[row.label], row in named),
        )
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return _finish(figure, axes, len(drawn) - len(named))


def _frontier(rows: list[Row], looks: dict[str, Style]) -> bytes | None:
    drawn = [r for r in rows if r.ranked and r.mb_per_worker]
    if not drawn:
        return None
    title = f"Traffic against {measure_of(rows[0]).axis}"
    figure, axes = _canvas(title, rows, _axis(rows), "MB sent per worker (log scale)")
    line = frontier(drawn)
    steps = {"color": "#b9bfc9", "linewidth": 1.2, "zorder": 1, "label": "_frontier", "drawstyle": "steps-post"}
    axes.plot([r.mb_per_worker for r in line], [_place(r) for r in line], **steps)
    named = _named(drawn, line + drawn)
    floor = _floor(drawn, line)
    places = {row.label: (row.mb_per_worker or 0.0, max(floor, _place(row))) for row in drawn}
    for row in sorted(drawn, key=lambda r: r in named):
        look = _look(looks[row.label], row in named)
        below = _place(row) < floor
        axes.plot(
            *([value] for value in places[row.label]),
            linestyle="",
            marker="v" if below else _MARKERS[looks[row.label].mark % len(_MARKERS)],
            fillstyle="none" if below else "full",
            markersize=8 if row.on_frontier else 6,
            color=look["color"],
            alpha=1 if row.on_frontier or row.plain else 0.75,
            label=_legend(row, looks, named),
        )
    if floor > min(map(_place, drawn)):
        axes.set_xlabel("MB sent per worker (log scale); ▽ further down", color=QUIET)
    axes.set_xscale("log")
    axes.margins(0.08)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _number(axes, {str(looks[row.label].number): places[row.label] for row in line + named if row in named}, list(places.values()))
    return _finish(figure, axes, len(drawn) - len(named))


def _floor(drawn: list[Row], line: list[Row]) -> float:
    """The lower limit of the chart, a little below the frontier: a few failed runs far below would compress all others."""
    low, high = min(map(_place, line)), max(map(_place, line))
    least = 0.03 * abs(high) if drawn[0].facet.by_loss else 3.0
    return max(min(map(_place, drawn)), low - max(least, (high - low) / 4))


def _number(axes: Any, names: dict[str, tuple[float, float]], points: list[tuple[float, float]]) -> None:
    """Numbers beside their points, in order, where they overlap neither a point nor another number."""
    axes.autoscale_view()
    taken = [tuple(axes.transData.transform(point)) for point in points]
    for name, point in names.items():
        x, y = axes.transData.transform(point)
        scale = axes.figure.dpi / 72
        spots = [(x + dx * scale, y + dy * scale) for dy in (9, -9, 18, -18, 27) for dx in (0, 9, -9)]
        free = [s for s in spots if all(abs(s[0] - a) > 10 * scale or abs(s[1] - b) > 7 * scale for a, b in taken)]
        if not free:
            continue
        taken.append(free[0])
        offset = ((free[0][0] - x) / scale, (free[0][1] - y) / scale)
        axes.annotate(name, point, offset, textcoords="offset points", fontsize=8, color=QUIET, zorder=5, ha="center", va="center")


def _bars(rows: list[Row], looks: dict[str, Style]) -> bytes | None:
    timed = sorted((r for r in rows if r.ranked and all(r.clock.values())), key=lambda r: r.seconds.mean if r.seconds else 0.0)
    if not timed:
        return None
    drawn = [r for i, r in enumerate(timed) if i < _MOST_BARS or r.plain]
    axis = ", ".join(["seconds", *[p for p in [rows[0].facet.predicted] if p], "mean over workers"])
    figure, axes = _canvas("Where the seconds went", rows, "", _plain(axis).strip(), height=1.8 + 0.3 * len(drawn))
    left = [0.0] * len(drawn)
    for name, colour in (("compute", "#8c96a5"), ("wait", "#E69F00"), ("transfer", "#0072B2")):
        widths = [part.mean if (part := row.clock[name]) else 0.0 for row in drawn]
        axes.barh(range(len(drawn)), widths, 0.65, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (end, row) in enumerate(zip(left, drawn, strict=True)):
        axes.annotate(f" {seconds(row.seconds.mean if row.seconds else None)}", (end, place), va="center", fontsize=8, color=QUIET)
    axes.set_yticks(range(len(drawn)), [_plain(f"{looks[r.label].number}  {r.label}") for r in drawn])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12, y=0.02)
    axes.set_xlim(left=0)
    return _finish(figure, axes, len(timed) - len(drawn), columns=3)


def _staleness(rows: list[Row], looks: dict[str, Style]) -> bytes | None:
    aged = sorted(((r.staleness.median, r.staleness.mean, i) for i, r in enumerate(rows) if r.staleness))
    if not aged:
        return None
    drawn = [rows[i] for *_, i in aged[:_MOST_BARS]]
    edges = column_edges(r.staleness for r in drawn)
    wider = "" if len(edges) == edges[-1] + 1 else "; towards the right a column holds several values"
    figure, axes = _canvas("Staleness of gradients", rows, "", f"staleness in updates, solid: the median{wider}", 0.52 * len(drawn))
    for place, row in enumerate(drawn):
        assert row.staleness is not None
        counts, middle = row.staleness.columns(edges), column_of(row.staleness.middle, edges)
        filled = {column: max(0.04, 0.75 * count / max(counts)) for column, count in enumerate(counts) if count}
        colours = [(_look(looks[row.label], True)["color"], 1 if column == middle else 0.5) for column in filled]
        axes.bar(filled.keys(), [-size for size in filled.values()], min(0.85, len(edges) / 30), bottom=place + 0.4, color=colours)
        axes.annotate(str(row.staleness), (1.01, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize=8, color=QUIET)
        axes.axhline(place + 0.4, color="#e6e8ec", linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(drawn)), [_plain(f"{looks[r.label].number}  {r.label}") for r in drawn])
    axes.set_ylim(len(drawn) - 0.6, -0.6)
    axes.set_xlim(-0.7, len(edges) - 1.3)
    ticks = _staleness_ticks(edges)
    axes.set_xticks([place_of(value, edges) for value in ticks], [f"{value:,}" for value in ticks])
    axes.grid(visible=False)
    return _finish(figure, axes, len(aged) - len(drawn))


_CHARTS = {"accuracy": _epochs, "frontier": _frontier, "bars": _bars, "staleness": _staleness}
NAMES = (*_CHARTS, "workers")


def _staleness_ticks(edges: list[int]) -> list[int]:
    """Round values far enough apart for their labels.

    >>> _staleness_ticks(list(range(41))), _staleness_ticks([0, 1, 2, 4, 8, 16])
    ([0, 5, 10, 15, 20, 25, 30, 35], [0, 1, 2, 5, 10])
    """
    round_values = [m * 10**e for e in range(len(str(edges[-1]))) for m in (1, 2, 5)]
    if len(edges) == edges[-1] + 1:
        step = next(s for s in round_values if s * 12 >= edges[-1])
        return list(range(0, edges[-1], step))
    found = [0]
    for value in round_values:
        if value < edges[-1] and place_of(value, edges) - place_of(found[-1], edges) >= len(edges) / 16:
            found.append(value)
    return found


def _workers(rows: list[Row], looks: dict[str, Style]) -> bytes | None:
    counts = sorted({r.facet.workers for r in rows if r.ranked})
    if len(counts) < 2:
        return None
    figure, axes = _canvas("Worker counts side by side", rows, _axis(rows), "workers")
    labels = sorted({r.label for r in rows if r.ranked}, key=lambda label: looks[label].number)
    best = sorted((r for r in rows if r.ranked), key=lambda r: -_place(r))
    named = _named(best, list({r.label: r for r in reversed(best)}.values())[::-1])
    shown = {r.label: r for r in named}
    for label in sorted(labels, key=lambda label: label in shown):
        found = {r.facet.workers: r for r in rows if r.ranked and r.label == label}
        xs = [i for i, count in enumerate(counts) if count in found]
        shift = (labels.index(label) / max(1, len(labels) - 1) - 0.5) * 0.5
        look = looks[label]
        axes.plot(
            [x + shift for x in xs],
            [_place(found[counts[x]]) for x in xs],
            marker=_MARKERS[look.mark % len(_MARKERS)],
            markersize=6,
            linewidth=0.7,
            label=_legend(shown[label], looks, named) if label in shown else "_other",
            **_look(look, label in shown),
        )
    axes.set_xticks(range(len(counts)), [str(c) for c in counts])
    return _finish(figure, axes, len(labels) - len(shown))


def _timeline(row: Row) -> bytes:
    """The timeline of a pipeline's processes; later stages of one process are paler, and uncovered time is idle."""
    assert row.measured is not None
    timeline, processes = row.measured.beginning(), len(row.measured.timeline.rows)
    scale, unit = (1000, "ms") if timeline.length < 1 else (1, "seconds")
    shares = f"bubble {percent(row.measured.bubble_share)}, communication {percent(row.measured.communication_share)}"
    drawn, every = sum(map(len, timeline.rows)), row.measured.actions
    cut = f"; the first {drawn:,} of {every:,} actions" if drawn < every else ""
    figure, axes = _canvas(_plain(row.label).strip(), [row], "", f"{unit}{cut}; {shares}", 1.4 + 0.34 * processes)
    bars: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    for process, spans in enumerate(timeline.rows):
        for span in spans:
            start, length = span.start * scale, (span.end - span.start) * scale
            bars.setdefault((process, span.action.stage // processes, span.action.kind), []).append((start, length))
            if length > 0.015 * len(str(span.action.microbatch)) * timeline.length * scale:
                place = {"xy": (start + length / 2, process), "ha": "center", "va": "center"}
                axes.annotate(str(span.action.microbatch), **place, fontsize=6, color="white")
    for (process, later, kind), places in bars.items():
        colour = COLOURS[LOOKS[kind][1]]
        axes.broken_barh(
            places, (process - 0.4, 0.8), color=colour, alpha=max(0.4, 1 - 0.35 * later), edgecolor="white", linewidth=0.4
        )
    for kind in sorted({kind for _, _, kind in bars}, key=KINDS.index):
        axes.broken_barh([], (0, 1), color=COLOURS[LOOKS[kind][1]], label=LOOKS[kind][0])
    axes.set_yticks(range(processes), [f"process {process}" for process in range(processes)])
    axes.set_ylim(processes - 0.5, -0.5)
    axes.set_xlim(0, timeline.length * scale)
    axes.grid(visible=False)
    axes.set_facecolor("#f2f3f5")
    return _finish(figure, axes, 0, columns=4)


def _canvas(title: str, rows: list[Row], ylabel: str, xlabel: str, height: float = 4.8) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    facet = rows[0].facet
    several = ", ".join(part for part in (facet.data, facet.model, f"{facet.kind} workers", facet.predicted) if part)
    place = str(facet) if all(row.facet == facet for row in rows) else several
    figure = Figure(figsize=(7.2, height), dpi=144)
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n{_plain(place).strip()} ({basis(rows, facet)})", loc="left", fontsize=10, color=INK)
    axes.set_xlabel(xlabel, color=QUIET)
    axes.set_ylabel(ylabel, color=QUIET)
    style(axes)
    if ylabel and facet.by_loss:
        axes.yaxis.set_major_formatter(lambda value, _: f"{-value:g}")
    return figure, axes


def _named(rows: list[Row], first: list[Row]) -> list[Row]:
    """The rows that get a colour: the baseline, and as many of ``first`` as the legend has room for."""
    order = dict.fromkeys(r.label for r in [r for r in rows if r.plain] + first)
    chosen = list(order)[:_MOST_NAMED]
    return [r for r in rows if r.label in chosen]


def _legend(row: Row, looks: dict[str, Style], named: list[Row]) -> str:
    if row not in named:
        return "_other"
    return _plain(f"{looks[row.label].number}  {row.label}{'' if row.ranked else f' ({row.state})'}")


def _finish(figure: Any, axes: Any, left_out: int, columns: int = 2) -> bytes:
    """The legend stands below the plot; ``bbox_inches`` makes the picture as large as both need."""
    title = f"{left_out} more are on the page" if left_out else None
    handles, labels = axes.get_legend_handles_labels()
    below = (0, -0.16 * 4.8 / figure.get_figheight())
    if labels or title:
        columns = 1 if any(len(label) > _LONG for label in labels) else columns
        axes.legend(handles, labels, bbox_to_anchor=below, ncols=columns, title=title, **_LEGEND)
    return png(figure)


def _look(style: Style, named: bool) -> dict[str, Any]:
    if not named:
        return {"color": "#d3d7dd", "linestyle": "-"}
    colour = INK if style.baseline else COLOURS[style.colour % len(COLOURS)]
    return {"color": colour, "linestyle": DASHES[style.mark % len(DASHES)]}


def _plain(text: str) -> str:
    """Text without matplotlib's mathematics; a leading underscore would hide it from the legend."""
    short = text if len(text) <= 120 else f"{text[:119]}…"  # the picture has no room for more
    return " " + short.replace("$", r"\$")


def _place(row: Row) -> float:
    return _height(row, row.final)


def _height(row: Row, score: float) -> float:
    """Where a score is drawn: better ones higher, so a test loss (minus the score) on a reversed axis."""
    return score if row.facet.by_loss else score * 100


def _axis(rows: list[Row], of: str = "at the end") -> str:
    return f"test loss {of}, lower losses higher up" if rows[0].facet.by_loss else f"accuracy {of} (%)"
