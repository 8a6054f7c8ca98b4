"""A shard's own memory on disk: its state every few seconds, the last two kept, so that a killed shard comes back.

Files appear whole or not at all, are on the disk when they count, and are read without pickle's powers (``weights_only``). One that
is damaged is passed over for the one before it.

They are written in a thread, while the shard goes on: its ``state_dict()`` is a copy. One is written at a time; where another is
begun meanwhile, the newest follows.
"""

import threading
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
        self._lock = threading.Lock()
        self._next: dict[str, Any] | None = None
        """Is written after the one that is being written."""
        self._thread: threading.Thread | None = None

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(f"shard-{self.place}-*.pt"), key=_number)

    def begin(self, state: dict[str, Any]) -> None:
        """Begin to write ``state``, which nobody changes any more."""
        with self._lock:
            self._next = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_begun, name="hocket-snapshot", daemon=True)
                self._thread.start()

    def save(self, state: dict[str, Any]) -> None:
        """Write ``state``, in place of one that has not begun to be written; returns once it is on the disk."""
        with self._lock:
            self._next = None
        self.wait()
        self._write(state)

    def wait(self) -> None:
        """Until all that was begun is written."""
        if (thread := self._thread) is not None:
            thread.join()

    def _write_begun(self) -> None:
        while True:
            with self._lock:
                state, self._next = self._next, None
                if state is None:
                    self._thread = None
                    return
            self._write(state)

    def _write(self, state: dict[str, Any]) -> None:
        """Write ``state`` beside the others, then drop the oldest."""
        files = self._files()
        path = self.folder / f"shard-{self.place}-{_number(files[-1]) + 1 if files else 1}.pt"
        try:
            write_whole(path, sealed(state))
            for old in files[: 1 - KEPT]:
                old.unlink(missing_ok=True)
        except Exception as error:  # a full disk must not end the training
            cause = error.cause if isinstance(error, CannotWrite) else f"Cannot write {path} ({error or type(error).__name__})"
            say(f"shard {self.place}: {cause}; it trains on")

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
