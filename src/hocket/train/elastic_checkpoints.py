"""Checkpoints of elastic runs, whose workers may be others at each of them, and share one folder.

The members of a generation agree on the number of a checkpoint, and on who writes it, in one exchange: all that complete it have
the same table. Then each writes its file, and says so in a small file beside it. The first of them, which waits for these, writes
the manifest. Where one is lost before it has written, the checkpoint does not count, and the one before stays the newest.

A checkpoint is written after every epoch, and where all workers have been told to leave, in the middle of one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.replica import ReplicaLost
from hocket.drivers.processes import say
from hocket.errors import HocketError
from hocket.files import CannotWrite, sealed_json, unsealed_json, write_whole
from hocket.train.checkpoints import Checkpoints, process_file
from hocket.train.elastic_loop import ElasticTraining
from hocket.train.loop import EpochLoop
from hocket.train.resume import mean_files

_TOLD = "told"
"""The folder beside the generations in which workers say what they have written."""
_SAID = "said"
_PAUSE_S, _MOST_S, _GRACE_S = 0.02, 60.0, 10.0
"""How often the first worker looks, for how long, and how long where another has left, which may still be writing."""
_MARK_BITS = 52
"""Of a random number, which travels as a float64."""
_LAST_S = 3.0
"""How long where all leave: whoever has told them to ends them soon."""


class FolderAgreement:
    """What workers tell the first of them by files in a folder that all share; ``gone`` says whether one of them is lost."""

    shared = True
    silent = f"has said nothing that can be read in the folder '{_TOLD}': it is lost, or has another folder"

    def __init__(
        self, folder: Path, rank: int, processes: int, gone: Callable[[], bool], most_s: float = _MOST_S, mark: int = 0
    ) -> None:
        """``mark``: a number that all of them have agreed on, and no others; their files bear it."""
        self.rank, self.processes, self._folder, self._gone, self._most_s = rank, processes, folder / _TOLD, gone, most_s
        self._mark = f"{mark:013x}"

    def gather(self, name: str, text: str, timeout_s: float) -> list[str | None]:
        """What each worker says of ``name``, on the first one; the others wait for nobody. None for one that says nothing, or
        whose file is damaged."""
        found: list[str | None] = [None] * self.processes
        found[self.rank] = text
        paths = {rank: self._folder / f"{self._mark} {name} {rank}" for rank in range(self.processes)}
        if self.rank > 0:
            with contextlib.suppress(OSError, CannotWrite):  # the first one says who has said nothing
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(paths[self.rank], sealed_json({_SAID: text}))
            return found
        del paths[self.rank]
        end, lost = time.monotonic() + min(timeout_s, self._most_s), False
        while True:
            for rank, path in list(paths.items()):
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                    del paths[rank]
                    path.unlink(missing_ok=True)
                    found[rank] = _said(content)
            if not paths or time.monotonic() >= end:
                return found
            if not lost and self._gone():
                end, lost = min(end, time.monotonic() + _GRACE_S), True
            time.sleep(_PAUSE_S)

    def clear(self) -> None:
        """Remove what was told of earlier checkpoints, which all have written; others may have told of this one already."""
        for path in self._folder.glob("*") if self.rank == 0 else ():
            if not path.name.startswith(self._mark):
                with contextlib.suppress(OSError):  # what is no file of ours
                    path.unlink(missing_ok=True)


def _said(content: bytes) -> str | None:
    """What a worker has told in a file; None where it is damaged."""
    with contextlib.suppress(ValueError, KeyError):
        return str(unsealed_json(content)[_SAID])
    return None


def begun(
    training: EpochLoop,
    kept: Checkpoints,
    run: Mapping[str, Any],
    go_on: Callable[[int, int], int],
    resume: bool,
    checkpoints: bool,
) -> Callable[[], None]:
    """Go on from a checkpoint, where the run begins with this worker and there is one, or ``resume`` demands it; what writes one
    more into ``kept``, which all workers must call at the same place. ``run`` is run.json. ``checkpoints``: one also where all
    leave."""
    assert isinstance(training, ElasticTraining)
    if training.runtime.began is not None:  # a worker that joins others has its state from them
        process, processes = training.runtime.began
        number = go_on(process, processes // training.cluster.parts) if resume or kept.newest() is not None else 0
        _check_together(training, number)
    if checkpoints:
        training.runtime.on_last = partial(_save, training, kept, run, last=True)
    return partial(_save, training, kept, run)


def _save(training: ElasticTraining, kept: Checkpoints, run: Mapping[str, Any], last: bool = False) -> None:
    """``last``: nobody is left to hand over to, so it is written before this returns."""
    runtime, cluster = training.runtime, training.cluster
    kept.wait()
    try:
        table, means = _meet(training, kept)
    except ReplicaLost:  # without this replica's files the checkpoint does not count
        if not last:
            training.rejoin()
        return
    parts, writers = cluster.parts, [int(number) for number in table[:, 0].tolist()]
    place = writers.index(runtime.member.uid) * parts + cluster.process % parts
    gone = lambda: not last and not set(writers) <= set(runtime.member.latest.members)  # noqa: E731
    processes = len(writers) * parts
    agreement = FolderAgreement(kept.folder, place, processes, gone, _LAST_S if last else _MOST_S, int(table[0, 2]))
    agreement.clear()
    kept.meet(agreement, int(table[:, 1].max()))
    where = {"workers": len(writers), "processes": processes, "host_size": cluster.host_size, "within": last}
    facts = {"step": runtime.step, "epoch": training.epoch, **where, "run": dict(run)}
    kept.save({process_file(place): training.state_dict(), **({} if place else means)}, facts)
    if last:
        kept.wait(_LAST_S)
        if place == 0 and (newest := kept.newest()) is not None:
            say(f"all workers leave; {newest.title} is written, and --resume goes on from it")


def _meet(training: ElasticTraining, kept: Checkpoints) -> tuple[Tensor, dict[str, Any]]:
    """Of each worker the number of this process's part, that of the next checkpoint and a mark, the same for all parts; and files
    of the mean model."""
    runtime, cluster = training.runtime, training.cluster
    with runtime.in_step(), cluster.uncounted():
        runtime.drain()
        own = [runtime.member.uid, runtime.most(kept.next), runtime.most(secrets.randbits(_MARK_BITS))]
        table = cluster.all_gather_metrics(torch.tensor([own], dtype=torch.float64))
        return table, mean_files(training, cluster.parts > 1)


def _check_together(training: ElasticTraining, number: int) -> None:
    """All with whom the run begins must go on from the same checkpoint."""
    table = training.cluster.all_gather_metrics(torch.tensor([[float(number)]], dtype=torch.float64))
    if len(numbers := sorted({int(found) for found in table.flatten().tolist()})) > 1:
        raise HocketError(f"Workers have found different checkpoints ({numbers}); all workers of an elastic run share one folder.")
