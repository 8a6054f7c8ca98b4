"""``hocket doctor`` on several processes, with faults planted, for tests/process/test_doctor.py."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from hocket.supervisor import doctor
from process import command

_NEWNET = 0x40000000


def examined(rank: int, folder: str, arguments: list[str], fault: str = "", namespaces: list[str] | None = None) -> None:
    """Process 1 has the fault, or each process lives in a network namespace of its own."""
    if namespaces is not None:
        file = os.open(f"/run/netns/{namespaces[rank]}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    if fault == "version" and rank == 1:
        told: Any = doctor.versions()
        doctor.versions = lambda: {**told, "torch": "1.0"}  # type: ignore[attr-defined]
    command.main(rank, folder, ["doctor", *arguments], folder)
