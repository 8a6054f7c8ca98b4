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

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hocket.cluster.loopback import LoopbackRendezvous
from hocket.drivers.start import ENDS_WITH
from hocket.errors import HocketError

_BACKEND = "hocket-loopback"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Those that the launcher passes on to the workers."""

rendezvous_handler_registry.register(_BACKEND, lambda parameters: LoopbackRendezvous(parameters.run_id, _BACKEND))


def launch(command: Sequence[str], processes: int) -> None:
    """Run Python with these arguments in ``processes`` processes; returns when all are done.

    When one dies the launcher ends the others; the first cause becomes one sentence.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ |= {"HOCKET_LAUNCHED": "1", ENDS_WITH: str(os.getpid())}
    with tempfile.TemporaryDirectory(prefix="hocket-") as folder:
        logs = DefaultLogsSpecs(folder)  # else torch leaves a folder of its own behind
        config = LaunchConfig(
            1,
            1,
            processes,
            logs,
            run_id=uuid.uuid4().hex,
            rdzv_backend=_BACKEND,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle=_SIGNALS,
        )
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            raise HocketError(_cause(error.failures)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise HocketError(f"Signal {error.sigval.name} ended this command; it has ended its workers, too.") from None


def _cause(failures: dict[int, ProcessFailure]) -> str:
    """The sentence of the worker that failed first, of those that were not ended by the launcher or merely left alone."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode == -signal.SIGTERM, _error(failure).get("kind") == "WorkerLost", failure.timestamp, rank

    rank, first = min(failures.items(), key=order)
    said = _error(first).get("message")
    if isinstance(said, dict) and said.get("message"):
        return str(said["message"])
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
