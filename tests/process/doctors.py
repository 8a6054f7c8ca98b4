"""``hocket doctor`` on several processes, with faults planted, for tests/process/test_doctor.py."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from hocket.supervisor import doctor
from process import command
from process.closed import listening

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
    if fault == "listens":
        mean: Any = doctor._mean

        def watched(*given: Any) -> str:
            """With a group of Gloo's beside the store and the listener."""
            group = threading.Event()
            seen = set[str]()

            def look() -> None:
                while not group.wait(0.001):
                    seen.update(listening())

            looks = threading.Thread(target=look)
            looks.start()
            said = mean(*given)
            group.set()
            looks.join()
            Path(folder, f"{rank}.listens").write_text(" ".join(seen | listening()))
            return str(said)

        doctor._mean = watched
    command.main(rank, folder, ["doctor", *arguments], folder)
