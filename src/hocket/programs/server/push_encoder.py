"""What a worker pushes: its gradients cut into slices, coded, with error feedback; and how a shard reads them.

The code is the strategy's compression, one message per bucket and shard. Its randomness is a function of (seed, worker, step,
bucket, shard) alone, so a virtual worker and a real one send the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.message import Message
from hocket.compression.base import Context, State
from hocket.programs.server.slices import Slices
from hocket.strategy import Strategy
from hocket.topology.base import slice_keys


class PushEncoder:
    """Worker ``worker`` of ``world``'s way of coding; it keeps the memories of feedback and of the code."""

    def __init__(self, strategy: Strategy, slices: Slices, worker: int, world: int, seed: int) -> None:
        self.slices, self.worker, self.world, self.seed = slices, worker, world, seed
        self.codec = strategy.compression.codec
        none: list[list[State]] = [[{} for _ in range(slices.shards)] for _ in slices.sizes]
        self.memory = none
        self.errors: list[Tensor | None] = [None for _ in slices.sizes]

    def encode(self, step: int, gradients: Sequence[Tensor]) -> list[list[Message]]:
        """The messages ``[shard][bucket]`` for flat ``gradients`` (one per bucket), pushed at ``step``."""
        coded = [self._bucket(b, step, g) for b, g in enumerate(gradients)]
        return [list(of_shard) for of_shard in zip(*coded, strict=True)]

    def _bucket(self, bucket: int, step: int, gradient: Tensor) -> list[Message]:
        if self.codec is None:
            return [Message((part.reshape(1, -1),)) for part in self.slices.cut(bucket, gradient)]
        wanted = gradient.to(torch.float32)
        held = self.errors[bucket]
        if held is not None:
            wanted = wanted + held
        context = _context(self.seed, step, bucket, self.worker, self.world)
        keys = slice_keys(context.keys(1), self.slices.shards)
        messages, rest = [], wanted.clone()
        for s, (part, left) in enumerate(zip(self.slices.cut(bucket, wanted), self.slices.cut(bucket, rest), strict=True)):
            row, memory = part.reshape(1, -1), self.memory[bucket]
            message, memory[s] = self.codec.encode(row, keys[s : s + 1].to(row.device), memory[s], context)
            messages.append(message)
            if self.codec.uses_error_feedback:
                left -= self.codec.decode(message, row.shape[1], context)[0]
        if self.codec.uses_error_feedback:
            self.errors[bucket] = rest
        return messages

    def state_dict(self) -> dict[str, Any]:
        """What was held back, and what the code remembers."""
        return copy.deepcopy({"memory": self.memory, "errors": self.errors})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.memory, self.errors = state["memory"], state["errors"]


def read(strategy: Strategy, message: Message, width: int, bucket: int, step: int, worker: int, world: int, seed: int) -> Tensor:
    """The flat slice of ``width`` values that a pushed message stands for; it may be the message's own storage."""
    codec = strategy.compression.codec
    if codec is None:
        return message.parts[0][0]
    return codec.decode(message, width, _context(seed, step, bucket, worker, world))[0]


def _context(seed: int, step: int, bucket: int, worker: int, world: int) -> Context:
    return Context(seed, step, step, bucket, torch.tensor([worker]), world)
