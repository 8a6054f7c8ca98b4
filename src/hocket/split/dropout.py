"""Dropout independent of the split: every dropout of a model is replaced by one that draws from ``Draws``."""

from __future__ import annotations

from torch import nn

from hocket.errors import HocketError
from hocket.models.gpt import Attention
from hocket.split.axis import Axis
from hocket.split.draws import Draws, Dropout
from hocket.split.tensor.attention import DrawnAttention, SplitMultihead, common, without_fast_path
from hocket.split.tensor.layers import ParameterSlicer, swap

_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_OTHER = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)


def prepare_dropout(model: nn.Module, draws: Draws) -> None:
    """Replace, in place, every ``nn.Dropout`` and the dropout of attention; layers are known by their names in the whole model.

    Call it for every mesh, also of one process, before a pipeline cuts the model; before or after ``split_tensor``. Samples are
    counted along the first dimension, in transformer layers with ``batch_first=False`` along the second. Functional
    dropout (``F.dropout``) cannot be found and draws from torch's generator.
    """
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer))
    second = {id(child) for layer in layers if not layer.self_attn.batch_first for child in layer.children()}
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Dropout, *_CHANNELS)):
            lies, channels = getattr(module, "lies", (0, 1)), isinstance(module, _CHANNELS)
            new = Dropout(module.p, name, draws, samples=int(id(module) in second), channels=channels, lies=lies)
            swap(model, module, new.train(module.training))
        elif type(module) is Attention and module.dropout:
            swap(model, module, DrawnAttention(module, name, draws))
        elif isinstance(module, nn.MultiheadAttention) and module.dropout:
            if not isinstance(module, SplitMultihead) and not common(module):
                raise HocketError(
                    f"'{name}' has dropout inside attention of an unusual form, whose mask would depend on the split: set it to 0."
                )
            drawn = module if isinstance(module, SplitMultihead) else SplitMultihead(module, ParameterSlicer(Axis("tensor")))
            drawn.draw(name, draws)
            swap(model, module, drawn)
        elif isinstance(module, _OTHER) and module.training and getattr(module, "p", True):
            raise HocketError(f"'{name}' is {type(module).__name__}, whose random mask would depend on the split: use nn.Dropout.")
    without_fast_path(model)
