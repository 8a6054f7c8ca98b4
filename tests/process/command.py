"""``hocket`` and ``python`` in a fork of the nursery, for tests of commands."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from hocket.cli import demo
from hocket.cli import main as cli
from hocket.torchrun import BACKEND, backend
from process import forks


def main(rank: int, folder: str, arguments: list[str], cwd: str) -> None:
    os.chdir(cwd)
    sys.argv = ["hocket", *arguments]
    cli.main()


def python(rank: int, folder: str, arguments: list[str], cwd: str) -> None:
    os.chdir(cwd)
    forks.program(arguments)()


def torchrun(rank: int, folder: str, arguments: list[str], cwd: str) -> None:
    """The nursery has loaded torchrun, whose backends are those of installed packages' entry points, before this process began."""
    rendezvous_handler_registry.register(BACKEND, backend())
    python(rank, folder, ["-m", "torch.distributed.run", *arguments], cwd)


def short_demo(rank: int, folder: str, arguments: list[str], cwd: str) -> None:
    """The demo with fewer strategies: all of them are tested elsewhere."""
    demo.REAL, demo.VIRTUAL = demo.REAL[:2], demo.VIRTUAL[:1] + demo.VIRTUAL[-1:]
    main(rank, folder, arguments, cwd)
