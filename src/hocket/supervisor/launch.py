"""Starting real workers on this machine through torch's own elastic launcher, which no other machine can reach here."""

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hocket.cluster.loopback import LoopbackRendezvous
from hocket.drivers.processes import ENDED, say
from hocket.drivers.start import ENDS_WITH
from hocket.errors import HocketError

_BACKEND = "hocket-loopback"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Those that the launcher passes on to the workers."""
_LEAVE_S = 600
"""Workers that are told to leave have so long to end the step, evaluate and write a checkpoint; of torch's launcher 30 s."""


class _Agent(LocalElasticAgent):
    left = False
    """Whether all workers were told to leave, and did."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:
        context: Any = self._pcontext
        if context is not None and death_sig != signal.SIGINT:
            context.close(death_sig, _LEAVE_S)
            self.left = not any(each.proc.returncode for each in context.subprocess_handlers.values())
        super()._shutdown(death_sig, *more, **named)


def launch(command: Sequence[str], processes: int) -> None:
    """Run Python with these arguments in ``processes`` processes; returns when all are done.

    When one dies the launcher ends the others; the first cause becomes one sentence.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ |= {"HOCKET_LAUNCHED": "1", ENDS_WITH: str(os.getpid())}
    with tempfile.TemporaryDirectory(prefix="hocket-") as folder:
        logs = DefaultLogsSpecs(folder)  # otherwise torch leaves a temporary folder behind
        rendezvous = LoopbackRendezvous(uuid.uuid4().hex, _BACKEND)
        workers = WorkerSpec(
            "default",
            processes,
            rendezvous,
            entrypoint=sys.executable,
            args=tuple(command),
            max_restarts=0,
            monitor_interval=0.1,
        )
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _SIGNALS
        agent = _Agent(workers, logs)
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            if not agent.left:
                raise HocketError(f"Signal {error.sigval.name} ended this command; it has ended its workers, too.") from None
            say(f"signal {error.sigval.name}: all workers have left, and --resume goes on from the newest checkpoint")
            return
        if result.is_failed():  # the workers' own errors are in the folder
            raise HocketError(_cause(result.failures))


def _cause(failures: dict[int, ProcessFailure]) -> str:
    """The sentence of the worker that failed first, not of one that the launcher ended or that only lost its peers."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode in (-signal.SIGTERM, ENDED), _error(failure).get("kind") == "WorkerLost", failure.timestamp, rank

    rank, first = min(failures.items(), key=order)
    message = _error(first).get("message")
    if isinstance(message, dict) and message.get("message"):
        return str(message["message"])
    if first.exitcode < 0:
        how = f"was ended by signal {signal.Signals(-first.exitcode).name}"
    else:
        how = f"ended with exit code {first.exitcode} (its own output says why)"
    return f"Process {rank} of the job (pid {first.pid}) {how}; the others were ended too."


def _error(failure: ProcessFailure) -> dict[str, object]:
    path = Path(failure.error_file)
    try:
        return dict(json.loads(path.read_text())) if path.is_file() else {}
    except (ValueError, OSError):
        return {}
