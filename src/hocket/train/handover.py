"""Nested state as bytes, for a worker that joins: lists, dicts, numbers, strings and tensors; never pickle."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.transport.frame import DTYPES

_LENGTH = struct.Struct("<Q")
_NAMES = {str(dtype): dtype for dtype in (*DTYPES, torch.complex64, torch.complex128)}


def pack_state(state: Any) -> Tensor:
    """The bytes of ``state``, uint8.

    >>> unpack_state(pack_state({"step": 3, 7: [torch.ones(2), None, (1, "a")]}))
    {'step': 3, 7: [tensor([1., 1.]), None, (1, 'a')]}
    """
    tensors: list[Tensor] = []
    text = json.dumps(_plain(state, tensors)).encode()
    parts = [torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)]
    parts += [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(parts)


def unpack_state(packed: Tensor) -> Any:
    """Back from :func:`pack_state`."""
    (length,) = _LENGTH.unpack(bytes(packed[: _LENGTH.size].tolist()))
    start = _LENGTH.size + length
    return _value(json.loads(bytes(packed[_LENGTH.size : start].tolist())), packed[start:], [0])


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().to("cpu").contiguous())
        return {"tensor": [str(value.dtype), list(value.shape)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(v, tensors) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise HocketError(f"A worker that joins cannot be given a {type(value).__name__}; keep numbers, strings and tensors in states.")


def _value(plain: Any, content: Tensor, at: list[int]) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, found),) = plain.items()
    if kind == "dict":
        return {_value(k, content, at): _value(v, content, at) for k, v in found}
    if kind in ("list", "tuple"):
        values = [_value(v, content, at) for v in found]
        return tuple(values) if kind == "tuple" else values
    dtype, shape = _NAMES[found[0]], found[1]
    size = torch.Size(shape).numel() * dtype.itemsize
    at[0] += size
    return content[at[0] - size : at[0]].clone().view(dtype).view(shape)
