"""The mesh: processes in a box whose edges are data, pipeline and tensor.

Processes are numbered with the tensor coordinate running fastest, then the pipeline's, then the data's: neighbours, which are
likely on one machine, exchange most. Groups are those of PyTorch's ``DeviceMesh``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hocket.cluster.base import Cluster
from hocket.cluster.plain import all_gather_plain
from hocket.cluster.virtual import VirtualCluster
from hocket.errors import HocketError, is_whole, nearest
from hocket.split.axis import Axis

AXES = ("data", "pipeline", "tensor")


@dataclass(frozen=True)
class Mesh:
    """How many processes lie along each axis; their product is the number of processes.

    >>> mesh = Mesh(data=2, pipeline=2)
    >>> mesh.size, str(mesh), Mesh.parse("pipeline=2,data=2") == mesh
    (4, 'data=2,pipeline=2', True)
    >>> [mesh.coordinates(rank) for rank in range(4)]
    [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    plan: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """How operations are split over the tensor axis: names of modules, or patterns, and kinds; None: found by itself."""

    def __post_init__(self) -> None:
        for name in AXES:
            value = getattr(self, name)
            if not is_whole(value):
                raise HocketError(f"Mesh({name}={value!r}): an axis has a whole number of processes, at least 1.")
        if self.plan is not None and self.tensor == 1:
            raise HocketError(
                f"Mesh(plan=…) is for operations that are split, but the mesh {self} has no tensor axis; add tensor=2, for example."
            )

    @classmethod
    def parse(cls, text: str | Mesh) -> Mesh:
        """A mesh from ``"data=2,pipeline=2"``."""
        if isinstance(text, Mesh):
            return text
        found: dict[str, Any] = {}
        for word in re.split(r"[,\s]+", text.strip()):
            name, _, value = word.partition("=")
            if name not in AXES:
                hint = nearest(name, AXES)
                raise HocketError(
                    f"Mesh '{text}': '{name}' is not an axis{hint or '.'} Write for example data=2,pipeline=2,tensor=2."
                )
            if not value.isdigit() or int(value) < 1 or name in found:
                raise HocketError(f"Mesh '{text}': give each axis once, with a whole number of at least 1, such as {name}=2.")
            found[name] = int(value)
        return cls(**found)

    def __str__(self) -> str:
        written = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        return ",".join(written) or "data=1"

    @property
    def size(self) -> int:
        """All processes."""
        return self.data * self.pipeline * self.tensor

    @property
    def parts(self) -> int:
        """Processes of a replica."""
        return self.pipeline * self.tensor

    @property
    def splits(self) -> bool:
        """Whether the model itself is split."""
        return self.parts > 1

    def replicas_per_host(self, host_size: int) -> int | None:
        """How many replicas share a host of ``host_size`` processes; None where they do not fill whole hosts.

        >>> Mesh(data=4, pipeline=2).replicas_per_host(4), Mesh(data=3, pipeline=2).replicas_per_host(4)
        (2, None)
        """
        here = max(1, host_size // self.parts) if host_size % self.parts == 0 or host_size < self.parts else 1
        return here if self.data % here == 0 else None

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Where a process lies: its place along data, pipeline and tensor."""
        return rank // (self.pipeline * self.tensor), rank // self.tensor % self.pipeline, rank % self.tensor

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        """The process at these coordinates."""
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def check(self, processes: int) -> None:
        """Refuse a number of processes that does not fill the mesh."""
        if processes != self.size:
            raise HocketError(
                f"The mesh {self} has {self.size} places, but the job has {processes} process{'es' * (processes != 1)}; "
                f"start {self.size}, or choose axes whose product is {processes}."
            )


@dataclass
class MeshCoordinate:
    """This process in its mesh."""

    mesh: Mesh
    data: Axis
    pipeline: Axis
    tensor: Axis
    apart = False
    """Whether each replica acts by itself, since the number of replicas changes."""

    @property
    def axes(self) -> dict[str, Axis]:
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    def gather_plain(self, own: Any) -> list[Any]:
        """Plain data of all processes of the job."""
        return all_gather_plain(own)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, exchanges are not counted: they do not belong to the training."""
        comm_stats = {name: replace(axis.comm_stats) for name, axis in self.axes.items()}
        try:
            yield
        finally:
            for name, axis in self.axes.items():
                axis.comm_stats = comm_stats[name]

    def data_cluster(self, world: Cluster) -> Cluster:
        """The replicas' processes that hold the same part as this one."""
        if self.data.size == 1:
            return VirtualCluster(1, world.device, timed=True)
        if not self.mesh.splits:
            return world.for_job()
        parts = [range(k, self.mesh.size, self.mesh.parts) for k in range(self.mesh.parts)]
        return world.subcluster(self.data.group, parts, self.mesh.replicas_per_host(world.host_size))


@cache
def _device_mesh(mesh: Mesh, device_type: str) -> Any:
    return init_device_mesh(device_type, (mesh.data, mesh.pipeline, mesh.tensor), mesh_dim_names=AXES)


def forget() -> None:
    """Destroy all groups, before the process leaves the job."""
    _device_mesh.cache_clear()


def init_mesh(mesh: Mesh, device_type: str = "cpu", cluster: Cluster | None = None) -> MeshCoordinate:
    """This process's coordinate in ``mesh``, with its process groups; all processes of the job (``cluster``) must call it."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    mesh.check(processes)
    if processes == 1:
        return MeshCoordinate(mesh, *(Axis(name) for name in AXES))
    found, own = _device_mesh(mesh, device_type), mesh.coordinates(dist.get_rank())
    axes = []
    for k, name in enumerate(AXES):
        places = [(*own[:k], i, *own[k + 1 :]) for i in range(getattr(mesh, name))]
        ranks = tuple(mesh.rank(*p) for p in places)
        axes.append(Axis(name, ranks, own[k], found.get_group(name) if len(ranks) > 1 else None, cluster))
    return MeshCoordinate(mesh, *axes)
