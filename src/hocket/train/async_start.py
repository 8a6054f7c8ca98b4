"""How workers of ``parallelize`` that send messages find their shards, or each other.

The id of the job and the addresses travel through torch.distributed's store. All on one machine listen on loopback; across machines
(or containers with networks of their own) they listen on the address that reaches the first one, and want keys.

Shards are children of the workers' processes: rank ``r`` of ``P`` starts shards ``r``, ``r + P``, … A shard ends when all workers
have left it, or with the process that started it.
"""

from __future__ import annotations

import math
import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hocket.cluster.base import Cluster
from hocket.cluster.layout import Layout
from hocket.drivers.gossip_runtime import GossipRuntime
from hocket.drivers.machines import own_network
from hocket.drivers.processes import SHARD, Role, Supervisor
from hocket.drivers.start import address_of, own_address, start_shard
from hocket.errors import HocketError
from hocket.programs.gossip.links import PeerConfig
from hocket.programs.server.wire import link_bytes
from hocket.strategy import Strategy
from hocket.transport import Keys

_started = 0


@dataclass
class Servers:
    """Where the shards of a job listen, and those of them that this process has started."""

    addresses: list[str]
    job: bytes
    children: Supervisor | None = None

    def see_off(self) -> None:
        """End the shards of this process: wait until all other workers have left them too."""
        if self.children is None:
            return
        try:
            self.children.shutdown(math.inf)
        except KeyboardInterrupt:
            self.children.shutdown()


def common_ground(cluster: Cluster) -> tuple[Any, bytes, str]:
    """A store for the processes of one more job (None where there is one process), the job's id, and where to listen."""
    global _started
    _started += 1
    if not cluster.has_process_group:
        return None, secrets.token_bytes(16), "tcp://127.0.0.1:0"
    store: Any = dist.PrefixStore(f"hocket/servers/{_started}/{cluster.scope}", dist.distributed_c10d._get_default_store())
    if cluster.rank == 0:
        store.set("job", secrets.token_hex(16))
    own = own_network()
    store.set(f"host/{cluster.rank}", own)
    here = all(store.get(f"host/{r}").decode() == own for r in range(cluster.processes))
    return store, bytes.fromhex(store.get("job").decode()), "tcp://127.0.0.1:0" if here else f"tcp://{own_address()}:0"


def start_servers(strategy: Strategy, layout: Layout, cluster: Cluster, keys: Path | None, liveness_timeout_s: float) -> Servers:
    """Start this process's share of the shards and exchange addresses; all processes of the cluster must call it."""
    shards = strategy.topology.num_shards(cluster.size)
    rank, processes = cluster.rank, cluster.processes
    store, job, bind = common_ground(cluster)
    most = link_bytes(strategy, layout)
    own = range(rank, shards, processes)

    def start(number: int, incarnation: int) -> subprocess.Popen[str]:
        return start_shard(own[number], job, bind, keys, liveness_timeout_s, most_bytes=most)

    children = Supervisor([Role(SHARD, len(own), start, ends_with_input=True)])
    children.start(SHARD)
    started: dict[int, str] = {}
    for number, place in enumerate(own):
        try:
            started[place] = address_of(children.process(SHARD, number))
        except HocketError as error:
            started[place] = f"!{error}"
        if store is not None:
            store.set(f"shard/{place}", started[place])
    addresses = [started[p] if p in started else store.get(f"shard/{p}").decode() for p in range(shards)]
    for address in addresses:
        if address.startswith("!"):
            raise HocketError(address[1:])
    return Servers(addresses, job, children)


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
        cluster.stop_heartbeat()  # from here on workers do not wait for each other, nor end together
        return addresses

    config = PeerConfig(worker, world, strategy.topology.partner_rule, seed, liveness_timeout_s)
    found = None if keys is None else Keys.read(keys)
    return GossipRuntime(config, job, link_bytes(strategy, layout), exchange_addresses, bind=bind, keys=found)
