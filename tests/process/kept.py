"""Runs of two processes, each with a disk of its own, whose checkpoints are damaged, cut short or refused by a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket import files
from hocket.cluster.agreement import Agreement
from hocket.cluster.join import join
from hocket.train import checkpoints, job_state
from hocket.train.loop import Progress
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


def train(
    rank: int, folder: str, name: str, cluster: Any, epochs: int = EPOCHS, resume: bool = False, **options: Any
) -> dict[str, Any]:
    said: list[str] = []
    out = Path(folder, name, f"disk-{rank}")
    training = run(SETTINGS.changed(epochs=epochs), cluster, out=out, resume=resume, note=said.append, **options)
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    return {"weights": [w.clone() for w in training.replicas.job.weights], "said": said, "kept": kept}


def dies(rank: int, folder: str) -> None:
    """Process 1 is killed in the midst of its third checkpoint."""
    refusing(rank, 3, killed)
    train(rank, folder, "killed", join(device="cpu", exact=True, liveness_timeout_s=2.0))


def leaves(rank: int, folder: str, cluster: Any) -> dict[str, Any]:
    """Process 1 is told to leave at the second step of the second epoch, and all know before they go on; they leave, and go on."""
    gather, known = Agreement.gather, threading.Event()

    def gathered(self: Agreement, name: str, *given: Any) -> list[str | None]:
        if name == "leave after":
            known.set()  # the step under way is settled
        return gather(self, name, *given)

    def told(progress: Progress) -> None:
        if progress.step == 7:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert known.wait(60)

    Agreement.gather, checkpoints.write_whole = gathered, files.write_whole
    with pytest.raises(SystemExit):
        train(rank, folder, "left", cluster, watch=told, leaves=True)
    Agreement.gather = gather
    facts = json.loads(Path(folder, "left", f"disk-{rank}", "checkpoints", "2", "manifest.json").read_bytes())["facts"]
    return {**train(rank, folder, "left", cluster, resume=True), "facts": facts}


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
    found["left"] = leaves(rank, folder, cluster)
    torch.save(found, Path(folder, f"{rank}.pt"))
    cluster.close()


# --- loops of people's own -----------------------------------------------------------------------------------------------------


def begin() -> tuple[nn.Module, torch.optim.Optimizer, hocket.Job]:
    hocket.init(device="cpu")
    torch.manual_seed(4)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, hocket.parallelize(model, optimizer, "gossip + topk(0.3) + exchange=gradients")


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, most: int = 100, then: Callable[[], Any] = dict) -> list[int]:
    """Train on the next batches of an epoch, of which there may be more; the numbers of their samples."""
    numbers, seen = torch.arange(50), list[int]()
    inputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    loader = hocket.distribute(DataLoader(TensorDataset(inputs, numbers), batch_size=4, shuffle=True))
    for count, (x, n) in enumerate(loader, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), n % 2).backward()
        optimizer.step()
        seen += n.tolist()
        if count == most:
            then()
            break
    return seen


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def stops(rank: int, folder: str) -> None:
    """Three steps of an epoch, saved by hand and by torch.distributed.checkpoint, and loaded by it."""
    model, optimizer, job = begin()
    found: dict[str, Any] = {"stateful": isinstance(job, Stateful)}

    def save() -> None:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": job.state_dict()}
        torch.save(saved, Path(folder, f"saved-{rank}"))
        dcp.save({"job": job}, checkpoint_id=Path(folder, "dcp"))
        found.update(saved=str(job.own_state()), weights=flat(model).clone())

    found["samples"] = learn(model, optimizer, 3, save)
    job.detach()
    _, _, other = begin()
    dcp.load({"job": other}, checkpoint_id=Path(folder, "dcp"))
    torch.save({**found, "loaded": str(other.own_state())}, Path(folder, f"{rank}.pt"))


def goes_on(rank: int, folder: str, before: str) -> None:
    """One worker goes on from what two have saved."""
    model, optimizer, job = begin()
    saved = [torch.load(Path(before, f"saved-{worker}")) for worker in range(2)]
    try:
        job.load_state_dict(saved[1]["job"])
        sentence = ""
    except hocket.HocketError as error:
        sentence = str(error)
    merge, hosts = job_state.one_for_all, list[Any]()

    def merged(*given: Any) -> Any:
        hosts.append(given[-1])
        return merge(*given)

    job_state.one_for_all = merged
    job.load_workers(saved)
    found = {"hosts": hosts, "sentence": sentence, "weights": flat(model).clone(), "step": job.step}
    torch.save({**found, "samples": learn(model, optimizer)}, Path(folder, f"{rank}.pt"))
