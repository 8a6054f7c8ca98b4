"""Text files of the user's: ``text:PATH`` is a file, a folder, or a pattern such as ``text:src/**/*.py``.

A token is a byte, or with ``text:PATH#tokenizer=FILE`` what the tokenizer in FILE makes (a JSON file of Hugging Face's tokenizers).
An example is a window of ``CONTEXT`` tokens, its targets the same window one further. Files are read in the order of their names, a
zero byte after each (of a tokenizer its end-of-text token, if it has one); those with a zero byte inside are no text and left out.
Of 32 files the last is for testing, so that no file is in both parts; where these are too short, the last 32nd of the text.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hocket.data.base import DataSet
from hocket.data.shakespeare import windows
from hocket.errors import HocketError

CONTEXT = 256
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
EACH = 32


def load(reference: str, context: int = CONTEXT) -> DataSet:
    """Windows of ``context`` tokens of the text under a path, side by side."""
    path, _, tokenizer = reference.partition("#tokenizer=")
    texts = [content for file in _files(path) if (content := file.read_bytes()) and 0 not in content]
    train = [text for i, text in enumerate(texts) if i % EACH != EACH - 1]
    test = [text for i, text in enumerate(texts) if i % EACH == EACH - 1]
    if sum(map(len, test)) <= context:
        whole = b"\0".join(texts)
        cut = len(whole) - len(whole) // EACH
        train, test = [whole[:cut]], [whole[cut:]]
    encode, classes = _tokenizer(tokenizer) if tokenizer else (_bytes, 256)
    parts = [encode(part) for part in (train, test)]
    if min(map(len, parts)) <= context:
        unit, count = ("tokens" if tokenizer else "bytes"), sum(map(len, parts))
        raise HocketError(f"text:{path} has {count:,} {unit} of text; it needs at least {EACH * (context + 1):,}.")
    pairs = [windows(part, context, context) for part in parts]
    return DataSet(f"text:{reference}", pairs[0], pairs[1], classes, as_tokens)


def as_tokens(x: Tensor) -> Tensor:
    """Bytes as the numbers that an embedding takes."""
    return x.to(torch.int64)


def _bytes(texts: list[bytes]) -> Tensor:
    whole = bytearray(b"\0".join(texts))
    return torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)


def _tokenizer(path: str) -> tuple[Callable[[list[bytes]], Tensor], int]:
    """What makes tokens of texts, and how many different ones there are."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise HocketError("A tokenizer is read with Hugging Face's tokenizers, not installed: pip install hocket[data].") from None
    try:
        made = Tokenizer.from_file(str(Path(path).expanduser()))
    except Exception as error:  # the library raises nothing more special
        raise HocketError(f"{path} is no tokenizer ({error}): give a tokenizer.json of Hugging Face's tokenizers.") from None
    end = next((found for name in _ENDS if (found := made.token_to_id(name)) is not None), None)

    def encode(texts: list[bytes]) -> Tensor:
        encoded = made.encode_batch([text.decode(errors="replace") for text in texts], add_special_tokens=False)
        after = [] if end is None else [end]
        return torch.cat([torch.empty(0, dtype=torch.int32), *(torch.tensor([*e.ids, *after], dtype=torch.int32) for e in encoded)])

    return encode, made.get_vocab_size()


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
