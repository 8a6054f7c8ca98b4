"""Trains a wide perceptron with little room for its data; run as ``python limited_worker.py MIB MESH WIDTH LAYERS STEPS``.

Alone (mesh ``data=1``) or as one of several processes with torchrun's variables. First it makes a step with a tiny model, so that
all libraries are loaded; from there on its address space may grow by MIB. What the libraries take themselves does not count: a CUDA
build of PyTorch maps several GiB where a CPU build maps half of one. It prints one line of JSON: by how many MiB the address space
had grown after the set-up and at its peak, and the losses. Out of memory, it ends with exit code 3 and says how far it came.
"""

from __future__ import annotations

import json
import os
import resource
import sys

# Before torch starts threads: each has a stack, and each arena of glibc reserves 64 MiB.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # read by glibc at the start of the process: set it outside, too


def address_space(what: str) -> int:
    """MiB of address space."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(what))


def step_once() -> None:
    """Have everything loaded that a step loads when it is first made: kernels, the autograd engine, the optimiser."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
    optimizer.step()


def main(mib: int, mesh: str, width: int, layers: int, steps: int) -> None:
    import torch
    from torch.nn import functional as F

    import hocket
    from hocket.models import mlp

    torch.set_num_threads(1)
    hocket.init(device="cpu", seed=1)
    step_once()
    before, at_import = address_space("VmSize"), address_space("VmPeak")
    resource.setrlimit(resource.RLIMIT_AS, ((before + mib) << 20,) * 2)
    report = {"before": before, "stage": "building", "losses": []}
    try:
        with hocket.deferred():
            model = mlp(64, 10, (width,) * layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        report["weights"] = sum(p.numel() * p.element_size() for p in model.parameters()) >> 20
        split = hocket.Mesh.parse(mesh)
        x, y = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8)
        pipeline = hocket.Pipeline(loss=F.cross_entropy)
        if split.pipeline > 1:
            pipeline = hocket.Pipeline(loss=F.cross_entropy, sample=x[:2], num_microbatches=2)
        job = hocket.parallelize(model, optimizer, mesh=split, pipeline=pipeline)
        report["set up"] = address_space("VmSize") - before
        for step in range(steps):
            report["stage"] = f"step {step + 1}"
            report["losses"].append(job.train(x, y).item())
        report["stage"] = "done"
    except (RuntimeError, MemoryError) as error:  # what torch raises without memory, and Python
        report["error"] = str(error).splitlines()[0][:120]
    peak = address_space("VmPeak")  # that of loading the libraries, if it was not reached again
    print(json.dumps({**report, "peak": (peak if peak > at_import else address_space("VmSize")) - before}), flush=True)
    if "error" in report:
        sys.stdout.flush()
        os._exit(3)  # others of the job may wait for this one


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
