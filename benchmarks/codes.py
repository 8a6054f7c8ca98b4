"""Bytes and errors of codes on random values, without training.

python benchmarks/codes.py              bytes of a message of 4 million values, by code, and its relative squared error
python benchmarks/codes.py --indices    bits per index in Rice's code, by density
python benchmarks/codes.py --bins       relative squared error of bins(2) beside other codes of two bits
python benchmarks/codes.py --exchange   operator calls and time of one exchange of 16 virtual workers (--device cuda)
python benchmarks/codes.py --speed      time to encode and decode, in copies of the row (--device cuda --values 100000000)
python benchmarks/codes.py --defaults   what one exchange takes of a worker's core: the cost model's defaults

``--speed`` measures `dgc` and `demo` with all that a worker does before it sends: momentum, selection, its own decoding, residual.
On CUDA it also counts the kernels and copies that the device is given.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributions import Laplace, StudentT
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hocket import Strategy
from hocket.cluster.layout import layout_of
from hocket.cluster.message import Message
from hocket.cluster.virtual import VirtualCluster
from hocket.compression import Codec
from hocket.compression.base import Compressor, Context, Mixed, State
from hocket.models import cnn
from hocket.prediction import probe
from hocket.programs.two_stage import program_for

SIZE = 1 << 22
Key = TypeVar("Key")
CODES = ["cast(bf16)", "cast(fp8)", "cast(e3m0)", "qsgd(4)", "bins(2)", "sign", "topk(0.015625)", "topk(64/4096)"]
CODES += ["topk(64/4096, indices=plain) | bins(2)", "topk(64/4096) | bins(2)"]
HERE = Context(0, 0, 0, 0, torch.arange(1))


def codec(text: str) -> Codec:
    found = Strategy.parse(text).compression
    assert isinstance(found, Codec)
    return found


def through(text: str, rows: Tensor) -> tuple[int, Tensor]:
    """The bytes of the first row's message, and the rows as receivers decode them."""
    code = codec(text)
    message, _ = code.encode(rows, torch.arange(len(rows)), {}, HERE)
    return int(message.payload_bytes()[0]), code.decode(message, rows.shape[1], HERE)


def error(decoded: Tensor, rows: Tensor) -> float:
    return float((decoded - rows).double().square().sum() / rows.double().square().sum())


def sizes() -> None:
    rows = torch.randn(1, SIZE)
    print("| | bytes | times fewer than fp32 | squared error |\n|---|---|---|---|")
    for text in CODES:
        count, decoded = through(text, rows)
        label = text.replace("|", r"\|")
        print(f"| `{label}` | {count:,} | {4 * SIZE / count:.1f} | {error(decoded, rows):.3f} |")


def indices() -> None:
    print("| density | bits per index | entropy |\n|---|---|---|")
    rows = torch.randn(1, SIZE)
    for text, p in [("64/4096", 1 / 64), *((str(d), d) for d in (0.5, 0.1, 0.01, 0.001))]:
        values = math.ceil(p * SIZE)
        bits = 8 * (through(f"topk({text}, indices=rice)", rows)[0] - 4 * values) / values
        print(f"| {text} | {bits:.2f} | {-math.log2(p) - (1 - p) / p * math.log2(1 - p):.2f} |")


def equal_bins(rows: Tensor, means: bool) -> Tensor:
    """Four equal bins over 6σ around the mean; a bin stands for its centre or for the mean of its values."""
    count, mean = 4, rows.mean(1, keepdim=True)
    width = 6 * rows.std(1, keepdim=True) / count
    codes = ((rows - mean) / width + count / 2).floor().clamp(0, count - 1)
    if not means:
        return mean + (codes + 0.5 - count / 2) * width
    members = torch.stack([codes == k for k in range(count)])
    levels = (members * rows).sum(2, keepdim=True) / members.sum(2, keepdim=True).clamp(min=1)
    return (members * levels).sum(0)


