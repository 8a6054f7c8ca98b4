"""Trains a wide perceptron under a limit on its address space; run as ``python limited_worker.py GIB MESH WIDTH LAYERS STEPS``.

Alone (mesh ``data=1``) or as one of several processes with torchrun's variables. It prints one line of JSON: the peak of its
address space, that after the set-up, and the losses. Out of memory, it ends with exit code 3 and says how far it came.
"""

from __future__ import annotations

import json
import os
import resource
import sys

# Before torch starts threads: each has a stack, and each arena of glibc reserves 64 MiB.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # read by glibc at the start of the process: set it outside, too


def address_space(what: str = "VmPeak") -> int:
    """MiB of address space."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith(what))


def main(gib: float, mesh: str, width: int, layers: int, steps: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30),) * 2)
    import torch
    from torch.nn import functional as F

    import hocket
    from hocket.models import mlp

    torch.set_num_threads(1)
    hocket.init(device="cpu", seed=1)
    report = {"imported": address_space("VmSize"), "stage": "building", "losses": []}
    try:
        with hocket.deferred():
            model = mlp(64, 10, (width,) * layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        report["weights"] = sum(p.numel() * p.element_size() for p in model.parameters()) >> 20
        split = hocket.Mesh.parse(mesh)
        x, y = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8)
        options = (
            {"loss": F.cross_entropy, "sample": x[:2], "num_microbatches": 2} if split.pipeline > 1 else {"loss": F.cross_entropy}
        )
        job = hocket.parallelize(model, optimizer, mesh=split, **options)
        report["set up"] = address_space("VmSize")
        for step in range(steps):
            report["stage"] = f"step {step + 1}"
            report["losses"].append(job.train(x, y).item())
        report["stage"] = "done"
    except (RuntimeError, MemoryError) as error:  # what torch raises without memory, and Python
        report["error"] = str(error).splitlines()[0][:120]
    print(json.dumps({**report, "peak": address_space()}), flush=True)
    if "error" in report:
        sys.stdout.flush()
        os._exit(3)  # others of the job may wait for this one


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6]))
