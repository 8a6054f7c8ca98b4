"""Old names of :mod:`hocket.programs.account`, for gossip until it is a program: times are read here."""

from __future__ import annotations

import time
from typing import Any

from hocket.programs import account
from hocket.programs.account import added, entry_of
from hocket.programs.account import staleness_of as ages_of
from hocket.programs.account import staleness_since as ages_since

__all__ = ["Account", "added", "ages_of", "ages_since", "entry_of"]


class Account(account.Account):
    """With the real clock."""

    def begin(self, now: float | None = None) -> None:
        super().begin(time.monotonic() if now is None else now)

    def pause(self, now: float | None = None) -> None:
        super().pause(time.monotonic() if now is None else now)

    def resume(self, now: float | None = None) -> None:
        super().resume(time.monotonic() if now is None else now)

    def describe(self, now: float | None = None) -> dict[str, Any]:
        return super().describe(time.monotonic() if now is None else now)

    stood = account.Account.stalled
    add_age = account.Account.add_staleness
