"""Virtual workers of ten kinds of models: one step of N workers against one model on the same samples.

    python benchmarks/virtual_models.py --device cuda [--workers 16] [--batch-size 32] [--rounds 20] [--models resnet18 lstm]
    python benchmarks/virtual_models.py --device cuda --bf16 --channels-last
    python benchmarks/virtual_models.py --device cuda --starts --models resnet18 gpt2
    python benchmarks/virtual_models.py --device cpu --small --workers 3 --batch-size 4 --rounds 2

A step is the gradients of all N workers, each with its own weights on its own batch, plus SGD with momentum on the stacked rows.
Beside it run one eager and one compiled model with all N x batch samples and torch's own SGD; the data is already on the device.
Times are minima over interleaved rounds. `first` is the first step of the workers, which compiles; hits and misses of torch's cache
on disk end the line (`--no-single` leaves the single models out). `--starts` measures what that cache saves: for each model two
fresh processes, one after the other, with a cache that was empty; seconds of the first step, and of the whole process.
Precision is torch's default unless `--bf16` asks for autocast; `--channels-last` has images, and the single models, in that memory
format. `--engine loop` computes the workers one after another, `--compile` compiles on a CPU too. `--kernels N` lists the N
operations that take most of a step, on both sides. Warnings of the engine, such as what it could not compile, follow the table.
gpt2, llama, bert and vit need Hugging Face's transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from hocket.cluster.layout import layout_of
from hocket.train.engines import LoopEngine, VmapEngine, stack_buffers
from hocket.train.stacked import StackedOptimizer

Step = Callable[[], None]


class Residual(nn.Module):
    """The basic block of ResNet-18: two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        changes = stride != 1 or before != after
        shortcut = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)] if changes else []
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(small: bool) -> nn.Module:
    """He et al., 2016: 11.2 M parameters for 100 classes."""
    width, depth = (8, 1) if small else (64, 2)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers, before = [*layers, nn.MaxPool2d(3, 2, 1)], width
    for stage in range(2 if small else 4):
        after = width * 2**stage
        for block in range(depth):
            layers.append(Residual(before, after, 2 if stage and not block else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(before, CLASSES))


class Squeeze(nn.Module):
    """Channels are weighted by what a small network makes of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, (channels // 4 + 4) // 8 * 8)
        self.pool, self.into, self.out = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.out(F.relu(self.into(self.pool(x)))))


class Inverted(nn.Module):
    """The block of MobileNetV3: wider by a 1x1 convolution, a depthwise one, narrower again."""

    def __init__(self, before: int, kernel: int, wide: int, after: int, squeeze: bool, hard: bool, stride: int) -> None:
        super().__init__()
        kind = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = []
        if wide != before:
            layers += [nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide, 1e-3, 0.01), kind(inplace=True)]
        layers += [nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide, 1e-3, 0.01)]
        layers += [kind(inplace=True), *([Squeeze(wide)] if squeeze else [])]
        self.layers = nn.Sequential(*layers, nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after, 1e-3, 0.01))
        self.whole = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.whole else self.layers(x)


_MOBILE = (
    (16, 3, 16, 16, True, False, 2), (16, 3, 72, 24, False, False, 2), (24, 3, 88, 24, False, False, 1),
    (24, 5, 96, 40, True, True, 2), (40, 5, 240, 40, True, True, 1), (40, 5, 240, 40, True, True, 1),
    (40, 5, 120, 48, True, True, 1), (48, 5, 144, 48, True, True, 1), (48, 5, 288, 96, True, True, 2),
    (96, 5, 576, 96, True, True, 1), (96, 5, 576, 96, True, True, 1),
)  # fmt: skip
_SMALL = ((16, 3, 16, 16, True, False, 1), (16, 5, 24, 12, True, True, 2))


def mobilenet(small: bool) -> nn.Module:
    """MobileNetV3-Small (Howard et al., 2019): depthwise convolutions, squeeze and excitation."""
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16, 1e-3, 0.01), nn.Hardswish(inplace=True)]
    last, wide, head = (12, 24, 32) if small else (96, 576, 1024)
    top = [nn.Conv2d(last, wide, 1, bias=False), nn.BatchNorm2d(wide, 1e-3, 0.01), nn.Hardswish(inplace=True)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, head), nn.Hardswish(inplace=True), nn.Linear(head, CLASSES)]
    return nn.Sequential(*stem, *(Inverted(*sizes) for sizes in (_SMALL if small else _MOBILE)), *top, *end)


class Encoder(nn.Module):
    """PyTorch's own layers of transformers over a sequence, or of attention alone, with weights asked for or not."""

    def __init__(self, small: bool, alone: bool) -> None:
        super().__init__()
        width, heads, layers = (16, 2, 2) if small else (256, 8, 6)
        self.into, self.out, self.alone = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES), alone
        if alone:
            self.layers = nn.ModuleList(nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(layers))
        else:
            layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if not self.alone:
            x = self.layers(x)
        else:
            for i, layer in enumerate(self.layers):
                x = x + layer(x, x, x, need_weights=i % 2 == 0)[0]
        return self.out(x.mean(1))


