"""Hocket: one model trained by many workers, over links that are not infinitely fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.version import __version__

if TYPE_CHECKING:
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
    from hocket.integrations.ddp import ddp_hook
    from hocket.notation import Ratio
    from hocket.notebook import ProgressBar
    from hocket.optim import LAMB, LARS, Muon, OneBitAdam, decay_groups, hidden_matrices
    from hocket.picture import Chart
    from hocket.prediction.advise import Advice, advise
    from hocket.prediction.api import Predictions, predict
    from hocket.sandblaster import Sandblaster, SandblasterRun
    from hocket.session import DistributedLoader, distribute, epochs, init, parallelize, shutdown
    from hocket.split.branches import Branches
    from hocket.split.materialize import deferred
    from hocket.split.mesh import Mesh
    from hocket.split.offload import Offload, offload
    from hocket.split.options import Pipeline
    from hocket.strategy import Strategy
    from hocket.sync import ACCO, SSP, AEDiT, Async, AsyncDiLoCo, Bulk, DiLoCo, Downpour, Local, PostLocal, Stale
    from hocket.topology import AllReduce, Gossip, Hierarchical, Server
    from hocket.train.audit import Checks
    from hocket.train.elastic import Elastic
    from hocket.train.job import Job
    from hocket.train.lr_schedule import scaled_lr
    from hocket.train.simulate import Run, simulate

_MODULES = {
    "hocket.cluster.layout": "Buckets",
    "hocket.cluster.spec": "ClusterSpec",
    "hocket.compression": "Bins Cast Chain DGC DeMo LowRank Natural NoCompression QSGD RandomK Sign Ternary Threshold TopK",
    "hocket.integrations.ddp": "ddp_hook",
    "hocket.notation": "Ratio",
    "hocket.notebook": "ProgressBar",
    "hocket.picture": "Chart",
    "hocket.optim": "LAMB LARS Muon OneBitAdam decay_groups hidden_matrices",
    "hocket.prediction.advise": "Advice advise",
    "hocket.prediction.api": "Predictions predict",
    "hocket.sandblaster": "Sandblaster SandblasterRun",
    "hocket.session": "DistributedLoader distribute epochs init parallelize shutdown",
    "hocket.split.branches": "Branches",
    "hocket.split.materialize": "deferred",
    "hocket.split.mesh": "Mesh",
    "hocket.split.offload": "Offload offload",
    "hocket.split.options": "Pipeline",
    "hocket.strategy": "Strategy",
    "hocket.sync": "ACCO AEDiT Async AsyncDiLoCo Bulk DiLoCo Downpour Local PostLocal SSP Stale",
    "hocket.topology": "AllReduce Gossip Hierarchical Server",
    "hocket.train.audit": "Checks",
    "hocket.train.elastic": "Elastic",
    "hocket.train.job": "Job",
    "hocket.train.lr_schedule": "scaled_lr",
    "hocket.train.simulate": "Run simulate",
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}
"""Names that are loaded when they are first used: `hocket --help` needs no PyTorch, a training script few of them."""

# When, whom, what
__all__ = ["ACCO", "AEDiT", "Async", "AsyncDiLoCo", "Bulk", "DiLoCo", "Downpour", "Local", "PostLocal", "SSP", "Stale"]
__all__ += ["AllReduce", "Gossip", "Hierarchical", "Server"]
__all__ += ["Bins", "Cast", "Chain", "DGC", "DeMo", "LowRank", "Natural", "NoCompression"]
__all__ += ["QSGD", "RandomK", "Ratio", "Sign", "Ternary", "Threshold", "TopK"]
# Training, split models, simulation
__all__ += ["Buckets", "Checks", "DistributedLoader", "Elastic", "Job", "Strategy"]
__all__ += ["distribute", "epochs", "init", "parallelize", "shutdown"]
__all__ += ["Branches", "Mesh", "Offload", "Pipeline", "deferred", "offload"]
__all__ += ["Advice", "ClusterSpec", "Predictions", "Run", "Sandblaster", "SandblasterRun"]
__all__ += ["LAMB", "LARS", "Muon", "OneBitAdam", "decay_groups", "hidden_matrices", "scaled_lr"]
__all__ += ["Chart", "ProgressBar", "advise", "predict", "simulate"]
__all__ += ["ddp_hook"]
__all__ += ["HocketError", "NonFiniteGradient", "WorkerLost", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hocket' has no attribute '{name}'")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
