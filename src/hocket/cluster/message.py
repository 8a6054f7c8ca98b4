"""Messages: encoded rows as workers send them, and their bytes.

A message holds one row per sender: ``parts[k]`` is a tensor ``[rows, capacity]``. Where the size depends on the data, ``lengths``
``[rows, parts]`` says how many values of each part are real; the others are padding that is never sent. Padded tensors plus
lengths instead of one Python object per pair of workers: with 210 workers the difference is a factor of twenty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FRAME_BYTES = 350
"""What TCP, IP and Gloo add to one message, acknowledgements included, as counted on network interfaces by benchmarks/steps.py."""
HEADER_SHARE = 0.033
"""Packet headers per payload byte: 0.5 % where network cards take large segments, 6.5 % where every packet is counted."""
LENGTH_BYTES = 4
"""Each part of a message of variable size is preceded by its length."""
PIECE_BYTES = 1 << 19
"""Messages larger than this go one after another, in pieces of this size (docs/decisions/11)."""


@dataclass
class Message:
    """Rows of coded values; see the module's docstring."""

    parts: tuple[Tensor, ...]
    lengths: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.parts[0].shape[0]

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a row whose size does not vary."""
        return sum(p.shape[1] * p.element_size() for p in self.parts)

    def payload_bytes(self) -> Tensor:
        """Bytes of each row on the wire, frame excluded: int64 ``[rows]``."""
        if self.lengths is None:
            return torch.full((self.rows,), self.fixed_bytes, dtype=torch.int64)
        if self.lengths.is_meta:  # there are sizes alone, and no padding
            return torch.full((self.rows,), self.fixed_bytes + LENGTH_BYTES * len(self.parts), dtype=torch.int64)
        sizes = there(torch.tensor([p.element_size() for p in self.parts]), self.lengths)
        return (self.lengths * sizes).sum(1) + LENGTH_BYTES * len(self.parts)

    def select(self, index: Tensor) -> Message:
        """The rows named by ``index``, in that order."""
        on_device = there(index, self.parts[0])  # lengths may be on another: those of messages by way of others are on the CPU
        parts = tuple(p.index_select(0, on_device) for p in self.parts)
        return Message(parts, None if self.lengths is None else self.lengths.index_select(0, there(index, self.lengths)))

    def part(self, first: int, end: int) -> Message:
        """The rows from ``first`` to before ``end`` (no copies)."""
        lengths = None if self.lengths is None else self.lengths[first:end]
        return Message(tuple(p[first:end] for p in self.parts), lengths)

    def pack(self, row: int) -> Tensor:
        """One row as the bytes that travel (no copy where a single part of fixed size allows it)."""
        if self.lengths is None:
            pieces = [p[row].contiguous().view(torch.uint8) for p in self.parts]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        lengths = self.lengths[row].tolist()
        head = torch.tensor(lengths, dtype=torch.int32).view(torch.uint8).to(self.parts[0].device)
        return torch.cat([head, *(p[row, :k].contiguous().view(torch.uint8) for p, k in zip(self.parts, lengths, strict=True))])

    def packed_bytes(self, packed: Tensor) -> int:
        """The bytes of the row of varying size with which ``packed`` begins."""
        head = LENGTH_BYTES * len(self.parts)
        lengths = packed[:head].clone().view(torch.int32).tolist()
        return head + sum(n * p.element_size() for n, p in zip(lengths, self.parts, strict=True))

    def unpack(self, blobs: Tensor) -> Message:
        """Packed rows ``[rows, bytes]`` (as peers sent them) back into a message like this one."""
        if self.lengths is None:
            return Message(_cut(blobs, [(p.dtype, p.shape[1]) for p in self.parts]))
        head = LENGTH_BYTES * len(self.parts)
        lengths = blobs[:, :head].flatten().clone().view(torch.int32).view(-1, len(self.parts)).to(torch.int64)
        parts = tuple(
            torch.zeros(blobs.shape[0], int(lengths[:, k].max()) if blobs.shape[0] else 0, dtype=p.dtype, device=p.device)
            for k, p in enumerate(self.parts)
        )
        for row, counts in enumerate(lengths.tolist()):
            start = head
            for part, count in zip(parts, counts, strict=True):
                end = start + count * part.element_size()
                part[row, :count] = blobs[row, start:end].clone().view(part.dtype).to(part.device)
                start = end
        return Message(parts, lengths.to(self.lengths.device))


def _cut(blobs: Tensor, shapes: list[tuple[torch.dtype, int]]) -> tuple[Tensor, ...]:
    if len(shapes) == 1:
        return (blobs.view(shapes[0][0]),)
    parts, start = [], 0
    for dtype, count in shapes:
        end = start + count * dtype.itemsize
        # A new flat tensor: a view as another dtype needs aligned storage, and an empty part has none.
        parts.append(blobs[:, start:end].flatten().clone().view(dtype).view(blobs.shape[0], count))
        start = end
    return tuple(parts)


def there(small: Tensor, other: Tensor) -> Tensor:
    """A small table on the device of ``other``; unlike a plain ``to``, it does not wait for the work queued on the GPU."""
    return small.to(other.device, non_blocking=True)


def framed(payload_bytes: int) -> int:
    """A message's bytes on the wire: payload, packet headers, and one frame.

    >>> framed(1000)
    1383
    """
    return payload_bytes + int(payload_bytes * HEADER_SHARE) + FRAME_BYTES


def on_wire(payloads: Tensor, announced: bool) -> Tensor:
    """The same of many messages; one of varying size is announced by a small one."""
    frame = 2 * FRAME_BYTES + LENGTH_BYTES if announced else FRAME_BYTES
    return payloads + (payloads * HEADER_SHARE).to(torch.int64) + frame


@lru_cache(maxsize=1024)
def fixed_on_wire(payload: int) -> int:
    """The same of one message, as a number."""
    return int(on_wire(torch.tensor(payload), False))


def ring_bytes(payload_bytes: int, workers: int) -> int:
    """What one worker sends in a ring all-reduce of ``payload_bytes``: ``2(N-1)/N · M``, headers, and ``2(N-1)`` frames.

    >>> ring_bytes(4000, 4) == 6 * (FRAME_BYTES + 1033)
    True
    """
    return 0 if workers == 1 else 2 * (workers - 1) * (FRAME_BYTES + int(payload_bytes / workers * (1 + HEADER_SHARE)))


def summed_bytes(payload_bytes: int, workers: int, servers: int) -> tuple[int, int]:
    """What one worker and one of ``servers`` summation servers send in a mean of ``payload_bytes`` (BytePS, Jiang 2020).

    With ``d = N² + nN − 2n`` a server sums ``2(N−1)M/d`` and a worker ``(N−n)M/d``, so that all links carry the same.

    >>> [round(b / ring_bytes(10**6, 4), 2) for b in summed_bytes(10**6, 4, 2)]
    [0.8, 0.8]
    >>> summed_bytes(10**6, 4, 0)[0] == ring_bytes(10**6, 4)
    True
    """
    if workers == 1:
        return 0, 0
    d = workers**2 + servers * workers - 2 * servers
    load = 2 * workers * (workers - 1) * payload_bytes / d
    frames = 2 * (workers - 1)
    return frames * (FRAME_BYTES + int(load / frames * (1 + HEADER_SHARE))), workers * FRAME_BYTES + int(load * (1 + HEADER_SHARE))


def ordered_mean(rows: Tensor) -> Tensor:
    """The mean over dimension 0, summed in worker order on the CPU, so that it does not depend on which process hosts a worker."""
    if rows.device.type != "cpu":
        return rows.mean(0)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(rows.shape[0])
