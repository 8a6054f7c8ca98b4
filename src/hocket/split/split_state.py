"""What one process holds of a split model and its optimiser: by name, gathered into a whole, and taken from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.errors import HocketError
from hocket.split.full_state import WholeOptimizer, gather_full_state, take_parts
from hocket.split.mesh import MeshCoordinate
from hocket.split.parts import Part
from hocket.split.pipeline.tied import Tied
from hocket.split.sharded import ShardedState


@dataclass
class SplitState:
    """The part of ``place``: ``module``, of whose tensors ``parts`` says what they are parts of."""

    module: nn.Module
    parts: dict[str, Part]
    place: MeshCoordinate
    whole_optimizer: WholeOptimizer
    saved: set[str]
    """The names in the whole model's ``state_dict``."""
    first: dict[str, str]
    """The first name of each parameter, for all names that it has."""

    def first_name(self, name: str) -> str:
        """The first of the names of a parameter."""
        return self.first.get(name, name)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those held here, by their first names."""
        return {self.first_name(name): p for name, p in self.module.named_parameters()}

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
        self.place.tensor.all_reduce(square)
        self.place.pipeline.all_reduce(square)
        return square.sqrt()

    def described(self) -> dict[str, Any]:
        """The mesh, and which part of what this process holds, in words that can be saved."""
        parts = {name: self.parts.get(name, Part(tuple(t.shape))) for name, t in self.held().items()}
        words = {name: [list(p.shape), p.dim, [list(r) for r in p.ranges]] for name, p in parts.items()}
        return {"mesh": str(self.place.mesh), "parts": words}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this process holds the parts of which ``state`` was taken; cuts that are measured may differ."""
        return all(state.get(name) == value for name, value in self.described().items())

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other parts."""
        if state["mesh"] != str(self.place.mesh):
            raise HocketError(
                f"The checkpoint is of the mesh {state['mesh']}, not {self.place.mesh}; use full_state and load_full_state."
            )
        if not self.fits(state):
            raise HocketError(
                "The checkpoint is of a model that was cut or split elsewhere; use full_state and load_full_state, or say where "
                "(Pipeline(cut=…), Mesh(plan=…), or Pipeline(measure='flops'): the same cut every time)."
            )

    def gather(self, sharded: ShardedState | None) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split, on the first process of each replica; a collective."""
        model = gather_full_state(self.held(), self.parts, self.place)
        state = None
        if sharded is not None:  # the whole of this part lies with the first replica
            packed = sharded.consolidate()
            state = {} if packed is None else tree_map_only(Tensor, Tensor.cpu, packed["state"])
        optimizer = self.whole_optimizer.gather(self.parts, self.place, state)
        if sharded is not None and self.place.data.place:
            optimizer = None
        if model is None:
            return None
        model.update({name: model[first] for name, first in self.first.items() if name in self.saved and first in model})
        return {"model": model, "optimizer": optimizer}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this process's parts of a whole."""
        take_parts(state["model"], self.held(), self.parts)
        if state.get("optimizer") is not None:
            self.whole_optimizer.load(state["optimizer"], self.parts)
