"""Models to train: all fit for ``torch.func.functional_call`` under ``vmap(grad)``."""

from hocket.models.gpt import gpt
from hocket.models.images import cnn, mlp, resnet20, vgg11
from hocket.models.registry import GPT_SIZES, MODELS, build, cross_entropy, loss_for

__all__ = ["GPT_SIZES", "MODELS", "build", "cnn", "cross_entropy", "gpt", "loss_for", "mlp", "resnet20", "vgg11"]
