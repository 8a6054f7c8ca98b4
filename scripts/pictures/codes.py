"""Codes: what they keep of a small vector, and what error feedback keeps for later. All values went through the codes."""

from __future__ import annotations

import torch
from svg import BLUE, INK, ORANGE, Drawing
from torch import Tensor

from hocket.cluster import VirtualCluster
from hocket.compression.base import Compressor, Context
from hocket.compression.feedback import mean_with_feedback
from hocket.strategy import Strategy
from hocket.topology.base import Channel

VALUES = torch.tensor([
    0.9, -0.35, 0.12, 0.55, -1.0, 0.07, 0.31, -0.62, 0.2, -0.11, 0.44, 0.78, -0.05, -0.28, 0.15, 0.36,
    -0.7, 0.03, 0.22, -0.48, 0.6, -0.16, 0.09, 0.5, -0.85, 0.27, -0.4, 0.13, 0.68, -0.2, 0.33, -0.09,
]).unsqueeze(0)  # fmt: skip
STEP, LEFT, HIGH = 19, 12, 44


def code(text: str) -> Compressor:
    return Strategy.parse(f"bulk + {text}").compression


def context(exchange: int, workers: int = 1, shapes: tuple[tuple[int, ...], ...] | None = None) -> Context:
    return Context(0, exchange, exchange, 0, torch.arange(workers), workers, shapes)


def alone() -> Channel:
    """The channel of a worker without others: what it decodes is its own message."""
    cluster = VirtualCluster(1)
    return Strategy.parse("bulk").topology.bind(cluster, cluster.world, 0)


def decoded(text: str, exchange: int = 0) -> tuple[Tensor, int]:
    """The values as others decode them, and the bytes of the message."""
    codec, where = code(text).codec, context(exchange)
    assert codec is not None
    message, _ = codec.encode(VALUES.clone(), where.keys(), {}, where)
    return codec.decode(message, VALUES.shape[1], where), int(message.payload_bytes()[0])


def bars(drawing: Drawing, y: float, before: Tensor, after: Tensor, left: Tensor | None = None, step: float = STEP) -> None:
    """``before`` as outlines, ``after`` as bars inside, ``left`` as dots: what waits for later."""
    peak = max(float(before.abs().max()), float(after.abs().max()), 1e-9)
    for k in range(before.numel()):
        x = LEFT + step * k
        for value, width, colour, opacity, line in ((before, 14, INK, 0.0, True), (after, 8, BLUE, 0.95, False)):
            tall = HIGH * float(value[k]) / peak
            if abs(tall) > 0.2:
                width_here = width * step / STEP
                drawing.rect(x + (step - width_here) / 2, y - max(tall, 0), width_here, abs(tall), colour, opacity, line)
        if left is not None and abs(float(left[k])) > 0.005:
            drawing.circle(x + step / 2, y - HIGH * float(left[k]) / peak, 2.6, ORANGE)
    drawing.line(LEFT, y, LEFT + step * before.numel(), y, opacity=0.5)


def _sheet(title: str, panels: int, feedback: bool = False) -> Drawing:
    drawing = Drawing(LEFT * 2 + STEP * VALUES.shape[1], panels * (2 * HIGH + 34) + 34, title)
    words = [(INK, 0.12, "a worker's values"), (BLUE, 0.95, "what the others decode")]
    drawing.legend(LEFT, drawing.height - 12, *words, *([(ORANGE, 1.0, "what waits for the next exchange")] if feedback else []))
    return drawing


def codes(*panels: tuple[str, str, int]) -> Drawing:
    """A panel for each code (or for one code at several exchanges): notation, a remark, the number of the exchange."""
    drawing = _sheet("; ".join(f"{text}: {remark}" for text, remark, _ in panels), len(panels))
    for k, (text, remark, exchange) in enumerate(panels):
        y, (after, sent) = k * (2 * HIGH + 34), decoded(text, exchange)
        drawing.text(LEFT, y + 16, text, bold=True)
        drawing.text(LEFT + 14 + 7.4 * len(text), y + 16, f"{remark}; {sent} bytes of {VALUES.nbytes}", opacity=0.75)
        bars(drawing, y + 26 + HIGH, VALUES[0], after[0])
    return drawing


def feedback(text: str, exchanges: int, title: str, remark: str) -> Drawing:
    """One gradient at several exchanges in a row, with the residual after each."""
    drawing = _sheet(title, exchanges, feedback=True)
    compressor, channel, state = code(text), alone(), {}
    for e in range(exchanges):
        y, before = e * (2 * HIGH + 34), VALUES + state.get("error", torch.zeros_like(VALUES))
        _, sent, state = mean_with_feedback(compressor, VALUES.clone(), channel, state, context(e))
        drawing.text(LEFT, y + 16, f"exchange {e + 1}", bold=True)
        drawing.text(LEFT + 90, y + 16, f"{text}; {remark if e else 'the same gradient at each exchange'}", opacity=0.75)
        bars(drawing, y + 26 + HIGH, before[0], sent[0], state["error"][0])
    return drawing


def accumulated() -> Drawing:
    """``dgc``: what its accumulator has before each exchange and what is sent of it."""
    drawing = _sheet("dgc: the largest values of an accumulated momentum at three exchanges", 3)
    channel, state = alone(), {}
    for e in range(3):
        y = e * (2 * HIGH + 34)
        _, sent, state = code("dgc(0.125)").mean(VALUES.clone(), channel, state, context(e))
        drawing.text(LEFT, y + 16, f"exchange {e + 1}", bold=True)
        drawing.text(LEFT + 90, y + 16, "dgc(0.125): outlines are what has accumulated; the largest eighth is sent", opacity=0.75)
        bars(drawing, y + 26 + HIGH, (state["v"] + sent)[0], sent[0])
    return drawing


