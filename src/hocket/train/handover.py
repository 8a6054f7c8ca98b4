"""The state that a joining worker receives from another one, as bytes without pickle."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.base import Cluster
from hocket.cluster.live_groups import STANDS
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram
from hocket.train.elastic import Stateful
from hocket.train.runtimes.base import Binding
from hocket.transport.frame import DTYPES

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES, _PIECES = 1 << 22, 4
"""Of these many pieces of a state are under way to the next worker at once."""
_NAMES = {str(dtype): dtype for dtype in (*DTYPES, torch.complex64, torch.complex128)}

_OWN = ("error", "u", "v", "momentum", "inner", "sender", "owner")
"""What codes keep of a worker's own rows: one that joins begins without it."""


class Shared:
    """The objects, by name, whose states a joining worker receives; a state may arrive before its object is added."""

    def __init__(self, **given: Stateful) -> None:
        self._given = dict(given)
        self._unclaimed: dict[str, Any] = {}

    @property
    def all(self) -> list[Stateful]:
        return list(self._given.values())

    def add(self, name: str, one: Stateful, then: Callable[[], None]) -> None:
        """Add an object; ``then`` is called if its state had arrived before."""
        self._given[name] = one
        if name in self._unclaimed:
            one.load_state_dict(self._unclaimed.pop(name))
            then()

    def state_dict(self) -> dict[str, Any]:
        return {**self._unclaimed, **{name: one.state_dict() for name, one in self._given.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unclaimed = dict(state)
        for name, one in self._given.items():
            if name in self._unclaimed:
                one.load_state_dict(self._unclaimed.pop(name))


def state_of(binding: Binding, program: CollectiveProgram, shared: Shared) -> dict[str, Any]:
    """The whole state of a worker at the end of a step."""
    return {
        "weights": binding.weights,
        "others": [t.detach() for t in _others(binding)],
        "optimizer": binding.optimizer.state_dict(),
        "program": program.state_dict(),
        "shared": shared.state_dict(),
    }


def load_state(binding: Binding, program: CollectiveProgram, shared: Shared, state: dict[str, Any]) -> None:
    """Take another worker's state, but not its residuals, which stay with that worker."""
    given = state["program"]
    with torch.no_grad():
        for own, other in zip([*binding.weights, *_others(binding)], [*state["weights"], *state["others"]], strict=True):
            own.copy_(other)
    binding.optimizer.load_state_dict(state["optimizer"])
    given["gradient_state"] = [{k: v for k, v in one.items() if k not in _OWN} for one in given["gradient_state"]]
    given["weight_state"] = [{**one, "inner": {}} if "inner" in one else one for one in given["weight_state"]]
    for one in given["outer_state"]:
        if "held" in one:
            one["held"].zero_()
    program.load_state_dict({**given, "workers": program._identity()["workers"]})
    shared.load_state_dict(state["shared"])


def hand_down(chain: list[int], packed: Tensor | None) -> Tensor:
    """Packed state of the first process of ``chain`` for all others of it; each gives every piece to the next one as soon as it has
    it, so many wait hardly longer than one. (The ranks are those of the default group.)"""
    place = chain.index(dist.get_rank())
    before, after = chain[max(place - 1, 0) : place], chain[place + 1 : place + 2]
    size = torch.tensor([0 if packed is None else packed.numel()])
    for rank in before:
        _end(dist.irecv(size, rank))
    for rank in after:
        _end(dist.isend(size, rank))
    packed = torch.empty(int(size), dtype=torch.uint8) if packed is None else packed
    sends: deque[dist.Work | None] = deque()
    for piece in packed.split(_PIECE_BYTES):
        for rank in before:
            _end(dist.irecv(piece, rank))
        sends += [dist.isend(piece, rank) for rank in after]
        if len(sends) > _PIECES:
            _end(sends.popleft())
    for work in sends:
        _end(work)
    return packed


def _end(work: dist.Work | None) -> None:
    assert work is not None, "this process belongs to the group"
    work.wait(STANDS)


def pass_on(cluster: Cluster, donor: int, receivers: list[int], state: Callable[[], Any]) -> Any:
    """Give ``state()`` of the process ``donor`` to other processes of the default group; what a receiver gets, None elsewhere."""
    rank = dist.get_rank()
    if not receivers or rank not in (donor, *receivers):
        return None
    packed = pack_state(state()) if rank == donor else None
    given = cluster.start(lambda: hand_down([donor, *receivers], packed), "the state of another worker")()
    return unpack_state(given) if rank != donor else None


def _others(binding: Binding) -> list[Tensor]:
    """The frozen parameters and the buffers."""
    ours = {id(p) for own in binding.params for p in own}
    return [*(p.data for p in binding.model.parameters() if id(p) not in ours), *binding.model.buffers()]


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
    (length,) = _LENGTH.unpack(packed[: _LENGTH.size].numpy().tobytes())
    start = _LENGTH.size + length
    return _value(json.loads(packed[_LENGTH.size : start].numpy().tobytes()), packed[start:], [0])


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
