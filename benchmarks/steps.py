"""Step time of ways to train together, relative to computing alone, over links of a given rate.

    python benchmarks/steps.py --hosts 4 --rate 100mbit --model cnn --methods compute ddp ddp+powersgd "hocket:local(16) + gossip"
    python benchmarks/steps.py --hosts 4 --rate 50mbit --model gpt --methods compute ddp torchft:diloco "hocket:diloco(4) + sign"

All methods run in the same processes of one lab (see netlab.py), one worker per host, one process group for the whole run. A round
gives each method a block of steps, so that drift of the machine hits all alike, and there are several rounds. Each block starts
from a fresh model, warms up untimed (a method with a period sees one whole period), and times a multiple of that period.
A block's time is that of its slowest worker. Ratios are taken within a round; all figures are medians over rounds.
Bytes are those of the hosts' interfaces, headers and acknowledgements included. Only ratios within one run mean anything:
the hosts share this machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netlab import INTERFACE, Lab
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, TEXTS = 100, 4
WARM_UP = 3
PERIOD = 16
ONE_BUCKET_MB = 1000
STUDY = (
    "bulk + allreduce",
    "bulk + gossip + exchange=gradients",
    "bulk + gossip + threshold(0.01, feedback=False) + exchange=gradients",
    "local(4)",
    "local(4) + gossip + exchange=gradients",
    "local(4) + gossip + threshold(0.01, feedback=False) + exchange=gradients",
    "local(16)",
    "local(16) + gossip + exchange=gradients",
    "local(16) + gossip + threshold(0.01, feedback=False) + exchange=gradients",
    "local(32)",
)


@dataclass
class Method:
    """A method under test on this worker: `step` does one training step, `finish` takes it apart, `sent` is its own byte count."""

    step: Callable[[], None]
    finish: Callable[[], None] = lambda: None
    sent: Callable[[], float] | None = None


@dataclass
class Block:
    """One timed block, as all workers agree on it; bytes are means over hosts."""

    method: str
    steps: int
    ms_per_step: float
    sent_bytes: float
    ledger_bytes: float | None


@dataclass
class Row:
    """A method's line in the table; None where there is nothing to compare with."""

    method: str
    steps: int = 0
    ms_per_step: float | None = None
    to_compute: float | None = None
    to_ddp: float | None = None
    sent_mb: float | None = None
    ledger_mb: float | None = None
    ledger_to_counter: float | None = None
    rounds_ms: list[float] = field(default_factory=list)
    refused: str | None = None


def cnn() -> nn.Module:
    """The study's small network for 32×32×3 images, 545,098 parameters."""
    features = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp() -> nn.Module:
    """Much to send for little to compute: 4,206,602 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def gpt() -> nn.Module:
    """A GPT-2 of 6 layers of width 384 on bytes, 10,818,432 parameters."""
    from hocket.models.gpt import gpt as build_gpt

    return build_gpt(256, context=256, layers=6, heads=6, width=384)


MODELS = {"cnn": cnn, "mlp": mlp, "gpt": gpt}


class Task:
    """This worker's model, optimiser and data: the same weights for all, other images or texts for each."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]()
        params, generator = self.model.parameters(), torch.Generator().manual_seed(dist.get_rank())
        self.optimizer: Any = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        self._x = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self._y = torch.randint(10, (BATCH,), generator=generator)
        if model == "gpt":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self._x, self._y = torch.randint(256, (2, TEXTS, 256), generator=generator)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self._x).flatten(0, -2), self._y.flatten()).backward()
        self.optimizer.step()


def compute(task: Task) -> Method:
    """No communication."""
    return Method(task.step)


def ddp(task: Task, hook: Callable[..., Any] | None = None, state: Any = None, bucket_cap_mb: int | None = None) -> Method:
    """PyTorch's DistributedDataParallel as it comes, or with one of its communication hooks."""
    wrapped = DistributedDataParallel(task.model, bucket_cap_mb=bucket_cap_mb)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    task.model = wrapped
    return Method(task.step)


def ddp_fp16(task: Task) -> Method:
    """DDP with gradients sent in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return ddp(task, fp16_compress_hook)


def ddp_powersgd(task: Task) -> Method:
    """DDP with PowerSGD of rank 2. One bucket: on Gloo the hook was seen to crash with several."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return ddp(task, powerSGD_hook, state, ONE_BUCKET_MB)


