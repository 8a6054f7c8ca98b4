"""What one process holds of a split model and its optimiser: by name, gathered into a whole for checkpoints, and taken from one.

Names are those of the whole model, so a gathered state loads into a model that was never split, and a split model loads the state
of such a model: every process takes its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.errors import HocketError
from hocket.split.axis import wire
from hocket.split.mesh import MeshCoordinate
from hocket.split.parts import Part, Parts, all_names, part_of
from hocket.split.pipeline.tied import Tied
from hocket.split.sharded import ShardedState


class SplitState:
    """The part of ``place``: its ``module``, of whose tensors ``parts`` says what they are parts of, and its ``optimizer``."""

    module: nn.Module
    parts: Parts

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, place: MeshCoordinate) -> None:
        """Call it before ``model`` is split, and :meth:`hold` afterwards."""
        self.optimizer, self.place = optimizer, place
        self.saved = set(model.state_dict())
        """The names in the whole model's ``state_dict``."""
        self.first = all_names(model)
        """The first name of each parameter, for all names that it has."""
        if any(optimizer.state.values()):
            raise HocketError("The optimiser has taken steps already; call hocket.parallelize(…, mesh=…) before the first one.")
        names = {id(p): name for name, p in model.named_parameters()}
        self.groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        """The names of the optimiser's parameters."""
        if any("" in group for group in self.groups):
            raise HocketError("The optimiser holds a parameter that this model lacks; build it from model.parameters().")

    def hold(self, module: nn.Module, parts: Parts) -> None:
        """Let the optimiser step the parameters of ``module``; the settings of its groups stay, so schedulers keep working."""
        self.module, self.parts = module, parts
        held = self.parameters()
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [held[name] for name in names if name in held]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those held here, by their first names."""
        return {self.first.get(name, name): p for name, p in self.module.named_parameters()}

    def held(self) -> dict[str, Tensor]:
        """What checkpoints hold of this process: parameters by their first names, and buffers that are saved."""
        return {**self.parameters(), **{n: b for n, b in self.module.named_buffers() if n in self.saved}}

    def gradient_norm(self, tied: Tied, device: torch.device) -> Tensor:
        """The norm of the whole replica's gradient, each parameter counted once; all its processes must ask together."""
        square = torch.zeros((), dtype=torch.float64, device=device)
        for name, p in self.parameters().items():
            counted = self.place.tensor.place == 0 or not self.parts[name].whole
            if p.grad is not None and counted and tied.first(name):
                square += p.grad.detach().double().square().sum()
        return self.place.pipeline.all_reduce(self.place.tensor.all_reduce(square)).sqrt()

    def described(self) -> dict[str, Any]:
        """The mesh, and which part of what this process holds, in words that can be saved."""
        parts = {name: part_of(self.parts, name, t) for name, t in self.held().items()}
        words = {name: [list(p.shape), p.dim, [list(r) for r in p.ranges]] for name, p in parts.items()}
        return {"mesh": str(self.place.mesh), "parts": words}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this process holds the parts of which ``state`` was taken; cuts that are measured may differ."""
        return bool(state.get("parts") == self.described()["parts"])

    def check(self, state: Mapping[str, Any]) -> None:
        if state["mesh"] != str(self.place.mesh):
            raise HocketError(
                f"The checkpoint is of the mesh {state['mesh']}, not {self.place.mesh}; use full_state and load_full_state."
            )
        self.check_parts(state)

    def check_parts(self, state: Mapping[str, Any]) -> None:
        """The same, whatever the number of replicas was."""
        if not self.fits(state):
            raise HocketError(
                "The checkpoint is of a model that was cut or split elsewhere; use full_state and load_full_state, or say where "
                "(Pipeline(cut=…), Mesh(plan=…), or Pipeline(measure='flops'): the same cut every time)."
            )

    def gather(self, sharded: ShardedState | None) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split, on the first process of each replica; a collective."""
        model = _gathered(self.held(), self.parts, self.place)
        if sharded is None:
            optimizer = self._gather_optimizer(self.optimizer.state_dict()["state"])
        else:  # the whole of this part lies with the first replica
            packed = sharded.consolidate()
            optimizer = self._gather_optimizer({} if packed is None else tree_map_only(Tensor, Tensor.cpu, packed["state"]))
            optimizer = None if self.place.data.place else optimizer
        if model is None:
            return None
        model.update({name: model[first] for name, first in self.first.items() if name in self.saved and first in model})
        return {"model": model, "optimizer": optimizer}

    def _gather_optimizer(self, own: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
        """``state_dict()`` as the optimiser of the whole model would have it; ``own`` is the state of the parameters held here."""
        held = self.parameters()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for k, name in enumerate(name for group in self.groups for name in group if name in held):
            for field, value in own.get(k, {}).items():
                alike = isinstance(value, Tensor) and value.shape == held[name].shape and value.dim() > 0
                (tensors if alike else plain)[f"{name}/{field}"] = value
        parts = {key: part_of(self.parts, key.rsplit("/", 1)[0], t) for key, t in tensors.items()}
        gathered = _gathered(tensors, parts, self.place)
        everyone: list[Any] = [plain]
        if self.place.mesh.splits:
            everyone = self.place.gather_plain(plain)
        if gathered is None:
            return None
        order = [name for group in self.groups for name in group]
        state: dict[int, dict[str, Any]] = {}
        for key, value in [*gathered.items(), *(item for some in everyone for item in some.items())]:
            name, field = key.rsplit("/", 1)
            state.setdefault(order.index(name), {})[field] = value
        groups = _numbered(self.optimizer.param_groups, [len(names) for names in self.groups])
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this process's parts of a whole."""
        for name, tensor in self.held().items():
            if name not in state["model"]:
                raise HocketError(f"The checkpoint lacks '{name}': the checkpoint is of another model.")
            whole, part = state["model"][name], part_of(self.parts, name, tensor)
            if tuple(whole.shape) != part.shape:
                raise HocketError(
                    f"The checkpoint's '{name}' has shape {tuple(whole.shape)}, this model's {part.shape}: it is of another model."
                )
            tensor.data.copy_(part.take(whole))
        if state.get("optimizer") is not None:
            self._load_optimizer(state["optimizer"])

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load the ``state_dict()`` of the whole model's optimiser."""
        order, held = [name for group in self.groups for name in group], self.parameters()
        names = [name for name in order if name in held]
        filled: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            name = order[int(index)]
            if name in held:
                part = part_of(self.parts, name, held[name])
                filled[names.index(name)] = {
                    field: part.take(v) if isinstance(v, Tensor) and tuple(v.shape) == part.shape else v
                    for field, v in values.items()
                }
        groups = _numbered(state["param_groups"], [len(group["params"]) for group in self.optimizer.param_groups])
        self.optimizer.load_state_dict({"state": filled, "param_groups": groups})


def _gathered_plain(held: Mapping[str, Tensor], parts: Parts, place: MeshCoordinate) -> dict[str, Tensor] | None:
    """The same from the plain data of one replica's processes, without the other replicas."""
    everyone = place.gather_plain({n: (t.detach().cpu(), *vars(part_of(parts, n, t)).values()) for n, t in held.items()})
    found: dict[str, Tensor] = {}
    for some in everyone:
        for name, (value, *part) in sorted(some.items()):
            lies = Part(*part)
            if not (lies.whole and name in found):
                lies.put(value, found.setdefault(name, torch.zeros(lies.shape, dtype=value.dtype)))
    first = place.pipeline.place == 0 and place.tensor.place == 0
    return found if first else None


def _numbered(groups: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[dict[str, Any]]:
    """Groups whose parameters are numbers, as in a ``state_dict()``."""
    ends = accumulate(counts)
    return [{**group, "params": list(range(end - n, end))} for group, n, end in zip(groups, counts, ends, strict=True)]


def _gathered(held: Mapping[str, Tensor], parts: Parts, place: MeshCoordinate) -> dict[str, Tensor] | None:
    """All whole tensors of a replica, on its first process; ``None`` on its others. All processes of the job must call it.

    A tensor without a part is whole on every process that has it; the first process that holds it sends it.
    """
    if not place.mesh.splits:
        return {name: t.detach().clone() for name, t in held.items()}
    if place.apart:
        return _gathered_plain(held, parts, place)
    listed = place.gather_plain({n: (tuple(t.shape), t.dtype, *vars(part_of(parts, n, t)).values()) for n, t in held.items()})
    everyone = [{name: (shape, dtype, Part(*part)) for name, (shape, dtype, *part) in some.items()} for some in listed]
    members = [place.mesh.rank(place.data.place, s, t) for s in range(place.pipeline.size) for t in range(place.tensor.size)]
    me, root = dist.get_rank(), members[0]
    device = next(iter(held.values())).device if held else torch.device("cpu")
    full_state: dict[str, Tensor] = {}
    for rank in members:
        for name, (shape, dtype, part) in sorted(everyone[rank].items()):
            if part.whole and any(name in everyone[earlier] for earlier in members[: members.index(rank)]):
                continue
            if me == rank and me != root:
                dist.send(held[name].detach().to(wire()).contiguous(), root)
            if me == root:
                got = held[name].detach() if rank == root else torch.empty(shape, dtype=dtype, device=wire())
                if rank != root:
                    dist.recv(got, rank)
                part.put(got, full_state.setdefault(name, torch.zeros(part.shape, dtype=dtype, device=device)))
    return full_state if me == root else None
