"""Data sets by name, and the partition of their samples among workers."""

from hocket.data.base import CropFlip, DataSet, Normalise, identity
from hocket.data.distribute import distribute_loader
from hocket.data.partition import Partition, Round, stacked
from hocket.data.registry import DATA_SETS, load
from hocket.data.shards.stream import ShardStream, stream
from hocket.data.tensors import as_tensors, from_parts

__all__ = ["DATA_SETS", "CropFlip", "DataSet", "Normalise", "Partition", "Round", "ShardStream"]
__all__ += ["as_tensors", "distribute_loader", "from_parts", "identity", "load", "stacked", "stream"]
