"""Whom workers talk to: one file per method."""

from hocket.topology.allreduce import AllReduce
from hocket.topology.base import Channel, Topology
from hocket.topology.gossip import Gossip
from hocket.topology.hierarchical import Hierarchical

METHODS: dict[str, type[Topology]] = {t.name: t for t in (AllReduce, Gossip, Hierarchical)}

__all__ = ["METHODS", "AllReduce", "Channel", "Gossip", "Hierarchical", "Topology"]
