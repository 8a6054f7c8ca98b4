"""Messages on a link: a checked header, metadata in JSON, and the raw bytes of tensors. Never pickle.

A message is a list of frames: the header, the metadata, then the tensors, each in frames of ``FRAME_BYTES``, of which the last may
be shorter. The header is a fixed struct (magic, version, kind, sender, place, step, number, job, how many tensors, bytes of the
metadata), a table with dtype and length of each tensor, and a CRC-32 of all that and of the metadata. TCP and the cipher of the
keys protect the tensors' bytes; the header protects their sizes and dtypes.

``unpack`` trusts nothing: for any list of bytes, it returns an envelope whose every field is valid, or raises ``Refused``. Magic
and version come first and stay there in every later version, so that a peer with an old version gets a clear error.

Tensors are not copied where that can be avoided. The link reads a sent tensor later: *do not write to a tensor after sending it*.
Received tensors may be views of the link's buffer, which lives as long as they do: *copy before writing*.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hocket.errors import HocketError

Frame: TypeAlias = "bytes | memoryview | Any"
"""Any: a ``zmq.Frame``, a buffer too, though its type does not say so."""

MAGIC = b"HKT1"
VERSION = 2
JOB_BYTES = 16
NO_JOB = bytes(JOB_BYTES)
"""The job id in a refusal: a peer that named the wrong job does not learn the right one."""
MAX_METADATA_BYTES = 64 * 1024
FRAME_BYTES = 256 * 1024
"""Listeners accept no longer frame, so that a peer that has not shown its key can make them hold no more than this."""
MOST_TENSORS = 4096
MOST_DEPTH = 16
"""How deep lists and objects of metadata may be nested."""

_HEAD = struct.Struct("<4sBBiiqq16sHI")
_ROW = struct.Struct("<BQ")
_CHECK = struct.Struct("<I")
_LEAST = _HEAD.size + _CHECK.size
MOST_HEADER_BYTES = _LEAST + MOST_TENSORS * _ROW.size

# The index is the code on the wire: append, never reorder.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SIZES = [dtype.itemsize for dtype in DTYPES]
_NOT_NUMPYS = frozenset((torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2))


REASONS = ("magic", "version", "damaged", "job", "kind", "dtype", "size", "metadata")
"""Why a message is refused, one word each for counting; ``magic``: not a message of Hocket. Listeners count ``key`` too."""


class Kind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSAL = 3
    PUSH = 4
    FETCH = 5
    REPLY = 6
    WAIT = 7
    BEAT = 8
    GOODBYE = 9
    ORDER = 10
    ANSWER = 11


_KINDS = {int(kind): kind for kind in Kind}


class Refused(HocketError):
    """A message that was refused; ``reason`` is one of ``REASONS``, the text is a sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(eq=False, slots=True)  # not frozen: building a frozen one takes three times as long
class Envelope:
    """One message: its sender, its kind, metadata, and tensors, which are 1-D, contiguous and on the CPU.

    ``place`` is a shard or a bucket, ``step`` the sender's, ``number`` numbers requests, so that none is applied twice.
    """

    kind: Kind
    sender: int = -1
    place: int = 0
    step: int = 0
    number: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    @property
    def tensor_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def pack(envelope: Envelope, job: bytes) -> list[Frame]:
    """The frames of a message of this job; the tensors' frames are views of the tensors themselves.

    >>> frames = pack(Envelope(Kind.PUSH, sender=3, tensors=(torch.ones(2),)), bytes(16))
    >>> [len(bytes(f)) for f in frames], unpack(frames, bytes(16), 1000).tensors
    ([65, 2, 8], (tensor([1., 1.]),))
    """
    metadata = _encoded(envelope.metadata)
    if len(envelope.tensors) > MOST_TENSORS:
        raise HocketError(f"A message holds at most {MOST_TENSORS} tensors, got {len(envelope.tensors)}: join them into fewer.")
    if len(job) != JOB_BYTES:
        raise HocketError(f"The id of a job has {JOB_BYTES} bytes, got {len(job)}.")
    e = envelope
    try:
        head = _HEAD.pack(MAGIC, VERSION, int(e.kind), e.sender, e.place, e.step, e.number, job, len(e.tensors), len(metadata))
    except struct.error:
        numbers = f"sender {e.sender}, place {e.place}, step {e.step}, number {e.number}"
        raise HocketError(f"Sender and place are whole numbers of 32 bits, step and number of 64 bits, got {numbers}.") from None
    rows, bodies = [], []
    for tensor in e.tensors:
        rows.append(_ROW.pack(_code(tensor), tensor.numel()))
        body = _body(tensor)
        bodies += [body] if len(body) <= FRAME_BYTES else [body[a : a + FRAME_BYTES] for a in range(0, len(body), FRAME_BYTES)]
    head = head + b"".join(rows)
    return [head + _CHECK.pack(zlib.crc32(metadata, zlib.crc32(head))), metadata, *bodies]


