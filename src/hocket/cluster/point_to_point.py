"""Messages between pairs of processes over torch.distributed: raw bytes, sent and received in one batch.

The size of a message may depend on the data; its sender then announces the size in a small message beforehand.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hocket.cluster.message import PIECE_BYTES, Message

if TYPE_CHECKING:
    from hocket.cluster.base import Subgroups

Group = dist.ProcessGroup | None
_MAX_TAG = 2**30


class Outgoing(NamedTuple):
    """A row of a message that goes from one worker to another."""

    row: int
    source: int
    target: int
    slot: int


class Incoming(NamedTuple):
    """A row that a worker receives from another; ``row``: its row of the own message, if the source is hosted here."""

    source: int
    target: int
    slot: int
    row: int

    @property
    def route(self) -> tuple[int, int, int]:
        """Source, target and slot: what tells the messages of one exchange apart."""
        return self.source, self.target, self.slot


class PointToPoint:
    """The messages of process ``rank``; ``hosting[r]`` are the workers of process ``r``, ``ranks[r]`` is its global rank."""

    def __init__(self, rank: int, ranks: list[int], hosting: list[range], backend: str, device: torch.device) -> None:
        self.rank, self._ranks, self._backend = rank, ranks, backend
        self.owner = [r for r, hosted in enumerate(hosting) for _ in hosted]
        """The process of each worker."""
        self.device = device if "nccl" in backend else torch.device("cpu")
        """Where a tensor must be to be sent."""
        self.timeout = timedelta(0)
        """How long a send or a receive may take; 0: as long as the group was made for."""
        self._workers = hosting[rank]
        self._sequence = 0

    def exchange(self, group: Group, message: Message, sources: Tensor) -> Message:
        """Each worker hears one message from each of its ``sources`` ``[slots, workers]`` (−1: none, its own row instead).

        A worker has one row for all that hear it, or one for each slot, in slot-major order like the rows that are returned.
        """
        own, here, table = self._workers.start, len(self._workers), sources.tolist()
        stride = here if message.rows > here else 0
        incoming, outgoing = [], []
        for slot, heard in enumerate(table):
            first = slot * stride - own
            incoming += [Incoming(heard[j], j, slot, first + (heard[j] if heard[j] >= 0 else j)) for j in self._workers]
            outgoing += [Outgoing(first + i, i, j, slot) for j, i in enumerate(heard) if i in self._workers]
        return self.route(group, message, outgoing, incoming)

    def all_to_all(self, group: Group, message: Message, subgroups: Subgroups) -> Message:
        """Row ``(i, k)`` goes directly from worker ``i`` to its group's k-th member."""
        own, size = self._workers.start, subgroups.size
        outgoing, incoming = [], []
        for i in self._workers:
            mates = subgroups.members[subgroups.group_of[i]].tolist()
            place = int(subgroups.place_of[i])
            outgoing += [Outgoing((i - own) * size + k, i, j, 0) for k, j in enumerate(mates)]
            incoming += [Incoming(j, i, 0, (j - own) * size + place) for j in mates]
        return self.route(group, message, outgoing, incoming)

    def route(self, group: Group, message: Message, outgoing: list[Outgoing], incoming: list[Incoming]) -> Message:
        """Send rows of ``message`` to other workers; the rows received, in the order of ``incoming``."""
        remote = sorted((w for w in incoming if w.source >= 0 and w.source not in self._workers), key=lambda w: w.route)
        sizes = self._sizes(group, message, outgoing, incoming, remote)
        self._sequence += 1
        distances: dict[int, list[dist.P2POp]] = {}
        blobs = torch.empty(len(remote), max(sizes, default=0), dtype=torch.uint8, device=self.device)
        for k, (source, target, slot, _) in enumerate(remote):
            by = self.owner[source]
            operation = dist.P2POp(dist.irecv, blobs[k, : sizes[k]], self._ranks[by], group, self._tag(source, target, slot))
            distances.setdefault((self.rank - by) % len(self._ranks), []).append(operation)
        packed: dict[int, Tensor] = {}
        for row, source, target, slot in sorted(outgoing, key=lambda o: o[1:]):
            if target in self._workers:
                continue
            if row not in packed:
                packed[row] = message.pack(row).to(self.device)
            to = self.owner[target]
            operation = dist.P2POp(dist.isend, packed[row], self._ranks[to], group, self._tag(source, target, slot))
            distances.setdefault((to - self.rank) % len(self._ranks), []).append(operation)
        self._perform(distances, max([*sizes, *(p.numel() for p in packed.values())], default=0))
        return _in_order(message, blobs, remote, incoming)

    def _perform(self, distances: dict[int, list[dist.P2POp]], largest_bytes: int) -> None:
        """Receive and send: small messages all at once; large ones on Gloo distance by distance and in pieces.

        Several large messages to one receiver slow each other down. Receives come first: Gloo tells the peer of a receive on the
        connection that also carries the own message, and the peer sends nothing before it hears of it (docs/decisions/11).
        """
        if "gloo" in self._backend and largest_bytes > PIECE_BYTES:
            rounds = [sorted(_pieces(distances[d]), key=_sends) for d in sorted(distances)]
        else:
            rounds = [sorted((o for operations in distances.values() for o in operations), key=_sends)]
        for operations in rounds:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait(self.timeout)

    def _tag(self, source: int, target: int, slot: int) -> int:
        size = len(self.owner)
        return ((self._sequence * size + slot) * size * size + source * size + target) % _MAX_TAG

    def _sizes(
        self, group: Group, message: Message, outgoing: list[Outgoing], incoming: list[Incoming], remote: list[Incoming]
    ) -> list[int]:
        """The bytes of each remote row; where they vary, senders announce them in a small message."""
        if message.lengths is None:
            return [message.fixed_bytes] * len(remote)
        own = message.payload_bytes().to("cpu", torch.int32).unsqueeze(1)
        announced = self.route(group, Message((own,)), outgoing, incoming).parts[0].flatten().tolist()
        by_route = {w.route: size for w, size in zip(incoming, announced, strict=True)}
        return [by_route[w.route] for w in remote]


