"""Tiny Shakespeare: 1,115,394 characters of his plays, for predicting the next character (Karpathy, char-rnn, 2015).

Read from ``tinyshakespeare/input.txt`` under the data folder. The vocabulary is the 65 characters that occur, in byte order; the
first 90 % of the text are for training. An example is a window of ``context`` characters, its targets the same window one further.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hocket.data import files
from hocket.data.base import DataSet, Pair, identity
from hocket.errors import HocketError

ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
PATH = "tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def load(data_dir: Path, context: int = 64, stride: int | None = None) -> DataSet:
    """Windows of ``context`` characters that start ``stride`` apart (None: side by side, without overlap)."""

    def missing() -> list[files.Remote]:
        return [] if (data_dir / PATH).exists() else [files.Remote(ADDRESS, PATH, SHA256)]

    files.obtain("Tiny Shakespeare", data_dir, missing)
    text = torch.frombuffer(bytearray(files.read(data_dir / PATH, SHA256)), dtype=torch.uint8)
    characters, tokens = text.unique(return_inverse=True)
    cut, step = len(tokens) * 9 // 10, context if stride is None else stride
    train, test = windows(tokens[:cut], context, step), windows(tokens[cut:], context, step)
    return DataSet("shakespeare", train, test, len(characters), identity)


def windows(tokens: Tensor, context: int, stride: int) -> Pair:
    """Inputs and targets ``[n, context]``; what does not fill a last window is left out.

    >>> windows(torch.arange(8), context=3, stride=3)
    (tensor([[0, 1, 2],
            [3, 4, 5]]), tensor([[1, 2, 3],
            [4, 5, 6]]))
    """
    if context < 1 or stride < 1 or len(tokens) <= context:
        raise HocketError(
            f"Windows need a stride of at least 1 and a context from 1 to {len(tokens) - 1}, one less than the text's length; "
            f"got stride {stride} and context {context}: choose them within these bounds."
        )
    return tokens[:-1].unfold(0, context, stride).contiguous(), tokens[1:].unfold(0, context, stride).contiguous()
