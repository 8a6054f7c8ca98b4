"""Replace one module by another."""

from __future__ import annotations

from torch import nn

from hocket.errors import HocketError
from hocket.split.tensor.attention import SplitMultihead


def swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` wherever ``model`` has it, at the same place in its parent, so that names and their order stay."""
    if model is old:
        raise HocketError(f"The model is a single {type(old).__name__}, which cannot replace itself: wrap it in nn.Sequential.")
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def without_fast_path(model: nn.Module) -> None:
    """Let transformer layers call their attention: in evaluation, torch would else compute a layer directly from its weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, SplitMultihead):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
