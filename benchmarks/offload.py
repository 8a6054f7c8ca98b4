"""Training with weights in slow memory against training in memory: milliseconds per step and resident memory.

    python benchmarks/offload.py --width 2048 --layers 12 --batch-size 64 --steps 6

A perceptron with AdamW, each case in a process of its own with one thread. Resident memory is the peak (VmHWM) less what it was
before the model was built; it includes gradients and activations. Files are likely still in the page cache when they are read
again; ``--cold`` drops them from it before each step, as far as a model larger than the machine's memory would.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

import hocket
from hocket.models import cross_entropy, mlp


def resident_mib(what: str = "VmHWM") -> float:
    """This process's resident memory, at its peak or now (VmRSS)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(what))


def forget(folder: Path) -> None:
    """Drop files from the page cache."""
    for path in folder.glob("hocket-offload-*/*"):
        with suppress(FileNotFoundError):  # renamed just now
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def train(case: str, width: int, layers: int, batch: int, steps: int, folder: Path) -> dict[str, float]:
    """One case, in this process."""
    torch.set_num_threads(1)
    warm = mlp(64, 10, (8,))
    cross_entropy(warm(torch.randn(2, 64)), torch.zeros(2, dtype=torch.int64)).backward()
    torch.optim.AdamW(warm.parameters()).step()  # loads what a first step loads
    before = resident_mib("VmRSS")
    with hocket.deferred():
        model = mlp(64, 10, (width,) * layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if case == "memory":
        from hocket.split.materialize import materialize

        materialize(model)
    else:
        offloaded = hocket.offload(model, optimizer, folder=folder, keep=int(case.split("=")[1].split()[0]))
    x, y = torch.randn(batch, 64), torch.randint(10, (batch,))
    seconds = []
    for _ in range(steps):
        if "cold" in case:
            forget(folder)
        start = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    figures = {"ms": median(seconds[1:]) * 1e3, "mib": resident_mib() - before}
    figures["weights_mib"] = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    if case != "memory":
        offloaded.close(bring_back=False)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 2048), ("layers", 12), ("batch-size", 64), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where files go")
    parser.add_argument("--cold", action="store_true", help="with files dropped from the page cache before each step, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        found = train(arguments.case, arguments.width, arguments.layers, arguments.batch_size, arguments.steps, arguments.folder)
        print(json.dumps(found))
        return
    cases = ["memory", "keep=0", "keep=1", "keep=2", *(["keep=1 cold"] if arguments.cold else [])]
    options = [f"--{k}={v}" for k, v in vars(arguments).items() if k not in ("case", "cold")]
    base: dict[str, float] = {}
    for case in cases:
        command = [sys.executable, __file__, *options, "--case", case]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)
        base = base or figures
        print(
            f"{case:12} {figures['ms']:8.0f} ms per step ({figures['ms'] / base['ms']:.2f}×)  {figures['mib']:8.0f} MiB resident "
            f"({figures['mib'] / base['mib']:.2f}×), weights {figures['weights_mib']:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
