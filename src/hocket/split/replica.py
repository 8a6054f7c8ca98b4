"""One replica among others: where the same part is held, and how all begin with the same values."""

from __future__ import annotations

from torch import nn

from hocket.cluster.base import Cluster
from hocket.cluster.virtual import VirtualCluster
from hocket.split.mesh import MeshCoordinate


def data_cluster(place: MeshCoordinate, world: Cluster) -> Cluster:
    """The replicas' processes that hold the same part as this one."""
    if place.data.size == 1:
        return VirtualCluster(1, world.device, timed=True)
    if not place.mesh.splits:
        return world.for_job()
    one = place.mesh.pipeline * place.mesh.tensor  # processes of a replica
    here = max(1, world.host_size // one) if world.host_size % one == 0 or world.host_size < one else 1
    parts = [range(k, place.mesh.size, one) for k in range(one)]
    return world.subcluster(place.data.group, parts, here if place.data.size % here == 0 else None)


def broadcast_model(model: nn.Module, world: Cluster) -> None:
    """Every process starts from process 0's values (a model that is not born yet has none)."""
    if world.size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            rows = tensor.data.reshape(1, -1).clone()
            world.synchronize(rows)
            tensor.data.copy_(rows.view(tensor.shape))


def free_others(model: nn.Module, own: nn.Module) -> None:
    """Free what other stages hold."""
    held = {id(t) for t in (*own.parameters(), *own.buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in held and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
