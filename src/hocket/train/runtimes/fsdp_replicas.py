"""Replicas that the user's own ``fully_shard`` calls have split (FSDP2), any collective strategy between them.

PyTorch gathers weights and averages gradients inside each replica, over fast links. What a process holds, its part of every
parameter, is exchanged with the processes that hold the same part of the other replicas, as on a mesh. FSDP2 keeps the memory of
its parameters, so rows are copies (:attr:`Binding.copied`).

Every process reads mini-batches of its own. Its share of the samples weighs its loss, since a gradient that FSDP2 has averaged is
of several processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hocket.cluster.base import Cluster
from hocket.cluster.dtensor import is_distributed
from hocket.cluster.plain import all_gather_plain
from hocket.errors import HocketError
from hocket.split.mesh import Mesh, init_mesh
from hocket.strategy import Strategy
from hocket.train.ledger_view import MeshAxes
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.collective import CollectiveRuntime
from hocket.train.runtimes.fsdp import full_state, load_full_state, refuse_fsdp_on


class FsdpReplicas(CollectiveRuntime):
    """The processes of ``world``; ``model`` says which of them are one replica."""

    def __init__(self, model: nn.Module, world: Cluster) -> None:
        refuse_fsdp_on(world)
        self._units = _units(model)
        self._reshard()  # parameters that an evaluation has gathered are not those that the optimiser steps
        self.place = init_mesh(_mesh(model, world), world.device.type, world)
        self.world = world
        self._handles: list[Any] = []
        super().__init__(self.place.data_cluster(world), axes=MeshAxes(self.place, world))

    @property
    def process(self) -> int:
        return self.world.rank

    @property
    def processes(self) -> int:
        return self.world.processes

    def terms(self) -> list[str]:
        return ["fully_shard"]

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        super().refuse(strategy, scaler)
        if scaler is not None:
            raise HocketError("FSDP2 shards gradients, which a GradScaler judges one by one; use bfloat16.")
        if strategy.runtime != "collective" or strategy.topology.sums_on_servers or strategy.sync.predicts:
            raise HocketError(
                f"{strategy} has servers, workers that do not step together or updates that are taken back, which replicas split "
                "by fully_shard(…) do not support; use bulk, local, postlocal or diloco with allreduce, gossip or hierarchical."
            )

    def join(self, binding: Binding) -> None:
        super().join(binding)
        self._handles = [binding.model.register_forward_hook(lambda _, __, out: self._weigh(out))]

    def _weigh(self, out: Any) -> Any:
        """Where gradients are exchanged, this process's loss counts by its share of the samples."""
        if not torch.is_grad_enabled() or not self.mixes_gradients:
            return out

        def weigh(gradient: Tensor) -> Tensor:
            return gradient if self.binding.weight == 1.0 else gradient * self.binding.weight

        def hooked(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)  # another output may be computed from this one, whose gradient is weighed already
                tensor.register_hook(weigh)
            return tensor

        return tree_map_only(Tensor, hooked, out)

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().leave()

    # --- rows are copies -----------------------------------------------------------------------------------------------------

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        super().before_update(gradients)
        self.binding.publish()

    def after_update(self) -> None:
        self.binding.reclaim()
        super().after_update()
        self.binding.publish()

    def _average_buffers(self) -> None:
        """Over all processes, since each reads mini-batches of its own."""
        for buffer in self.binding.buffers:
            rows = buffer.data.reshape(1, -1).clone()
            exchange = self.world.exchange()
            exchange.submit(partial(self.world.mean, rows, self.world.world), name=f"the mean of {rows.shape[1]} values")
            exchange.wait()
            buffer.data.copy_(rows.view(buffer.shape))

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        try:
            with super().averaged() as model:
                self._publish()
                yield model
        finally:
            self._publish()

    def finish(self) -> nn.Module:
        model = super().finish()
        self._publish()
        return model

    def _publish(self) -> None:
        self._reshard()
        self.binding.publish()

    def _reshard(self) -> None:
        """Drop gathered weights, which a forward pass without a backward pass leaves behind."""
        for unit in self._units:
            unit.reshard()

    # --- state ---------------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any] | None:
        return full_state(self.binding.model, self.binding.optimizer, self.place.tensor.place == 0)

    def load_full_state(self, state: dict[str, Any]) -> None:
        load_full_state(self.binding.model, self.binding.optimizer, state)


def _units(model: nn.Module) -> list[Any]:
    """The modules on which ``fully_shard`` was called."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to load

    if not isinstance(model, FSDPModule):
        raise HocketError(
            "The model has DTensor parameters, but fully_shard(…) was not called on it: call fully_shard(model, mesh=…), too, or "
            "split whole models by hocket.parallelize(…, mesh='tensor=2')."
        )
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _mesh(model: nn.Module, world: Cluster) -> Mesh:
    """How many replicas there are, and of how many processes each."""
    found: list[int] | None = None
    for name, p in model.named_parameters():
        if p.is_meta:
            raise HocketError(f"Parameter {name} has no values yet; call model.to_empty(device=…) and initialise the model first.")
        if not is_distributed(p):
            raise HocketError(
                f"Parameter {name} is not sharded, so FSDP2 does not average its gradient in a replica; call fully_shard(…) on the "
                "whole model, without ignored_params."
            )
        mesh: Any = p.device_mesh  # type: ignore[attr-defined]
        if mesh.ndim != 1:
            raise HocketError(
                f"Parameter {name} is distributed over the mesh {mesh.mesh_dim_names or tuple(mesh.shape)}, so FSDP2 would "
                "exchange between replicas itself; give fully_shard(…) the dimension inside a replica alone, such as mesh['shard']."
            )
        own = mesh.mesh.tolist()
        if found is not None and own != found:
            raise HocketError(f"Parameter {name} lies on processes {own}, others on {found}; give fully_shard(…) one mesh for all.")
        found = own
    assert found is not None
    size, everyone = len(found), all_gather_plain(found)
    first = world.rank // size * size
    if world.size % size or any(len(ranks) != size for ranks in everyone) or found != list(range(first, first + size)):
        raise HocketError(
            f"fully_shard(…) split the model over processes {found} of {world.size}; replicas must be of the same number of "
            "consecutive processes, as in init_device_mesh(…, (replicas, processes of each))."
        )
    if size == world.size > 1 and world.rank == 0:
        warnings.warn(
            f"fully_shard(…) split the model over all {size} processes, so there are no other replicas to exchange with; give it "
            "the mesh of one replica, such as mesh['shard'].",
            stacklevel=2,
        )
    return Mesh(data=world.size // size, tensor=size)
