"""``hocket``: the command."""

import json
import math
import os
import signal
import sys
import threading
import time
from types import FrameType

import typer

from hocket.cli.commands import Commands
from hocket.drivers.processes import quit_at_once, quit_in_order
from hocket.errors import HocketError, Interrupted, NonFiniteGradient, WorkerLost
from hocket.version import __version__

app = typer.Typer(
    name="hocket",
    cls=Commands,
    help="Parallel training of neural networks when links are slow, machines differ and workers fail.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command; every expected failure is one sentence on standard error and a non-zero exit."""
    if os.environ.get("HOCKET_ENDS_WITH"):
        from hocket.drivers.start import end_with_parent  # PyTorch is loaded only where it is needed

        # A worker is killed, a training of a study ends its workers and cleans up.
        end_with_parent(signal.SIGKILL if os.environ.get("HOCKET_LAUNCHED") else signal.SIGTERM)
    if os.environ.get("HOCKET_LAUNCHED"):
        signal.signal(signal.SIGINT, _Interruption())
    try:
        app()
    except (HocketError, WorkerLost, NonFiniteGradient) as error:
        _end(error, 2 if isinstance(error, HocketError) else 1)
    except Interrupted as error:
        _end(error, 130)
    except SystemExit as end:  # typer makes this of an interruption
        if end.code != 130:
            if "torch" in sys.modules:
                quit_in_order(int(end.code or 0))
            raise
        if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
            _say("interrupted.")
        quit_at_once(130)


class _Interruption:
    """A worker hears Ctrl-C twice, from the terminal and from its launcher: the second must not disturb its leaving.

    After ten seconds it counts again: the first may have been lost, in a destructor for instance.
    """

    def __init__(self) -> None:
        self._interrupted_at = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name in ("__del__", "_remove"):  # Python ignores what is raised in there
            threading.Timer(0.02, os.kill, (os.getpid(), number)).start()
            return
        if time.monotonic() - self._interrupted_at > 10.0:
            self._interrupted_at = time.monotonic()
            raise KeyboardInterrupt


def _end(error: Exception, code: int) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if os.environ.get("HOCKET_TELLS_ERRORS"):  # whoever started this process prints one sentence for all workers
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        quit_at_once(code)
    if path:
        message = {"message": str(error), "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        with open(path, "w") as file:
            json.dump({"message": message, "kind": type(error).__name__}, file)
    if not path or not os.environ.get("HOCKET_LAUNCHED"):  # our own launcher prints one sentence for all workers
        _say(str(error))
    quit_at_once(code)


def _say(text: str) -> None:
    print(f"hocket: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
