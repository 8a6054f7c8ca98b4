"""Slow memory for offload, and the blocks whose bytes it keeps while they do not compute."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import HocketError


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that shares its storage with no other, in storage order."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _window(tensor: Tensor) -> memoryview:
    """The same of a tensor on the CPU, as what files read into. (NumPy would fix the size of the storage.)"""
    storage = tensor.untyped_storage()
    return memoryview((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def return_memory_at_once() -> None:
    """Make glibc return freed memory to the system at once, for the rest of this process.

    Otherwise it keeps blocks of up to 32 MiB, in one arena per thread, and a process that empties and fills storages all the time
    ends up with more memory than if it had kept them all.
    """
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)


_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: larger blocks are mapped one by one


class Disk:
    """Keeps the bytes of tensors under keys: a file per key in a temporary folder, which is removed with the process."""

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise HocketError(f"offload(folder={str(folder)!r}): there is no such folder; make it, or leave folder= out.")
        self.folder = Path(tempfile.mkdtemp(prefix="hocket-offload-", dir=folder))
        self.close = weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep all of ``tensors``; the previous content of ``key`` is removed only when this is complete."""
        path = self.folder / key
        try:
            with open(path.with_suffix(".new"), "wb") as file:
                for tensor in tensors:
                    there = tensor if tensor.device.type == "cpu" else raw(tensor).cpu()
                    file.write(_window(there))
            os.replace(path.with_suffix(".new"), path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise HocketError(
                f"No space is left for offloaded weights in {self.folder}; give offload(folder=…) with room."
            ) from error

    def read(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors`` with what was kept."""
        with open(self.folder / key, "rb") as file:
            for tensor in tensors:
                there = tensor if tensor.device.type == "cpu" else torch.empty(raw(tensor).shape, dtype=torch.uint8)
                view = _window(there)
                if file.readinto(view) < len(view):
                    raise HocketError(f"The file {file.name} of offloaded weights was truncated by another program; start again.")
                if there is not tensor:
                    raw(tensor).copy_(there)


class Pinned:
    """Keeps the bytes of tensors in page-locked memory of the CPU, for models on a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}
        self.close = self._kept.clear

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        kept = self._kept.setdefault(key, [])
        for k, tensor in enumerate(tensors):
            if k == len(kept):
                kept.append(torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, pin_memory=True))
            kept[k].copy_(raw(tensor))

    def read(self, key: str, tensors: Sequence[Tensor]) -> None:
        for tensor, values in zip(tensors, self._kept[key], strict=True):
            raw(tensor).copy_(values)


class Block:
    """The tensors of one block. Each keeps its storage, empty or filled, so that what autograd has saved of it stays right.

    While a tensor is in slow memory, its place holds a single NaN expanded to its shape, so that a premature read gives NaN.
    """

    def __init__(self, index: int, name: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.index, self.name, self.module, self.optimizer = index, name, module, optimizer
        self.params = list(module.parameters())
        self.weights = [p.data.clone() for p in self.params]
        self.states: list[tuple[dict[str, Any], str, Tensor]] = []
        self.busy = False
        """Whether its backward pass is running."""
        self.waiting: set[int] = set()
        self.coming: list[Future[None]] = []

    def _kept(self) -> dict[str, list[Tensor]]:
        return {f"{self.index:05d}-weights": self.weights, f"{self.index:05d}-state": [t for _, _, t in self.states]}

    def fetch(self, slow: Disk | Pinned, state: bool) -> None:
        """Fill what is empty: the weights, and the optimiser's state if that is wanted, too."""
        for key, tensors in list(self._kept().items())[: 1 + state]:
            if tensors and tensors[0].untyped_storage().nbytes() == 0:
                for tensor in tensors:
                    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                slow.read(key, tensors)

    def store(self, slow: Disk | Pinned) -> None:
        for key, tensors in self._kept().items():
            if tensors:
                slow.write(key, tensors)
        self.empty()

    def empty(self) -> None:
        """Free the memory."""
        for tensor in (t for tensors in self._kept().values() for t in tensors):
            tensor.untyped_storage().resize_(0)

    def settle(self) -> None:
        """Wait until the thread has finished with this block."""
        for future in self.coming:
            future.result()
        self.coming.clear()

    def show(self) -> None:
        """Put the real parameters and states in place."""
        for p, weight in zip(self.params, self.weights, strict=True):
            p.data = weight
        for state, key, tensor in self.states:
            if tensor.untyped_storage().nbytes():
                state[key] = tensor

    def hide(self) -> None:
        """Replace parameters and states by placeholders; state that the optimiser has just made is included."""
        known = {(id(state), key) for state, key, _ in self.states}
        for p, weight in zip(self.params, self.weights, strict=True):
            p.data = _absent(weight)
            state = self.optimizer.state.get(p, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and (id(state), key) not in known:
                    self.states.append((state, key, _alone(value)))
        for state, key, tensor in self.states:
            state[key] = _absent(tensor)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that shares its storage with no other."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _absent(tensor: Tensor) -> Tensor:
    return tensor.new_full((), float("nan") if tensor.is_floating_point() else 0).expand(tensor.shape)
