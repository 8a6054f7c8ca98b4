"""The mesh as a picture for the terminal: what each process holds, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hocket.cluster.plain import all_gather_plain
from hocket.split.inputs import Inputs, call
from hocket.split.mesh import Mesh
from hocket.split.parts import evaluating
from hocket.split.pipeline.schedules import Action
from hocket.split.sharded import ShardedState


@dataclass(frozen=True)
class HeldBytes:
    """What one process holds, in bytes; ``what`` names the layers."""

    what: str
    weights: int
    gradients: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state + self.activations


def gather_picture(mesh: Mesh, own: HeldBytes) -> str:
    """:func:`draw` of what all processes hold; all must call it together."""
    everyone = [own] * mesh.size
    if mesh.size > 1:
        everyone = [HeldBytes(**theirs) for theirs in all_gather_plain(vars(own))]
    return draw(mesh, everyone)


def held_bytes(
    module: nn.Module, optimizer: torch.optim.Optimizer, activations: int, sharded: ShardedState | None = None
) -> HeldBytes:
    """What this process holds of a model and its optimiser, whose state may lie in parts."""
    weights = sum(p.nbytes for p in module.parameters())
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    layers = [name.rsplit(".", 1)[0] for name, _ in module.named_parameters()] or ["nothing to train"]
    what = layers[0] if layers[0] == layers[-1] else f"{layers[0]} … {layers[-1]}"
    stepped = trained if sharded is None else sharded.owned_bytes
    return HeldBytes(what, weights, trained, stepped * state_copies(optimizer), activations)


def state_copies(optimizer: torch.optim.Optimizer) -> int:
    """How many values an optimiser keeps for each parameter: found by one step on a small one.

    >>> one = [nn.Parameter(torch.zeros(2))]
    >>> state_copies(torch.optim.AdamW(one)), state_copies(torch.optim.SGD(one)), state_copies(torch.optim.SGD(one, momentum=0.9))
    (2, 0, 1)
    """
    small = nn.Parameter(torch.zeros(8))
    small.grad = torch.zeros(8)
    kind: Any = type(optimizer)
    probe = kind([small])
    probe.param_groups[0].update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    probe.step()
    return sum(value.shape == small.shape for value in probe.state[small].values() if isinstance(value, torch.Tensor))


def in_flight(actions: Iterable[Action]) -> int:
    """The largest number of micro-batches between forward and backward on a process, over all its stages.

    >>> from hocket.split.pipeline.schedules import make
    >>> [in_flight(row) for row in make("1f1b", 4, 8)], [in_flight(row) for row in make("gpipe", 4, 8)]
    ([4, 3, 2, 1], [8, 8, 8, 8])
    """
    return max(accumulate({"F": 1, "I": 0}.get(action.kind, -1) for action in actions), default=0)


def saved_bytes(module: nn.Module, sample: Inputs) -> int:
    """What one forward pass of ``sample`` keeps for its backward, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with evaluating(module), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call(module, sample)
    return sum(kept.values())


def draw(mesh: Mesh, held: Sequence[HeldBytes]) -> str:
    """One box per process: columns are stages, rows are parts of operations, replicas stand below each other.

    >>> print(draw(Mesh(pipeline=2), [HeldBytes("0 … 2", 4096, 4096, 0, 512), HeldBytes("3 … 5", 2048, 2048, 0, 512)]))
    mesh pipeline=2: 2 processes, the largest with 8.5 KiB
    ┌ process 0 · stage 0 ┬ process 1 · stage 1 ┐
    │ 0 … 2               │ 3 … 5               │
    │ weights         4.0 │ weights         2.0 │
    │ gradients       4.0 │ gradients       2.0 │
    │ state           0.0 │ state           0.0 │
    │ activations     0.5 │ activations     0.5 │
    └─────────────────────┴─────────────────────┘
    KiB; optimiser state as it will be after the first step, activations as estimated for one mini-batch.
    """
    most = max(h.total for h in held)
    unit, scale = next((u, s) for u, s in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)) if most < 1024 * s or u == "GiB")
    lines = [f"mesh {mesh}: {mesh.size} processes, the largest with {most / scale:.1f} {unit}"]
    width = min(44, max([19, *(len(_title(mesh, rank)) for rank in range(mesh.size)), *(len(h.what) for h in held)]))
    for data in range(mesh.data):
        if mesh.data > 1:
            lines.append(f"replica {data}")
        for tensor in range(mesh.tensor):
            ranks = [mesh.rank(data, stage, tensor) for stage in range(mesh.pipeline)]
            lines += _row([_title(mesh, rank) for rank in ranks], [held[rank] for rank in ranks], width, scale)
    lines.append(f"{unit}; optimiser state as it will be after the first step, activations as estimated for one mini-batch.")
    return "\n".join(lines)


def _row(titles: list[str], held: list[HeldBytes], width: int, scale: float) -> list[str]:
    lines = ["┌" + "┬".join(f" {title} ".ljust(width + 2, "─") for title in titles) + "┐"]
    whats = (h.what if len(h.what) <= width else h.what[: width - 1] + "…" for h in held)
    lines.append("│" + "│".join(f" {what.ljust(width)} " for what in whats) + "│")
    for name in ("weights", "gradients", "state", "activations"):
        cells = (f" {name.ljust(width - 8)}{getattr(h, name) / scale:8.1f} " for h in held)
        lines.append("│" + "│".join(cells) + "│")
    return [*lines, "└" + "┴".join("─" * (width + 2) for _ in titles) + "┘"]


def _title(mesh: Mesh, rank: int) -> str:
    _, stage, tensor = mesh.coordinates(rank)
    where = [f"stage {stage}"] * (mesh.pipeline > 1) + [f"part {tensor}"] * (mesh.tensor > 1)
    return " · ".join([f"process {rank}", *where])
