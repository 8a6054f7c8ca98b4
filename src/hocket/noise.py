"""Randomness as a hash of (seed, worker, step, bucket, index).

It depends neither on the process that hosts a worker nor on the device, so a virtual worker and a real one draw the same numbers.
The mixing is the 32-bit finaliser "lowbias32" (Wellons, 2018); keys are folded with the same function in plain Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def fold(*parts: int) -> int:
    """One 32-bit key out of several integers.

    >>> fold(1, 2) == fold(1, 2), fold(1, 2) == fold(2, 1), fold(-1) == fold(0)
    (True, False, False)
    """
    key = 0x9E3779B9
    for part in parts:
        key = _mix(key ^ _mix(part & _MASK))
        if high := (part >> 32) & _MASK:
            key = _mix(key ^ _mix(high ^ 0x85EBCA6B))
    return key


def bits(keys: Tensor, size: int, first: int = 0) -> Tensor:
    """``[len(keys), size]`` pseudo-random int32 values, from the index ``first`` on: row ``r`` depends on ``keys[r]`` alone."""
    return bits_at(keys, torch.arange(first, first + size, dtype=torch.int32, device=keys.device))


def bits_at(keys: Tensor, index: Tensor) -> Tensor:
    """The values at the indices ``index`` (int32) of :func:`bits`.

    >>> keys = torch.tensor([1, 2])
    >>> torch.equal(bits_at(keys, torch.tensor([7, 3], dtype=torch.int32)), bits(keys, 8)[:, [7, 3]])
    True
    """
    if keys.is_meta:  # sizes alone
        return keys.new_empty(len(keys), len(index), dtype=torch.int32)
    start = keys.to(torch.int64) & _MASK
    key = torch.where(start >= 2**31, start - 2**32, start).to(torch.int32).unsqueeze(1)
    x, added = index.unsqueeze(0) ^ key, key * (0x9E3779B1 - 2**32)
    # Two rounds with the key between them: after one alone, rows whose keys differ in low bits are permutations of each other.
    for _ in range(2):
        x ^= (x >> 16).bitwise_and_(0xFFFF)
        x *= 0x7FEB352D
        x ^= (x >> 15).bitwise_and_(0x1FFFF)
        x *= 0x846CA68B - 2**32
        x ^= (x >> 16).bitwise_and_(0xFFFF)
        x += added
    return x


_AHEAD = 32
"""Keys of so many steps are made at once, where there are few of each: a tensor of a step costs as much as one of all."""
_KEPT = 1 << 13
"""Keys of a table, at most, that is kept."""


def worker_keys(seed: int, step: int, bucket: int, salt: int, workers: Tensor, slices: int, device: torch.device) -> Tensor:
    """One key for each of ``workers`` (of its id alone) or, with ``slices``, for each of its slices, flattened."""
    ids = tuple(workers.tolist())
    steps = min(_AHEAD, _KEPT // max(1, len(ids) * max(1, slices)))
    if not steps:
        return _keys_of_steps(seed, step, 1, bucket, salt, ids, slices, device)[0]
    return _kept_keys(seed, step // steps, steps, bucket, salt, ids, slices, device)[step % steps]


@lru_cache(maxsize=256)
def _kept_keys(seed: int, block: int, steps: int, *rest: Any) -> tuple[Tensor, ...]:
    return _keys_of_steps(seed, block * steps, steps, *rest)


def _keys_of_steps(
    seed: int, first: int, steps: int, bucket: int, salt: int, ids: tuple[int, ...], slices: int, device: torch.device
) -> tuple[Tensor, ...]:
    # On the CPU, which is faster for so few values.
    common = torch.tensor([fold(seed, step, bucket, salt) for step in range(first, first + steps)])
    keys = bits_at(common, torch.tensor(ids, dtype=torch.int32)).to(torch.int64)
    if slices:
        keys = bits(keys.flatten(), slices).to(torch.int64).view(steps, -1)
    return keys.to(device, non_blocking=True).unbind()


def step_keys(seed: int, step: int, workers: int) -> Tensor:
    """One key per worker for a step's augmentation and dropout: the same in every process.

    >>> step_keys(0, 3, 2).tolist() == step_keys(0, 3, 5)[:2].tolist()
    True
    """
    common = torch.tensor([fold(seed, step, 0x5EED)])
    return bits(common, workers)[0].to(torch.int64) & 0x7FFFFFFF


def uniform(keys: Tensor, size: int, first: int = 0) -> Tensor:
    """``[len(keys), size]`` float32 values, uniform in [0, 1) with 24 random bits each; from the index ``first`` on.

    >>> u = uniform(torch.tensor([1, 2]), 10_000)
    >>> bool((u >= 0).all() and (u < 1).all()), round(u.mean().item(), 1)
    (True, 0.5)
    """
    return (bits(keys, size, first) >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)
