"""What a program was given, in order, as lines of JSON: enough to replay a real run with the same programs.

=========  ======================================================================================================================
event      fields
=========  ======================================================================================================================
start      what the program is: a worker's strategy, digest of the layout, number, world and seed, or a shard's place and times;
           ``identity`` by which others know it
call       ``name`` of a method of the program or (``account.begin``) of its account, ``arguments`` (tensors are null: the replay
           computes them), ``now``
batch      ``id`` of the mini-batch that the worker takes for its next step
message    ``sender`` (a number, or an identity in hexadecimal digits), ``kind``, ``worker``, ``step``, ``number``, ``bytes`` of its
           tensors; ``metadata``, where no recorded program sent it (heartbeats, observers, refusals of a link); ``now``
timer      ``name``; ``now``
=========  ======================================================================================================================

A message's content is not recorded: the replay of its sender makes it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from hocket.errors import HocketError
from hocket.programs.base import Address
from hocket.transport import Envelope, Kind


class Recorder:
    """Appends to the file ``path``, a line for each event."""

    def __init__(self, path: str | Path) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - until close(); whole lines
        except OSError as error:
            raise HocketError(f"Cannot record in {path} ({error.strerror}); choose another file.") from None

    def start(self, **program: Any) -> None:
        """A process begins; what its program is."""
        self._write("start", program)

    def call(self, name: str, arguments: tuple[Any, ...], now: float) -> None:
        """A method of the program is called."""
        self._write("call", {"name": name, "arguments": arguments, "now": now})

    def batch(self, number: int | None) -> None:
        """A worker takes a mini-batch; None: there is none left."""
        self._write("batch", {"id": number})

    def message(self, sender: Address, message: Envelope, now: float) -> None:
        """A message has arrived."""
        event: dict[str, Any] = {
            "sender": sender.hex() if isinstance(sender, bytes) else sender,
            "kind": message.kind.name,
            "worker": message.sender,
            "step": message.step,
            "number": message.number,
            "bytes": message.tensor_bytes,
            "now": now,
        }
        if message.sender < 0 or message.kind == Kind.BEAT:
            event["metadata"] = message.metadata
        self._write("message", event)

    def timer(self, name: str, now: float) -> None:
        """A timer has run out."""
        self._write("timer", {"name": name, "now": now})

    def close(self) -> None:
        """The process has left; what comes later is not recorded."""
        self._file.close()

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps({"event": event, **fields}, default=_plain) + "\n")


def read_record(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file; a last line that was cut off is left out."""
    events = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    return value.describe() if hasattr(value, "describe") else str(value)
