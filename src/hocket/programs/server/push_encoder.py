"""What a worker pushes: its gradients cut into slices, encoded, with error feedback; and how a shard reads them.

Every bucket is cut into one slice per shard. Slices are consecutive, except where the code compares values (top-k): there shard
``s`` of ``k`` holds every ``k``-th value, so that each slice is a fair sample of all layers. Optimisers on shards are elementwise,
so it does not matter to them.

The code is the strategy's compression, one message per bucket and shard. Its randomness is a function of (seed, worker, step,
bucket, shard) alone, so a virtual worker and a real one send the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.message import Message
from hocket.compression.base import Codec, Context, State
from hocket.compression.feedback import with_feedback
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
        """The slices into which ``strategy`` cuts ``layout`` for ``workers`` workers."""
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

    def put(self, bucket: int, shard: int, part: Tensor, row: Tensor) -> None:
        """Write a shard's slice into a bucket's values."""
        self.cut(bucket, row)[shard].copy_(part)


class PushEncoder:
    """The encoder of worker ``worker`` of ``world``; it keeps the residuals of error feedback and the state of the codec."""

    def __init__(self, strategy: Strategy, slices: Slices, worker: int, world: int, seed: int) -> None:
        self.slices, self.worker, self.world, self.seed = slices, worker, world, seed
        self.codec = strategy.compression.codec
        self.states: list[list[State]] = [[{} for _ in range(slices.shards)] for _ in slices.sizes]
        self.errors: list[Tensor | None] = [None for _ in slices.sizes]

    def encode(self, step: int, gradients: Sequence[Tensor]) -> list[list[Message]]:
        """The messages ``[shard][bucket]`` for flat ``gradients`` (one per bucket), pushed at ``step``."""
        coded = [self._bucket(b, step, g) for b, g in enumerate(gradients)]
        return [list(of_shard) for of_shard in zip(*coded, strict=True)]

    def _bucket(self, bucket: int, step: int, gradient: Tensor) -> list[Message]:
        if self.codec is None:
            return [Message((part.reshape(1, -1),)) for part in self.slices.cut(bucket, gradient)]
        codec, values = self.codec, gradient.to(torch.float32)
        context = _context(self.seed, step, bucket, self.worker, self.world)
        if not codec.uses_error_feedback:
            return self._encoded(codec, bucket, values, context)

        def send(wanted: Tensor) -> tuple[list[Message], Tensor]:
            messages, sent = self._encoded(codec, bucket, wanted, context), torch.empty_like(wanted)
            for message, part in zip(messages, self.slices.cut(bucket, sent), strict=True):
                part.copy_(codec.decode(message, part.numel(), context)[0])
            return messages, sent

        messages, self.errors[bucket] = with_feedback(values, self.errors[bucket], codec.feedback_decay, send)
        return messages

    def _encoded(self, codec: Codec, bucket: int, values: Tensor, context: Context) -> list[Message]:
        """The message of each shard for a bucket's flat ``values``."""
        keys, states = context.keys(1, self.slices.shards), self.states[bucket]
        messages = []
        for s, part in enumerate(self.slices.cut(bucket, values)):
            row = part.reshape(1, -1)
            message, states[s] = codec.encode(row, keys[s : s + 1].to(row.device), states[s], context)
            messages.append(message)
        return messages

    def state_dict(self) -> dict[str, Any]:
        """The residuals and the state of the codec."""
        return copy.deepcopy({"memory": self.states, "errors": self.errors})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states, self.errors = state["memory"], state["errors"]


def read(strategy: Strategy, message: Message, width: int, bucket: int, step: int, worker: int, world: int, seed: int) -> Tensor:
    """The flat slice of ``width`` values that a pushed message stands for; it may be the message's own storage."""
    codec = strategy.compression.codec
    if codec is None:
        return message.parts[0][0]
    return codec.decode(message, width, _context(seed, step, bucket, worker, world))[0]


def _context(seed: int, step: int, bucket: int, worker: int, world: int) -> Context:
    return Context(seed, step, step, bucket, torch.tensor([worker]), world)