class Recurrent(nn.Module):
    """Two recurrent layers; the last output is classified."""

    def __init__(self, kind: type[nn.RNNBase], small: bool) -> None:
        super().__init__()
        width = 8 if small else 256
        self.layers, self.out = kind(FEATURES, width, num_layers=2, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0][:, -1])


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def _transformers(kind: str, small: bool) -> nn.Module:
    import transformers

    width, layers, heads = (16, 2, 2) if small else (192, 12, 3) if kind == "vit" else (384, 6, 6)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    text = {"vocab_size": CLASSES, "max_position_embeddings": LENGTH, "use_cache": False}
    text |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "vit":
        patch = {"image_size": 16, "patch_size": 4} if small else {"image_size": 64, "patch_size": 8}
        return Logits(
            transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **patch, **no_dropout, num_labels=CLASSES))
        )
    if kind == "llama":
        return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **text)))
    if kind == "bert":
        return Logits(transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **text, **no_dropout)))
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": LENGTH}
    return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **none, **text)))


CLASSES, FEATURES, LENGTH = 100, 32, 128
MODELS: dict[str, tuple[str, Callable[[bool], nn.Module]]] = {
    "resnet18": ("images", resnet18),
    "mobilenet": ("images", mobilenet),
    "vit": ("images", lambda small: _transformers("vit", small)),
    "encoder": ("sequences", lambda small: Encoder(small, False)),
    "multihead": ("sequences", lambda small: Encoder(small, True)),
    "lstm": ("sequences", lambda small: Recurrent(nn.LSTM, small)),
    "gru": ("sequences", lambda small: Recurrent(nn.GRU, small)),
    "gpt2": ("tokens", lambda small: _transformers("gpt2", small)),
    "llama": ("tokens", lambda small: _transformers("llama", small)),
    "bert": ("tokens", lambda small: _transformers("bert", small)),
}
"""By name: what it reads, and what builds it, small or not."""


def samples(kind: str, workers: int, batch: int, small: bool) -> tuple[Tensor, Tensor]:
    """Random inputs and targets ``[workers, batch, …]``."""
    lead = (workers, batch)
    if kind == "images":
        side = 16 if small else 64
        return torch.randn(*lead, 3, side, side), torch.randint(CLASSES, lead)
    length = 9 if small else LENGTH
    if kind == "sequences":
        return torch.randn(*lead, length, FEATURES), torch.randint(CLASSES, lead)
    return torch.randint(CLASSES, (*lead, length)), torch.randint(CLASSES, (*lead, length))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one target per sample, or per token."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of both sides."""
    return torch.optim.SGD(params, 0.01, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """One model, its samples on the device, and how it is computed."""

    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    bf16: bool = False
    channels_last: bool = False

    def built(self) -> nn.Module:
        """The model at the same start."""
        torch.manual_seed(0)
        return self.model().to(self.x.device).train()

    def single(self, compiled: bool) -> Step:
        """A step of one model on the samples of all workers."""
        model = self.built()
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        optimizer, x, y = sgd(list(model.parameters())), self.x.flatten(0, 1), self.y.flatten(0, 1)

        def forward() -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
                return loss(model(x), y)

        function = torch.compile(forward, dynamic=False) if compiled else forward

        def step() -> None:
            optimizer.zero_grad()
            function().backward()
            optimizer.step()

        return step

    def workers(self, engine: str, compiled: bool) -> Step:
        """A step of one worker per row of samples."""
        model, rows = self.built(), len(self.x)
        layout, named = layout_of(model.named_parameters()), dict(model.named_parameters())
        flat = [torch.cat([named[s.name].detach().flatten() for s in b.slots]) for b in layout.buckets]
        weights = [f.expand(rows, -1).clone() for f in flat]
        grads, buffers, keys = [torch.zeros_like(w) for w in weights], stack_buffers(model, rows), torch.arange(rows)
        autocast = torch.bfloat16 if self.bf16 else None
        made: LoopEngine | VmapEngine = LoopEngine(model, loss, layout, autocast=autocast)
        if engine == "vmap":
            made = VmapEngine(model, loss, layout, rows, compiled, autocast=autocast, fall_back=True)
        optimizer = StackedOptimizer(sgd, layout, weights, grads, "buckets")

        def step() -> None:
            _, used = made.gradients(weights, buffers, self.x, self.y, grads, keys)
            optimizer.step(used)

        return step


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, device: torch.device) -> float:
    """How long one step takes."""
    wait(device)
    begun = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - begun