def unpack(frames: Sequence[Frame], job: bytes, most_bytes: int) -> Envelope:
    """The envelope in these frames, or ``Refused``; nothing else is raised, whatever the frames hold."""
    first = frames[0] if frames else b""
    head = bytes(first if len(first) <= MOST_HEADER_BYTES else memoryview(first)[: MOST_HEADER_BYTES + 1])
    if not head.startswith(MAGIC) or len(head) == len(MAGIC):
        raise Refused("magic", "This is not a message of Hocket.")
    if head[len(MAGIC)] != VERSION:
        theirs = f"The message is of version {head[len(MAGIC)]}, this side has version {VERSION}"
        raise Refused("version", f"{theirs}: use the same version of Hocket on both sides.")
    if (total := sum(map(len, frames))) > most_bytes:
        raise Refused("size", f"The message has {total} bytes; the limit is {most_bytes}.")
    if len(head) < _LEAST or len(frames) < 2:
        raise Refused("damaged", "The message is truncated.")
    _, _, kind, sender, place, step, number, of_job, count, metadata_bytes = _HEAD.unpack_from(head)
    if metadata_bytes > MAX_METADATA_BYTES:
        raise Refused("size", f"The metadata has {metadata_bytes} bytes by its header; the limit is {MAX_METADATA_BYTES}.")
    if count > MOST_TENSORS or len(head) != _LEAST + count * _ROW.size:
        raise Refused("size", f"A header of {len(head)} bytes is not one of {count} tensors.")
    if len(frames[1]) != metadata_bytes:
        raise Refused("size", f"The metadata has {len(frames[1])} bytes, but its header says {metadata_bytes}.")
    text, checked = bytes(frames[1]), head[: -_CHECK.size]
    if zlib.crc32(text, zlib.crc32(checked)) != _CHECK.unpack_from(head, len(checked))[0]:
        raise Refused("damaged", "The header or the metadata is damaged.")
    if of_job != job:
        raise Refused("job", "The message belongs to another job.")
    if (known := _KINDS.get(kind)) is None:
        raise Refused("kind", f"There is no message of kind {kind}.")
    bodies = _bodies(frames[2:], checked)
    metadata = {} if text == b"{}" else _read_metadata(text)
    tensors = tuple([_tensor(_joined(body), code) for code, body in bodies])
    return Envelope(known, sender, place, step, number, metadata, tensors)


