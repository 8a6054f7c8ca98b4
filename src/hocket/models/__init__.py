"""Models to train: each a file with a factory, all fit for ``torch.func.functional_call`` under ``vmap(grad)``."""

from hocket.models.cnn import cnn
from hocket.models.gpt import gpt
from hocket.models.loss import cross_entropy, loss_for
from hocket.models.mlp import mlp
from hocket.models.registry import MODELS, build
from hocket.models.resnet import resnet20
from hocket.models.vgg import vgg11

__all__ = ["MODELS", "build", "cnn", "cross_entropy", "gpt", "loss_for", "mlp", "resnet20", "vgg11"]
