"""Hocket: one model trained by many workers, over links that are not infinitely fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket.cluster.layout import Buckets
from hocket.cluster.spec import ClusterSpec
from hocket.compression import (
    DGC,
    QSGD,
    Bins,
    Cast,
    Chain,
    DeMo,
    LowRank,
    Natural,
    NoCompression,
    RandomK,
    Sign,
    Ternary,
    Threshold,
    TopK,
)
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.notation import Ratio
from hocket.session import DistributedLoader, distribute, epochs, init, parallelize, shutdown
from hocket.split.branches import Branches
from hocket.split.materialize import deferred
from hocket.split.mesh import Mesh
from hocket.split.offload import Offload, offload
from hocket.split.options import Pipeline
from hocket.strategy import Strategy
from hocket.sync import SSP, AEDiT, Async, AsyncDiLoCo, Bulk, DiLoCo, Downpour, Local, PostLocal, Stale
from hocket.topology import AllReduce, Gossip, Hierarchical, Server
from hocket.train.elastic import Elastic
from hocket.train.job import Job
from hocket.version import __version__

if TYPE_CHECKING:
    from hocket.optim import Muon, OneBitAdam, hidden_matrices
    from hocket.prediction.advise import Advice, advise
    from hocket.prediction.api import Predictions, predict
    from hocket.sandblaster import Sandblaster, SandblasterRun
    from hocket.train.simulate import Run, simulate

_LATER = dict.fromkeys(("Run", "simulate"), "hocket.train.simulate")
_LATER |= dict.fromkeys(("Muon", "OneBitAdam", "hidden_matrices"), "hocket.optim")
_LATER |= dict.fromkeys(("Sandblaster", "SandblasterRun"), "hocket.sandblaster")
_LATER |= dict.fromkeys(("Predictions", "predict"), "hocket.prediction.api")
_LATER |= dict.fromkeys(("Advice", "advise"), "hocket.prediction.advise")
"""Names that are loaded when they are first used: a training script may need none of them."""

# When, whom, what
__all__ = ["AEDiT", "Async", "AsyncDiLoCo", "Bulk", "DiLoCo", "Downpour", "Local", "PostLocal", "SSP", "Stale"]
__all__ += ["AllReduce", "Gossip", "Hierarchical", "Server"]
__all__ += ["Bins", "Cast", "Chain", "DGC", "DeMo", "LowRank", "Natural", "NoCompression"]
__all__ += ["QSGD", "RandomK", "Ratio", "Sign", "Ternary", "Threshold", "TopK"]
# Training, split models, simulation
__all__ += ["Buckets", "DistributedLoader", "Elastic", "Job", "Strategy", "distribute", "epochs", "init", "parallelize", "shutdown"]
__all__ += ["Branches", "Mesh", "Offload", "Pipeline", "deferred", "offload"]
__all__ += ["Advice", "ClusterSpec", "Muon", "OneBitAdam", "Predictions", "Run", "Sandblaster", "SandblasterRun", "hidden_matrices"]
__all__ += ["advise", "predict", "simulate"]
__all__ += ["HocketError", "NonFiniteGradient", "WorkerLost", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hocket' has no attribute '{name}'")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
