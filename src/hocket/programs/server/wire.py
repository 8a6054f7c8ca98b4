"""What workers and shards write into envelopes: encoded gradients, terms that both must agree on, and the size of a message."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.cluster.layout import Layout
from hocket.cluster.message import Message
from hocket.errors import HocketError
from hocket.programs.server.push_encoder import Slices, read
from hocket.strategy import Strategy
from hocket.version import __version__

LIVENESS_TIMEOUT_S = 10.0
"""A worker that is silent for so long is no longer waited for."""
SNAPSHOT_S = 5.0
MAX_BATCH_IDS = 4096
"""Mini-batches that one answer can name."""
OBSERVER = -1
"""The sender of an observer's messages: it asks for status and weights, and takes no part."""
WORKER_MARK = b"w"
"""The first byte of a worker's identity on its link; the rest says which process it is."""
FETCH = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
JobConfig = dict[str, Any]
DEFAULT_JOB = b"hocket".ljust(16, b".")
"""The id of a job whose shards were started by hand, unless they were given another."""


def job_id(text: str) -> bytes:
    """The id of a job from its 32 hexadecimal digits."""
    try:
        job = bytes.fromhex(text)
    except ValueError:
        job = b""
    if len(job) != 16:
        raise HocketError(f"{text!r}: the id of a job is written as 32 hexadecimal digits.")
    return job


def link_bytes(strategy: Strategy, layout: Layout) -> int:
    """The largest message of a job: a shard's slice, in the least favourable encoding or with an optimiser's state (two values per
    weight), all buffers, and room for header and metadata."""
    shards = strategy.topology.num_shards(1)  # at least; more make it smaller
    return 3 * (layout.bytes // shards + 8 * len(layout.buckets)) + layout.buffer_bytes + (1 << 20)


def job_config(strategy: Strategy, layout: Layout, seed: int, world: int) -> JobConfig:
    """What all processes of a job must have in common."""
    return {"hocket": __version__, "strategy": str(strategy), "model": layout.digest(), "seed": seed, "world": world}


def difference(ours: JobConfig, theirs: JobConfig) -> tuple[str, str] | None:
    """Where the configuration of a worker that joins (``theirs``) differs from the job's: a word, and a sentence for the worker."""
    for name, value in ours.items():
        other = theirs.get(name)
        if other != value:
            if name == "model":
                return name, "Your model has other parameters than the job's: build the same model everywhere."
            return name, f"The job has {name} {value}, you have {other}: start all its processes with the same."
    return None


def as_tensors(messages: Sequence[Message]) -> tuple[list[list[int]], list[Tensor]]:
    """Coded rows (one per bucket) as tensors, with ``[parts, varying]`` of each for :func:`as_messages`."""
    shapes, tensors = [], []
    for message in messages:
        shapes.append([len(message.parts), int(message.lengths is not None)])
        lengths = [p.shape[1] for p in message.parts] if message.lengths is None else message.lengths[0].tolist()
        tensors += [p[0, :k].contiguous() for p, k in zip(message.parts, lengths, strict=True)]
    return shapes, tensors


def as_messages(shapes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> list[Message]:
    """Back from :func:`as_tensors`; raises ValueError where they do not fit."""
    messages, rest = [], list(tensors)
    for parts, varying in shapes:
        if not 1 <= parts <= len(rest):
            raise ValueError("too few tensors")
        own, rest = rest[:parts], rest[parts:]
        lengths = torch.tensor([[t.numel() for t in own]]) if varying else None
        messages.append(Message(tuple(t.reshape(1, -1) for t in own), lengths))
    if rest:
        raise ValueError("too many tensors")
    return messages


def gradients_of(
    strategy: Strategy, messages: Sequence[Message], like: Sequence[Tensor], step: int, worker: int, world: int, seed: int
) -> list[Tensor]:
    """The gradients of a push, of the shapes and dtypes of ``like``; ValueError where they do not fit."""
    if len(messages) != len(like):
        raise ValueError(f"{len(messages)} buckets instead of {len(like)}")
    found = []
    for bucket, (message, own) in enumerate(zip(messages, like, strict=True)):
        value = read(strategy, message, own.numel(), bucket, step, worker, world, seed)
        if value.shape != own.shape:
            raise ValueError(f"bucket {bucket} has {value.numel()} values instead of {own.numel()}")
        if not value.is_floating_point():
            raise ValueError(f"bucket {bucket} is of {value.dtype}")
        found.append(value.to(own.dtype))
    return found


def write_state(state: Sequence[dict[str, Any]], slices: Slices, shard: int) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """A shard's slice of an optimiser's state: per bucket its numbers (None: the next of the tensors)."""
    plain = [{k: None if isinstance(v, Tensor) else v for k, v in bucket.items()} for bucket in state]
    rows = [(b, v) for b, bucket in enumerate(state) for v in bucket.values() if isinstance(v, Tensor)]
    return plain, [slices.cut(b, row)[shard].clone().contiguous() for b, row in rows]


def read_state(plain: Any, tensors: Sequence[Tensor]) -> tuple[dict[str, Any], ...]:
    """Back from :func:`write_state`; raises ValueError where they do not fit."""
    if not isinstance(plain, list) or not all(isinstance(bucket, dict) for bucket in plain):
        raise ValueError("the optimiser's state is not that of buckets")
    if sum(v is None for bucket in plain for v in bucket.values()) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors beside the weights, but the optimiser's state has another number")
    rest = iter(tensors)
    return tuple({str(k): next(rest) if v is None else v for k, v in bucket.items()} for bucket in plain)


def write_figures(figures: dict[str, Any]) -> Tensor:
    """The state of a job as bytes: the accounts of many workers do not fit into metadata."""
    return torch.frombuffer(bytearray(json.dumps(figures).encode()), dtype=torch.uint8)


def read_figures(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Back from :func:`write_figures`, the last of a message's tensors."""
    return dict(json.loads(bytes(tensors[-1].numpy())))


def slices_of(slices: Slices, shard: int, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A shard's slice of every bucket's row ``[1, values]``: copies."""
    return tuple(slices.cut(b, row[0])[shard].detach().clone().contiguous() for b, row in enumerate(rows))
