"""Files that appear whole or not at all, that outlive a power cut, and that show when a byte of them has changed."""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hocket.errors import SettingError

_CHECK_BYTES = 4
_CHECK = "crc32"
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CannotWrite(SettingError):
    """No space is left, or writing is not permitted; files written before are complete."""

    def __init__(self, what: str, error: OSError) -> None:
        self.cause = f"Cannot {what} ({error.strerror})"
        self.remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        super().__init__(f"{self.cause}; files written before are complete: {self.remedy} and go on with <resume:True>.")


def write_whole(path: Path, content: bytes, writer: str = "") -> None:
    """Write to a temporary name, then rename: a reader never sees half a file. File and folder are on the disk afterwards.

    ``writer`` tells processes apart that write the same file at once.
    """
    temporary = path.with_name(f"{path.name}{writer}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise  # an interruption
        raise CannotWrite(f"write {path}", error) from None


def sync_folder(folder: Path) -> None:
    """Let the names in ``folder`` be on the disk: a renamed file is otherwise its old self again after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- states ------------------------------------------------------------------------------------------------------------------


def copied(state: Any) -> Any:
    """``state`` with copies of its tensors on the CPU, so that it can be written while training changes them."""
    return tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)


def state_bytes(state: Any) -> bytes:
    """``state`` in torch's format."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read_state(content: bytes) -> Any:
    """The inverse, without pickle's powers; one of torch's own errors where it is damaged."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def sealed(state: Any) -> bytes:
    """``state`` in torch's format with a checksum behind it: torch itself does not notice that bytes of a tensor have changed."""
    body = state_bytes(state)
    return body + zlib.crc32(body).to_bytes(_CHECK_BYTES, "little")


def unsealed(content: bytes) -> Any:
    """The inverse of :func:`sealed`; ValueError (or one of torch's own) where the bytes are damaged."""
    body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECK_BYTES, "little") != check:
        raise ValueError("its checksum does not match")
    return read_state(body)


def unlike(own: Any, saved: Any, path: str = "") -> str | None:
    """Where a saved state is of another structure than ``own``: the path of the first entry that is missing, of another kind or of
    another shape; None where it is not. What ``own`` lacks, has as None, or has under numbers may be anything.

    >>> unlike({"a": 1, "b": [torch.zeros(2)]}, {"a": 2, "b": [torch.zeros(3)], "c": None}), unlike({"a": None}, {"a": 1})
    ('b.0', None)
    """
    if own is None:
        return None
    if isinstance(own, Tensor):
        same = isinstance(saved, Tensor) and (own.shape, own.dtype) == (saved.shape, saved.dtype)
        return None if same else path
    if isinstance(own, dict) and isinstance(saved, dict):
        shared = [key for key in own if key in saved or isinstance(key, str)]  # numbers count workers and the like
        found = [unlike(own[key], saved[key], f"{path}.{key}") if key in saved else f"{path}.{key}" for key in shared]
    elif isinstance(own, (list, tuple)) and isinstance(saved, (list, tuple)):
        same = not own or len(own) == len(saved) or all(isinstance(item, (int, float, str)) for item in own)
        found = [unlike(*pair, f"{path}.{k}") for k, pair in enumerate(zip(own, saved, strict=False))] if same else [path]
    else:
        numbers = isinstance(own, (int, float)) and isinstance(saved, (int, float))
        return None if numbers or isinstance(saved, type(own)) else path.lstrip(".")
    return next((place.lstrip(".") for place in found if place is not None), None)


# --- plain data --------------------------------------------------------------------------------------------------------------


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """Plain data as JSON with its checksum.

    >>> sealed_json({"step": 3})
    b'{"step": 3, "crc32": 145879999}'
    """
    return json.dumps({**content, _CHECK: zlib.crc32(json.dumps(content).encode())}).encode()


def unsealed_json(content: bytes) -> dict[str, Any]:
    """The inverse of :func:`sealed_json`; ValueError where the bytes are damaged.

    >>> unsealed_json(sealed_json({"step": 3}))
    {'step': 3}
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict) or found.pop(_CHECK, None) != zlib.crc32(json.dumps(found).encode()):
        raise ValueError("its checksum does not match")
    return found


# --- weights -----------------------------------------------------------------------------------------------------------------


def safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """``tensors`` in the safetensors format: the length of a header, the header in JSON, and the bytes of each tensor.

    >>> content = safetensors({"bias": torch.tensor([1.0, 2.0])})
    >>> content[8:80]
    b'{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}       \\x00\\x00\\x80?\\x00\\x00\\x00@'
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    bodies: list[bytes] = []
    at = 0
    # Wide values first: each tensor then begins at a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"safetensors has no {tensor.dtype} ('{name}')")
        bodies.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        end = at + len(bodies[-1])
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % _ALIGNMENT)
    return b"".join([len(words).to_bytes(8, "little"), words, *bodies])


def read_safetensors(content: bytes) -> dict[str, Tensor]:
    """The inverse; ValueError where it is damaged.

    >>> read_safetensors(safetensors({"bias": torch.tensor([1.0, 2.0])}))
    {'bias': tensor([1., 2.])}
    """
    length, kinds = int.from_bytes(content[:8], "little"), {name: kind for kind, name in _DTYPES.items()}
    body = memoryview(bytearray(content))[8 + length :]  # a copy: tensors may be written to
    found = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            raw = torch.frombuffer(body[first:end], dtype=torch.uint8) if end > first else torch.empty(0, dtype=torch.uint8)
            found[name] = raw.clone().view(kinds[entry["dtype"]]).view(entry["shape"])
    return found
