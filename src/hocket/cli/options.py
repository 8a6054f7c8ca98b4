"""Settings of a run as options of the command line: one table for ``train``, ``study`` and the errors that name them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from hocket import compression, sync, topology
from hocket.cluster.spec_file import PRESETS
from hocket.models import GPT_SIZES
from hocket.split.pipeline.schedules import SCHEDULES
from hocket.train.settings import RunSettings, defaults, types

_METHODS = (f"{kind}: {', '.join(axis.METHODS)}." for kind, axis in (("When", sync), ("Whom", topology), ("What", compression)))
HELP = {
    "strategy": f"Such as 'local(4) + gossip + topk(0.01)'. {' '.join(_METHODS)}",
    "workers": "How many workers (default: 1, or the number of launched processes).",
    "virtual": "Virtual workers in this one process.",
    "data": "digits, mnist, cifar10, cifar100, shakespeare, text:PATH (a file, folder or pattern), shards:URL or module:factory.",
    "model": f"mlp, cnn, resnet20, vgg11, gpt, gpt:{{{','.join(GPT_SIZES)}}}, hf:{{gpt2,config.json,FOLDER}} or module:factory.",
    "pretrained": "Start from these weights: a file of safetensors, or a folder that has some (such as Hugging Face's).",
    "lora": "Train adapters of this rank alone (hf: models; needs hocket[hf]): only they travel.",
    "optimizer": "sgd, adam, adamw, …: as in torch.optim; lars, lamb, onebit, muon (adamw for embeddings, vectors); sandblaster.",
    "lr": "Learning rate (default: 0.1; lars 1, lamb 0.003, onebit 0.001; of sandblaster's first step: 1).",
    "momentum": "Momentum of sgd and rmsprop, and of lars and muon (default: 0.9).",
    "weight_decay": "Weight decay.",
    "lr_schedule": "constant, cosine, linear or step.",
    "warmup": "Epochs of linear warm-up, from 0, or from one worker's rate to the scaled one.",
    "scale_lr": "The rate is one worker's: multiply it by the number of workers (linear), by its root (sqrt), or not (none).",
    "batch_size": "Mini-batch per worker.",
    "epochs": "Epochs.",
    "max_steps": "End after this many steps.",
    "clip": "Clip gradients to this norm.",
    "rest_lr": "Muon's rate for what AdamW updates (default: the same).",
    "freeze_step": "Of onebit: the step after which its variance is fixed (default: after 15 % of the steps).",
    "refresh": "Of onebit: refresh the variance so many times at every step, at every second, at every fourth … (0/1 Adam).",
    "decay": "Weight decay of all parameters, or of matrices only, not of norms and biases (lars and lamb: always).",
    "autocast": "Mixed precision: none, bf16 or fp16.",
    "augment": "Random crops and flips, where the data set has them.",
    "last": "An epoch's incomplete round: even (dealt out evenly) or drop.",
    "seed": "Seed of weights, partition and codecs.",
    "engine": "Gradients of virtual workers: auto, loop, vmap, or vmap(8): 8 workers at a time.",
    "nonfinite": "NaN or Inf gradients: raise or skip.",
    "exact": "Sum in worker order: equal bit for bit to virtual workers.",
    "host_size": "Workers per host, for hierarchical topologies.",
    "cluster": f"Predict seconds of virtual workers for a cluster: {', '.join(PRESETS)} or a TOML file.",
    "slowdown": "How many times as long each worker takes to compute, such as 1,1,1,4 (repeated over all).",
    "balance": "A worker's part of a round: even, or by its speed so far (speed).",
    "partition": "Samples of a worker: any (iid), or its own by label: label(2), dirichlet(0.5).",
    "bucket_cap_bytes": "Largest bucket (default: by strategy).",
    "first_bucket_cap_bytes": "Largest first bucket (default: by strategy).",
    "mesh": "Split each worker's model over processes: data=2,pipeline=2,tensor=2 (data: the workers).",
    "pipe": f"Schedule of the stages: {', '.join(SCHEDULES)} (default: 1f1b).",
    "num_microbatches": "Micro-batches per mini-batch (default: twice as many as stages).",
    "cut": "Modules after which to cut, with commas between them (default: by cost).",
    "stages_per_rank": "Stages of each process (default: by schedule).",
    "measure": "How the cost of layers is found: seconds (measured) or flops (counted: the same cut every time).",
    "plan_file": "How operations are split: a TOML file of modules' names or patterns and their kinds (default: found).",
    "zero": "1: each worker keeps a part of the optimiser's state (ZeRO-1).",
    "fsdp": "Each worker keeps a part of weights, gradients and optimiser state (PyTorch's FSDP2).",
}
"""What each setting's option says in ``--help``, in the order of :data:`hocket.train.settings.FIELDS`."""
_WRITTEN: dict[str, tuple[str, ...]] = {"strategy": ("--strategy", "-s"), "workers": ("--workers", "-n"), "pretrained": ("--from",)}
_WRITTEN |= {"plan_file": ("--plan", "--plan-file"), "liveness_timeout_s": ("--liveness-timeout",), "snapshot_s": ("--snapshot",)}
_SWITCHES = ("virtual", "exact", "fsdp")
"""Without a ``--no-…`` of their own."""


def option(name: str, value: Any = None) -> str:
    """How a setting is written on the command line; without a value its name.

    >>> option("slowdown", "1,4"), option("plan_file"), option("virtual", True), option("augment", False)
    ('--slowdown 1,4', '--plan', '--virtual', '--no-augment')
    """
    plain = _WRITTEN[name][0] if name in _WRITTEN else f"--{name.replace('_', '-')}"
    if value is False:
        return f"--no-{plain[2:]}"
    return plain if value in (None, True, "True") else f"{plain} {value}"


def arguments(settings: RunSettings) -> list[str]:
    """The arguments of ``hocket train`` that give these settings.

    >>> arguments(RunSettings.of(strategy="local(4)", workers=2, virtual=True))[:5]
    ['--strategy', 'local(4) + allreduce', '--workers', '2', '--virtual']
    """
    written: list[str] = []
    for name, value in settings.by_name().items():
        if value is True or (value is False and name not in _SWITCHES):
            written.append(option(name, value))
        elif value is not None and value is not False:
            written += [option(name), str(value)]
    return written


Command = Callable[..., None]


def with_settings(names: Iterable[str] = HELP, **others: Any) -> Callable[[Command], Command]:
    """Give a command the options of settings ``names``, which it takes as ``**given``; ``others`` are defaults of its own."""
    kinds, usual = types(), {**defaults(), **others}

    def decorated(function: Command) -> Command:
        own = inspect.signature(function, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter(name, kinds[name], usual[name], HELP[name]) for name in names]
        first = [p for p in kept if p.default is inspect.Parameter.empty]
        parameters = [*first, *added, *(p for p in kept if p not in first)]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorated


def _parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    written: tuple[str, ...] = (option(name),) if name in _SWITCHES else _WRITTEN.get(name, ())
    kind = kind | None if default is None else kind
    annotation = Annotated[kind, typer.Option(*written, help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
