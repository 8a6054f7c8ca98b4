"""A shard's own memory on disk: its state every few seconds, the last two kept, so that a killed shard comes back.

Files appear whole or not at all, are on the disk when they count, and are read without pickle's powers (``weights_only``). One that
is damaged is passed over for the one before it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hocket.drivers.processes import say
from hocket.errors import HocketError
from hocket.files import CannotWrite, sealed, unsealed, write_whole

KEPT = 2


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
        try:
            write_whole(path, sealed(state))
        except CannotWrite as error:  # a full disk must not end the training
            say(f"shard {self.place}: {error.cause}; it trains on")
            return
        for old in files[: 1 - KEPT]:
            old.unlink(missing_ok=True)

    def load(self, check: Callable[[dict[str, Any]], Any] = lambda _: None) -> dict[str, Any] | None:
        """The newest that can be read and that ``check`` takes without an error; None where there is none."""
        for path in reversed(self._files()):
            try:
                state = dict(unsealed(path.read_bytes()))
                check(state)
                return state
            except Exception as error:
                say(f"{path} is damaged ({error or type(error).__name__}); the one before it is used")
        return None


def _number(path: Path) -> int:
    """
    >>> _number(Path("shard-0-17.pt"))
    17
    """
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
