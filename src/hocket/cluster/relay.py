"""Small messages by way of others: which messages the members of a group send where everyone has something for everyone.

Sent directly, an all-to-all or an all-gather of ``n`` members takes ``n − 1`` messages of each member, all at once: one *trip*. By
way of others (store and forward; Bruck 1997, whose radix 2 MPI libraries use) it takes ``R`` trips and about ``R·(n^(1/R) − 1)``
messages: each member sends what it holds for, or has from, several others in one message. An all-gather sends hardly more bytes
that way, an all-to-all every block up to ``R`` times. What arrives is the same, bit for bit; only the number of messages and of
bytes differ.

The choice is the cheapest of ``R = 1, 2, …, ⌈log2 n⌉``, where a trip and a message cost as much as so many bytes take on a link:

    trips·TRIP_BYTES + messages·(MESSAGE_BYTES + payload)

It depends on the size of a block and on ``n`` alone, so that all members choose the same without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hocket.cluster.message import Message

if TYPE_CHECKING:
    from hocket.cluster.base import Subgroups

TRIP_BYTES = 2500
"""What a trip costs beside its bytes: 0.2 ms at 100 Mbit/s, as in the preset ``100mbit``: compression is for slow links."""
MESSAGE_BYTES = 600
"""What a message costs beside its payload: its frame of 350 bytes, and 20 µs of a processor at 100 Mbit/s."""


Send = Callable[[Message, Tensor], Message]
"""Carries rows ``(slot, worker here)`` to the workers that hear them by a table of sources ``[slots, workers]``; what comes, in
the same order."""


class Trip(NamedTuple):
    """Messages that each member sends at once: one to the member ``shifts[s]`` places further on, for each slot ``s``."""

    shifts: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    """What each of them carries. All-to-all: blocks by how many places further on they belong. All-gather: by how many places
    further on they come from."""

    @property
    def most(self) -> int:
        """Blocks of the largest message."""
        return max(map(len, self.blocks))


@lru_cache
def gather_trips(members: int, radix: int) -> tuple[Trip, ...]:
    """An all-gather: who holds ``h`` blocks gets as many from each of ``radix − 1`` others, until all are there.

    >>> gather_trips(4, 2)
    (Trip(shifts=(-1,), blocks=((0,),)), Trip(shifts=(-2,), blocks=((0, 1),)))
    """
    trips, held = [], 1
    while held < members:
        starts = range(held, min(radix * held, members), held)
        trips.append(Trip(tuple(-s for s in starts), tuple(tuple(range(min(held, members - s))) for s in starts)))
        held *= radix
    return tuple(trips)


@lru_cache
def scatter_trips(members: int, radix: int) -> tuple[Trip, ...]:
    """An all-to-all: a block that belongs ``o`` places further on goes there by the digits of ``o``, the lowest first.

    >>> scatter_trips(4, 2)
    (Trip(shifts=(1,), blocks=((1, 3),)), Trip(shifts=(2,), blocks=((2, 3),)))
    """
    trips, weight = [], 1
    while weight < members:
        shifts = range(weight, min(radix * weight, members), weight)
        blocks = tuple(tuple(o for o in range(members) if o // weight % radix == s // weight) for s in shifts)
        trips.append(Trip(tuple(shifts), blocks))
        weight *= radix
    return tuple(trips)


@lru_cache(maxsize=4096)
def radix_for(members: int, block_bytes: int, gather: bool, varying: bool = False) -> int:
    """The radix of the cheapest way; ``members`` means directly. ``varying``: messages are announced by others.

    >>> [radix_for(n, 8, gather=True) for n in (6, 32, 256, 1024)], radix_for(32, 10_000, gather=False)
    ([6, 6, 4, 4], 32)
    """
    found: dict[int, int] = {}
    for trips in range(1, max(2, members.bit_length() + 1)):
        radix = max(2, round(members ** (1 / trips)))
        radix += int(radix**trips < members)
        found.setdefault(min(radix, members), trips)
    return min(found, key=lambda radix: _cost(members, radix, block_bytes, gather, varying))


def _cost(members: int, radix: int, block_bytes: int, gather: bool, varying: bool) -> int:
    """What one member's messages cost, in bytes."""
    trips = (gather_trips if gather else scatter_trips)(members, radix)
    overhead = sum(TRIP_BYTES + len(trip.shifts) * MESSAGE_BYTES for trip in trips) * (1 + varying)
    return overhead + block_bytes * sum(len(trip.shifts) * trip.most for trip in trips)


def sources(trip: Trip, subgroups: Subgroups) -> Tensor:
    """From whom each worker receives in each slot of a trip: ``[slots, workers]``."""
    return torch.stack([subgroups.shifted(-shift) for shift in trip.shifts])


