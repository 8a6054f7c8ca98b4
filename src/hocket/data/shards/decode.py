"""Fields of a sample as Python and torch values, by the ends of their names as in WebDataset."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.errors import HocketError

TARGETS = ("cls", "target.npy")


def image(content: bytes) -> Tensor:
    """A picture as uint8 ``[channels, height, width]``: 1 channel if it is grey, else 3."""
    Image = pillow()
    with Image.open(io.BytesIO(content)) as picture:
        plain = picture if picture.mode in ("L", "RGB") else picture.convert("L" if picture.mode in ("1", "I", "F") else "RGB")
        values = torch.from_numpy(np.array(plain))
    return values.unsqueeze(0) if values.dim() == 2 else values.permute(2, 0, 1).contiguous()


def png(values: Tensor) -> bytes:
    """The inverse of :func:`image`."""
    plain = values[0] if len(values) == 1 else values.permute(1, 2, 0)
    out = io.BytesIO()
    pillow().fromarray(plain.numpy()).save(out, "png")
    return out.getvalue()


def array(content: bytes) -> Tensor:
    """A .npy file as a tensor."""
    return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))


def npy(values: Tensor) -> bytes:
    """The inverse of :func:`array`."""
    out = io.BytesIO()
    np.save(out, values.numpy(), allow_pickle=False)
    return out.getvalue()


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff"), image),
    "cls": int,
    "npy": array,
    "json": json.loads,
    "txt": lambda content: content.decode(),
}
"""By what follows the last dot of a field."""


def fields(sample: Mapping[str, bytes]) -> dict[str, Any]:
    """All fields decoded; what has no known ending stays bytes.

    >>> fields({"txt": b"so", "cls": b"3", "raw": b"?"})
    {'txt': 'so', 'cls': 3, 'raw': b'?'}
    """
    return {name: DECODERS.get(name.rpartition(".")[2], bytes)(content) for name, content in sample.items()}


def example(sample: Mapping[str, bytes]) -> Any:
    """``(input, target)`` where a sample is one field and a target (``cls``, ``target.npy``), the input alone where it is one
    field, else all fields.

    >>> example({"txt": b"so", "cls": b"3"}), example({"txt": b"so"})
    (('so', 3), 'so')
    """
    found = fields(sample)
    target = next((found.pop(name) for name in TARGETS if name in found), None)
    if len(found) != 1:
        return fields(sample)
    (only,) = found.values()
    return only if target is None else (only, target)


def pillow() -> Any:
    """``PIL.Image``, which only pictures need."""
    try:
        from PIL import Image
    except ImportError:
        raise HocketError("Pictures are read and written with Pillow, which is not installed: pip install hocket[data].") from None
    return Image
