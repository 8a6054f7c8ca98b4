"""`server(role=sum)` against a ring: the mean of four hosts' gradients, with 0, 2 and 4 spare hosts that only sum.

    python benchmarks/summing.py --rate 200mbit

Theory (BytePS, N = 4): 1.25 times as fast as a ring with n = 2, 1.5 times with n = 4. Ring (Gloo's) and sums are timed in turn
within one run; ratios are of medians. Needs root and iproute2 (see netlab.py).

Outside of this benchmark links between machines are always encrypted. Here they are not unless `--encrypt` says so: eight hosts
share this machine's cores, and their ciphers would be the limit instead of the links.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from netlab import Lab
from rich.console import Console
from rich.table import Table

WORKERS, SPARE, PORT = 4, 4, 41000
JOB = bytes(range(1, 17))
BURST_BYTES = 70_000  # the kernel's large segments stay whole: cutting those of eight hosts would keep this machine busy
THEORY = {2: 1.25, 4: 1.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of every host's link, in each direction")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the gradient")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--encrypt", action="store_true", help="with keys, as between real machines")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--server", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.encrypt and (options.worker or options.server):
        open_links()
    if options.server:
        from hocket.drivers.summation import main as serve

        serve(options.server)
        return
    if options.worker:
        work(json.loads(options.worker))
        return
    from hocket.transport import Keys

    with tempfile.TemporaryDirectory() as folder, Lab(WORKERS + SPARE, options.rate, BURST_BYTES) as lab:
        keys = Path(folder) / "job.keys"
        Keys.make().write(keys)
        spare = [f"tcp://{lab.addresses[WORKERS + k]}:{PORT}" for k in range(SPARE)]
        terms = {
            "addresses": lab.addresses[:WORKERS],
            "spare": spare,
            "keys": str(keys) if options.encrypt else None,
            **vars(options),
        }
        program = [sys.executable, __file__, *(["--encrypt"] if options.encrypt else [])]
        me = [*program, "--worker", json.dumps(terms)]
        commands = [["env", f"WORLD_SIZE={WORKERS}", *me] for _ in range(WORKERS)]
        os.environ["HOCKET_JOB"] = JOB.hex()  # other users can read arguments
        for k in range(SPARE):
            server = [*program, "--server", "--stay", "--workers", str(WORKERS), "--port", str(PORT)]
            secret = ["--keys", str(keys)] if options.encrypt else []
            commands.append([*server, "--bind", lab.addresses[WORKERS + k], *secret])
        done = lab.run(commands, timeout_s=600)
        if any(d.returncode for d in done):
            raise SystemExit("\n".join(d.stderr for d in done if d.returncode))
        times = json.loads(done[0].stdout.strip().splitlines()[-1])
    show(times, options)


def open_links() -> None:
    """Lets links of this process go beyond the machine without keys; the lab's namespaces reach nobody else."""
    from hocket.transport import link

    link.stays_here = lambda _: True


def show(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    table = Table(title=f"mean of {options.megabytes:g} MB over {WORKERS} hosts at {options.rate}, median of {options.repetitions}")
    for column in ("", "seconds", "times as fast as the ring", "theory"):
        table.add_column(column, justify="left" if not column else "right")
    ring = statistics.median(times["ring"])
    table.add_row("ring (Gloo)", f"{ring:.3f}", "1.00", "1")
    for servers, theory in THEORY.items():
        median = statistics.median(times[str(servers)])
        table.add_row(f"server({servers}, role=sum)", f"{median:.3f}", f"{ring / median:.2f}", f"{theory:g}")
    Console().print(table)


def work(terms: dict) -> None:
    """One worker: all ways in turn, several times."""
    import torch
    import torch.distributed as dist

    from hocket.cluster.join import join
    from hocket.drivers.summation import Summation

    cluster = join(device="cpu")
    worker = cluster.workers.start
    bind, keys = terms["addresses"][worker], None if terms["keys"] is None else Path(terms["keys"])
    ways = {str(n): Summation(cluster, n, bind, keys, spare=terms["spare"][:n], job=JOB) for n in THEORY}
    values = torch.randn(1, int(terms["megabytes"] * 1e6) // 4)
    expected = cluster.all_gather_metrics(values).mean(0)
    times: dict[str, list[float]] = {"ring": [], **{name: [] for name in ways}}
    for repetition in range(terms["repetitions"] + 1):
        for name in times:
            rows = values.clone()
            dist.barrier()
            begun = time.perf_counter()
            if name == "ring":
                cluster.mean(rows, cluster.world)
            else:
                ways[name].mean(rows)
            took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            torch.testing.assert_close(rows[0], expected)
            if repetition:  # the first round opens connections
                times[name].append(float(took))
    dist.barrier()
    if worker == 0:
        mean = ways[str(max(THEORY))].mean
        mean.begin(mean.program.dismiss)
    for way in ways.values():
        way.close()
    cluster.close()
    if worker == 0:
        print(json.dumps(times))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
