"""Pictures of split models, optimisers, CHOCO, updates and Sandblaster, each from what the code does with a small case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from codes import alone, context
from svg import BLUE, GREEN, INK, ORANGE, Drawing
from torch import nn

import hocket
from hocket.cluster import VirtualCluster
from hocket.compression.feedback import mean_with_feedback
from hocket.optim.muon import orthogonal
from hocket.sandblaster.virtual import VirtualWorld
from hocket.split.offload import Offload
from hocket.split.pipeline.schedules import make
from hocket.split.pipeline.timeline import simulate
from hocket.split.sharded import owners_of
from hocket.split.tensor.plan import automatic
from hocket.strategy import Strategy

LEFT, WIDE = 86, 560
TWO = (BLUE, ORANGE, GREEN, "#8a63c4")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- charts ------------------------------------------------------------------------------------------------------------------


def chart(title: str, series: Sequence[tuple[str, str, Sequence[float]]], across: str, upwards: str, low: float = 0.0) -> Drawing:
    """Curves over steps, one colour and one name each."""
    height, peak, longest = 150, max(max(values) for *_, values in series), max(len(values) for *_, values in series)
    drawing = Drawing(LEFT + WIDE + 14, height + 34 + 20 * len(series), title)
    drawing.line(LEFT, height + 8, LEFT + WIDE, height + 8, opacity=0.5)
    drawing.line(LEFT, 8, LEFT, height + 8, opacity=0.5)
    drawing.text(LEFT - 8, 20, upwards, "end", 11)
    drawing.text(LEFT + WIDE, height + 24, f"{across} {longest}", "end", 11)
    for k, (name, colour, values) in enumerate(series):
        step = WIDE / (longest - 1)
        drawing.curve([(LEFT + step * n, 8 + height * (1 - (v - low) / (peak - low))) for n, v in enumerate(values)], colour)
        drawing.line(LEFT, height + 36 + 20 * k, LEFT + 22, height + 36 + 20 * k, colour, 2.5)
        drawing.text(LEFT + 30, height + 40 + 20 * k, name)
    return drawing


def bars(title: str, names: Sequence[str], series: Sequence[tuple[str, str, Sequence[float]]], remark: str) -> Drawing:
    """Bars side by side for each name."""
    height, each, peak = 130, WIDE / len(names), max(max(values) for *_, values in series)
    drawing = Drawing(WIDE + 40, height + 84, title)
    wide = min(each * 0.8 / len(series), 34)
    drawing.text(20, 18, remark, opacity=0.75)
    for n, name in enumerate(names):
        for k, (_, colour, values) in enumerate(series):
            tall = height * values[n] / peak
            drawing.rect(20 + each * (n + 0.5) + wide * (k - len(series) / 2), height + 28 - tall, wide - 1, tall, colour, 0.9)
        drawing.text(20 + each * (n + 0.5), height + 44, name, "middle", 11)
    drawing.line(20, height + 28, 20 + WIDE, height + 28, opacity=0.5)
    drawing.legend(20, drawing.height - 10, *((colour, 0.9, name) for name, colour, _ in series))
    return drawing


# --- compression -------------------------------------------------------------------------------------------------------------


def public_copies() -> Drawing:
    """``CHOCO``: the distance of eight workers from their mean, over exchanges of weights on a ring."""
    start = torch.randn(8, 200, generator=seeded())
    found = []
    for text, colour in (("none", GREEN), ("topk(0.25)", BLUE), ("topk(0.05)", ORANGE)):
        strategy = Strategy.parse(f"local(1) + gossip(ring) + {text}")
        cluster = VirtualCluster(8)
        channel = strategy.topology.bind(cluster, cluster.world, 0)
        rows, state = start.clone(), channel.init_state(strategy.compression, torch.zeros_like(start))
        distances = []
        for exchange in range(121):
            distances.append(float((rows - rows.mean(0)).norm() / (start - start.mean(0)).norm()))
            rows, state = channel.weights(strategy.compression, rows, state, context(exchange, 8))
        found.append((f"gossip(ring){'' if text == 'none' else f' + {text}'}", colour, distances))
    return chart("CHOCO: workers come together although each sends a part of its values", found, "exchanges:", "distance")


def spikes() -> Drawing:
    """``updates``: Adam's way with a gradient, and with the same gradient from a code with error feedback."""
    gradients = 1 + 0.3 * torch.randn(60, 40, generator=seeded())
    code = Strategy.parse("bulk + topk(0.1)").compression
    ways = {}
    for exchanged in ("plain", "gradients", "updates"):
        weight = nn.Parameter(torch.zeros(40))
        adam, state, way = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0), {}, [0.0]
        shown = torch.zeros(40)
        for step, gradient in enumerate(gradients):
            weight.grad = gradient.clone()
            if exchanged == "gradients":
                heard, _, state = mean_with_feedback(code, gradient.view(1, -1).clone(), alone(), state, context(step))
                weight.grad = heard[0]
            before = weight.detach().clone()
            adam.step()
            if exchanged == "updates":
                moved = (weight.detach() - before).view(1, -1)
                heard, _, state = mean_with_feedback(code, moved, alone(), state, context(step))
                shown = shown + heard[0]
            way.append(-float((shown if exchanged == "updates" else weight.detach()).mean()))
        ways[exchanged] = way
    series = [
        ("AdamW, gradients sent whole", GREEN, ways["plain"]),
        ("topk(0.1) of updates", BLUE, ways["updates"]),
        ("topk(0.1) of gradients: each value arrives rarely and large, and AdamW divides by that", ORANGE, ways["gradients"]),
    ]
    return chart("Updates: codes of gradients slow AdamW down, codes of updates do not", series, "steps:", "distance")


