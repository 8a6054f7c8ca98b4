"""Causal language models of Hugging Face's transformers: from a folder, from a config file, or by the name of an architecture.

A folder that holds weights starts from them; all else starts from random weights, drawn from the seed of the run. Nothing is
downloaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hocket.errors import HocketError, nearest

WEIGHTS = ("*.safetensors", "*.bin")


class CausalLM(nn.Module):
    """A language model of transformers as a module from tokens ``[B, T]`` to logits ``[B, T, vocabulary]``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def causal_lm(source: str, classes: int, length: int) -> CausalLM:
    """The model that ``source`` names, for ``classes`` tokens and texts of ``length``: ``gpt2``, ``config.json`` or a folder."""
    try:
        auto = import_module("transformers")
    except ImportError:
        raise HocketError(f"The model hf:{source} needs Hugging Face's transformers: pip install transformers.") from None
    path = Path(source).expanduser()
    if not path.exists():
        config = _by_name(auto, source)
        config.vocab_size = classes
    else:
        config = _read(auto, path)
    config.use_cache = False
    if config.vocab_size < classes:
        raise HocketError(
            f"The model in {path} knows {config.vocab_size} tokens, but the data set has {classes}: use a data set made with its "
            f"tokens, or a config with vocab_size {classes}."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < length:
        raise HocketError(f"{source} has {positions} positions, but the texts have {length} tokens: use shorter texts.")
    if path.is_dir() and any(next(path.glob(kind), None) for kind in WEIGHTS):
        return CausalLM(auto.AutoModelForCausalLM.from_pretrained(path, config=config, local_files_only=True))
    return CausalLM(auto.AutoModelForCausalLM.from_config(config))


def _by_name(auto: Any, name: str) -> Any:
    """The default config of an architecture."""
    known = [kind for kind, config in auto.CONFIG_MAPPING.items() if config in auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    if name not in known:
        instead = nearest(name, known) or ": give a folder, a config.json, or an architecture such as gpt2 or llama."
        raise HocketError(f"hf:{name} names no file and no causal language model of transformers{instead}")
    return auto.AutoConfig.for_model(name)


def _read(auto: Any, path: Path) -> Any:
    try:
        return auto.AutoConfig.from_pretrained(os.fspath(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise HocketError(f"{path} holds no config of a language model ({first}): give a folder with a config.json.") from None
