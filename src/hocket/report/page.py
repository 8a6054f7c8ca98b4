"""The page: page.html with page.css, page.js and the data inserted, as one self-contained file.

Answers and tables are static HTML and need no script. Text reaches the page escaped, data as JSON that cannot end its own script
element, and the script inserts text only as text nodes.
"""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from hocket.report.answers import Answer, basis
from hocket.report.charts import styles
from hocket.report.figure import Figure
from hocket.report.figures import NONE, lr_text, percent, plain, times, whole
from hocket.report.read import FAILED, FINISHED, Reading, number
from hocket.report.rows import NOT_CONFIGURATION, Facet, Row
from hocket.report.split import split_section
from hocket.report.staleness import Staleness, column_edges, column_of
from hocket.report.stragglers import Stragglers
from hocket.report.table import as_html, columns
from hocket.version import __version__

_MOST_POINTS = 200
_MOST_WORKERS = 256
_SHOWN = NOT_CONFIGURATION | {"strategy", "workers", "virtual", "data", "model", "lr", "cluster", "spec"}
"""Settings that are in the table already, or that do not help a reader."""


def make_page(
    title: str, rows: Sequence[Row], answers: Mapping[Facet, list[Answer]], reading: Reading, pictures: bool, predicted: str = ""
) -> str:
    more = {
        "eyebrow": "Hocket report",
        "policy": "",
        "progress": "",
        "noscript": "The charts need scripts; answers and tables do not."
        + (" The same charts are PNG files in charts/, beside this page." if pictures else ""),
        "predicted": predicted,
        "footer": "This page is one file and asks nothing of the network.",
        "live_js": "",
    }
    return fill({**parts_of(title, rows, answers, reading), **more}, page_data(rows, list(answers)))


def parts_of(title: str, rows: Sequence[Row], answers: Mapping[Facet, list[Answer]], reading: Reading) -> dict[str, str]:
    """The parts of the page that depend on the runs, as HTML."""
    head, body = as_html(rows)
    return {
        "title": html.escape(title),
        "summary": html.escape(_summary(rows, reading)),
        "answers": "\n".join(_facet_answers(i, f, found, rows) for i, (f, found) in enumerate(answers.items())),
        "split": split_section(rows),
        "table_head": head,
        "table_body": body,
        "table_note": _table_note(rows),
        "provenance": _provenance(rows, reading),
    }


