"""What is sent: one file per method."""

from hocket.compression.base import Codec, Compressor, Context, Precision, Selection
from hocket.compression.bins import Bins
from hocket.compression.cast import Cast
from hocket.compression.chain import Chain, chained
from hocket.compression.demo import DeMo
from hocket.compression.dgc import DGC
from hocket.compression.lowrank import LowRank
from hocket.compression.natural import Natural
from hocket.compression.none import NoCompression
from hocket.compression.qsgd import QSGD
from hocket.compression.randomk import RandomK
from hocket.compression.sign import Sign
from hocket.compression.ternary import Ternary
from hocket.compression.threshold import Threshold
from hocket.compression.topk import TopK

METHODS: dict[str, type[Compressor]] = {
    c.name: c for c in (NoCompression, Cast, QSGD, Bins, Ternary, Sign, Natural, Threshold, TopK, RandomK, LowRank, DGC, DeMo)
}

__all__ = [
    "DGC",
    "METHODS",
    "QSGD",
    "Bins",
    "Cast",
    "Chain",
    "chained",
    "Codec",
    "Compressor",
    "Context",
    "DeMo",
    "LowRank",
    "Natural",
    "NoCompression",
    "Precision",
    "RandomK",
    "Selection",
    "Sign",
    "Ternary",
    "Threshold",
    "TopK",
]