def postlocal(task: Task) -> Method:
    """PyTorch's PostLocalSGDOptimizer: averages the weights every 16 steps, after the step."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    # A group of this worker alone: the default takes all workers of what it believes to be one machine.
    alone, _ = dist.new_subgroups(group_size=1)
    method = ddp(task, post_localSGD_hook, PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2))
    task.optimizer = PostLocalSGDOptimizer(task.optimizer, PeriodicModelAverager(period=PERIOD, warmup_steps=2))
    method.finish = lambda: dist.destroy_process_group(alone)
    return method


def torchft(task: Task, kind: str) -> Method:
    """torchft's ways on Gloo, if torchft-nightly is installed. Its lighthouse is on the first host, and every worker is a replica
    with a manager and a store of its own."""
    os.environ.setdefault("RUST_LOG", "error")
    named, socket.gethostname = socket.gethostname, _own_address  # by which its stores are called: a lab's hosts share one name
    from torchft import DistributedDataParallel as TolerantDDP
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    rank, world = dist.get_rank(), dist.get_world_size()
    here = _own_address()
    lighthouse = LighthouseServer(bind=f"{here}:0", min_replicas=world, join_timeout_ms=1000) if rank == 0 else None
    port = None if lighthouse is None else lighthouse.address().rsplit(":", 1)[1]
    address = next(f"http://{host}:{found}" for host, found in _gather((here, port)) if found)
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=world,
        use_async_quorum=kind == "ddp",
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"worker{rank}",
        hostname=here,
        init_sync=False,
    )

    def finish() -> None:
        manager.shutdown(wait=False)
        group.shutdown()
        socket.gethostname = named
        dist.barrier()  # the lighthouse goes last
        if lighthouse is not None:
            lighthouse.shutdown()

    if kind == "ddp":
        task.model = TolerantDDP(manager, task.model)
        task.optimizer = Optimizer(manager, task.optimizer)
        return Method(task.step, finish)
    if kind == "local":
        together: Any = LocalSGD(manager, task.model, task.optimizer, PERIOD)
    else:
        outer = torch.optim.SGD(task.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        together = DiLoCo(manager, [task.model], task.optimizer, outer, PERIOD, pin_memory=False, use_bucketization=True)
    together.__enter__()
    return Method(task.step, lambda: (together.__exit__(None, None, None), finish())[1])


def hocket_strategy(task: Task, strategy: str) -> Method:
    """Hocket with a strategy in its notation."""
    job = _hocket().parallelize(task.model, task.optimizer, strategy)
    # The ledger's bytes are the sum over workers, the interfaces' those of one host.
    return Method(task.step, job.detach, lambda: job.summary(all_workers=True)["bytes_sent"] / dist.get_world_size())


@functools.cache
def _hocket() -> Any:
    """Imported only when asked for: the other methods can be measured without it. Adopts the process group that is there."""
    import hocket

    hocket.init()
    return hocket


METHODS: dict[str, Callable[[Task], Method]] = {
    "compute": compute,
    "ddp": ddp,
    "ddp+fp16": ddp_fp16,
    "ddp+powersgd": ddp_powersgd,
    "postlocal": postlocal,
    "torchft:ddp": functools.partial(torchft, kind="ddp"),
    "torchft:local": functools.partial(torchft, kind="local"),
    "torchft:diloco": functools.partial(torchft, kind="diloco"),
}


def build(name: str, model: str) -> Method:
    """The method of that name, on a fresh model."""
    task = Task(model)
    if name.startswith("hocket:"):
        return hocket_strategy(task, name.removeprefix("hocket:"))
    return METHODS[name](task)


def period_of(name: str) -> int:
    """Steps from one exchange to the next.

    >>> period_of("hocket:local(4) + gossip"), period_of("postlocal"), period_of("ddp")
    (4, 16, 1)
    """
    if name in ("postlocal", "torchft:local", "torchft:diloco"):
        return PERIOD
    match = re.search(r"(?:local|diloco|stale)\(\s*(?:p\s*=\s*)?(\d+)", name)
    return int(match[1]) if match else 1


def expand(methods: Sequence[str]) -> list[str]:
    """Method names with the shorthand `study` written out, each once; ValueError for an unknown one."""
    names: list[str] = []
    for name in methods:
        names += [f"hocket:{strategy}" for strategy in STUDY] if name == "study" else [name]
    for name in names:
        if name not in METHODS and not name.startswith("hocket:"):
            raise ValueError(f"unknown method {name!r}: use {', '.join(METHODS)}, study or hocket:<strategy>")
    return list(dict.fromkeys(names))


def block_steps(period: int, asked: int, step_s: float, limit_s: float) -> int:
    """How many steps to time: a multiple of the period, at most `asked` and within the limit, but one period or two steps at least.

    >>> block_steps(16, 40, 0.1, 20), block_steps(1, 32, 2.4, 20), block_steps(1, 32, 60, 20)
    (32, 8, 2)
    """
    steps = min(asked, int(limit_s / step_s))
    return max(steps - steps % period, period, 2)


def worker(options: argparse.Namespace) -> None:
    """One host's part: runs every block, and worker 0 writes what all measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    planned: dict[str, int] = {}
    for turn in range(options.rounds):
        for name in options.methods:
            if name in refused:
                continue
            outcome = run_block(name, options, planned)
            _say(f"round {turn + 1} of {options.rounds}, {name}: {_line(outcome)}")
            if isinstance(outcome, str):
                refused[name] = outcome
            else:
                results.append({"round": turn, **asdict(outcome)})
    if dist.get_rank() == 0:
        Path(options.result).write_text(json.dumps({"blocks": results, "refused": refused}))
    dist.barrier()
    dist.destroy_process_group()


