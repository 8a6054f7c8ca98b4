"""Models in stages beside the same models whole, for tests/process/test_pipeline.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from hocket.cluster.join import join
from hocket.models import cnn, cross_entropy, gpt, mlp, vgg11
from hocket.split import Mesh, MeshCoordinate, init_mesh
from hocket.split.pipeline import Cut, PipelineRunner, cut_model
from hocket.split.pipeline.tied import Tied

SIZES = (5, 8, 3, 5, 6)
"""Samples of each of five steps: four micro-batches do not divide them, and three samples are fewer than four."""
FEW = (4, 5, 2, 4, 3)
"""For vgg11, which takes long."""
MICRO = 4
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(64, 10, hidden=(16,) * 8),
    "cnn": lambda: cnn((1, 8, 8), 10),
    "vgg11": lambda: vgg11((3, 32, 32), 10),
    "gpt": lambda: gpt(32, context=8, layers=4, heads=2, width=16),
}
SHAPES = {"mlp": (1, 8, 8), "cnn": (1, 8, 8), "vgg11": (3, 32, 32), "gpt": (8,), "norm": (1, 8, 8)}
FLUSHED = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")


def norm() -> nn.Module:
    """Batch statistics on both sides of a cut."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


@functools.cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return {**MODELS, "norm": norm}[name]()


def build(name: str) -> nn.Module:
    return copy.deepcopy(_built(name))


def batches(name: str) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(5)
    shape, sizes = SHAPES[name], FEW if name == "vgg11" else SIZES
    if name == "gpt":
        texts = [torch.randint(0, 32, (n, 9), generator=drawn) for n in SIZES]
        return [(t[:, :-1], t[:, 1:].contiguous()) for t in texts]
    return [(torch.randn(n, *shape, generator=drawn), torch.randint(0, 10, (n,), generator=drawn)) for n in sizes]


def sgd(name: str, parameters: Any) -> torch.optim.Optimizer:
    # vgg11 starts with large losses: at a higher rate rounding errors grow a hundredfold in each step, also on one process
    return torch.optim.SGD(parameters, 0.0005 if name == "vgg11" else 0.01, momentum=0.9, weight_decay=0.01)


# --- one process -----------------------------------------------------------------------------------------------------------


def whole(name: str, num_microbatches: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """The model's state after all steps on one process, and the losses. Micro-batches go one after another, gradients add up."""
    model = build(name)
    optimizer = sgd(name, model.parameters())
    losses = []
    for x, y in batches(name):
        optimizer.zero_grad()
        parts = [(a, b) for a, b in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True) if len(a)]
        found = [cross_entropy(model(a), b) * (len(a) / len(x)) for a, b in parts]
        sum(found, torch.zeros(())).backward()
        optimizer.step()
        losses.append(sum(float(loss.detach()) for loss in found))
    return {key: value.detach().clone() for key, value in model.state_dict().items()}, losses


def stale(name: str, stages: int) -> tuple[list[dict[str, Tensor]], list[float]]:
    """What each stage's weights are after all mini-batches when gradients are late: stage s has seen max(0, j − (S−1−s)) updates
    when mini-batch j comes by. A tied copy above the lowest stage ``a`` applies the common sum s − a + 1 updates later."""
    cut = cut_model(build(name), batches(name)[0][0], stages)
    now = [{n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()} for stage in cut.stages]
    optimizers = [sgd(name, list(weights.values())) if weights else None for weights in now]
    history = [[{n: w.detach().clone() for n, w in weights.items()}] for weights in now]
    sums: dict[str, list[Tensor]] = {n: [] for n in cut.tied}
    losses = []

    def step(s: int) -> None:
        if optimizer := optimizers[s]:
            optimizer.step()
        history[s].append({n: w.detach().clone() for n, w in now[s].items()})

    for j, (x, y) in enumerate(batches(name)):
        used = [history[s][max(0, j - (stages - 1 - s))] for s in range(stages)]
        used = [{n: w.clone().requires_grad_() for n, w in weights.items()} for weights in used]
        values: Any = (x,)
        for stage, weights in zip(cut.stages, used, strict=True):
            values = functional_call(stage, weights, values)
        loss = cross_entropy(values, y)
        losses.append(float(loss.detach()))
        loss.backward()
        for n, held in cut.tied.items():
            sums[n].append(sum((used[s][n].grad for s in held), torch.zeros_like(used[held[0]][n])))
        for s in range(stages):
            for n, w in now[s].items():
                held = cut.tied.get(n, (s,))
                due = j if s == held[0] else j - (s - held[0] + 1)
                w.grad = used[s][n].grad if n not in cut.tied else sums[n][due] if due >= 0 else None
            step(s)
    for s in range(stages):
        for n in now[s]:
            if n in cut.tied and s != cut.tied[n][0]:
                for due in range(max(0, len(SIZES) - (s - cut.tied[n][0] + 1)), len(SIZES)):
                    for other in now[s].values():
                        other.grad = None
                    now[s][n].grad = sums[n][due]
                    step(s)
    return [history[s][-1] for s in range(stages)], losses


# --- several ---------------------------------------------------------------------------------------------------------------


def furthest(held: nn.Module, wanted: dict[str, Tensor]) -> float:
    """The largest difference of what is held here."""
    state = held.state_dict()
    return max((float((value - wanted[key]).abs().max()) for key, value in state.items()), default=0.0)