def measure(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, float]:
    """The least milliseconds of each step, taken in turn, and the seconds of the workers' first one."""
    first = seconds(steps["virtual"], device)
    for name, step in steps.items():
        for _ in range(4 if name == "virtual" else 5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(1000 * seconds(step, device))
    return {name: min(t) for name, t in times.items()} | {"first_s": first}


def kernels(steps: dict[str, Step], count: int, device: torch.device) -> None:
    """Prints which operations of one step take most of the device's time."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    for name, step in steps.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
            step()
            wait(device)
        found = [e for e in trace.key_averages() if e.device_type == kind]
        took = {e.key: (e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total) / 1000 for e in found}
        calls = {e.key: e.count for e in found}
        print(f"  {name}: {sum(took.values()):.2f} ms in {sum(calls.values())} calls")
        for key in sorted(took, key=lambda key: -took[key])[:count]:
            print(f"    {took[key]:9.2f} ms {calls[key]:6d}  {key[:120]}")


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    device, (kind, build) = torch.device(args.device), MODELS[name]
    x, y = (t.to(device) for t in samples(kind, args.workers, args.batch_size, args.small))
    last = args.channels_last and kind == "images"
    if last:
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (args.workers, -1))
    case, compiled = Case(lambda: build(args.small), x, y, args.bf16, last), args.compile or device.type == "cuda"
    steps = {"virtual": case.workers(args.engine, compiled)}
    if not args.no_single:
        steps |= {"eager": case.single(False)} | ({"compiled": case.single(True)} if compiled else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._dynamo.utils.counters.clear()
        found: dict[str, Any] = measure(steps, args.rounds, device)
        if args.kernels:
            kernels(steps, args.kernels, device)
    notes = [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "computed" in str(w.message)]
    compiled_graphs = torch._dynamo.utils.counters["aot_autograd"]
    cache = {k.removeprefix("autograd_cache_"): n for k, n in compiled_graphs.items() if k.startswith("autograd_cache_")}
    return {"model": name, **found, "notes": notes, "cache": cache}


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [f"{row['model']:10s} {row['first_s']:8.1f} {row['virtual']:9.2f}"]
    for name in ("eager", "compiled"):
        cells.append(f"{row[name]:9.2f} {row['virtual'] / row[name]:6.2f}" if name in row else f"{'':16s}")
    return " ".join([*cells, *(f"{name} {count}" for name, count in row["cache"].items())])


def starts(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The first and the second start of the workers of one model, each in a process of its own."""
    command = [sys.executable, __file__, "--models", model, "--no-single", "--rounds", "1", "--device", args.device]
    command += ["--workers", str(args.workers), "--batch-size", str(args.batch_size), "--engine", args.engine]
    command += [f"--{flag.replace('_', '-')}" for flag in ("small", "bf16", "channels_last", "compile") if getattr(args, flag)]
    found: dict[str, Any] = {"model": model}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        for start in ("first", "second"):
            out, begun = Path(folder) / f"{start}.json", time.perf_counter()
            said = subprocess.run([*command, "--out", str(out)], env={**os.environ, **caches}, capture_output=True, text=True)
            whole = time.perf_counter() - begun
            if said.returncode or not (rows := json.loads(out.read_text())["rows"]):
                raise RuntimeError(f"{model}, {start} start: {(said.stderr or said.stdout).strip().splitlines()[-1]}")
            found[start] = {"step_s": rows[0]["first_s"], "process_s": whole, "cache": rows[0]["cache"]}
    return found


def table_of_starts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints one line per model."""
    print(f"{'model':10s} {'first start: step':>18s} {'process':>8s} {'second start: step':>19s} {'process':>8s}   seconds")
    rows = []
    for model in args.models:
        try:
            rows.append(starts(model, args))
        except RuntimeError as error:
            print(f"{model:10s} left out: {error}", flush=True)
            continue
        first, second = rows[-1]["first"], rows[-1]["second"]
        cells = f"{first['step_s']:18.1f} {first['process_s']:8.1f} {second['step_s']:19.1f} {second['process_s']:8.1f}"
        print(f"{model:10s} {cells}  ", *(f"{name} {count}" for name, count in second["cache"].items()), flush=True)
    return rows


def main() -> None:
    """Prints one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engine", choices=["vmap", "loop"], default="vmap")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that all of it runs")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 on both sides")
    parser.add_argument("--channels-last", action="store_true", help="images in this memory format on both sides")
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too")
    parser.add_argument("--no-single", action="store_true", help="the workers alone")
    parser.add_argument("--starts", action="store_true", help="the first and the second start of each model, in fresh processes")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="also the N operations that take most of a step")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    size = f"{args.workers} workers x {args.batch_size}"
    print(f"{name}, torch {torch.__version__}, {size}; milliseconds per step, least of {args.rounds}")
    if args.starts:
        return write(args, name, table_of_starts(args))
    print(f"{'model':10s} {'first s':>8s} {'virtual':>9s} {'eager':>9s} {'ratio':>6s} {'compiled':>9s} {'ratio':>6s}")
    rows = []
    for model in args.models:
        try:
            rows.append(measured(model, args))
        except ImportError as error:
            print(f"{model:10s} left out: {error}")
            continue
        print(show(rows[-1]), *(f"\n  {note}" for note in rows[-1]["notes"]), flush=True)
        torch._dynamo.reset()
        with contextlib.suppress(AttributeError):
            torch.cuda.empty_cache()
    write(args, name, rows)


def write(args: argparse.Namespace, device: str, rows: list[dict[str, Any]]) -> None:
    """The figures as JSON, where they are asked for."""
    if args.out:
        run = {
            "device": device,
            "torch": torch.__version__,
            "settings": {k: v for k, v in vars(args).items() if k != "out"},
            "rows": rows,
        }
        args.out.write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
