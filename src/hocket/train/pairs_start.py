"""Where workers without servers find each other before they train: they tell each other their addresses.

The processes of a ``torchrun`` job do so through torch.distributed's store. All on one machine listen on loopback; across machines
they listen on the address that reaches the first one, and want keys.
"""

from __future__ import annotations

from pathlib import Path

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.wire import link_bytes
from hocket.strategy import Strategy
from hocket.train.free_start import common_ground
from hocket.transport import Keys


def connect_peers(
    strategy: Strategy, layout: Layout, cluster: Cluster, keys: Path | None, liveness_timeout_s: float, seed: int
) -> GossipRuntime:
    """This process's worker among those of ``cluster``; all of them must call it."""
    assert cluster.has_process_group
    worker, world = cluster.workers.start, cluster.size
    store, job, bind = common_ground(cluster)

    def exchange_addresses(address: str) -> list[str | None]:
        store.set(f"peer/{worker}", address)
        addresses: list[str | None] = [store.get(f"peer/{other}").decode() for other in range(world)]
        cluster.stop_heartbeat()  # from here on no worker waits for the others, nor ends with them
        return addresses

    config = PeerConfig(worker, world, strategy.topology.partner_rule, seed, liveness_timeout_s)
    found = None if keys is None else Keys.read(keys)
    return GossipRuntime(config, job, link_bytes(strategy, layout), exchange_addresses, bind=bind, keys=found)
