"""The runtime of a worker of ``hocket train`` without servers: it finds the others through the coordinator."""

from __future__ import annotations

from pathlib import Path

from hocket.cluster.layout import Layout
from hocket.drivers.coordinator_link import CoordinatorLink
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.wire import link_bytes
from hocket.strategy import Strategy
from hocket.transport import Keys


def connect_coordinated(
    strategy: Strategy, layout: Layout, config: PeerConfig, coordinator: str, job: bytes, keys: Keys | None, record: Path | None
) -> GossipRuntime:
    """The worker ``config``; its coordinator listens at ``coordinator``."""
    most = link_bytes(strategy, layout)
    link = CoordinatorLink(coordinator, job, config.worker, keys, most, config.incarnation)
    return GossipRuntime(config, job, most, coordinator=link, keys=keys, record=record)
