"""Text files of the user's, byte by byte: ``text:PATH`` is a file, a folder, or a pattern such as ``text:src/**/*.py``.

A token is a byte, an example a window of ``CONTEXT`` bytes, its targets the same window one further. Files are read in the order of
their names, a zero byte after each; those with a zero byte inside are no text and left out. Of 32 files the last is for testing, so
that no file is in both parts; where these are too short, the last 32nd of the text.
"""

from __future__ import annotations

import glob
from pathlib import Path

import torch
from torch import Tensor

from hocket.data.base import DataSet
from hocket.data.shakespeare import windows
from hocket.errors import HocketError

CONTEXT = 256
EACH = 32


def load(path: str, context: int = CONTEXT) -> DataSet:
    """Windows of ``context`` bytes of the text under ``path``, side by side."""
    texts = [content for file in _files(path) if (content := file.read_bytes()) and 0 not in content]
    train = [text for i, text in enumerate(texts) if i % EACH != EACH - 1]
    test = [text for i, text in enumerate(texts) if i % EACH == EACH - 1]
    if sum(map(len, test)) <= context:
        whole = b"\0".join(texts)
        cut = len(whole) - len(whole) // EACH
        train, test = [whole[:cut]], [whole[cut:]]
    parts = [bytearray(b"\0".join(part)) for part in (train, test)]
    if min(map(len, parts)) <= context:
        raise HocketError(f"text:{path} has {sum(map(len, parts)):,} bytes of text; it needs at least {EACH * (context + 1):,}.")
    pairs = [windows(torch.frombuffer(part, dtype=torch.uint8), context, context) for part in parts]
    return DataSet(f"text:{path}", pairs[0], pairs[1], 256, as_tokens)


def as_tokens(x: Tensor) -> Tensor:
    """Bytes as the numbers that an embedding takes."""
    return x.to(torch.int64)


def _files(path: str) -> list[Path]:
    found = Path(path).expanduser()
    if found.is_dir():
        return sorted(file for file in found.rglob("*") if file.is_file())
    if found.is_file():
        return [found]
    files = sorted(Path(name) for name in glob.glob(str(found), recursive=True) if Path(name).is_file())
    if not files:
        raise HocketError(f"There is no file under '{path}': text: takes a file, a folder, or a pattern such as src/**/*.py.")
    return files
