"""Hocket: one model trained by many workers, over links that are not infinitely fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket.cluster.layout import Buckets
from hocket.cluster.spec import ClusterSpec
from hocket.compression import DGC, QSGD, Cast, Chain, LowRank, Natural, NoCompression, RandomK, Sign, Ternary, Threshold, TopK
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.session import DistributedLoader, distribute, init, parallelize, shutdown
from hocket.split.branches import Branches
from hocket.split.materialize import deferred
from hocket.split.mesh import Mesh
from hocket.split.offload import Offload, offload
from hocket.split.options import Pipeline
from hocket.strategy import Strategy
from hocket.sync import SSP, Async, Bulk, DiLoCo, Downpour, Local, PostLocal, Stale
from hocket.topology import AllReduce, Gossip, Hierarchical, Server
from hocket.train.job import Job
from hocket.version import __version__

if TYPE_CHECKING:
    from hocket.sandblaster import Sandblaster, SandblasterRun
    from hocket.train.simulate import Run, simulate

_LATER = {
    "Run": "hocket.train.simulate",
    "Sandblaster": "hocket.sandblaster",
    "SandblasterRun": "hocket.sandblaster",
    "simulate": "hocket.train.simulate",
}
"""Names that are loaded when they are first used: a training script may need none of them."""

__all__ = [
    "DGC",
    "QSGD",
    "SSP",
    "AllReduce",
    "Async",
    "Branches",
    "Buckets",
    "Bulk",
    "Cast",
    "Chain",
    "ClusterSpec",
    "DiLoCo",
    "DistributedLoader",
    "Downpour",
    "Gossip",
    "Hierarchical",
    "HocketError",
    "Job",
    "Local",
    "LowRank",
    "Mesh",
    "Natural",
    "NoCompression",
    "NonFiniteGradient",
    "Offload",
    "Pipeline",
    "PostLocal",
    "RandomK",
    "Run",
    "Sandblaster",
    "SandblasterRun",
    "Server",
    "Sign",
    "Stale",
    "Strategy",
    "Ternary",
    "Threshold",
    "TopK",
    "WorkerLost",
    "__version__",
    "deferred",
    "distribute",
    "init",
    "offload",
    "parallelize",
    "shutdown",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hocket' has no attribute '{name}'")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