def bins() -> None:
    sources = {"normal": torch.randn, "Laplace": lambda *shape: Laplace(0.0, 1.0).sample(shape)}
    sources["Student's t, 3 degrees"] = lambda *shape: StudentT(3.0).sample(shape)
    print("| values | `bins(2)` | equal bins, means | equal bins, centres | `qsgd(2)` |\n|---|---|---|---|---|")
    for chosen in (False, True):
        for name, draw in sources.items():
            rows = draw(64, 8 * 4096) if chosen else draw(64, 512)
            if chosen:
                rows = rows.view(64, 8, 4096).gather(2, rows.view(64, 8, 4096).abs().topk(64, 2).indices).flatten(1)
            found = [through("bins(2)", rows)[1], equal_bins(rows, True), equal_bins(rows, False), through("qsgd(2)", rows)[1]]
            cells = " | ".join(f"{error(decoded, rows):.4f}" for decoded in found)
            print(f"| {name}{', 64 largest of 4,096' if chosen else ''} | {cells} |")


SPEED = [
    "cast(bf16)",
    "cast(fp8)",
    "cast(e3m0)",
    "qsgd(2)",
    "qsgd(3)",
    "qsgd(4)",
    "qsgd(8)",
    "ternary",
    "natural",
    "sign",
    "bins(2)",
]
SPEED += ["topk(0.01)", "topk(64/4096)", "threshold(keep=0.01)", "randomk(0.01)", "topk(0.01) | qsgd(4)"]
SPEED += ["lowrank(4)", "dgc(0.01)", "demo(32)"]
Works = tuple[Callable[[], object], Callable[[], object]]


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """The shortest of several times, after one that does not count; on CUDA of ten calls in a row, as the device sees them."""
    found = []
    for _ in range(repeats + 1):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(10):
                work()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 10_000)
        else:
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
    return min(found[1:])


class Alone:
    """The mean of one worker alone, which decodes its own message; the message is kept."""

    uniform = True

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def mean(self, rows: Tensor, context: Context) -> Tensor:
        return rows

    def coded(self, codec: Codec, rows: Tensor, state: State, context: Context, wants_sent: bool = True) -> Mixed:
        message, state = codec.encode(rows, self.keys, state, context)
        self.last: tuple[Codec, Message, int] = codec, message, rows.shape[1]
        sent = codec.decode(message, rows.shape[1], context)
        return Mixed(sent, sent, state)


def works_of(text: str, rows: Tensor, keys: Tensor) -> Works:
    """What encodes the rows, and what decodes their message."""
    code, size = Strategy.parse(text).compression, rows.shape[1]
    if isinstance(code, Codec):
        message, state = code.encode(rows, keys, {}, HERE)
        return partial(code.encode, rows, keys, state, HERE), partial(code.decode, message, size, HERE)
    assert isinstance(code, Compressor)
    channel = Alone(keys)
    state = code.mean(rows, channel, {}, HERE).state
    inner, message, width = channel.last
    return partial(code.mean, rows, channel, state, HERE), lambda: code.decoded(inner.decode(message, width, HERE), size, HERE)


