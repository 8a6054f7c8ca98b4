"""Whom workers talk to: one file per method."""

from hocket.topology.allreduce import AllReduce
from hocket.topology.base import Channel, Topology
from hocket.topology.gossip import Gossip
from hocket.topology.hierarchical import Hierarchical
from hocket.topology.server import Server

METHODS: dict[str, type[Topology]] = {t.name: t for t in (AllReduce, Gossip, Hierarchical, Server)}

__all__ = ["METHODS", "AllReduce", "Channel", "Gossip", "Hierarchical", "Server", "Topology"]
