"""Draws docs/architecture.svg from the imports in src/hocket: packages as boxes in layers, an arrow where one imports another.

``python scripts/architecture.py`` writes the drawing. An arrow that others imply (A → B → C beside A → C) is left out, and so are
those to ``errors``, ``version`` and ``noise``, which nearly everything imports. Imports are read from the source, not carried out.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
SOURCE, DRAWING = ROOT / "src" / "hocket", ROOT / "docs" / "architecture.svg"
EVERYWHERE = ("errors", "version", "noise")
ABOUT = {
    "cli": "the command, one file per verb",
    "study": "many strategies side by side",
    "report": "tables, charts, a page, live",
    "integrations": "launchers, other libraries",
    "session": "init, parallelize, shutdown",
    "predict": "time and traffic, no training",
    "sandblaster": "L-BFGS over the whole batch",
    "prediction": "probe, predict, advise",
    "supervisor": "starts and watches processes",
    "train": "job, engines, loop, settings",
    "split": "tensor, pipeline, mesh, sharding",
    "models": "networks and their losses",
    "data": "data sets, partition",
    "drivers": "sockets, simulation, recordings",
    "programs": "algorithms without I/O",
    "transport": "frames, keys, links",
    "strategy": "where the axes meet",
    "sync": "when workers talk",
    "topology": "whom they talk to",
    "compression": "what they send",
    "cluster": "workers, clock, ledger",
    "synonyms": "the field's names",
    "optim": "optimisers for rows",
    "notation": "strategies as text",
    "torchrun": "elastic runs under torchrun",
    "notebook": "HTML tables, progress",
    "picture": "charts for notebooks",
}
"""What stands in a box below the name; a package without an entry has its name alone."""
WIDTH, HEIGHT, GAP, RISE, MARGIN = 220, 48, 26, 44, 24
"""Of a box, between boxes of a layer, between layers, and around the drawing, in pixels."""

Graph = dict[str, set[str]]


def imports() -> Graph:
    """For each package (or module) right below ``hocket`` those that it imports."""
    found: Graph = {}
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        own = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module] if node.module != "hocket" else [f"hocket.{alias.name}" for alias in node.names]
            own |= {name.split(".")[1] for name in names if name.startswith("hocket.")}
    return {package: {other for other in own if other in found and other != package} for package, own in found.items()}


def reduced(graph: Graph) -> Graph:
    """The same without arrows that others imply.

    >>> reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    {'a': {'b'}, 'b': {'c'}, 'c': set()}
    """
    reach: Graph = {}

    def below(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set().union(*({other} | below(other) for other in graph[name]))
        return reach[name]

    return {name: {o for o in own if not any(o in below(p) for p in own - {o})} for name, own in graph.items()}


def levels(graph: Graph) -> dict[str, int]:
    """The layer of each package, 0 on top: one below the lowest of those that import it.

    >>> levels({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    {'a': 0, 'b': 1, 'c': 2}
    """
    importers: Graph = defaultdict(set)
    for name, own in graph.items():
        for other in own:
            importers[other].add(name)
    found: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((level(above) for above in importers[name]), default=-1)
        return found[name]

    for name in graph:
        level(name)
    return found


def rows(graph: Graph, level: dict[str, int]) -> tuple[list[list[str]], list[list[str]]]:
    """The boxes of each layer in order, and the arrows as paths; where an arrow passes a layer it holds a place (``a>b@3``)."""
    paths = []
    layers: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in sorted(graph):
        layers[level[name]].append(name)
    for name in sorted(graph):
        for other in sorted(graph[name]):
            passed = [f"{name}>{other}@{k}" for k in range(level[name] + 1, level[other])]
            for k, place in enumerate(passed, level[name] + 1):
                layers[k].append(place)
            paths.append([name, *passed, other])
    beside: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for upper, lower in pairwise(path):
            beside[upper].append(lower)
            beside[lower].append(upper)
    for turn in range(24):  # each layer by the mean place of its neighbours, down and up again
        at = {name: (k + 0.5) / len(layer) for layer in layers for k, name in enumerate(layer)}
        for layer in layers if turn % 2 else reversed(layers):
            layer.sort(key=lambda name: (sum(at[o] for o in beside[name]) / max(len(beside[name]), 1), name))
            at.update({name: (k + 0.5) / len(layer) for k, name in enumerate(layer)})
    return layers, paths


def drawing(graph: Graph) -> str:
    """The drawing as SVG."""
    graph = {name: own - set(EVERYWHERE) for name, own in graph.items() if name not in EVERYWHERE}
    graph = reduced(graph)
    layers, paths = rows(graph, levels(graph))
    wide = {name: WIDTH if "@" not in name else 8 for layer in layers for name in layer}
    spans = [sum(wide[name] for name in layer) + GAP * (len(layer) - 1) for layer in layers]
    width, height = max(spans) + 2 * MARGIN, len(layers) * (HEIGHT + RISE) - RISE + 2 * MARGIN
    centre: dict[str, tuple[float, float]] = {}
    for k, (layer, span) in enumerate(zip(layers, spans, strict=True)):
        x = (width - span) / 2
        for name in layer:
            centre[name] = (x + wide[name] / 2, MARGIN + k * (HEIGHT + RISE) + HEIGHT / 2)
            x += wide[name] + GAP
    parts = [_curve(path, centre) for path in paths]
    parts += [_box(name, *centre[name]) for layer in layers for name in layer if "@" not in name]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="Packages of Hocket and their imports">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5c6370"/></marker></defs>\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _curve(path: list[str], centre: dict[str, tuple[float, float]]) -> str:
    """An arrow from the lower edge of its first box, through the layers that it passes, to the upper edge of its last."""
    points = [centre[name] for name in path]
    x, y = points[0][0], points[0][1] + HEIGHT / 2
    steps = [f"M{x:.1f} {y:.1f}"]
    for k, (nx, ny) in enumerate(points[1:], 1):
        last = k == len(points) - 1
        top = ny - HEIGHT / 2 - (1 if last else 0)
        middle = (y + top) / 2
        steps.append(f"C{x:.1f} {middle:.1f} {nx:.1f} {middle:.1f} {nx:.1f} {top:.1f}")
        if not last:
            steps.append(f"L{nx:.1f} {ny + HEIGHT / 2:.1f}")
        x, y = nx, ny + HEIGHT / 2
    return f'<path d="{"".join(steps)}" fill="none" stroke="#5c6370" stroke-width="1.3" marker-end="url(#tip)"/>'


def _box(name: str, x: float, y: float) -> str:
    left, top, about = x - WIDTH / 2, y - HEIGHT / 2, ABOUT.get(name, "")
    shape = f'<rect x="{left:.1f}" y="{top:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="#eef2fb" stroke="#3f51b5"/>'
    title = _text(x, y - 3 if about else y + 5, name, 'font-size="15" font-weight="600"')
    more = _text(x, y + 15, about, 'font-size="12" fill="#444"') if about else ""
    return shape + title + more


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {style}>{escape(text)}</text>'


def main() -> None:
    """Write the drawing, or with ``--check`` say whether it is up to date."""
    text = drawing(imports())
    if "--check" in sys.argv[1:]:
        if not DRAWING.exists() or DRAWING.read_text() != text:
            sys.exit(f"{DRAWING.relative_to(ROOT)} is not what the imports say: run python scripts/architecture.py.")
        return
    DRAWING.write_text(text)


if __name__ == "__main__":
    main()
