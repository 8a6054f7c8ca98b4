"""One worker of a supervised run: ``python -m hocket.supervisor.worker_process`` reads its task, a line of JSON, from its input.

It ends when that input closes, for then the process that started it is gone. An error is one line of JSON on standard output.
"""

import json
import os
import signal
import sys
import threading
import warnings

from hocket.drivers.processes import quit_at_once
from hocket.drivers.start import end_with_parent
from hocket.errors import HocketError, NonFiniteGradient, WorkerLost


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor gets the signal and ends this process
    sys.path.insert(0, os.getcwd())  # for module:factory
    warnings.simplefilter("ignore")  # the supervisor prints it once
    from hocket.train.async_worker import read_worker_task, work

    # What a model or a data set prints goes where people read; the pipe is for the one line that tells what went wrong.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        work(read_worker_task(json.loads(line)))
    except (HocketError, NonFiniteGradient, WorkerLost) as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), file=output, flush=True)
        quit_at_once(2)
    quit_at_once(0)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
