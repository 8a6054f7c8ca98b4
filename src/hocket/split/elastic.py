"""The axes of a replica in an elastic run: its processes are connected anew when one of them was lost."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.live_groups import STANDS
from hocket.cluster.message import framed, ring_bytes
from hocket.cluster.replica import Replica
from hocket.split.axis import Axis, Received
from hocket.split.mesh import Mesh, MeshCoordinate


class ElasticAxis(Axis):
    """The processes of ``replica`` along one axis."""

    def __init__(self, name: str, replica: Replica) -> None:
        super().__init__(name, tuple(range(replica.size(name))), replica.place(name))
        self.replica = replica

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.size == 1 or values.is_meta:
            return values
        self._count(ring_bytes(values.numel() * values.element_size(), self.size))
        self._blocked(lambda: self._group.allreduce([values]).wait())
        return values

    def all_gather(self, values: Tensor, dim: int = -1) -> Tensor:
        if self.size == 1 or values.is_meta:
            return super().all_gather(values, dim)
        values = values.contiguous()
        self._count((self.size - 1) * framed(values.numel() * values.element_size()))
        everyone = [torch.empty_like(values) for _ in self.ranks]
        self._blocked(lambda: self._group.allgather([everyone], [values]).wait())
        return torch.cat(everyone, dim)

    def gather_plain(self, own: Any) -> list[Any]:
        if self.size == 1:
            return [own]
        file = io.BytesIO()
        torch.save(own, file)
        body = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(body)]))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(body)] = body
        bodies = self.all_gather(padded).split(len(padded))
        told = [heard[: int(size)].numpy().tobytes() for heard, size in zip(bodies, sizes, strict=True)]
        return [torch.load(io.BytesIO(heard), weights_only=True, map_location="cpu") for heard in told]

    def send(self, values: Tensor, to: int, tag: int = 0) -> Any:
        self._count(framed(values.numel() * values.element_size()))
        with self._guarded():
            return self._group.send([values.cpu()], to, tag)

    def receive(self, into: Tensor, source: int, tag: int = 0) -> Any:
        buffer = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        with self._guarded():
            work = self._group.recv([buffer], source, tag)
        return work if buffer is into else Received(work, buffer, into)

    @property
    def _group(self) -> Any:
        return self.replica.group(self.name)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self.replica.waiting():
            yield

    def wait(self, work: Any) -> None:
        self._blocked(lambda: work.wait(STANDS))

    def _wait_for(self, work: Callable[[], object]) -> None:
        with self.replica.waiting():
            self.replica.watched(self.name, self.ranks, lambda: self.replica.ended(work))


@dataclass
class ElasticCoordinate(MeshCoordinate):
    """This process in a replica, of which the number changes."""

    apart = True

    def data_cluster(self, world: Cluster) -> Cluster:
        return world

    def gather_plain(self, own: Any) -> list[Any]:
        """Of the processes of this replica alone."""
        return [found for row in self.pipeline.gather_plain(self.tensor.gather_plain(own)) for found in row]


def elastic_coordinate(mesh: Mesh, replica: Replica) -> ElasticCoordinate:
    return ElasticCoordinate(mesh, Axis("data"), ElasticAxis("pipeline", replica), ElasticAxis("tensor", replica))
