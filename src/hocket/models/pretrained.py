"""A model that starts from weights in a file, and adapters of low rank (LoRA; Hu 2021, arXiv:2106.09685) in place of all weights.

A file is in the safetensors format, such as the ``model.safetensors`` that a run leaves behind; a folder holds one or several, as
Hugging Face's do. Every worker reads the same file, so all start equal. With LoRA only adapters are trained: what is frozen is in
no bucket, so only adapters travel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import HocketError
from hocket.extras import require
from hocket.files import read_safetensors
from hocket.models.hugging_face import CausalLM


def load_weights(model: nn.Module, source: str) -> nn.Module:
    """``model`` with the weights in ``source``; names and shapes must be the model's."""
    path = Path(source).expanduser()
    own: Any = model.model if isinstance(model, CausalLM) else model
    if isinstance(model, CausalLM) and (path / "config.json").exists():
        try:
            own.load_state_dict(type(own).from_pretrained(path, local_files_only=True).state_dict())
        except (OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0].rstrip(".")
            raise HocketError(f"{source} has no weights for this model ({first}); use the model that it was saved from.") from None
        return model
    found = _read(path)
    if isinstance(model, CausalLM) and all(name.startswith("model.") for name in found):  # written by a Hocket run
        own = model
    state = own.state_dict()
    odd = next((name for name in found if name not in state), None)
    if odd is not None:
        raise HocketError(f"{source} has '{odd}', which the model lacks; use the model that the file was saved from.")
    wrong = next((name for name, tensor in found.items() if tensor.shape != state[name].shape), None)
    if wrong is not None:
        shapes = f"{tuple(found[wrong].shape)}, the model's {tuple(state[wrong].shape)}"
        raise HocketError(f"{source}: '{wrong}' has the shape {shapes}; use the model and the data set that it was saved from.")
    there = {state[name].data_ptr() for name in found}
    missing = next((name for name, tensor in state.items() if tensor.data_ptr() not in there and tensor.numel()), None)
    if missing is not None:
        raise HocketError(f"{source} lacks '{missing}' of the model; use the model that the file was saved from.")
    with torch.no_grad():
        for name, tensor in found.items():
            state[name].copy_(tensor)
    return model


def _read(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise HocketError(f"The folder {path} holds no *.safetensors; name a file of weights, or a folder that has some.")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= read_safetensors(file.read_bytes())
        except OSError as error:
            raise HocketError(f"Cannot read {file} ({error.strerror}); name a file of weights (*.safetensors).") from None
        except (ValueError, KeyError, TypeError):
            raise HocketError(f"{file} is damaged, or not in the safetensors format; name a file of weights.") from None
    return found


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """``model`` with adapters of ``rank`` on all linear layers but the head; only the adapters are trained."""
    if rank < 1:
        raise HocketError(f"LoRA's rank {rank} must be at least 1, such as 8.")
    if not isinstance(model, CausalLM):
        raise HocketError(
            f"LoRA adapts language models of transformers (hf:FOLDER), not {type(model).__name__}; use peft's get_peft_model in a "
            "script, before hocket.parallelize."
        )
    peft = require("peft", "hf")
    kind = next((type(m).__name__ for m in model.modules() if type(m).__name__ == "Conv1D"), "")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", fan_in_fan_out=bool(kind))
    model.model = peft.get_peft_model(model.model, config)
    return model
