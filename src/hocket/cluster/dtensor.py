"""What this process holds of a tensor that PyTorch has distributed (a ``DTensor``, such as the parameters under FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_distributed(tensor: Any) -> bool:
    """Whether this process may hold a part of it alone."""
    return hasattr(tensor, "to_local")


def is_sharded(model: Any) -> bool:
    """Whether a model has distributed parameters: ``fully_shard`` was called on it, or on a part of it."""
    return isinstance(model, nn.Module) and any(is_distributed(p) for p in model.parameters())


def local(tensor: Any) -> Tensor:
    """The part that this process holds, which shares its memory; an ordinary tensor is its own part."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def with_local(part: Tensor, like: Any) -> Tensor:
    """A tensor that is distributed as ``like`` is and of which this process holds ``part``, in whose memory it is; ``part`` itself
    where ``like`` is an ordinary tensor."""
    if not is_distributed(like):
        return part
    from torch.distributed.tensor import DTensor  # takes a second to load

    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
