"""Flags of workers, which all combine: whether any worker used a parameter, or met a gradient that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hocket.cluster.message import Message

_BITS = 8


def with_flags(message: Message, flags: Tensor) -> Message:
    """``message`` with the flags ``[rows, k]`` of each of its rows as one more part, eight to a byte."""
    bits = pad(flags.to(torch.uint8), (0, -flags.shape[1] % _BITS)).view(flags.shape[0], -1, _BITS)
    packed = (bits * _weights(flags)).sum(2, dtype=torch.uint8)
    lengths = message.lengths
    if lengths is not None:
        lengths = torch.cat([lengths, torch.full_like(lengths[:, :1], packed.shape[1])], 1)
    return Message((*message.parts, packed), lengths)


def without_flags(message: Message, count: int) -> tuple[Message, Tensor]:
    """The inverse: the message, and its flags combined over all rows, bool ``[count]``.

    >>> told = with_flags(Message((torch.zeros(2, 1),)), torch.tensor([[True, False, False], [False, False, True]]))
    >>> told.fixed_bytes, without_flags(told, 3)[1].tolist()
    (5, [True, False, True])
    """
    packed, lengths = message.parts[-1], message.lengths
    flags = (packed.unsqueeze(2) & _weights(packed)).flatten(1)[:, :count] > 0
    return Message(message.parts[:-1], None if lengths is None else lengths[:, :-1]), flags.any(0)


def _weights(like: Tensor) -> Tensor:
    return 1 << torch.arange(_BITS, dtype=torch.uint8, device=like.device)