def fill(parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The page of all its parts."""
    own = {"version": html.escape(__version__), "css": source("page.css"), "js": source("page.js"), "data": _safe_json(data)}
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: {**parts, **own}[match[1]], source("page.html"))
    return page.encode(errors="replace").decode()  # names of folders may hold what is no UTF-8


def source(name: str) -> str:
    """A file of this package."""
    return files("hocket.report").joinpath(name).read_text(encoding="utf-8")


def _safe_json(data: Any) -> str:
    """JSON inside a script element: ``<`` could end it, the two separators end a line for old parsers."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _summary(rows: Sequence[Row], reading: Reading) -> str:
    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    *few, most = sorted({r.facet.workers for r in rows})
    parts = [count(len(reading.runs), "run", "runs"), count(len({r.strategy for r in rows}), "strategy", "strategies")]
    parts.append(count(len({r.facet.data for r in rows}), "data set", "data sets"))
    parts.append(f"{', '.join(map(str, few))}{' and ' * bool(few)}{count(most, 'worker', 'workers')}")
    return " · ".join(parts)


def _facet_answers(index: int, facet: Facet, answers: list[Answer], rows: Sequence[Row]) -> str:
    title = f'{html.escape(str(facet))} <span class="basis">{html.escape(basis(rows, facet))}</span>'
    cards = "\n".join(_answer(a) for a in answers)
    return f'<div class="facet" data-facet="{index}"><h2>{title}</h2>\n<div class="answers">{cards}</div></div>'


def _table_note(rows: Sequence[Row]) -> str:
    note = ""
    if any(r.staleness for r in rows):
        note += (
            " Staleness: how many updates (without servers: contributions of others) lie between the weights that a gradient"
            " was computed at and its own."
        )
    if any(r.lost and r.lost.mean > 0 for r in rows):
        note += " “Lost batches” are mini-batches whose gradients were lost through faults; they count as done."
    if any(r.comm_stats for r in rows):
        note += (
            " Where models are split, a worker is a replica, on several processes: its bytes are those of all of them along"
            " all axes, and what they wait for along pipeline and tensor is part of the seconds but not of “wait”."
        )
    if any(r.bubble for r in rows):
        note += " “Bubble” is the share of time, but for communication, in which the processes of a pipeline were idle."
    return note


def _answer(answer: Answer) -> str:
    text = {name: html.escape(str(getattr(answer, name))) for name in ("question", "strategy", "figure", "detail")}
    if not answer.question:
        return f'<p class="answer verdict">{text["detail"]}</p>'
    question = f'<span class="question">{text["question"]}</span>'
    if not answer.strategy:
        detail = text["detail"][:1].upper() + text["detail"][1:]
        return f'<p class="answer empty">{question} <span class="detail">{detail}</span></p>'
    detail = f' <span class="detail">{text["detail"]}</span>' if answer.detail else ""
    return (
        f'<p class="answer">{question} <strong class="figure">{text["figure"]}</strong> '
        f'<span class="strategy">{text["strategy"]}</span>{detail}</p>'
    )


def page_data(rows: Sequence[Row], facets: list[Facet], live: bool = False) -> dict[str, Any]:
    """The data of the charts; for ``live`` pages also of runs that are not finished, and training losses."""
    looks = styles(rows)
    labels = sorted(looks, key=lambda label: looks[label].number)
    place = {label: i for i, label in enumerate(labels)}
    shown = columns(rows)
    edges = {f: column_edges(row.staleness for row in rows if row.facet == f) for f in facets}
    names = ("data", "model", "workers", "kind", "study", "cluster", "by_loss")
    return {
        "live": live,
        "facets": [{**{name: getattr(f, name) for name in names}, "staleness": edges[f]} for f in facets],
        "series": [{"label": label, **vars(looks[label])} for label in labels],
        "rows": [
            {
                "facet": facets.index(row.facet),
                "series": place[row.label],
                "ranked": row.ranked,
                "state": row.state,
                "frontier": row.on_frontier,
                "score": row.score and row.score.mean,
                "mb": row.mb_per_worker,
                **{name: figure and figure.mean for name, figure in row.clock.items()},
                "curve": _curve(row, live),
                "staleness": _staleness(row.staleness, edges[row.facet]),
                "steps": _steps(row.stragglers),
                "tip": _tip(row),
                "text": " ".join(c.text(row) for c in shown if not c.numeric).lower(),
            }
            for row in rows
        ],
    }


def _curve(row: Row, loss: bool = False) -> list[list[float | None]]:
    """By epoch: its number, score, spread, seconds, MB per worker, and with ``loss`` that of training; at most as many epochs and
    digits as a plot can show."""
    last, points = len(row.curve) - 1, []
    places = {round(i * last / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)} if last >= _MOST_POINTS else range(last + 1)
    for point in (row.curve[place] for place in sorted(places)):
        score = row.score_of(point)
        sent = None if point.bytes_sent is None else point.bytes_sent / max(1, row.facet.workers) / 1e6
        figures = (
            point.epoch,
            score and score.mean,
            score and score.spread,
            point.seconds,
            sent,
            *[point.loss and point.loss.mean] * loss,
        )
        points.append([None if f is None else float(f"{f:.7g}") for f in figures])
    return points


def _staleness(found: Staleness | None, edges: list[int]) -> dict[str, Any] | None:
    if found is None:
        return None
    middle = column_of(found.middle, edges)
    return {"counts": found.columns(edges), "middle": middle, "mean": found.mean, "text": str(found)}


def _steps(found: Stragglers | None) -> dict[str, Any] | None:
    """Step times of the slowest workers, slowest first: each worker's number, p50 and p99."""
    if found is None or len(found.p50_s) < 2:
        return None
    slowest = sorted(range(len(found.p50_s)), key=lambda worker: -found.p50_s[worker])[:_MOST_WORKERS]
    workers = [[worker, *(float(f"{of[worker]:.4g}") for of in (found.p50_s, found.p99_s))] for worker in slowest]
    times_median = times(found.p50_s[found.slowest] / found.median_s) if found.median_s else NONE
    return {"workers": workers, "text": f"worker {found.slowest}: {times_median} the median"}


def _tip(row: Row) -> list[list[str]]:
    def share(figure: Figure | None) -> str:
        return "–" if figure is None else f"{figure.scaled(100).text(1)} %"

    pairs = [["accuracy", share(row.accuracy)]] if row.accuracy or not row.facet.by_loss else []
    pairs += [[name, figure.text()] for name, figure in (("test loss", row.test_loss), ("perplexity", row.perplexity)) if figure]
    if row.worst and row.accuracy and row.worst.mean != row.accuracy.mean:
        pairs.append(["worst replica", share(row.worst)])
    pairs += [[name, f"{figure.text()} s"] for name, figure in row.clock.items() if figure]
    pairs += [["tokens/s", row.tokens_per_s.text()]] if row.tokens_per_s else []
    pairs += [["waited for data", f"{row.data_wait.text()} s"]] if row.data_wait else []
    pairs += [["data read", f"{row.data_bytes.scaled(1e-6).text()} MB"]] if row.data_bytes else []
    pairs += [["samples left out", row.data_skipped.text()]] if row.data_skipped and row.data_skipped.mean else []
    pairs.append(["sent per worker", "–" if row.mb_per_worker is None else f"{plain(row.mb_per_worker)} MB"])
    if row.times_fewer is not None:
        pairs.append(["fewer bytes", times(row.times_fewer)])
    if row.staleness is not None:
        pairs += [["median staleness", whole(row.staleness.median)], ["mean staleness", plain(row.staleness.mean)]]
        pairs.append(["largest staleness", whole(row.staleness.largest)])
    if row.bubble is not None:
        pairs.append(["bubble", share(row.bubble)])
    if row.lost and row.lost.mean > 0:
        pairs.append(["lost batches", row.lost.text()])
    pairs.append(["rate", lr_text(row.lr)])
    if not row.ranked:
        pairs.append(["state", row.state])
    source = "virtual" if row.facet.virtual else "measured"
    pairs.append(["figures", f"{source}, seconds {row.facet.predicted}" if row.facet.cluster else source])
    return pairs


def _provenance(rows: Sequence[Row], reading: Reading) -> str:
    """How it was run: commands, versions, common settings, how learning rates were chosen, and what failed or was not finished."""
    failed = [f"{r.label} ({r.facet}): {r.reason}" for r in rows if r.state == FAILED]
    unfinished = [f"{r.label} ({r.facet}): {r.reason or r.state}" for r in rows if r.state not in (FINISHED, FAILED)]
    notes = [n for study in reading.studies for n in study.notes] + reading.notes
    commands = dict.fromkeys(s.command for s in reading.studies if s.command)
    versions = [found for run in reading.runs if isinstance(found := run.settings.get("versions"), dict)]
    blocks = {
        "Commands": "".join(f"<pre><code>{html.escape(c)}</code></pre>" for c in commands),
        "Failed runs": _list(failed),
        "Unfinished runs, not ranked": _list(unfinished),
        "Notes": _list(dict.fromkeys(notes)),
        "Seconds that a step computes, by worker (p50 / p99)": _list(_stragglers(rows)),
        "Settings common to all runs": _common(reading),
        "Clusters that seconds are predicted for": _list(_clusters(rows)),
        "Learning rates": _lrs(rows),
        "Outer rates and momenta": _list(f"{r.label} ({r.facet}): {_sweep(found)}" for r, found in swept(rows, "outer")),
        "Versions": _list(dict.fromkeys(", ".join(f"{name} {value}" for name, value in found.items()) for found in versions)),
    }
    return "\n".join(f"<div><h3>{html.escape(title)}</h3>{content}</div>" for title, content in blocks.items() if content)


def _common(reading: Reading) -> str:
    settings = [run.settings for run in reading.runs]
    names = [name for name in settings[0] if name not in _SHOWN]
    same = [name for name in names if len({json.dumps(s.get(name), sort_keys=True, default=str) for s in settings}) == 1]
    pairs = [(html.escape(name), html.escape(_shown(settings[0][name]))) for name in same if settings[0][name] is not None]
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="pairs">{items}</dl>' if items else ""


def _stragglers(rows: Sequence[Row]) -> list[str]:
    """The stragglers of runs on several workers."""
    shown = [row for row in rows if row.stragglers is not None and len(row.stragglers.p50_s) > 1]
    kind = {False: ", measured", True: ""}  # a virtual facet says what its seconds are predicted for
    return [f"{row.label} ({row.facet}{kind[row.facet.virtual]}): {row.stragglers.line()}" for row in shown if row.stragglers]


def _clusters(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        spec = row.settings.get("spec")
        if row.facet.cluster and isinstance(spec, dict):
            text = ", ".join(f"{name} {_shown(value)}" for name, value in spec.items() if name != "name" and value is not None)
            found.append(f"{row.facet.cluster}: {text}")
    return list(dict.fromkeys(found))


def _lrs(rows: Sequence[Row]) -> str:
    """The learning rates: searched ones one by one, given ones in one sentence."""
    searched = swept(rows, "rate")
    given = sorted({row.lr for row in rows if not isinstance(row.settings.get("rate"), dict) and row.lr is not None})
    text = ""
    if given:
        which = "The other rates" if searched else "Rates"
        text = f"<p>{which} were given, not searched: {html.escape(', '.join(lr_text(g) for g in given))}.</p>"
    if not searched:
        return text
    lines = [f"{row.label} ({row.facet}): {_sweep(found)}" for row, found in searched]
    by = "lowest training loss" if any(isinstance(found.get("losses"), dict) for _, found in searched) else "highest accuracy"
    listed = f"<details><summary>The {len(lines)} sweeps</summary>{_list(lines)}</details>" if len(lines) > 8 else _list(lines)
    return f"<p>Chosen by a short sweep, for the {by} at its end.</p>{listed}{text}"


def swept(rows: Sequence[Row], what: str) -> list[tuple[Row, dict[str, Any]]]:
    """Rows for which a ``rate`` or the ``outer`` rate and momentum were searched, and how."""
    return [(row, found) for row in rows if isinstance(found := row.settings.get(what), dict)]


def _sweep(found: dict[str, Any]) -> str:
    names = ("tried", "losses", "longer")
    tried, losses, longer = (part if isinstance(part := found.get(name), dict) else {} for name in names)
    shown = []
    for name in dict.fromkeys((*losses, *tried)):
        loss, late, accuracy = number(losses.get(name)), number(longer.get(name)), number(tried.get(name))
        figures = [f"loss {plain(loss)}"] if loss is not None else []
        figures += [f"{plain(late)} in twice as long"] if late is not None else []
        figures += [percent(accuracy)] if accuracy is not None else []
        shown.append(f"{name} ({', '.join(figures) or 'diverged'})")
    length = f", {found['epochs']} epochs each" if number(found.get("epochs")) else ""
    given_up = given if isinstance(given := found.get("given_up"), dict) else {}
    ends = [f"{name} ({'diverged' if number(loss) is None else f'loss {plain(number(loss))}'})" for name, loss in given_up.items()]
    left = f"; given up after a whole training: {', '.join(ends)}" if ends else ""
    return f"{_shown(found.get('chosen'))}; tried: {', '.join(shown)}{length}{left}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return lr_text(value) if isinstance(value, float) else str(value)


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""
