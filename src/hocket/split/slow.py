"""Slow memory for offload: it keeps the bytes of a block while the block does not compute."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hocket.errors import HocketError


class Slow(Protocol):
    """Keeps the bytes of tensors, one after another, under a key."""

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep all of ``tensors``; the previous content of ``key`` is removed only when this is complete."""

    def read(self, key: str, tensors: Sequence[Tensor], start: int) -> None:
        """Fill ``tensors`` with what was kept from byte ``start`` on."""

    def close(self) -> None:
        """Forget everything."""


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
    """A file per key in a temporary folder, which is removed with the process."""

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is not None and not Path(folder).is_dir():
            raise HocketError(f"offload(folder={str(folder)!r}): there is no such folder; make it, or leave folder= out.")
        self.folder = Path(tempfile.mkdtemp(prefix="hocket-offload-", dir=folder))
        self._end = weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        path = self.folder / key
        try:
            with open(path.with_suffix(".new"), "wb", buffering=0) as file:
                for tensor in tensors:
                    there = tensor if tensor.device.type == "cpu" else raw(tensor).cpu()
                    view = _window(there)
                    while view:
                        view = view[file.write(view) or 0 :]
            os.replace(path.with_suffix(".new"), path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise HocketError(
                f"No space is left for offloaded weights in {self.folder}; give offload(folder=…) with room."
            ) from error

    def read(self, key: str, tensors: Sequence[Tensor], start: int) -> None:
        with open(self.folder / key, "rb", buffering=0) as file:
            file.seek(start)
            for tensor in tensors:
                there = tensor if tensor.device.type == "cpu" else torch.empty(raw(tensor).shape, dtype=torch.uint8)
                view = _window(there)
                while view:
                    got = file.readinto(view)
                    if not got:
                        raise HocketError(
                            f"The file {file.name} of offloaded weights was truncated by another program; start again."
                        )
                    view = view[got:]
                if there is not tensor:
                    raw(tensor).copy_(there)

    def close(self) -> None:
        self._end()


class Pinned:
    """Page-locked memory of the CPU, for models on a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}

    def write(self, key: str, tensors: Sequence[Tensor]) -> None:
        kept = self._kept.setdefault(key, [])
        for k, tensor in enumerate(tensors):
            if k == len(kept):
                kept.append(torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, pin_memory=True))
            kept[k].copy_(raw(tensor))

    def read(self, key: str, tensors: Sequence[Tensor], start: int) -> None:
        kept = self._kept[key]
        first = 0
        while start > 0:
            start -= kept[first].numel()
            first += 1
        for tensor, values in zip(tensors, kept[first:], strict=False):
            raw(tensor).copy_(values)

    def close(self) -> None:
        self._kept.clear()