def pipeline(
    name: str, place: MeshCoordinate, schedule: str, num_microbatches: int = MICRO, points: list[str] | None = None
) -> tuple[Cut, PipelineRunner]:
    stages_per_rank = 2 if schedule == "interleaved" else 1
    cut = cut_model(build(name), batches(name)[0][0], place.pipeline.size * stages_per_rank, points=points)
    return cut, PipelineRunner(cut, place.pipeline, cross_entropy, schedule, num_microbatches)


def trained(name: str, place: MeshCoordinate, schedule: str, num_microbatches: int = MICRO, **options: Any) -> dict[str, Any]:
    """Five steps with a flush; replicas get halves of each batch where there are two."""
    cut, pipe = pipeline(name, place, schedule, num_microbatches, **options)
    held = dict(pipe.module.named_parameters())
    tied = Tied({n: p for n, p in held.items() if n in cut.tied}, cut.tied, place.pipeline)
    optimizer = sgd(name, held.values()) if held else None
    data = place.data
    losses, comm_stats = [], []
    for x, y in batches(name):
        pipe.module.zero_grad()
        place.pipeline.comm_stats.take()
        own = x.tensor_split(data.size)[data.place]
        share = len(own) / len(x)
        loss = pipe.run(own, y.tensor_split(data.size)[data.place])
        comm_stats.append(place.pipeline.comm_stats.take().bytes_sent)
        tied.sum_gradients()
        for p in held.values():
            assert p.grad is not None
            data.all_reduce(p.grad.mul_(share))
        losses.append(float(data.all_reduce(loss * share)))
        if optimizer is not None:
            optimizer.step()
    timeline = pipe.timeline().to_dict()
    pipe.module.eval()
    output = pipe.forward(batches(name)[1][0])
    return {"module": pipe.module, "losses": losses, "bytes": comm_stats, "timeline": timeline, "output": output}


def compared(found: dict[str, Any], state: dict[str, Tensor], losses: list[float], name: str) -> dict[str, Any]:
    """How far from one process it ended."""
    module = found.pop("module")
    model = build(name)
    moved = furthest(module, _built(name).state_dict())
    model.load_state_dict(state)
    output = model.eval()(batches(name)[1][0]).detach()
    return {
        **found,
        "weights": furthest(module, state),
        "moved": moved,
        "held": [n for n, _ in module.named_parameters()],
        "losses": max(abs(a - b) for a, b in zip(found["losses"], losses, strict=True)),
        "output": float((found["output"] - output).abs().max()),
    }


def asynchronous(name: str, place: MeshCoordinate) -> dict[str, Any]:
    """All mini-batches through PipeDream, twice: the pipe can be fed anew after it was drained."""
    axis = place.pipeline
    state, losses = stale(name, axis.size)
    _, pipe = pipeline(name, place, "pipedream")
    optimizer = sgd(name, list(pipe.module.parameters())) if any(True for _ in pipe.module.parameters()) else None
    pipe.update = lambda: optimizer.step() if optimizer is not None else None
    inner = pipe._asynchronous
    found, versions = [], []
    axis.comm_stats.take()
    for x, y in batches(name):
        found.append(pipe.feed(x, y))
        versions.append(inner.versions)
    filling = sum(loss is None for loss in found)
    found = [float(loss) for loss in [*found, *pipe.drain()] if loss is not None]
    sent = axis.comm_stats.take().bytes_sent
    weights = furthest(pipe.module, state[axis.place])
    return {
        "weights": weights,
        "moved": furthest(pipe.module, _built(name).state_dict()),
        "losses": max(abs(a - b) for a, b in zip(found, losses, strict=True)),
        "count": len(found),
        "filling": filling,
        "versions": max(versions),
        "left": inner.versions,
        "bytes": sent,
        "timeline": pipe.timeline().to_dict(),
    }


def real(rank: int, folder: str) -> None:
    """All cases in one world."""
    join(device="cpu").close()
    world = dist.get_world_size()
    place = init_mesh(Mesh(pipeline=world))
    results: dict[str, Any] = {}
    for name in MODELS:
        state, losses = whole(name)
        for schedule in FLUSHED:
            results[f"{name} {schedule}"] = compared(trained(name, place, schedule), state, losses, name)
        results[f"{name} pipedream"] = asynchronous(name, place)
    state, losses = whole("norm")
    results["norm 1"] = compared(trained("norm", place, "gpipe", num_microbatches=1), state, losses, "norm")
    state, losses = whole("norm", MICRO)
    results["norm 4"] = compared(trained("norm", place, "1f1b"), state, losses, "norm")
    points = [str(2 + 2 * k) for k in range(world - 1)]  # after a hidden layer's ReLU
    state, losses = whole("mlp")
    results["points"] = compared(trained("mlp", place, "1f1b", points=points), state, losses, "mlp")
    middle = ["blocks.0.attention", "blocks.1.attention", "blocks.2.perceptron.into"][: world - 1]  # the residual crosses too
    state, losses = whole("gpt")
    results["middle"] = compared(trained("gpt", place, "zero-bubble", points=middle), state, losses, "gpt")
    if world == 4:
        both = init_mesh(Mesh(data=2, pipeline=2))
        for name in ("mlp", "gpt"):
            state, losses = whole(name)
            for schedule in ("1f1b", "interleaved"):
                results[f"data {name} {schedule}"] = compared(trained(name, both, schedule), state, losses, name)
    torch.save(copy.deepcopy(results), f"{folder}/{rank}.pt")
    dist.barrier()
