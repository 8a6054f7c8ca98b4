"""What a training would cost, before it is begun: ``probe`` measures a cluster, ``predict`` gives time, traffic, memory, money."""

from hocket.prediction.api import Predictions, predict
from hocket.prediction.steps import Prediction

__all__ = ["Prediction", "Predictions", "predict"]
