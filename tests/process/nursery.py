"""Starts groups of worker processes quickly: torch is imported once, then every worker is a fork.

Run as ``python nursery.py SOCKET``; it reads one JSON request per line and answers each with one line. By the descriptor SOCKET
whoever started it asks for forks of its own (see ``forks``). A worker runs its function at the interpreter's own top level, so that
exceptions, exit codes and ``atexit`` are those of a script. Nothing here starts a thread or touches autograd before the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # optimisers import it at their first step

from process import forks
from process.launched import enter_namespace

MODULES = (
    "pytest",
    "hypothesis.strategies",
    "torch.distributed.run",
    "hocket.drivers.shard_process",
    "hocket.drivers.summation",
    "hocket.sandblaster.launch",
    "hocket.supervisor.worker_process",
    "hocket.supervisor.launch",
    "hocket.split.pipeline.timeline",
    "hocket.train.elastic_split",
    "hocket.train.split_job",
    "hocket.train.runtimes.fsdp",
    "loops.harness",
    "process.command",
    "process.equality",
    "process.faults",
    "process.meshes",
    "process.paired",
    "process.pipelines",
    "process.served",
    "process.sharded_cases",
    "process.tensor",
)
"""What workers import after the fork, if it is not here."""


def serve() -> Callable[[], Any]:
    """Answer requests; returns only in a worker, with what it is to run. When nobody asks any more, no worker is left."""
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pids = []
            for rank in range(len(request["environ"])):
                pid = os.fork()
                if pid == 0:
                    return worker(request, rank)
                pids.append(pid)
            running.update(pids)
            answer: Any = pids
        else:
            answer = [poll(pid) for pid in request["pids"]]
            running -= {pid for pid, code in zip(request["pids"], answer, strict=True) if code is not None}
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    sys.exit()


def poll(pid: int) -> int | None:
    """The exit code of a worker that has ended (−9 for killed by signal 9), else None."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def worker(request: dict[str, Any], rank: int) -> Callable[[], Any]:
    """Become a worker: own session, own output, own environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{request['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environ"][rank])
    tempfile.tempdir = None  # it may be another one
    enter_namespace()
    if (program := forks.begin()) is not None:
        return program
    module, name = request["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    return lambda: function(rank, request["folder"], **request["arguments"])


if __name__ == "__main__":
    for module in MODULES:  # once for all
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections in workers pass over what all of them share, and copy none of its pages
    asked = socket.socket(fileno=int(sys.argv[1]))
    if os.fork() == 0:
        forks.leave(forks.serve(asked))
    asked.close()
    forks.leave(serve())