# --- split models ------------------------------------------------------------------------------------------------------------


def schedules() -> Drawing:
    """The schedules of a pipeline of four processes; eight micro-batches (naive: four)."""
    unit, row, all_rows = 11.0, 17, []
    for name, stages_per_rank in (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        all_rows.append((name, simulate(make(name, 4, 4 if name == "naive" else 8, stages_per_rank)), stages_per_rank))
    longest = max(timeline.length / stages for _, timeline, stages in all_rows)
    drawing = Drawing(
        LEFT + unit * longest + 12, sum(30 + row * 4 for _ in all_rows) + 32, "Schedules of a pipeline: who computes what when"
    )
    colours = {"F": (BLUE, 0.9), "B": (GREEN, 0.9), "I": (GREEN, 0.9), "W": (ORANGE, 0.85)}
    y = 0.0
    for name, timeline, stages in all_rows:
        scale = unit / stages  # a stage is so many times smaller
        drawing.text(8, y + 18, f"{name}: {timeline.bubble_share:.0%} idle", bold=True)
        for process, spans in enumerate(timeline.rows):
            top = y + 26 + row * process
            drawing.text(LEFT - 8, top + 12, f"process {process}", "end", 11)
            drawing.rect(LEFT, top, scale * timeline.length, row - 3, INK, 0.06)
            for span in spans:
                colour, opacity = colours[span.action.kind]
                opacity *= 1 if span.action.stage < 4 else 0.55
                drawing.rect(LEFT + scale * span.start, top, scale * (span.end - span.start) - 1, row - 3, colour, opacity)
        y += 30 + row * 4
    words = [
        (BLUE, 0.9, "forward"),
        (GREEN, 0.9, "backward (of the inputs)"),
        (ORANGE, 0.85, "backward of the weights"),
        (INK, 0.06, "idle"),
    ]
    drawing.legend(LEFT, y + 18, *words)
    return drawing


def tensor_plan() -> Drawing:
    """Which part of each weight each of two processes has, by the plan that is found for a small model."""
    layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True)
    model = nn.Sequential(nn.Embedding(64, 32), layer, nn.Linear(32, 10))
    plan = automatic(model, 2)
    drawing = Drawing(560, 210, "Tensor parallel: which part of each weight each of two processes has")
    by_inputs = ("rows", "rotate")
    x = 14.0
    for name, kind in plan.kinds.items():
        module: Any = model.get_submodule(name)
        weight = module.in_proj_weight if kind == "heads" else module.weight
        high, wide = (1.1 * size for size in weight.shape)
        wide = max(wide, 34)
        drawing.text(x, 18, f"'{name}'", bold=True)
        drawing.text(x, 34, kind, opacity=0.75)
        for part in range(2):
            blocks = 3 if kind == "heads" else 1  # queries, keys and values below each other
            for block in range(blocks):
                tall = high / blocks
                if kind in by_inputs:
                    drawing.rect(x + wide / 2 * part, 44, wide / 2 - 1, high, TWO[part], 0.85)
                else:
                    drawing.rect(x, 44 + tall * block + tall / 2 * part, wide, tall / 2 - 1, TWO[part], 0.85)
        x += max(wide, 8.0 * len(name) + 10, 74) + 22
    drawing.text(
        14, 176, "A weight's height is its outputs, its width its inputs (an embedding's height its tokens).", opacity=0.75
    )
    drawing.legend(14, 200, (TWO[0], 0.85, "process 0"), (TWO[1], 0.85, "process 1"))
    return drawing