def launches(work: Callable[[], object]) -> int:
    """Kernels and copies that one call gives to the CUDA device."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in found.events())


def speed(device: str, values: int, count: int) -> None:
    """In copies of the rows: into memory that is there, and into new memory, which encoding and decoding need as well."""
    torch.set_num_threads(1)
    rows, keys = torch.randn(count, values, device=device), torch.arange(count, device=device)
    there, cuda = torch.empty_like(rows), device == "cuda"
    works: dict[tuple[str, str], Callable[[], object]] = {("copy", ""): lambda: there.copy_(rows), ("clone", ""): rows.clone}
    for text in SPEED:
        works[text, "encode"], works[text, "decode"] = works_of(text, rows, keys)
    took = shortest(works, device)
    copy, clone = took["copy", ""], took["clone", ""]
    print(f"{count} rows of {values:,} values, {device}: a copy takes {1e3 * copy:.2f} ms, into new memory {1e3 * clone:.2f} ms")
    columns = ["copies", "new copies", *(["launches"] if cuda else [])]
    heads = ["", *(head for way in ("encode", "decode") for head in (f"{way}, ms", *columns))]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for text in SPEED:
        cells = ["`" + text.replace("|", r"\|") + "`"]
        for key in ((text, "encode"), (text, "decode")):
            cells += [f"{1e3 * took[key]:.2f}", f"{took[key] / copy:.1f}", f"{took[key] / clone:.1f}"]
            cells += [str(launches(works[key]))] if cuda else []
        print(f"| {' | '.join(cells)} |", flush=True)
    if not cuda:
        print("HOCKET_COMPILE=0 before the command leaves compiled codes out: the same codes as PyTorch operations.")


def shortest(works: dict[Key, Callable[[], object]], device: str, rounds: int = 5) -> dict[Key, float]:
    """The shortest time of each work, in rounds of all: others may use this machine, too."""
    found = [{key: seconds(work, device, 3) for key, work in works.items()} for _ in range(rounds)]
    return {key: min(each[key] for each in found) for key in works}


def defaults(rounds: int = 60, repeats: int = 6) -> None:
    """``a`` and ``b`` of ``a + b·values``: exchanges as `hocket probe` makes them, of a worker with one thread of a CPU.

    For a busy machine: processor time of the thread, the shortest of some exchanges in a row, in rounds of all codes.
    """
    torch.set_num_threads(1)
    few, many = 1 << 12, 1 << 20
    model = nn.Linear(1 << 10, 1 << 10, bias=False)
    coders = {(code, values): probe.Coder(code, model, 4, values) for code in probe.CODES for values in (few, many)}
    took = dict.fromkeys(coders, math.inf)
    for _ in range(rounds):
        for key, coder in coders.items():
            for turn in range(repeats):
                coder.refresh()
                begun = time.thread_time()
                coder()
                took[key] = min(took[key], time.thread_time() - begun if turn else math.inf)
    print(f"4 workers, {few:,} and {many:,} values, one thread, the shortest of {rounds * (repeats - 1)}")
    print("| | per exchange, us | per value, ns |\n|---|---:|---:|")
    for code in probe.CODES:
        each = (took[code, many] - took[code, few]) / (many - few)
        print(f"| `{code}` | {1e6 * max(0.0, took[code, few] - each * few):.0f} | {1e9 * each:.2g} |")


EXCHANGES = ["bulk", "bulk + qsgd(4)", "bulk + ternary", "bulk + sign", "bulk + topk(0.01)", "bulk + topk(0.01) | qsgd(4)"]
EXCHANGES += ["bulk + topk(64/4096)", "bulk + threshold(keep=0.01)", "bulk + dgc(0.01)", "local(1) + qsgd(4)"]


class Calls(TorchDispatchMode):
    """Counts calls of PyTorch's operators, but for those that only give another view of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def exchanges(device: str, values: int, count: int) -> None:
    """Gradients (or weights) of ``count`` virtual workers in, their mean out: what the small CNN's training does once per step."""
    torch.set_num_threads(1)
    model = cnn((3, 32, 32), 10) if not values else nn.Linear(values, 1, bias=False)
    workers = {}
    for text in EXCHANGES:
        layout, cluster = layout_of(model.to(device).named_parameters()), VirtualCluster(count, device)
        weights, grads = ([b.empty(count).normal_() for b in layout.buckets] for _ in range(2))
        program = program_for(Strategy.parse(text), layout, cluster, weights)

        def step(program: Any = program, weights: Any = weights, grads: Any = grads) -> None:
            for b, rows in enumerate(grads):
                program.gradient_ready(b, rows)
            program.gradients_done()
            program.before_update(weights)
            program.after_update(weights)

        for _ in range(3):
            step()
        with Calls() as calls:
            step()
        workers[text] = step, calls.count
    size = layout.parameters
    print(f"{count} workers of {size:,} parameters in {len(layout.buckets)} buckets, {device}")
    print("| | operator calls | ms |\n|---|---|---|")
    took = shortest({text: step for text, (step, _) in workers.items()}, device)
    for text, (_, calls) in workers.items():
        label = text.replace("|", r"\|")
        print(f"| `{label}` | {calls} | {1e3 * took[text]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--indices", action="store_true")
    parser.add_argument("--bins", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for --speed, --exchange")
    parser.add_argument("--values", type=int, help="of a row, for --speed (4,194,304) and --exchange (those of the small CNN)")
    parser.add_argument("--rows", type=int, help="for --speed (1) and --exchange (16)")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.defaults:
        return defaults()
    if options.speed:
        return speed(options.device, options.values or SIZE, options.rows or 1)
    if options.exchange:
        return exchanges(options.device, options.values or 0, options.rows or 16)
    (indices if options.indices else bins if options.bins else sizes)()


if __name__ == "__main__":
    main()
