"""How the parameters lie on the shards: every bucket is cut into one slice per shard.

Slices are consecutive, except where the code compares values (top-k): there shard ``s`` of ``k`` holds every ``k``-th value, so
that each slice is a fair sample of all layers. Optimisers on shards are elementwise, so it does not matter to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.errors import HocketError
from hocket.strategy import Strategy


@dataclass(frozen=True)
class Slices:
    """``sizes[b]`` values in bucket ``b``, over ``shards``."""

    sizes: tuple[int, ...]
    shards: int
    interleaved: bool = False

    @classmethod
    def of(cls, strategy: Strategy, layout: Layout, workers: int = 1) -> Slices:
        """As ``strategy`` cuts ``layout`` for ``workers`` workers."""
        shards = strategy.topology.num_shards(workers)
        if shards > layout.parameters:
            raise HocketError(
                f"server(shards={shards}): the model has only {layout.parameters} parameters; use at most as many shards."
            )
        return cls(tuple(b.size for b in layout.buckets), shards, strategy.compression.global_selection)

    def cut(self, bucket: int, row: Tensor) -> list[Tensor]:
        """A bucket's values (the last dimension) as one slice per shard: views.

        >>> import torch
        >>> [s.tolist() for s in Slices((5,), 2).cut(0, torch.arange(5))], Slices((5,), 2, True).cut(0, torch.arange(5))[1].tolist()
        ([[0, 1, 2], [3, 4]], [1, 3])
        """
        if self.interleaved:
            return [row[..., s :: self.shards] for s in range(self.shards)]
        return list(row.tensor_split(self.shards, -1))

    def widths(self, shard: int) -> list[int]:
        """How many values of each bucket lie on a shard."""
        if self.interleaved:
            return [len(range(shard, n, self.shards)) for n in self.sizes]
        return [n // self.shards + (shard < n % self.shards) for n in self.sizes]

    def put(self, bucket: int, shard: int, part: Tensor, row: Tensor) -> None:
        """Write a shard's slice into a bucket's values."""
        self.cut(bucket, row)[shard].copy_(part)
