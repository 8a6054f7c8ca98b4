"""The events of a program, in order, as lines of JSON: enough to replay a real run with the same programs.

=========  ======================================================================================================================
event      fields
=========  ======================================================================================================================
start      what the program is: a worker's strategy, digest of the layout, number, world and seed, or a shard's place and times;
           ``identity`` by which others know it
call       ``name`` of a method of the program or (``account.begin``) of its account, ``arguments`` (tensors are null: the replay
           computes them), ``now``
batch      ``id`` of the mini-batch that the worker takes for its next step
message    ``sender`` (a number, or an identity in hexadecimal digits), ``kind``, ``worker``, ``place``, ``step``, ``number``,
           ``bytes`` of its tensors, ``check`` (a checksum of its metadata); ``metadata``, where it may be that no recorded
           program sent it (heartbeats, observers, refusals of a link); ``now``
timer      ``name``; ``now``
end        ``digests`` of all parts of the program's state: a replay must end with the same
=========  ======================================================================================================================

A message's content is not recorded: the replay of its sender makes it again.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.programs.base import Address, Program, to_plain
from hocket.transport import Envelope, Kind

_FIGURES = ("figures", "ledger", "ledgers")


class Recorder:
    """Appends a line for each event to the file ``path``; without one it records nothing."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._file: TextIO | None = None
        try:
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - until close(); whole lines
        except OSError as error:
            raise HocketError(f"Cannot record in {path} ({error.strerror}); choose another file.") from None

    def write(self, event: str, **fields: Any) -> None:
        """An event of the table above."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **fields}, default=_plain) + "\n")

    def start(self, **program: Any) -> None:
        """A process begins; what its program is."""
        self.write("start", threads=torch.get_num_threads(), **program)

    def message(self, sender: Address, message: Envelope, now: float) -> None:
        """A message has arrived."""
        if self._file is None:
            return
        fields: dict[str, Any] = {name: getattr(message, name) for name in ("place", "step", "number")}
        fields |= {"sender": sender.hex() if isinstance(sender, bytes) else sender, "kind": message.kind.name, "now": now}
        fields |= {"worker": message.sender, "bytes": message.tensor_bytes, "check": checksum(message)}
        if message.sender < 0 or message.kind == Kind.BEAT:
            fields["metadata"] = message.metadata
        self.write("message", **fields)

    def end(self, program: Program) -> None:
        """The process has left, with its program in this state; later events are not recorded."""
        if self._file is not None:
            self.write("end", digests=digests_of(program))
            self.close()

    def close(self) -> None:
        """Close the file without an ``end`` event."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_record(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file; a last line that was cut off is left out."""
    events = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


def read_whole(path: Path) -> list[dict[str, Any]]:
    """The events of one process that was not started again and began anew; anything else is refused."""
    if not path.exists():
        raise HocketError(f"{path.parent} has no recording of {path.stem.replace('-', ' ')}; only whole runs are replayed.")
    events = read_record(path)
    starts = [event for event in events if event["event"] == "start"]
    if len(starts) != 1 or starts[0].get("restored") or starts[0].get("resumed"):
        raise HocketError(
            f"{path}: this process began from a snapshot or replaced one that died, and a recording does not hold what was on "
            "disk; replay a run without restarts."
        )
    return events


def checksum(message: Envelope) -> int:
    """A checksum of a message's metadata without figures, which the training thread may change meanwhile."""
    return zlib.crc32(json.dumps({name: value for name, value in message.metadata.items() if name not in _FIGURES}).encode())


def digests_of(program: Program) -> dict[str, str]:
    """A digest of each part of a program's state: equal digests, equal bits."""
    return {name: digest(value) for name, value in program.end_state().items()}


def digest(value: Any) -> str:
    """Of a value made of tensors, numbers and texts in mappings, sequences and objects.

    >>> zeros = torch.zeros(2)
    >>> digest({"x": zeros, "n": 1}) == digest({"n": 1, "x": zeros}), digest(zeros) == digest(-zeros)
    (True, False)
    """
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{list(part.shape)}".encode())
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(part, Mapping):
            for name in sorted(part, key=str):
                add(str(name))
                add(part[name])
        elif isinstance(part, (list, tuple)):
            found.update(f"[{len(part)}".encode())
            for each in part:
                add(each)
        elif isinstance(part, Envelope):
            add(to_plain(part))
        elif hasattr(part, "__dict__"):
            add(vars(part))
        else:
            found.update(f"{part!r};".encode())

    add(value)
    return found.hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    return value.describe() if hasattr(value, "describe") else str(value)
