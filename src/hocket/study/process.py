"""A training of a study in a process of its own: started, followed by what it records, ended with the study."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hocket.cluster.join import without_launcher
from hocket.drivers.start import ENDS_WITH
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost
from hocket.files import CannotWrite, write_whole
from hocket.study.carry_out import Watch
from hocket.train.loop import Progress
from hocket.train.settings import RunSettings

_LEAVE_S = 15.0


def train_process(
    command: Sequence[str], settings: RunSettings, out: Path, watch: Watch, lock: int | None = None
) -> Sequence[dict[str, Any]]:
    """Train ``settings`` in a process of Python with the arguments ``command``; its epochs are read as it records them in ``out``.

    The process holds the file descriptor ``lock``, too.
    """
    with tempfile.TemporaryFile("w+") as log:
        # A process group of its own: Ctrl-C reaches this process alone, which then tells the other once.
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            process_group=0,
            pass_fds=() if lock is None else (lock,),
            # A batch system may have started this process, but not the training's workers.
            env={**without_launcher(os.environ), ENDS_WITH: str(os.getpid())},
        )
        try:
            seen = 0
            while process.poll() is None:
                seen = _follow(out, settings, watch, seen)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            _follow(out, settings, watch, seen)
        except BaseException:
            _end(process)
            raise
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "output.txt", "".join(f"{line}\n" for line in lines).encode())  # a crash leaves only its last lines
        fail(process.returncode, lines)
    return _epochs(out)


def _epochs(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _follow(out: Path, settings: RunSettings, watch: Watch, seen: int) -> int:
    epochs = _epochs(out)
    for metrics in epochs[seen:]:
        watch.step(Progress(metrics["epoch"], settings.epochs, metrics["epoch"], settings.epochs))
        watch.epoch(metrics)
    return len(epochs)


def fail(code: int, lines: list[str]) -> NoReturn:
    """Raise the error that a failed training printed."""
    sentences = [line.removeprefix("hocket: ") for line in lines if line.startswith("hocket: ")] or lines[-1:]
    reason = sentences[-1] if sentences else f"hocket train ended with exit code {code}."
    if written := re.match(r"Cannot (write .*) \((.*?)\); files written before", reason):
        number_ = errno.ENOSPC if written[2] == os.strerror(errno.ENOSPC) else errno.EACCES
        raise CannotWrite(written[1], OSError(number_, written[2]))
    if "NaN or Inf" in reason:
        raise NonFiniteGradient(reason)
    raise WorkerLost(reason) if code == 1 else HocketError(reason)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a training and its workers: first by SIGINT."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number_ in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number_)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_S)
                return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)
