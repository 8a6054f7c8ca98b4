"""The links of a described cluster, as those who send one by one see them.

Every node (a worker, a shard, a coordinator) has a link. What it sends leaves one message after another, and so does what reaches
it: a server's link is shared by all its workers, and a host's by all of its. A message takes ``o + α + bytes/B`` (the cost of a
message, the latency, its bytes at the link's rate), the bytes on both ends at once; on a link that is not full duplex the share
``h`` of it keeps the other direction busy. A shard updates its weights with one push after another.
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
        self.working = [0.0] * ends

    def send(self, now: float, source: int, target: int, size: int, work_s: float = 0.0) -> float:
        """When ``size`` bytes that ``source`` sends now have reached ``target``, and it has worked on them for ``work_s``."""
        spec = self.spec
        moving = size / (spec.bandwidth * spec.links)
        begun = max(now, self.out[source]) + spec.message_s
        self.out[source] = begun + moving
        reached = max(begun + spec.latency_s, self.into[target])
        self.into[target] = reached + moving
        if spec.half_duplex:
            self.into[source] = max(self.into[source], begun) + spec.half_duplex * moving
            self.out[target] = max(self.out[target], reached) + spec.half_duplex * moving
        self.sent[source] += size
        if not work_s:
            return reached + moving
        self.working[target] = max(self.working[target], reached + moving) + work_s
        return self.working[target]

    def state_dict(self) -> dict[str, list[float] | list[int]]:
        return {"out": list(self.out), "into": list(self.into), "sent": list(self.sent), "working": list(self.working)}

    def load_state_dict(self, state: dict[str, list[float] | list[int]]) -> None:
        self.out, self.into, self.working = ([float(t) for t in state[name]] for name in ("out", "into", "working"))
        self.sent = [int(n) for n in state["sent"]]


class LinkNetwork:
    """The links as a network of a :class:`~hocket.drivers.simulation.Simulation`; ``ends`` says on which link each node is.

    Nodes on the same link are on one machine: what they send each other takes no time. ``free``: nothing does (while workers join).
    ``scale``: messages are thought to have so many times as many bytes as they have.
    """

    def __init__(self, links: LinkModel, ends: Mapping[Key, int]) -> None:
        self.links, self.ends, self.free, self.scale = links, ends, False, 1.0

    def arrivals(self, now: float, source: Key, target: Key, message: Envelope) -> list[float]:
        if self.free or self.ends[source] == self.ends[target]:
            return [now]
        payload = round(message.tensor_bytes * self.scale)
        work_s = self.links.spec.update_s * payload / 4 if target[0] == "shard" else 0.0  # of float32 values
        return [self.links.send(now, self.ends[source], self.ends[target], framed(payload), work_s)]