def _bodies(frames: Sequence[Frame], head: bytes) -> list[tuple[int, Sequence[Frame]]]:
    """The dtype's code and the frames of each tensor.

    All sizes are checked before any tensor is made: a message is accepted as a whole or refused.
    """
    bodies, end = list[tuple[int, Sequence[Frame]]](), 0
    for k, (code, values) in enumerate(_ROW.iter_unpack(memoryview(head)[_HEAD.size :])):
        if code >= len(DTYPES):
            raise Refused("dtype", f"Tensor {k} has a dtype of code {code}, which is unknown.")
        size, start = values * _SIZES[code], end
        end = start + max(1, -(-size // FRAME_BYTES))
        if end > len(frames):
            raise Refused("size", f"The message has {len(frames)} frames of tensors, fewer than its header says.")
        if (held := sum(map(len, frames[start:end]))) != size:
            raise Refused("size", f"Tensor {k} has {held} bytes, but the header says {values} values of {DTYPES[code]}.")
        bodies.append((code, frames[start:end]))
    if end != len(frames):
        raise Refused("size", f"The message has {len(frames)} frames of tensors, but its header says {end}.")
    return bodies


def _joined(frames: Sequence[Frame]) -> memoryview:
    return memoryview(frames[0]) if len(frames) == 1 else memoryview(bytearray().join(memoryview(frame) for frame in frames))


def _code(tensor: Tensor) -> int:
    if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_cpu:
        raise HocketError(
            f"Only 1-D, contiguous CPU tensors can be sent, got shape {list(tensor.shape)} with stride {list(tensor.stride())} "
            f"on {tensor.device}: use tensor.flatten().cpu()."
        )
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise HocketError(f"A tensor of {tensor.dtype} cannot be sent: use one of {', '.join(str(d)[6:] for d in DTYPES)}.")
    return code


def _body(tensor: Tensor) -> Frame:
    if tensor.numel() == 0:
        return b""
    if tensor.requires_grad or tensor.is_neg():
        tensor = tensor.detach().resolve_neg()
    if tensor.dtype in _NOT_NUMPYS:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy().data.cast("B")


def _tensor(view: memoryview, code: int) -> Tensor:
    dtype = DTYPES[code]
    if not len(view):
        return torch.empty(0, dtype=dtype)
    # A link's buffers are writable. Others are copied, since torch has no read-only tensors (and warns).
    tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
    if tensor.data_ptr() % _SIZES[code]:
        tensor = torch.frombuffer(bytearray(view), dtype=dtype)  # small frames share a buffer and may be unaligned in it
    if dtype == torch.bool and int(tensor.view(torch.uint8).max()) > 1:
        raise Refused("damaged", "A bool tensor holds values other than 0 and 1.")
    return tensor


def _encoded(metadata: Mapping[str, Any]) -> bytes:
    if metadata == {}:
        return b"{}"
    _check_metadata(metadata)
    text = _ENCODER.encode(dict(metadata)).encode()
    if len(text) > MAX_METADATA_BYTES:
        raise HocketError(f"Metadata has at most {MAX_METADATA_BYTES} bytes, got {len(text)}: send numbers as tensors.")
    return text


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse values that JSON does not give back unchanged (a tuple becomes a list)."""
    if not isinstance(metadata, Mapping):
        raise HocketError(f"Metadata is a mapping, got {type(metadata).__name__}.")
    layer: list[Any] = [dict(metadata)]
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        for thing in layer:
            if type(thing) in _PLAIN:
                continue
            if isinstance(thing, dict):
                if wrong := [k for k in thing if not isinstance(k, str)]:
                    raise HocketError(f"Keys of metadata are text, got {wrong[0]!r}.")
                _check_text(*thing)
                inner += thing.values()
            elif isinstance(thing, list | tuple):
                inner += thing
            elif isinstance(thing, str):
                _check_text(thing)
            elif not isinstance(thing, int | float):
                raise HocketError(f"Metadata holds numbers, text, lists and mappings, got {type(thing).__name__}.")
        layer = inner
        if not layer:
            return
    raise HocketError(f"Metadata is nested at most {MOST_DEPTH} deep.")


def _check_text(*texts: str) -> None:
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise HocketError("Metadata holds a lone surrogate, which is not valid text.") from None


def _read_metadata(text: bytes) -> dict[str, Any]:
    # NaN and the infinities are written as Python's json writes them: a loss may be one, and both ends are Hocket.
    try:
        metadata = _DECODER.decode(str(text, "utf-8"))
        # Decoded JSON is valid metadata, except for lone surrogates, which are escaped with \\u, and deep nesting.
        if not isinstance(metadata, dict) or b"\\u" in text or text.count(b"[") + text.count(b"{") > MOST_DEPTH:
            _check_metadata(metadata)
    except (ValueError, RecursionError) as error:  # HocketError is a ValueError
        raise Refused("metadata", f"The metadata cannot be read: {str(error).rstrip('.')}.") from None
    return metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_PLAIN = frozenset((int, float, bool, type(None)))
