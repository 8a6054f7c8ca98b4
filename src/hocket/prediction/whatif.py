"""The report's section of predictions: beside what was measured, and for other links, latencies and numbers of workers.

Everything is computed when the page is made: sliders choose among the points of a grid, and no server is asked. A facet's
strategies are predicted from its model's size and the time that its runs took to compute a step.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError
from hocket.prediction.api import predict
from hocket.prediction.model import ModelSize, of_size
from hocket.prediction.steps import Prediction
from hocket.report.rows import Facet, Row
from hocket.strategy import Strategy

BITS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 2.5e10, 1e11, 4e11)
LATENCIES_S = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
WORKERS = (2, 4, 8, 16, 64, 256, 1024)
MOST_STRATEGIES, MOST_FACETS = 6, 3


def what_if(rows: Sequence[Row], cluster: ClusterSpec) -> str:
    """The section, as HTML with its data; an error where no run says how long a step takes."""
    blocks: list[str] = []
    data: list[dict[str, Any]] = []
    for facet in sorted({row.facet for row in rows}):
        own = [row for row in rows if row.facet == facet and _predictable(row)][:MOST_STRATEGIES]
        if own and len(data) < MOST_FACETS:
            size = _size(own)
            blocks.append(_block(len(data), facet, own, size, cluster))
            data.append(_grid(own, size, cluster))
    if not blocks:
        raise HocketError(
            "No run here has what a prediction needs (seconds of computing, and a strategy whose workers step together); name "
            "other runs."
        )
    script = files("hocket.report").joinpath("whatif.js").read_text(encoding="utf-8")
    written = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    about = f"By the cost model of virtual workers, for {html.escape(cluster.name)}; computing takes as long as in these runs."
    return (
        '\n<section id="what-if" aria-labelledby="what-if-title">\n<h2 id="what-if-title">Predicted</h2>\n'
        f'<p class="note">{about}</p>\n{"".join(blocks)}\n'
        f'<script type="application/json" id="what-if-data">{written}</script>\n<script>\n{script}</script>\n</section>\n'
    )


def _predictable(row: Row) -> bool:
    figures = (row.settings.get("parameters"), row.settings.get("steps"), row.compute and row.compute.mean)
    together = not row.mesh and Strategy.parse(row.strategy).runtime == "collective"
    return together and all(isinstance(f, (int, float)) and f > 0 for f in figures)


def _step_s(row: Row) -> float:
    assert row.compute is not None
    return row.compute.mean / row.settings["steps"]


def _size(rows: Sequence[Row]) -> ModelSize:
    """The facet's model; a step is the shortest of its strategies', whose other work is predicted."""
    settings = rows[0].settings
    return of_size(settings["parameters"], int(settings.get("batch_size") or settings.get("batch") or 1), min(map(_step_s, rows)))


def _predicted(rows: Sequence[Row], size: ModelSize, cluster: ClusterSpec, workers: int) -> list[Prediction]:
    strategies = [row.strategy for row in rows]
    return list(predict(size, replace(cluster, step_s=None), strategies, workers, batch_size=size.batch_size).rows)


def _grid(rows: Sequence[Row], size: ModelSize, cluster: ClusterSpec) -> dict[str, Any]:
    """Milliseconds of a step, and efficiency in percent, by workers, latency, bandwidth and strategy."""
    table = []
    for workers in WORKERS:
        for latency_s in LATENCIES_S:
            for bits in BITS:
                spec = replace(cluster, bandwidth=bits / 8, latency_s=latency_s, workers=None)
                found = _predicted(rows, size, spec, workers)
                table.append([[_short(p.step_s * 1000), _short(100 * p.efficiency)] for p in found])
    axes = {"bits": BITS, "latency_s": LATENCIES_S, "workers": WORKERS}
    return {"strategies": [row.label for row in rows], "batch": size.batch_size, "table": table, **axes}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _block(number: int, facet: Facet, rows: Sequence[Row], size: ModelSize, cluster: ClusterSpec) -> str:
    workers = facet.workers
    head = f'<div class="what-if" data-block="{number}">\n<h3>{html.escape(str(facet))}</h3>\n'
    bits = min(8 * cluster.bandwidth, BITS[-1])
    sliders = "".join(
        _slider(number, *slider)
        for slider in (
            ("bits", "Bandwidth of each link", BITS, bits),
            ("latency_s", "Latency", LATENCIES_S, max(cluster.latency_s, LATENCIES_S[0])),
            ("workers", "Workers", WORKERS, workers),
        )
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Strategy", "ms per step", "samples/s", "Efficiency"))
    chosen = f'<table class="what-if-table"><thead><tr>{heads}</tr></thead><tbody></tbody></table>'
    beside = _beside(rows, _predicted(rows, size, cluster, workers)) if workers > 1 else ""
    return f'{head}{beside}<h4>What if?</h4><div class="sliders" hidden>{sliders}</div>\n<div class="box">{chosen}</div>\n</div>\n'


def _slider(number: int, name: str, label: str, stops: Sequence[float], value: float) -> str:
    at = min(range(len(stops)), key=lambda k: abs(math.log(stops[k] / value)))
    ident = f"what-if-{number}-{name}"
    return (
        f'<label for="{ident}">{label} <output for="{ident}"></output></label>'
        f'<input type="range" id="{ident}" data-axis="{name}" min="0" max="{len(stops) - 1}" step="1" value="{at}">'
    )


def _beside(rows: Sequence[Row], predicted: Sequence[Prediction]) -> str:
    """Measured and predicted steps side by side; of virtual workers both are predicted, and only real ones are shown."""
    lines = []
    for row, found in zip(rows, predicted, strict=True):
        if row.facet.virtual or row.seconds is None or not math.isfinite(found.step_s):
            continue
        measured, ours = row.seconds.mean / row.settings["steps"] * 1000, found.step_s * 1000
        cells = "".join(
            f'<td class="number">{text}</td>' for text in (f"{measured:.4g}", f"{ours:.4g}", f"{ours / measured - 1:+.0%}")
        )
        lines.append(f'<tr><th scope="row">{html.escape(row.label)}</th>{cells}</tr>')
    if not lines:
        return ""
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Strategy", "measured ms", "predicted ms", "error"))
    return f'<div class="box"><table class="beside"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>\n'
