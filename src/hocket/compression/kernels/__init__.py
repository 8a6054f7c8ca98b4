"""Fused kernels of the codecs: one pass over the values. On CUDA in Triton, on a CPU compiled C++.

The PyTorch code in each codec's own file is the reference and the fallback: without Triton or a C++ compiler, and for blocks that
are no power of two. Kernels give the same bits, but for sums of many values (``sign``, ``bins``), whose order differs; of values
of equal magnitude ``topk`` takes the first ones here. What a kernel computes of a row depends on that row alone, not on how many
there are.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from torch import Tensor

SMALLEST, LARGEST = 8, 8192
"""The blocks of values that kernels take: powers of two between these."""


def block_kernels(tensor: Tensor, size: int, block: int) -> ModuleType | None:
    """The kernels for rows of ``size`` in such blocks, where they can run on this tensor (rows, or a part of a message)."""
    return _found("blocks", tensor, size, block)


def elementwise_kernels(tensor: Tensor, size: int) -> ModuleType | None:
    """The kernels for rows of ``size`` without blocks, likewise."""
    return _found("elementwise", tensor, size)


def select_kernels(tensor: Tensor, size: int, chunk: int = SMALLEST) -> ModuleType | None:
    """The kernels that select values of rows of ``size`` (of each chunk) and write values at their indices, likewise."""
    return _found("select", tensor, size, chunk)


def native_kernels(tensor: Tensor, size: int) -> ModuleType | None:
    """The CPU kernels of the operations that have no Triton kernel."""
    return _found("native", tensor, size) if device_of(tensor) == "cpu" else None


def _found(name: str, tensor: Tensor, size: int, block: int = SMALLEST) -> ModuleType | None:
    power = SMALLEST <= block <= LARGEST and block & (block - 1) == 0
    if not power or not 0 < size < 2**31 - LARGEST or not len(tensor):
        return None
    device = device_of(tensor)
    if device == "cpu" and _compiled():
        return importlib.import_module("hocket.compression.kernels.native")
    if device == "cuda" and _installed():
        return importlib.import_module(f"hocket.compression.kernels.{name}")
    return None


def device_of(tensor: Tensor) -> str:
    """The kind of device whose kernels a tensor is for."""
    return tensor.device.type


@cache
def _installed() -> bool:
    """Whether Triton is there; PyTorch's builds for CUDA on Linux bring it."""
    return importlib.util.find_spec("triton") is not None


def _compiled() -> bool:
    """Whether the library for CPUs is there, or could be compiled now."""
    from hocket.compression.kernels.build import library

    return library() is not None
