"""Loops as people write them, on real Gloo processes: a loop is a function of the rank; what it returns comes back to its test.

def sums(rank: int) -> list[float]: ...   # runs in each process, after hocket.init

def test_sums(loop: Loop) -> None:
    assert loop(sums, 2) == [[3.0], [3.0]]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import hocket
from process.launch import Group, Nursery


class Loop(Protocol):
    """What the fixture ``loop`` is: runs a function of the rank on that many processes; the results in order of ranks."""

    def __call__(
        self, function: Callable[..., Any], processes: int = 2, timeout_s: float = 60.0, **arguments: Any
    ) -> list[Any]: ...


class Start(Protocol):
    """What the fixture ``start`` is: the same, but the processes are not waited for."""

    def __call__(self, function: Callable[..., Any], processes: int = 2, **arguments: Any) -> Group: ...


def start_loop(nursery: Nursery, folder: Path, function: Callable[..., Any], processes: int, **arguments: Any) -> Group:
    """Start ``function``, which stands at the top of its module, on that many processes."""
    named = {"module": f"loops.{Path(function.__code__.co_filename).stem}", "name": function.__name__}
    return nursery.start("loops.harness:main", processes, folder, **named, **arguments)


def main(rank: int, folder: str, module: str, name: str, **arguments: Any) -> None:
    """What each process runs."""
    hocket.init(device="cpu", liveness_timeout_s=5.0)
    torch.manual_seed(7)
    result = getattr(importlib.import_module(module), name)(rank, **arguments)
    torch.save(result, f"{folder}/{rank}.pt")


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The sentence with which a call is refused; empty where it is not."""
    try:
        function(*arguments, **named)
    except hocket.HocketError as error:
        return str(error)
    return ""


def flat(model: nn.Module) -> Tensor:
    """All parameters of a model as one vector."""
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])
