"""The links of a described cluster, as those who send one by one see them.

Every node (a worker, a shard, a coordinator) has a full-duplex link. What it sends leaves one message after another, and so does
what reaches it: a server's link is shared by all its workers. A message takes the latency and then its bytes at the link's rate, on
both ends at once.
"""

from collections.abc import Mapping

from hocket.cluster.message import framed
from hocket.cluster.spec import ClusterSpec
from hocket.drivers.simulation import Key
from hocket.transport.frame import Envelope


class LinkModel:
    """``ends`` links of the cluster ``spec``; ``sent[end]`` counts bytes.

    >>> links = LinkModel(ClusterSpec(bandwidth=100.0, latency_s=1.0), 3)
    >>> links.send(0.0, 0, 2, 200), links.send(0.0, 1, 2, 200)  # the second waits at the receiver's link
    (3.0, 5.0)
    """

    def __init__(self, spec: ClusterSpec, ends: int) -> None:
        self.spec = spec
        self.out, self.into, self.sent = [0.0] * ends, [0.0] * ends, [0] * ends

    def send(self, now: float, source: int, target: int, size: int) -> float:
        """When ``size`` bytes that ``source`` sends now have reached ``target``."""
        moving = size / self.spec.bandwidth
        begun = max(now, self.out[source])
        self.out[source] = begun + moving
        reached = max(begun + self.spec.latency_s, self.into[target])
        self.into[target] = reached + moving
        self.sent[source] += size
        return reached + moving

    def state_dict(self) -> dict[str, list[float] | list[int]]:
        return {"out": list(self.out), "into": list(self.into), "sent": list(self.sent)}

    def load_state_dict(self, state: dict[str, list[float] | list[int]]) -> None:
        self.out, self.into = [float(t) for t in state["out"]], [float(t) for t in state["into"]]
        self.sent = [int(n) for n in state["sent"]]


class LinkNetwork:
    """The links as a network of a :class:`~hocket.drivers.simulation.Simulation`; ``ends`` says on which link each node is.

    Nodes on the same link are on one machine: what they send each other takes no time. ``free``: nothing does (while workers join).
    """

    def __init__(self, links: LinkModel, ends: Mapping[Key, int]) -> None:
        self.links, self.ends, self.free = links, ends, False

    def arrivals(self, now: float, source: Key, target: Key, message: Envelope) -> list[float]:
        if self.free or self.ends[source] == self.ends[target]:
            return [now]
        return [self.links.send(now, self.ends[source], self.ends[target], framed(message.tensor_bytes))]
