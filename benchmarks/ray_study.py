"""A study over a Ray cluster: the time of its trainings on two nodes, relative to one node with half the cores.

    python benchmarks/ray_study.py [--trainings 8] [--epochs 20] [--nodes 2]

Both clusters are local (`ray.cluster_utils.Cluster`), each node has one core; the study has `--trainings` seeds of one strategy on
4 virtual workers. Seconds are those of the whole command `hocket study --launcher ray`, its start and that of the
processes in which Ray runs trainings included; not those of starting the cluster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUDY = 'title = "Seeds"\nworkers = 4\nbatch_size = 25\nmodel = "mlp"\nlr = 0.1\nstrategies = ["local(4)"]\n'


def seconds(nodes: int, trainings: int, epochs: int) -> float:
    """Of the study on a fresh cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "seeds.toml"
            file.write_text(f"{STUDY}epochs = {epochs}\nseeds = {list(range(trainings))}\n")
            command = [sys.executable, "-m", "hocket.cli.main", "study", str(file), "--launcher", "ray", "--out", f"{folder}/out"]
            begun = time.monotonic()
            environ = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            took = time.monotonic() - begun
            if done.returncode:
                raise SystemExit(f"the study failed: {done.stderr}")
        return took
    finally:
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    one = seconds(1, options.trainings, options.epochs)
    print(f"{options.trainings} trainings on 1 node of 1 core: {one:.1f} s", flush=True)
    more = seconds(options.nodes, options.trainings, options.epochs)
    print(f"{options.trainings} trainings on {options.nodes} nodes of 1 core: {more:.1f} s, {more / one:.2f} of that")


if __name__ == "__main__":
    main()