def _in_order(message: Message, blobs: Tensor, remote: list[Incoming], incoming: list[Incoming]) -> Message:
    """The received bytes and the rows of the own message as one message, in the order of ``incoming``."""
    if not remote:
        return message.select(torch.tensor([w.row for w in incoming], dtype=torch.int64))
    place = {w.route: k for k, w in enumerate(remote)}
    kept = [place[w.route] if w.route in place else len(remote) + w.row for w in incoming]
    received = message.unpack(blobs.to(message.parts[0].device))
    if not any(w.route not in place for w in incoming) and kept == list(range(len(remote))):
        return received
    return _stack(received, message).select(torch.tensor(kept, dtype=torch.int64))


def _sends(operation: dist.P2POp) -> bool:
    return operation.op is dist.isend


def _pieces(operations: list[dist.P2POp]) -> list[dist.P2POp]:
    """The same in pieces, one of each operation in turn; pieces with one tag arrive in the order in which they were sent."""
    cut = [
        [dist.P2POp(o.op, piece, o.peer, o.group, o.tag) for piece in o.tensor.split(PIECE_BYTES // o.tensor.element_size())]
        for o in operations
    ]
    return [piece for turn in zip_longest(*cut) for piece in turn if piece is not None]


def _stack(first: Message, second: Message) -> Message:
    """The rows of both messages, padded to the larger capacity."""
    parts = []
    for a, b in zip(first.parts, second.parts, strict=True):
        width = max(a.shape[1], b.shape[1])
        parts.append(torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in (a, b)]))
    lengths = None
    if first.lengths is not None and second.lengths is not None:
        lengths = torch.cat([first.lengths, second.lengths])
    return Message(tuple(parts), lengths)