def run_block(name: str, options: argparse.Namespace, planned: dict[str, int]) -> Block | str:
    """Builds, warms up, times and takes apart one method; the reason when it cannot be built."""
    gc.collect()
    method, refusal = None, None
    try:
        method = build(name, options.model)
    except Exception as error:  # whatever a method cannot do, the others are still measured
        refusal = f"{type(error).__name__}: {error}".splitlines()[0]
    refusal = next((text for text in _gather(refusal) if text), None)
    if method is None or refusal is not None:
        return refusal or "refused"
    period = period_of(name)
    step_s = _warm_up(method, period)
    steps = planned.setdefault(name, block_steps(period, options.steps, step_s, options.limit_s))
    block = _timed(name, method, steps)
    method.finish()
    return block


def _warm_up(method: Method, period: int) -> float:
    """Seconds per step, over one whole period after the first steps."""
    for _ in range(WARM_UP if period == 1 else 2):
        method.step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(max(period, 2)):
        method.step()
    return max(_gather((time.perf_counter() - start) / max(period, 2)))


def _timed(name: str, method: Method, steps: int) -> Block:
    ledger_before = None if method.sent is None else method.sent()
    dist.barrier()
    sent_before = _interface_bytes()
    start = time.perf_counter()
    for _ in range(steps):
        method.step()
    seconds = time.perf_counter() - start
    dist.barrier()
    sent = _interface_bytes() - sent_before
    ledger = None if method.sent is None or ledger_before is None else method.sent() - ledger_before
    measured = _gather((seconds, sent, ledger))
    return Block(
        method=name,
        steps=steps,
        ms_per_step=1000 * max(seconds for seconds, _, _ in measured) / steps,
        sent_bytes=statistics.fmean(sent for _, sent, _ in measured) / steps,
        ledger_bytes=None if ledger is None else statistics.fmean(ledger for _, _, ledger in measured) / steps,
    )


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing
        return str(s.getsockname()[0])


def _interface_bytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _line(outcome: Block | str) -> str:
    return outcome if isinstance(outcome, str) else f"{outcome.ms_per_step:.1f} ms per step over {outcome.steps} steps"


def rows(methods: Sequence[str], blocks: Sequence[dict[str, Any]], refused: dict[str, str]) -> list[Row]:
    """The table's lines: medians over rounds, ratios within a round."""
    times = {(block["method"], block["round"]): block["ms_per_step"] for block in blocks}
    return [_row(name, [block for block in blocks if block["method"] == name], times, refused.get(name)) for name in methods]


