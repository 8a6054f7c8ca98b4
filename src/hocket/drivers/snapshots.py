"""A shard's own memory on disk: its state every few seconds, the last two kept, so that a killed shard comes back.

Files appear whole or not at all, and are read without pickle's powers (``weights_only``). One that is damaged is passed over for
the one before it.
"""

import io
import os
import zlib
from pathlib import Path
from typing import Any

import torch

from hocket.drivers.processes import say
from hocket.errors import HocketError

KEPT = 2
_CHECK_BYTES = 4


class Snapshots:
    """Those of shard ``place`` in ``folder``."""

    def __init__(self, folder: Path, place: int) -> None:
        self.folder, self.place = folder, place
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HocketError(f"Cannot make the folder {folder} for snapshots ({error.strerror}); choose another.") from None

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(f"shard-{self.place}-*.pt"), key=_number)

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state`` beside the others, then drop the oldest."""
        files = self._files()
        path = self.folder / f"shard-{self.place}-{_number(files[-1]) + 1 if files else 1}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(sealed(state))
            os.replace(temporary, path)
        except OSError as error:  # a full disk must not end the training
            temporary.unlink(missing_ok=True)
            say(f"shard {self.place} cannot write {path} ({error.strerror}); it trains on")
            return
        for old in files[: 1 - KEPT]:
            old.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest that can be read; None where there is none."""
        for path in reversed(self._files()):
            try:
                return dict(unsealed(path.read_bytes()))
            except Exception as error:
                say(f"{path} is damaged ({type(error).__name__}); the one before it is used")
        return None


def sealed(state: Any) -> bytes:
    """``state`` in torch's format with a checksum behind it: torch itself does not notice that bytes of a tensor have changed."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()
    return body + zlib.crc32(body).to_bytes(_CHECK_BYTES, "little")


def unsealed(content: bytes) -> Any:
    """What was sealed; ValueError (or one of torch's own) where it is damaged."""
    body, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECK_BYTES, "little") != check:
        raise ValueError("its checksum is another")
    return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")


def _number(path: Path) -> int:
    """
    >>> _number(Path("shard-0-17.pt"))
    17
    """
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
