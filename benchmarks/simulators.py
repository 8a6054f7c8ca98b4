"""Hocket's predictions beside Calculon's and mlsysim's, on trainings whose time is published.

    git clone https://github.com/calculon-ai/calculon; python -m venv other; other/bin/pip install mlsysim==0.3.0 pandas psutil
    python benchmarks/simulators.py --calculon calculon --python other/bin/python

The four trainings with full recomputation of Korthikanti 2022 (arXiv:2205.05198, table 5), as Calculon's own validation has them:
GPTs of 22 G to 1 T parameters on hosts of 8 A100, operations split over the 8 GPUs of a host, layers over 1 to 64 hosts in a
pipeline with eight micro-batches of one sequence of 2,048 tokens per stage, interleaved where the paper interleaves. Hocket is told
the preset `infiniband` (A100 at 150 TFLOP/s in practice, from another paper than this one); Calculon its own description of the
A100; mlsysim, on the smallest training alone, its DGX A100 at its default of half the peak.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hocket
from hocket import ClusterSpec
from hocket.prediction.model import of_size


class Case(NamedTuple):
    """A published training: hosts in the pipeline, stages on each, sequences in a mini-batch, seconds of a step."""

    name: str
    parameters: float
    blocks: int
    width: int
    hosts: int
    stages: int
    batch: int
    seconds: float


TOKENS = 2048
CASES = (
    Case("megatron-22B", 22e9, 48, 6144, 1, 1, 4, 1.42),
    Case("gpt3-175B", 175e9, 96, 12288, 8, 3, 64, 18.13),
    Case("turing-530B", 530e9, 105, 20480, 35, 3, 280, 49.05),
    Case("megatron-1T", 1e12, 128, 25600, 64, 1, 512, 94.42),
)
SMALLEST = CASES[0]
MLSYSIM = f"""
from mlsysim.core.units import Q_
from mlsysim.engine.solvers.distributed import DistributedModel
from mlsysim.models.types import TransformerWorkload
from mlsysim.systems.registry import Fabrics, Nodes
from mlsysim.systems.types import Fleet

fleet = Fleet(name="one host", node=Nodes.DGX_A100, count=1, fabric=Fabrics.InfiniBand_HDR)
model = TransformerWorkload(
    name="22G", architecture="Transformer", parameters=Q_({SMALLEST.parameters}, "count"), layers={SMALLEST.blocks},
    hidden_dim={SMALLEST.width}, heads=64,
    inference_flops=Q_({2 * SMALLEST.parameters}, "flop"),
)
found = DistributedModel().solve(
    model, fleet, batch_size={SMALLEST.batch}, tp_size=8, seq_len={TOKENS}, activation_recomputation=True
)
print(found.step_latency_total.to("s").magnitude)
"""


def ours(case: Case) -> float:
    """Seconds by Hocket's cost model."""
    tokens = case.batch * TOKENS
    # Forward twice and backward: 8 operations per parameter and token. Attention and MLP of each block are a pair of layers each;
    # the forward pass, its second run and the backward pass exchange activations: one and a half times what a plain step does.
    size = of_size(case.parameters, case.batch, layers=3 * case.blocks, activation_bytes=tokens * case.width * 2.0)
    size = replace(size, flops=8 * case.parameters * tokens)
    spec = replace(ClusterSpec.parse("infiniband"), jitter=0.0)
    mesh: dict[str, Any] = {"meshes": [f"pipeline={case.hosts},tensor=8"]}
    if case.hosts > 1:
        mesh |= {
            "num_microbatches": case.batch,
            "stages_per_rank": case.stages,
            "schedule": "interleaved" if case.stages > 1 else "1f1b",
        }
    return hocket.predict(size, spec, ["bulk"], 8 * case.hosts, batch_size=case.batch, **mesh).rows[0].step_s


def calculon(case: Case, folder: Path, python: Path) -> float:
    """Seconds by Calculon, from a checkout of it, with a Python that has pandas."""
    files = [f"models/{case.name}.json", f"validation/seqsel/tab5/{case.name}_full.json", "systems/a100_80g.json"]
    command = [str(python), "bin/calculon", "llm", *files, "-"]
    said = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=True
    ).stdout
    return float(re.search(r"Batch total time: ([\d.]+)", said)[1])  # type: ignore[index]


def mlsysim(python: Path) -> float:
    """Seconds by mlsysim, in an environment that has it."""
    done = subprocess.run([str(python), "-c", MLSYSIM], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Predictions of three simulators for one published training.")
    parser.add_argument("--calculon", type=Path, help="a checkout of Calculon")
    parser.add_argument("--python", type=Path, help="a Python that has mlsysim and pandas")
    parser.add_argument("--no-mlsysim", action="store_true", help="leave mlsysim out")
    options = parser.parse_args()
    for case in CASES:
        found = {"Hocket": ours(case)}
        if options.calculon is not None and options.python is not None:
            found["Calculon"] = calculon(case, options.calculon, options.python)
        if options.python is not None and case is SMALLEST and not options.no_mlsysim:
            found["mlsysim"] = mlsysim(options.python)
        print(f"{case.name}, measured (published): {case.seconds} s")
        for name, seconds in found.items():
            print(f"  {name:<10} {seconds:.3f} s  {seconds / case.seconds - 1:+.1%}")


if __name__ == "__main__":
    main()