def _row(name: str, blocks: list[dict[str, Any]], times: dict[tuple[str, int], float], refused: str | None) -> Row:
    if not blocks:
        return Row(name, refused=refused)

    def ratio(base: str) -> float | None:
        pairs = [(block["ms_per_step"], times.get((base, block["round"]))) for block in blocks]
        return _median([mine / other for mine, other in pairs if other])

    sent = statistics.median(block["sent_bytes"] for block in blocks)
    ledger = _median([block["ledger_bytes"] for block in blocks if block["ledger_bytes"] is not None])
    rounds_ms = [block["ms_per_step"] for block in blocks]
    return Row(
        method=name,
        steps=blocks[0]["steps"],
        ms_per_step=statistics.median(rounds_ms),
        to_compute=ratio("compute"),
        to_ddp=ratio("ddp"),
        sent_mb=sent / 1e6,
        ledger_mb=None if ledger is None else ledger / 1e6,
        ledger_to_counter=None if ledger is None or sent == 0 else ledger / sent,
        rounds_ms=rounds_ms,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def table(lines: Sequence[Row]) -> str:
    """The rows as text, one line each."""
    width = max(len("method"), *(len(line.method) for line in lines))
    heads = ("ms/step", "/compute", "/ddp", "MB/step", "ledger MB", "ledger/if", "steps")
    text = [f"{'method':<{width}}  " + "  ".join(f"{head:>9}" for head in heads)]
    for line in lines:
        if line.refused is not None:
            text.append(f"{line.method:<{width}}  refused: {line.refused}")
            continue
        ratios = [_cell(line.ms_per_step, ".1f"), _cell(line.to_compute, ".3f"), _cell(line.to_ddp, ".3f")]
        traffic = [_cell(line.sent_mb, ".4f"), _cell(line.ledger_mb, ".4f"), _cell(line.ledger_to_counter, ".3f")]
        text.append(f"{line.method:<{width}}  " + "  ".join(ratios + traffic + [f"{line.steps:>9}"]))
    return "\n".join(text)


def _cell(value: float | None, form: str) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9{form}}"


def on_hosts(file: str, arguments: Sequence[str], options: argparse.Namespace) -> Any:
    """Starts the lab, runs a benchmark's file as worker on every host, and returns the result that worker 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, Lab(options.hosts, options.rate) as lab:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(file).resolve()), "--worker", "--result", str(result), *arguments]
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hosts without a name server make torch warn that they have no names
        done = lab.run([command] * options.hosts, quiet, timeout_s=options.timeout_s, follow=0)
        failed = {host: process for host, process in enumerate(done) if process.returncode}
        if failed:
            words = [f"host {host}, exit code {process.returncode}: {process.stderr[-1500:]}" for host, process in failed.items()]
            raise RuntimeError("workers failed\n" + "\n".join(words))
        return json.loads(result.read_text())


def master(options: argparse.Namespace) -> list[Row]:
    """Measures on all hosts and returns the table."""
    arguments = ["--model", options.model, "--steps", str(options.steps), "--rounds", str(options.rounds)]
    arguments += ["--limit-s", str(options.limit_s), "--methods", *options.methods]
    measured = on_hosts(__file__, arguments, options)
    return rows(options.methods, measured["blocks"], measured["refused"])


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def write_json(path: Path, run: dict[str, Any], indent: int | None = None) -> None:
    """In one piece or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(run, indent=indent) + "\n")
    draft.replace(path)


def write(path: Path, options: argparse.Namespace, lines: Sequence[Row]) -> None:
    """The run as JSON."""
    run = {
        "benchmark": "steps",
        "hosts": options.hosts,
        "rate": options.rate,
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in MODELS[options.model]().parameters()),
        "batch": BATCH,
        "rounds": options.rounds,
        "machine": machine(),
        "rows": [asdict(line) for line in lines],
    }
    write_json(path, run, indent=1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Step time of ways to train together, relative to computing alone.")
    parser.add_argument("--hosts", type=int, default=4, help="one worker on each (default 4)")
    parser.add_argument("--rate", help="of each link and direction, such as 100mbit or 1gbit (default: unlimited)")
    parser.add_argument("--model", choices=list(MODELS), default="cnn")
    parser.add_argument("--steps", type=int, default=32, help="timed steps per block at most (default 32)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks per method (default 3)")
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds per block at most, whole periods kept (default 20)")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="seconds for the whole run at most (default 3600)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"{', '.join(METHODS)}, hocket:<strategy>, study")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        options.methods = expand(options.methods)
    except ValueError as error:
        parser.error(str(error))
    for name in ("hosts", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out: the folder {options.out.parent} does not exist, make it first")
    return options


def main() -> None:
    """The command."""
    options = parse()
    if options.worker:
        return worker(options)
    try:
        lines = master(options)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise SystemExit(f"steps: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"{options.hosts} hosts, {options.rate or 'unlimited'} links, {options.model}, batch {BATCH}, {options.rounds} rounds")
    print(table(lines))
    if options.out is not None:
        write(options.out, options, lines)


if __name__ == "__main__":
    main()
