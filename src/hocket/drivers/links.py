"""The links of a described cluster: when a message that one node sends has reached another.

Every node (a worker, a shard, a coordinator) has a full-duplex link. What it sends leaves one message after another, and so does
what reaches it: a server's link is shared by all its workers. A message takes the latency and then its bytes at the link's rate, on
both ends at once.
"""

from __future__ import annotations

from hocket.cluster.message import Message, framed
from hocket.cluster.spec import Spec


class LinkModel:
    """``nodes`` links of the cluster ``spec``; ``sent[node]`` counts bytes.

    >>> links = LinkModel(Spec(bandwidth=100.0, latency_s=1.0), 3)
    >>> links.send(0.0, 0, 2, 200), links.send(0.0, 1, 2, 200)  # the second waits at the receiver's link
    (3.0, 5.0)
    """

    def __init__(self, spec: Spec, nodes: int) -> None:
        self.spec = spec
        self.out, self.into, self.sent = [0.0] * nodes, [0.0] * nodes, [0] * nodes

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


def size_of(messages: list[Message]) -> int:
    """Bytes on the wire of several coded rows that travel as one message."""
    return framed(sum(int(m.payload_bytes().sum()) for m in messages))
