"""The full state of split models: gathered for checkpoints, and cut into parts when one is loaded.

Names are those of the whole model, so a gathered state loads into a model that was never split, and a split model loads the state
of such a model: every process takes its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.split.axis import wire
from hocket.split.mesh import MeshCoordinate
from hocket.split.parts import Part, Parts


def gather_full_state(held: Mapping[str, Tensor], parts: Parts, place: MeshCoordinate) -> dict[str, Tensor] | None:
    """All whole tensors of a replica, on its first process; ``None`` on its others. All processes of the job must call it.

    A tensor without a part is whole on every process that has it; the first process that holds it sends it.
    """
    own = {name: (tuple(t.shape), t.dtype, parts.get(name, Part(tuple(t.shape)))) for name, t in held.items()}
    if not place.mesh.splits:
        return {name: t.detach().clone() for name, t in held.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    members = [place.mesh.rank(place.data.place, s, t) for s in range(place.pipeline.size) for t in range(place.tensor.size)]
    me, root = dist.get_rank(), members[0]
    device = next(iter(held.values())).device if held else torch.device("cpu")
    full_state: dict[str, Tensor] = {}
    for rank in members:
        for name in sorted(everyone[rank]):
            shape, dtype, part = everyone[rank][name]
            if part.whole and any(name in everyone[earlier] for earlier in members[: members.index(rank)]):
                continue
            if me == rank and me != root:
                dist.send(held[name].detach().to(wire()).contiguous(), root)
            if me == root:
                got = held[name].detach() if rank == root else torch.empty(shape, dtype=dtype, device=wire())
                if rank != root:
                    dist.recv(got, rank)
                whole = full_state.setdefault(name, torch.zeros(part.shape, dtype=dtype, device=device))
                part.put(got, whole)
    return full_state if me == root else None


def take_parts(full_state: Mapping[str, Tensor], held: Mapping[str, Tensor], parts: Parts) -> None:
    """Fill ``held`` with its parts of ``full_state``."""
    for name, tensor in held.items():
        if name not in full_state:
            raise HocketError(f"The checkpoint lacks '{name}': the checkpoint is of another model.")
        part = parts.get(name, Part(tuple(tensor.shape)))
        if tuple(full_state[name].shape) != part.shape:
            there, here = tuple(full_state[name].shape), part.shape
            raise HocketError(f"The checkpoint's '{name}' has shape {there}, this model's {here}: it is of another model.")
        tensor.data.copy_(part.take(full_state[name]))


class WholeOptimizer:
    """An optimiser whose parameters were split, by the names and groups that it had before.

    Each process's optimiser keeps its parameters of every group; the groups' settings stay, so schedulers keep working.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Call it before the model is split."""
        names = {id(p): name for name, p in model.named_parameters()}
        if any(optimizer.state.values()):
            raise HocketError("The optimiser has taken steps already; call hocket.parallelize(…, mesh=…) before the first one.")
        self.optimizer = optimizer
        self.groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if any("" in group for group in self.groups):
            raise HocketError("The optimiser holds a parameter that this model lacks; build it from model.parameters().")
        self.held: dict[str, nn.Parameter] = {}

    def point_at(self, held: Mapping[str, nn.Parameter]) -> None:
        """Let the optimiser step the parameters that this process holds."""
        self.held = dict(held)
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [held[name] for name in names if name in held]

    def gather(
        self, parts: Parts, place: MeshCoordinate, known: Mapping[int, Mapping[str, Any]] | None = None
    ) -> dict[str, Any] | None:
        """``state_dict()`` as the optimiser of the whole model would have it, on the first process of each replica.

        ``known``: the state of the parameters held here, by number, where the optimiser itself has a part of it.
        """
        tensors, plain = self._split_state(known)
        gathered = gather_full_state(tensors, {key: self._part(key, t, parts) for key, t in tensors.items()}, place)
        everyone: list[Any] = [plain]
        if place.mesh.splits:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, plain)
        if gathered is None:
            return None
        order = [name for group in self.groups for name in group]
        state: dict[int, dict[str, Any]] = {}
        for key, value in [*gathered.items(), *(item for some in everyone for item in some.items())]:
            name, field = key.rsplit("/", 1)
            state.setdefault(order.index(name), {})[field] = value
        described, start = [], 0
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            described.append({**group, "params": list(range(start, start + len(names)))})
            start += len(names)
        return {"state": dict(sorted(state.items())), "param_groups": described}

    def load(self, state: Mapping[str, Any], parts: Parts) -> None:
        """Load the ``state_dict()`` of the whole model's optimiser."""
        order = [name for group in self.groups for name in group]
        names = [name for group in self.groups for name in group if name in self.held]
        filled: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            name = order[int(index)]
            if name in self.held:
                part = parts.get(name)
                filled[names.index(name)] = {
                    field: part.take(v) if part is not None and isinstance(v, Tensor) and tuple(v.shape) == part.shape else v
                    for field, v in values.items()
                }
        groups, start = [], 0
        for saved, own in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            groups.append({**saved, "params": list(range(start, start + len(own["params"])))})
            start += len(own["params"])
        self.optimizer.load_state_dict({"state": filled, "param_groups": groups})

    def _split_state(self, known: Mapping[int, Mapping[str, Any]] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State by ``name/field``: tensors of their parameters' shapes, and everything else."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        numbers = {id(p): k for k, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        for name, p in self.held.items():
            own = self.optimizer.state.get(p, {}) if known is None else known.get(numbers.get(id(p), -1), {})
            for field, value in own.items():
                alike = isinstance(value, Tensor) and value.shape == p.shape and p.dim() > 0
                (tensors if alike else plain)[f"{name}/{field}"] = value
        return tensors, plain

    def _part(self, key: str, tensor: Tensor, parts: Parts) -> Part:
        return parts.get(key.rsplit("/", 1)[0], Part(tuple(tensor.shape)))