def cosines() -> Drawing:
    """``demo``: a matrix of 64 × 64, and what its largest cosines make of it, each drawn as means of 4 × 4 values."""
    at = torch.arange(64) + 0.5
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    wave = [torch.cos(torch.pi * n * at / 64) for n in range(12)]
    matrix = torch.outer(wave[2], wave[3]) - 0.7 * torch.outer(wave[5], wave[1]) + 0.5 * torch.outer(wave[7], wave[6]) + 0.4 * noise
    shown = [("a momentum of 64 × 64 values", "drawn as means of 4 × 4", matrix)]
    for most in (1, 2, 8):
        where = context(0, 1, ((64, 64),))
        found = code(f"demo({most}, sign=False)").mean(matrix.reshape(1, -1).clone(), alone(), {}, where).mixed
        shown.append((f"demo({most})", f"{most} of its 4,096 cosines", found.view(64, 64)))
    small = [(name, words, torch.nn.functional.avg_pool2d(values.view(1, 1, 64, 64), 4)[0, 0]) for name, words, values in shown]
    return maps("demo: a momentum, and what the largest cosines of it are", small, 11)


def low_rank() -> Drawing:
    """``lowrank``: a matrix and what its factors are at the first and at the third exchange."""
    rows, columns = 10, 14
    i, j = torch.arange(rows).view(-1, 1) / rows, torch.arange(columns).view(1, -1) / columns
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    matrix = torch.cos(5 * i) * torch.sin(4 * j + 0.5) + 0.6 * torch.sin(7 * i + 1) * torch.cos(9 * j) + 0.12 * noise
    shown = [("a gradient", f"{rows} × {columns} = {rows * columns} values", matrix)]
    for rank, last in ((1, 2), (2, 0), (2, 2)):
        state: dict = {}
        for exchange in range(last + 1):
            where = context(exchange, shapes=((rows, columns),))
            heard, _, state = code(f"lowrank({rank}, feedback=False)").mean(matrix.reshape(1, -1).clone(), alone(), state, where)
        found = heard.view(rows, columns)
        error = float((found - matrix).norm() / matrix.norm())
        words = f"{rank * (rows + columns)} values travel; error {error:.0%}"
        shown.append((f"lowrank({rank}), exchange {last + 1}", words, found))
    return maps("lowrank: a matrix, and the products of thin factors that are sent of it", shown, 14)


def maps(title: str, shown: list[tuple[str, str, Tensor]], side: float) -> Drawing:
    """Matrices two by two: blue above zero, orange below."""
    rows, columns = shown[0][2].shape
    peak, wide, tall = float(shown[0][2].abs().max()), max(columns * side, 200) + 24, rows * side + 52
    drawing = Drawing(2 * wide, 2 * tall + 24, title)
    for k, (name, words, values) in enumerate(shown):
        x, y = 12 + wide * (k % 2), tall * (k // 2)
        drawing.text(x, y + 18, name, bold=True)
        drawing.text(x, y + 34, words, opacity=0.75)
        cells = [(round(min(abs(float(v)) / peak, 1.0), 1), float(v) > 0, n) for n, v in enumerate(values.flatten())]
        for level, above, n in sorted(cells):
            if level:
                place = x + side * (n % columns), y + 42 + side * (n // columns)
                drawing.rect(*place, side - 1, side - 1, BLUE if above else ORANGE, level)
    drawing.legend(12, drawing.height - 8, (BLUE, 0.9, "above zero"), (ORANGE, 0.9, "below zero"))
    return drawing


PICTURES = {
    "cast": lambda: codes(("cast(bf16)", "eight bits of mantissa", 0), ("cast(e3m0)", "powers of two in four bits", 0)),
    "qsgd": lambda: codes(
        ("qsgd(4)", "7 levels on each side of zero", 0),
        ("qsgd(2)", "1 level: −1, 0, 1", 0),
        ("qsgd(2)", "the next exchange rounds anew", 1),
    ),
    "bins": lambda: codes(
        ("bins(2, feedback=False)", "signs and two magnitudes", 0), ("bins(3, feedback=False)", "signs and four magnitudes", 0)
    ),
    "ternary": lambda: codes(("ternary", "−1, 0 or 1 times a scale, drawn", 0), ("ternary", "the next exchange draws anew", 1)),
    "sign": lambda: codes(("sign(feedback=False)", "signs times the mean magnitude", 0)),
    "natural": lambda: codes(
        ("natural", "one of the two nearest powers of two, drawn", 0), ("natural", "the next exchange draws anew", 1)
    ),
    "threshold": lambda: codes(
        ("threshold(0.5, feedback=False)", "what is above 0.5", 0),
        ("threshold(keep=0.125, feedback=False)", "an eighth of the values", 0),
    ),
    "topk": lambda: codes(
        ("topk(0.125, feedback=False)", "the largest eighth of all", 0),
        ("topk(1/8, feedback=False)", "the largest of each 8 values", 0),
    ),
    "randomk": lambda: codes(
        ("randomk(0.125, feedback=False)", "an eighth, drawn", 0),
        ("randomk(0.125, feedback=False)", "the next exchange draws anew", 1),
    ),
    "chains": lambda: codes(
        ("topk(0.25, feedback=False)", "first what", 0), ("topk(0.25, feedback=False) | qsgd(3)", "then how precisely", 0)
    ),
    "feedback": lambda: feedback(
        "topk(0.125)",
        3,
        "Error feedback: what is not sent is added at the next exchange",
        "what waited has grown, and is among the largest now",
    ),
    "dgc": accumulated,
    "demo": cosines,
    "lowrank": low_rank,
}
