"""Studies by name: which strategies, under which settings.

A preset is plain data, except for strategies with a number of steps or hosts (``postlocal``, ``dgc`` with warm-up,
``hierarchical``): these depend on the number of workers and steps of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import HocketError, nearest


@dataclass(frozen=True)
class Entry:
    """One strategy of a study, with the settings in which it differs from the others."""

    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    """File and line, if it came from a file."""


@dataclass(frozen=True)
class Preset:
    """A study by name: ``entries(workers, steps)`` and its default settings.

    The rate ``"auto"`` is searched for per strategy; a number is the rate of all.
    """

    name: str
    title: str
    entries: Callable[[int, int], list[Entry]]
    settings: Mapping[str, Any]
    lr: float | str
    about: str
    within: float | None = None
    """Points of accuracy that may be given up for fewer bytes."""


def preset(name: str) -> Preset:
    """The preset of that name.

    >>> preset("ten").settings["epochs"]
    50
    """
    if name not in PRESETS:
        hint = nearest(name, PRESETS) or ": choose one of these, or name a file such as mine.toml."
        raise HocketError(f"There is no study '{name}' among {', '.join(PRESETS)}, and no such file{hint}")
    return PRESETS[name]


_PERIODS = ("bulk", "local(4)", "local(16)")


def _ten(gossip: str, compressed: str) -> list[Entry]:
    """Three periods × (all-reduce, gossip, gossip with threshold), and a long period."""
    three = [f"{when} + {how}" for when in _PERIODS for how in ("allreduce", gossip, compressed)]
    return [Entry(s) for s in (*three, "local(32) + allreduce")]


def _ten_as_studied(workers: int, steps: int) -> list[Entry]:
    return _ten("gossip + exchange=gradients", "gossip + threshold(0.01, feedback=False) + exchange=gradients")


def _ten_modern(workers: int, steps: int) -> list[Entry]:
    return _ten("gossip", "gossip + threshold(keep=0.05)")


def _host_size(workers: int) -> int:
    """Workers per host where a topology has hosts: the divisor of ``workers`` nearest below its root.

    >>> [_host_size(n) for n in (2, 4, 16, 60, 210, 7)]
    [1, 2, 4, 6, 14, 1]
    """
    return max(d for d in range(1, workers + 1) if workers % d == 0 and d * d <= workers)


def _dgc(density: float, warmup: int, precision: str = "") -> Entry:
    """DGC with so many exchanges as warm-up; it applies the momentum itself."""
    return Entry(f"bulk + dgc({density}, warmup={max(4, warmup)}){precision}", {"momentum": 0.0})


def _axes(workers: int, steps: int) -> list[Entry]:
    sync = [f"{s} + allreduce" for s in ("local(4)", "local(16)", f"postlocal(16, {steps // 2})", "diloco(16)")]
    topology = ["gossip", "gossip(ring)", "gossip(exponential)", "gossip(random)"]
    size = _host_size(workers)
    if 1 < size < workers:
        topology.append(f"hierarchical(allreduce, gossip, size={size})")
    compression = [
        *("cast(fp16)", "cast(bf16)", "cast(fp8)", "qsgd(4)", "qsgd(8)", "ternary", "sign", "natural"),
        *("threshold(keep=0.05)", "topk(0.01)", "randomk(0.05)", "lowrank(2)", "topk(0.05) | qsgd(4)"),
    ]
    topology += ["server(2)", f"server({max(1, workers // 2)}, role=sum)"]
    # Asynchronous workers need another topology than allreduce: these strategies differ from the baseline in two axes.
    free = ["stale(4) + allreduce", "async + server(2)", "ssp(4) + server(2)", "downpour(4, 4) + server(2)", "async + gossip"]
    strategies = [*sync, *free, *(f"bulk + {t}" for t in topology), *(f"bulk + allreduce + {c}" for c in compression)]
    return [Entry("bulk + allreduce"), *(Entry(s) for s in strategies), _dgc(0.01, steps // 10)]


def _frontier(workers: int, steps: int) -> list[Entry]:
    strategies = (
        "bulk + allreduce",
        "bulk + cast(bf16)",
        "local(4)",
        "bulk + qsgd(4)",
        "local(4) + gossip",
        "local(16)",
        "diloco(16)",
        "bulk + sign",
        "bulk + topk(0.01)",
        "bulk + lowrank(2)",
        "local(4) + qsgd(4)",
        "local(4) + gossip + threshold(keep=0.05)",
        "local(16) + qsgd(4)",
        "local(4) + sign",
        "local(4) + topk(0.01)",
        "local(4) + topk(0.01) | qsgd(4)",
        "bulk + topk(0.01) | qsgd(4)",
        "local(2) + topk(0.02) | qsgd(4)",
        "local(2, residual=weights) + topk(0.02) | qsgd(4)",
        "local(4) + topk(0.05) | qsgd(4)",
        "local(16) + sign",
        "local(16) + topk(0.01) | qsgd(4)",
    )
    return [
        *(Entry(s) for s in strategies),
        _dgc(0.01, steps // 10),
        _dgc(0.005, steps // 20, " | qsgd(4)"),
    ]


_STUDY = {"data": "digits", "model": "cnn", "batch_size": 100, "epochs": 50, "augment": False, "last": "drop"}
_TODAY = {"momentum": 0.9, "lr_schedule": "cosine", "warmup": "tenth"}
"""``"tenth"``: a tenth of the epochs, at most five (Goyal 2017 takes five)."""

PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            "ten",
            "Ten configurations",
            _ten_as_studied,
            {**_STUDY, "optimizer": "sgd", "momentum": 0.0, "lr_schedule": "constant", "warmup": 0.0},
            0.01,
            "period 1, 4, 16, 32 × all-reduce, gossip of gradients, gossip with a threshold; plain SGD, rate 0.01",
        ),
        Preset(
            "ten-modern",
            "Ten configurations with current practice",
            _ten_modern,
            {**_STUDY, **_TODAY},
            "auto",
            "the same ten with gossip of weights, error feedback, momentum, warm-up, cosine schedule and tuned rates",
        ),
        Preset(
            "axes",
            "Each axis alone",
            _axes,
            {"data": "digits", "model": "cnn", "batch_size": 20, "epochs": 10, "augment": False, **_TODAY},
            0.05,
            "when, whom and what, each varied alone against bulk + allreduce",
        ),
        Preset(
            "frontier",
            "What sends least",
            _frontier,
            {"data": "digits", "model": "cnn", "batch_size": 20, "epochs": 10, "augment": False, **_TODAY},
            "auto",
            "from all of the traffic to a hundredth and less: what sends least within --within points of bulk + allreduce",
            0.5,
        ),
    )
}
