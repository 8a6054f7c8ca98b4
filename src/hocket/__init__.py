"""Hocket: one model trained by many workers, over links that are not infinitely fast."""

from hocket.cluster.spec import Spec
from hocket.compression import DGC, QSGD, Cast, Chain, LowRank, Natural, NoCompression, RandomK, Sign, Ternary, Threshold, TopK
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.sandblaster import Sandblaster, SandblasterRun
from hocket.session import Shard, init, leave, parallelize, shard
from hocket.strategy import Strategy
from hocket.sync import Bulk, DiLoCo, Local, PostLocal
from hocket.topology import AllReduce, Gossip, Hierarchical
from hocket.train.free_job import FreeJob
from hocket.train.job import Job
from hocket.train.simulate import Run, simulate
from hocket.version import __version__

__all__ = [
    "DGC",
    "QSGD",
    "AllReduce",
    "Bulk",
    "Cast",
    "Chain",
    "DiLoCo",
    "FreeJob",
    "Gossip",
    "Hierarchical",
    "HocketError",
    "Job",
    "Local",
    "LowRank",
    "Natural",
    "NoCompression",
    "NonFiniteGradient",
    "PostLocal",
    "RandomK",
    "Run",
    "Sandblaster",
    "SandblasterRun",
    "Shard",
    "Sign",
    "Spec",
    "Strategy",
    "Ternary",
    "Threshold",
    "TopK",
    "WorkerLost",
    "__version__",
    "init",
    "leave",
    "parallelize",
    "shard",
    "simulate",
]