def owners() -> Drawing:
    """Who keeps the optimiser's state of which parameter."""
    model = nn.Sequential(*(nn.Linear(n, m) for n, m in ((40, 32), (32, 32), (32, 32), (32, 32), (32, 32), (32, 32), (32, 10))))
    sizes = [p.numel() for p in model.parameters()]
    owner = owners_of(sizes, 4)
    drawing = Drawing(WIDE + 124, 190, "Sharded state: each worker keeps the optimiser's state of consecutive parameters")
    for n, (label, kept) in enumerate((("weights", False), ("optimiser's state", True))):
        drawing.text(8, 18 + 88 * n, f"{label}: {'each worker keeps its own part' if kept else 'every worker has all'}", bold=True)
        for worker in range(4):
            y, x = 26 + 88 * n + 15 * worker, 96.0
            drawing.text(88, y + 10, f"worker {worker}", "end", 11)
            for size, of in zip(sizes, owner, strict=True):
                wide = WIDE * size / sum(sizes)
                here = not kept or of == worker
                drawing.rect(x, y, max(wide - 1, 0.4), 12, TWO[of] if here else INK, 0.85 if here else 0.06)
                x += wide
    return drawing


def blocks_in_memory() -> Drawing:
    """Which blocks of a model are in fast memory while each one computes, over two steps."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    seen: list[tuple[int, bool, list[int]]] = []
    ahead: Callable = Offload._ahead

    def on_ahead(self: Offload, blocks: list, state: bool) -> None:
        ahead(self, blocks, state)
        computes = (blocks[0].index + (1 if state else -1)) if blocks else (0 if state else 5)
        seen.append((computes, state, [b.index for b in self._here]))

    with mock.patch.object(Offload, "_ahead", on_ahead), hocket.offload(model, torch.optim.SGD(model.parameters(), 0.1)):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
    cell = 24
    drawing = Drawing(96 + cell * len(seen) + 12, 6 * 20 + 74, "Offload: which blocks are in fast memory while each one computes")
    for block in range(6):
        drawing.text(86, 40 + 20 * block, f"block {block}", "end", 11)
    for n, (computes, backward, here) in enumerate(seen):
        for block in range(6):
            colour = (GREEN if backward else BLUE) if block == computes else ORANGE
            drawing.rect(
                96 + cell * n, 26 + 20 * block, cell - 2, 18, colour if block in here else INK, 0.9 if block in here else 0.06
            )
    drawing.text(96, 16, "two steps, time goes to the right")
    words = [
        (BLUE, 0.9, "computes forward"),
        (GREEN, 0.9, "computes backward"),
        (ORANGE, 0.9, "in fast memory"),
        (INK, 0.06, "in slow memory"),
    ]
    drawing.legend(14, drawing.height - 12, *words)
    return drawing


# --- optimisers --------------------------------------------------------------------------------------------------------------


def moved(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[list[str], list[float]]:
    """How far one step moves the weight of each layer, relative to its norm."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 5)
        )
        x, y = torch.randn(256, 20), torch.randint(0, 5, (256,))
    step = optimizer(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    nn.functional.cross_entropy(model(x), y).backward()
    step.step()
    names = [n for n, p in model.named_parameters() if p.ndim > 1]
    found = dict(model.named_parameters())
    return names, [float((found[n].detach() - before[n]).norm() / before[n].norm()) for n in names]


def layer_steps() -> Drawing:
    names, plain = moved(lambda m: torch.optim.SGD(m.parameters(), 1.0))
    _, lars = moved(lambda m: hocket.LARS(m, lr=1.0, weight_decay=0.0, trust=0.02))
    _, lamb = moved(lambda m: hocket.LAMB(m, lr=0.02, weight_decay=0.0))
    series = [("SGD", ORANGE, plain), ("LARS", BLUE, lars), ("LAMB", GREEN, lamb)]
    return bars(
        "LARS and LAMB: each layer's step is the same share of its norm",
        names,
        series,
        "how far the first step moves each layer's weight, relative to its norm",
    )


def singular_values() -> Drawing:
    matrix = torch.randn(12, 30, generator=seeded()) @ torch.diag(torch.linspace(1, 0.1, 30) ** 2)
    before, after = (torch.linalg.svdvals(m) for m in (matrix, orthogonal(matrix.view(1, 12, 30))[0]))
    series = [("of the update", ORANGE, (before / before[0]).tolist()), ("after orthogonalisation", BLUE, after.tolist())]
    return bars(
        "Muon: all singular values of an update become about 1",
        [str(k + 1) for k in range(12)],
        series,
        "singular values of a 12 × 30 update, the largest first",
    )


def bytes_per_step() -> Drawing:
    """``OneBitAdam``: what each step sends, before and after the variance is fixed."""
    x = torch.randn(64, 400, generator=seeded())
    sent: list[float] = []
    cluster_end = VirtualCluster.end_step

    def on_end(self: VirtualCluster, step: int) -> None:
        sent.append(float(self.ledger.bytes_sent.sum()))
        cluster_end(self, step)

    data = (x, (x.sum(1) > 0).long())
    with mock.patch.object(VirtualCluster, "end_step", on_end):
        hocket.simulate(
            lambda: nn.Linear(400, 64), nn.functional.cross_entropy, data,
            strategy="bulk + sign + exchange=momentum", workers=4, batch_size=1,
            max_steps=16, evaluate=False, optimizer=lambda p: hocket.OneBitAdam(p, lr=1e-3, freeze_step=6),
        )  # fmt: skip
    each = [b - a for a, b in zip([0.0, *sent], sent, strict=False)]
    return bars(
        "1-bit Adam: bytes of each step",
        [str(n + 1) for n in range(len(each))],
        [("bytes that four workers send in each step", BLUE, each)],
        "freeze_step=6: gradients travel whole until step 6, then the momentum in one bit per value",
    )


# --- a batch at a time -------------------------------------------------------------------------------------------------------


def portions() -> Drawing:
    """``Sandblaster``: who computes which portion of the batch when; worker 3 is four times slower."""
    x = torch.randn(960, 5, generator=seeded())
    spec = hocket.ClusterSpec(step_s=1.0, slowdown=(1, 1, 1, 4), latency_s=0.001)
    happened: list[tuple[int, int, float, float]] = []
    seconds: Callable = VirtualWorld._seconds

    def on_seconds(self: VirtualWorld, worker: int, portion: int) -> float:
        took, now = seconds(self, worker, portion), self.simulation.now
        happened.append((worker, portion, now, now + took))
        return took

    with mock.patch.object(VirtualWorld, "_seconds", on_seconds):
        job = hocket.Sandblaster(
            lambda: nn.Linear(5, 2), nn.functional.cross_entropy, (x, (x.sum(1) > 0).long()), workers=4, max_iter=1, max_eval=2,
            portions_per_worker=6, cluster=spec, l2=0.01,
        )  # fmt: skip
        job.run()
    end = max(to for *_, to in happened)
    scale = WIDE / end
    drawing = Drawing(LEFT + WIDE + 14, 4 * 34 + 62, "Sandblaster: portions of the batch go to whoever is free")
    for worker, portion, begin, to in happened:
        again = any(p == portion and w != worker and b <= begin < t for w, p, b, t in happened)
        x0 = LEFT + scale * begin
        drawing.rect(x0, 12 + 34 * worker, scale * (to - begin) - 1, 22, ORANGE if again else BLUE, 0.9)
    for worker in range(4):
        drawing.text(LEFT - 8, 28 + 34 * worker, f"worker {worker}", "end")
    drawing.line(LEFT, 148, LEFT + WIDE, 148, opacity=0.5)
    drawing.text(LEFT + WIDE, 163, "time", "end", 11)
    drawing.legend(
        LEFT, 186, (BLUE, 0.9, "a portion of the batch"), (ORANGE, 0.9, "the second copy of one that a slow worker has in hand")
    )
    return drawing


PICTURES = {
    "choco": public_copies,
    "updates": spikes,
    "pipeline": schedules,
    "tensor": tensor_plan,
    "sharded": owners,
    "offload": blocks_in_memory,
    "layerwise": layer_steps,
    "muon": singular_values,
    "onebit": bytes_per_step,
    "sandblaster": portions,
}
