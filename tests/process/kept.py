"""Runs of two processes, each with a disk of its own, whose checkpoints are damaged, cut short or refused by a full disk."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hocket import files
from hocket.cluster.join import join
from hocket.train import checkpoints
from hocket.train.run import run
from hocket.train.settings import RunSettings

SETTINGS = RunSettings.of(strategy="local(3) + topk(0.2)", workers=2, batch_size=150, lr=0.05, momentum=0.9, seed=2, exact=True)
EPOCHS = 4


def refusing(rank: int, generation: int, fails: Callable[[Path, bytes], None]) -> None:
    """On process 1 the state of a generation cannot be written."""
    write = files.write_whole

    def broken(path: Path, content: bytes, writer: str = "") -> None:
        if rank == 1 and path.parent.name == str(generation) and path.suffix == ".pt":
            fails(path, content)
        write(path, content, writer)

    checkpoints.write_whole = broken


def full(path: Path, content: bytes) -> None:
    raise files.CannotWrite(f"write {path.name}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def killed(path: Path, content: bytes) -> None:
    path.with_name(path.name + ".tmp").write_bytes(content[: len(content) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, folder: str, name: str, cluster: Any, epochs: int = EPOCHS, resume: bool = False) -> dict[str, Any]:
    said: list[str] = []
    out = Path(folder, name, f"disk-{rank}")
    training = run(SETTINGS.changed(epochs=epochs), cluster, out=out, resume=resume, note=said.append)
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    return {"weights": [w.clone() for w in training.replicas.job.weights], "said": said, "kept": kept}


def dies(rank: int, folder: str) -> None:
    """Process 1 is killed in the midst of its third checkpoint."""
    refusing(rank, 3, killed)
    train(rank, folder, "killed", join(device="cpu", exact=True, liveness_timeout_s=2.0))


def main(rank: int, folder: str, before: str) -> None:
    """All that goes on; ``before`` is the folder of the run that died."""
    cluster = join(device="cpu", exact=True)
    found = {"whole": train(rank, folder, "whole", cluster), "killed": train(rank, before, "killed", cluster, resume=True)}
    refusing(rank, 2, full)
    found["full"] = train(rank, folder, "full", cluster, 3)
    if rank == 1:
        path = Path(folder, "full", "disk-1", "checkpoints", "3", checkpoints.process_file(1))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    found["flipped"] = train(rank, folder, "full", cluster, resume=True)
    torch.save(found, Path(folder, f"{rank}.pt"))
    cluster.close()