def payloads(trips: tuple[Trip, ...], sizes: Tensor, subgroups: Subgroups, varying: bool) -> list[Tensor]:
    """The payload of each worker's messages in each trip, ``[slots, workers]``, given the bytes of each block.

    ``sizes``: ``[workers]`` of an all-gather, or ``[workers, members]`` of an all-to-all, to each place of the group.
    """
    workers, first = len(subgroups.group_of), sizes.flatten()[:1]
    if bool((sizes == first).all()):
        counts = [[len(blocks) if varying else trip.most for blocks in trip.blocks] for trip in trips]
        return [first * torch.tensor(each).unsqueeze(1).expand(-1, workers) for each in counts]

    def find() -> list[list[Tensor]]:
        each = partial(_block, matrix=sizes.dim() > 1, subgroups=subgroups)
        return [[torch.stack([each(trip.shifts[0], block) for block in blocks]) for blocks in trip.blocks] for trip in trips]

    tables: list[list[Tensor]] = subgroups.table(("blocks", trips, sizes.dim()), find)
    flat = sizes.flatten()
    return [torch.stack([flat[index].sum(0) for index in slots]) for slots in tables]


def _block(weight: int, block: int, matrix: bool, subgroups: Subgroups) -> Tensor:
    """Where the bytes of a block that each worker sends on stand among all sizes."""
    if not matrix:
        return subgroups.shifted(block)
    origin = subgroups.shifted(-(block % weight))  # it has gone by its lower digits already
    return origin * subgroups.size + (subgroups.place_of[origin] + block) % subgroups.size


class Relayed:
    """The blocks of the workers of one process on their way, as the bytes that travel."""

    def __init__(self, message: Message, subgroups: Subgroups, workers: range, device: torch.device, send: Send) -> None:
        """``message``: rows of blocks, those of each worker one after another; ``send`` carries one trip's messages."""
        self._like, self._subgroups, self._workers, self._send = message, subgroups, workers, send
        self._device, self._varying = device, message.lengths is not None
        packed = [message.pack(row).to(device) for row in range(message.rows)]
        each = message.rows // len(workers)
        self._held = [packed[each * w : each * (w + 1)] for w in range(len(workers))]

    def all_gather(self, radix: int) -> Message:
        """Rows ``(g, k)`` for the groups that have members here."""
        groups = self._subgroups
        for trip in gather_trips(groups.size, radix):
            for held, got in zip(self._held, self._carried(trip), strict=True):
                held += [block for blocks in got for block in blocks]
        first = {int(groups.group_of[i]): w for w, i in reversed(list(enumerate(self._workers)))}
        return self._unpacked([self._from(first[g], k, 1) for g in sorted(first) for k in range(groups.size)])

    def all_to_all(self, radix: int) -> Message:
        """Rows ``(i, k)``: the block to worker ``i`` from its group's k-th member."""
        groups = self._subgroups
        for w, i in enumerate(self._workers):  # by how many places further on they belong
            place = int(groups.place_of[i])
            self._held[w] = self._held[w][place:] + self._held[w][:place]
        for trip in scatter_trips(groups.size, radix):
            for held, got in zip(self._held, self._carried(trip), strict=True):
                for numbers, blocks in zip(trip.blocks, got, strict=True):
                    for number, block in zip(numbers, blocks, strict=True):
                        held[number] = block
        return self._unpacked([self._from(w, k, -1) for w in range(len(self._workers)) for k in range(groups.size)])

    def _from(self, worker: int, member: int, sign: int) -> Tensor:
        """The block that a worker here has of its group's member number ``member``."""
        groups = self._subgroups
        return self._held[worker][sign * (member - int(groups.place_of[self._workers[worker]])) % groups.size]

    def _carried(self, trip: Trip) -> list[list[list[Tensor]]]:
        """Send the blocks of a trip: what each worker here receives in each slot."""
        bundles = [torch.cat([held[b] for b in blocks]) for blocks in trip.blocks for held in self._held]
        lengths = torch.tensor([[len(bundle)] for bundle in bundles])
        rows = torch.zeros(len(bundles), int(lengths.max()), dtype=torch.uint8, device=self._device)
        for row, bundle in zip(rows, bundles, strict=True):
            row[: len(bundle)] = bundle
        got = self._send(Message((rows,), lengths if self._varying else None), sources(trip, self._subgroups)).parts[0]
        here = len(self._workers)
        return [[self._cut(got[s * here + w], len(trip.blocks[s])) for s in range(len(trip.blocks))] for w in range(here)]

    def _cut(self, bundle: Tensor, count: int) -> list[Tensor]:
        """The blocks of a bundle."""
        blocks, start = [], 0
        for _ in range(count):
            size = self._like.fixed_bytes if not self._varying else self._like.packed_bytes(bundle[start:])
            blocks.append(bundle[start : start + size])
            start += size
        return blocks

    def _unpacked(self, blocks: list[Tensor]) -> Message:
        rows = torch.zeros(len(blocks), max(map(len, blocks)), dtype=torch.uint8, device=self._device)
        for row, block in zip(rows, blocks, strict=True):
            row[: len(block)] = block
        return self._like.unpack(rows.to(self._like.parts[0].device))
