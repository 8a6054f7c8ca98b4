"""Who the workers are: real processes or virtual rows, their messages and their ledger."""

from hocket.cluster.base import Cluster, Exchange, Subgroups
from hocket.cluster.layout import Bucket, Layout, layout_of
from hocket.cluster.ledger import Entry, Ledger
from hocket.cluster.message import Message
from hocket.cluster.virtual import VirtualCluster

__all__ = ["Bucket", "Cluster", "Entry", "Exchange", "Layout", "Ledger", "Message", "Subgroups", "VirtualCluster", "layout_of"]
