"""Hocket: one model trained by many workers, over links that are not infinitely fast."""

from hocket.cluster.spec import ClusterSpec
from hocket.compression import DGC, QSGD, Cast, Chain, LowRank, Natural, NoCompression, RandomK, Sign, Ternary, Threshold, TopK
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.sandblaster import Sandblaster, SandblasterRun
from hocket.session import DistributedLoader, distribute, init, parallelize, shutdown
from hocket.split.branches import Branches
from hocket.split.materialize import deferred
from hocket.split.mesh import Mesh
from hocket.split.offload import Offload, offload
from hocket.strategy import Strategy
from hocket.sync import SSP, Async, Bulk, DiLoCo, Downpour, Local, PostLocal, Stale
from hocket.topology import AllReduce, Gossip, Hierarchical, Server
from hocket.train.free_job import FreeJob
from hocket.train.job import Job
from hocket.train.pairs_job import PairsJob
from hocket.train.simulate import Run, simulate
from hocket.version import __version__

__all__ = [
    "DGC",
    "QSGD",
    "SSP",
    "AllReduce",
    "Async",
    "Branches",
    "Bulk",
    "Cast",
    "Chain",
    "DiLoCo",
    "DistributedLoader",
    "Downpour",
    "FreeJob",
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
    "PairsJob",
    "PostLocal",
    "RandomK",
    "Run",
    "Sandblaster",
    "SandblasterRun",
    "Server",
    "Sign",
    "ClusterSpec",
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
