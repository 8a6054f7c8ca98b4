"""Where workers without servers meet before they train: they tell each other the addresses of their doors.

The processes of a ``torchrun`` job do so through torch.distributed's store. All on one machine listen on loopback; across machines
they listen on the address that reaches the first one, and want keys.
"""

from __future__ import annotations

from pathlib import Path

from hocket.cluster.base import Cluster
from hocket.messages import Keys
from hocket.train.free_start import common_ground
from hocket.train.pairs_job import PeerConfig


def peer_config(cluster: Cluster, keys: Path | None, liveness_timeout_s: float) -> PeerConfig:
    """This process's place among those of ``cluster``; all of them must call it."""
    assert cluster.has_process_group
    worker, world = cluster.workers.start, cluster.size
    store, job, bind = common_ground(cluster)

    def meet(address: str) -> list[str | None]:
        store.set(f"door/{worker}", address)
        addresses: list[str | None] = [store.get(f"door/{other}").decode() for other in range(world)]
        cluster.stop_heartbeat()  # from here on nobody waits for others, nor ends with them
        return addresses

    return PeerConfig(worker, world, job, meet, bind, None if keys is None else Keys.read(keys), liveness_timeout_s)
