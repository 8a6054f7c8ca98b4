"""The links of a described cluster, for messages that are sent one at a time.

Every node (a worker, a shard, a coordinator) has a link. What it sends leaves one message after another, and so does what reaches
it: a server's link is shared by all its workers, and a host's link by the workers on that host. A message takes ``o + α +
bytes/B`` (the cost of a message, the latency, its bytes at the link's rate), the bytes on both ends at once; on a link that is not
full duplex the share ``h`` of it keeps the other direction busy. A shard handles one message after another, also where the worker
is on the same machine: a time for the message, and one for each byte that comes in or goes out; where the spec has neither, a
worker's update.
"""

from collections.abc import Mapping
from typing import Any

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
        self.handling: list[list[tuple[float, float]]] = [[] for _ in range(ends)]
        """When the shards on each link handle what has been sent to them."""
        self.worked = [0.0] * ends
        """Seconds that the shards on each link have worked."""

    def send(self, now: float, source: int, target: int, size: int) -> float:
        """The time at which ``size`` bytes that ``source`` sends now have reached ``target``."""
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
        return reached + moving

    def work(self, now: float, arrives: float, end: int, seconds: float) -> float:
        """The time at which a shard at ``end`` has handled, for ``seconds``, a message that is sent ``now`` and ``arrives`` then:
        it uses the first long enough gap, since messages sent earlier may arrive later."""
        if not seconds:
            return arrives
        self.worked[end] += seconds
        spans, begun = [span for span in self.handling[end] if span[1] > now], arrives
        for first, last in spans:
            if begun + seconds <= first:
                break
            begun = max(begun, last)
        self.handling[end] = sorted([*spans, (begun, begun + seconds)])
        return begun + seconds

    def state_dict(self) -> dict[str, Any]:
        handling = [[list(span) for span in spans] for spans in self.handling]
        return {"out": list(self.out), "into": list(self.into), "sent": list(self.sent), "handling": handling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.out, self.into = ([float(t) for t in state[name]] for name in ("out", "into"))
        self.sent = [int(n) for n in state["sent"]]
        if "handling" in state:
            self.handling = [[(float(a), float(b)) for a, b in spans] for spans in state["handling"]]


class LinkNetwork:
    """The links as a network of a :class:`~hocket.drivers.simulation.Simulation`; ``ends`` says on which link each node is.

    Nodes on the same link are on one machine: messages between them take no time on links. ``free``: nothing takes time (while
    workers join). ``scale``: a factor on the bytes of every message.
    """

    def __init__(self, links: LinkModel, ends: Mapping[Key, int]) -> None:
        self.links, self.ends, self.free, self.scale = links, ends, False, 1.0

    def arrivals(self, now: float, source: Key, target: Key, message: Envelope) -> list[float]:
        if self.free:
            return [now]
        spec, links = self.links.spec, self.links
        payload = round(message.tensor_bytes * self.scale)
        arrives = now
        if source[0] == "shard":
            links.work(now, now, self.ends[source], spec.server_byte_s * payload)
            arrives += spec.server_byte_s * payload  # the answer leaves at once; later messages wait
        if self.ends[source] != self.ends[target]:
            arrives = links.send(arrives, self.ends[source], self.ends[target], framed(payload))
        if target[0] == "shard":
            known = spec.server_message_s or spec.server_byte_s
            each = spec.server_byte_s if known else spec.update_s / 4  # of float32 values
            arrives = links.work(now, arrives, self.ends[target], spec.server_message_s + each * payload)
        return [arrives]
