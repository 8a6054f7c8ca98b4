"""Studies by name: which strategies, under which settings.

A preset is plain data, except for strategies with a number of steps or hosts (``postlocal``, ``dgc`` with warm-up,
``hierarchical``): these depend on the number of workers and steps of a run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hocket.errors import HocketError, nearest
from hocket.study.plan import AUTO, Entry, Outline


def preset(name: str) -> Outline:
    """The preset of that name.

    >>> preset("ten").settings["epochs"]
    50
    """
    if name not in PRESETS:
        hint = nearest(name, PRESETS) or ": choose one of these, or name a file such as mine.toml."
        raise HocketError(f"There is no study '{name}' among {', '.join(PRESETS)}, and no such file{hint}")
    return PRESETS[name]


def _ten(gossip: str, compressed: str) -> Callable[[int, int], list[Entry]]:
    """Three periods × (all-reduce, gossip, gossip with threshold), and a long period."""
    periods = ("bulk", "local(4)", "local(16)")
    three = [f"{when} + {how}" for when in periods for how in ("allreduce", gossip, compressed)]
    return lambda workers, steps: [Entry(s) for s in (*three, "local(32) + allreduce")]


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
    sync = [f"{s} + allreduce" for s in ("local(4)", "local(16)", f"postlocal(16, {steps // 2})", "diloco(16)", "acco")]
    topology = ["gossip", "gossip(ring)", "gossip(exponential)", "gossip(random)"]
    size = _host_size(workers)
    if 1 < size < workers:
        topology.append(f"hierarchical(allreduce, gossip, size={size})")
    compression = [
        *("cast(fp16)", "cast(bf16)", "cast(fp8)", "cast(e3m0)", "qsgd(4)", "qsgd(8)", "bins(2)", "ternary", "sign", "natural"),
        *("threshold(keep=0.05)", "topk(0.01)", "randomk(0.05)", "lowrank(2)", "topk(0.05) | qsgd(4)"),
    ]
    topology += ["server(2)", f"server({max(1, workers // 2)}, role=sum)"]
    # Asynchronous workers need another topology than allreduce: these strategies differ from the baseline in two axes.
    free = ["stale(4) + allreduce", "async + server(2)", "ssp(4) + server(2)", "downpour(4, 4) + server(2)", "async + gossip"]
    free += ["aedit(0.05) + allreduce", "asyncdiloco(16) + server(2)"]
    strategies = [*sync, *free, *(f"bulk + {t}" for t in topology), *(f"bulk + allreduce + {c}" for c in compression)]
    demo = Entry("bulk + demo(32, sign=False)", {"momentum": 0.0})  # with signs it would need a rate of its own
    return [Entry("bulk + allreduce"), *(Entry(s) for s in strategies), _dgc(0.01, steps // 10), demo]


_FRONTIER = """
bulk + allreduce; bulk + cast(bf16); local(4); bulk + qsgd(4); local(4) + gossip; local(16); diloco(16); bulk + sign;
bulk + topk(0.01); bulk + lowrank(2); local(4) + qsgd(4); local(4) + gossip + threshold(keep=0.05); local(16) + qsgd(4);
local(4) + sign; local(4) + topk(0.01); local(4) + topk(0.01) | qsgd(4); bulk + topk(0.01) | qsgd(4);
local(2) + topk(0.02) | qsgd(4); local(2, residual=weights) + topk(0.02) | qsgd(4); local(4) + topk(0.05) | qsgd(4);
local(16) + sign; local(16) + topk(0.01) | qsgd(4)
"""


def _frontier(workers: int, steps: int) -> list[Entry]:
    plain = [Entry(strategy.strip()) for strategy in _FRONTIER.split(";")]
    return [*plain, _dgc(0.01, steps // 10), _dgc(0.005, steps // 20, " | qsgd(4)")]


_CODE = "sign(block=4096)"
_MUON = f"""
bulk; diloco(4, 1.0, 0.3) + {_CODE}; diloco(13, 0.9, 0.5) + {_CODE}; diloco(15, 0.9, 0.5, fragments=3, overlap=1) + {_CODE};
diloco(15, 1.0, 0) + topk(64/4096, feedback=0.95) | bins(2)
"""


def _llm(workers: int, steps: int) -> list[Entry]:
    """AdamW as it is commonly set, and Muon, which loses less with few exchanges; the baseline of each is bulk with the same."""
    adamw = ("bulk + allreduce", "bulk + sign", "local(8)", "diloco(30, 0.7, 0.6)", f"diloco(4, 0.9, 0.5) + {_CODE}")
    muon = [Entry(strategy.strip(), {"optimizer": "muon"}) for strategy in _MUON.split(";")]
    return [*(Entry(strategy) for strategy in adamw), *muon]


_RECIPE: dict[str, dict[str, Any]] = {
    "plain": {"scale_lr": "none", "warmup": 0.0},
    "linear": {"scale_lr": "linear", "warmup": 0.0},
    "linear, warm-up": {"scale_lr": "linear"},
    "square root, warm-up": {"scale_lr": "sqrt"},
    "linear, warm-up, norms and biases do not decay": {"scale_lr": "linear", "decay": "matrices"},
    "LARS, linear, warm-up": {"scale_lr": "linear", "optimizer": "lars", "lr": 1.0},
    "LAMB, square root, warm-up": {"scale_lr": "sqrt", "optimizer": "lamb", "lr": 0.003, "momentum": 0.0},
}
"""The ingredients of training with large batches: what each adds."""


def _large_batch(workers: int, steps: int) -> list[Entry]:
    return [Entry("bulk + allreduce", own) for own in _RECIPE.values()]


_SHORT = {"data": "digits", "model": "cnn", "batch_size": 20, "epochs": 10, "augment": False}
_LONG = {**_SHORT, "batch_size": 100, "epochs": 50, "last": "drop"}
_TODAY = {"momentum": 0.9, "lr_schedule": "cosine", "warmup": "tenth"}
"""``"tenth"``: a tenth of the epochs, at most five (Goyal 2017 takes five)."""

PRESETS = {
    "ten": Outline(
        "Ten configurations",
        _ten("gossip + exchange=gradients", "gossip + threshold(0.01, feedback=False) + exchange=gradients"),
        settings={**_LONG, "optimizer": "sgd", "momentum": 0.0, "lr_schedule": "constant", "warmup": 0.0},
        lr=0.01,
        about="period 1, 4, 16, 32 × all-reduce, gossip of gradients, gossip with a threshold; plain SGD, rate 0.01",
    ),
    "ten-modern": Outline(
        "Ten configurations with current practice",
        _ten("gossip", "gossip + threshold(keep=0.05)"),
        settings={**_LONG, **_TODAY},
        lr=AUTO,
        about="the same ten with gossip of weights, error feedback, momentum, warm-up, cosine schedule and tuned rates",
    ),
    "axes": Outline(
        "Each axis alone",
        _axes,
        settings={**_SHORT, **_TODAY},
        lr=0.05,
        about="when, whom and what, each varied alone against bulk + allreduce",
    ),
    "frontier": Outline(
        "What sends least",
        _frontier,
        settings={**_SHORT, **_TODAY},
        lr=AUTO,
        within=0.5,
        about="from all of the traffic to a hundredth and less: what sends least near the accuracy of bulk + allreduce",
    ),
}
PRESETS["llm"] = Outline(
    "Language models over slow links",
    _llm,
    settings={
        **{"data": "shakespeare", "model": "gpt", "batch_size": 16, "epochs": 4, "optimizer": "adamw", "clip": 1.0},
        **{"lr_schedule": "cosine", "warmup": "tenth"},
    },
    workers=(8,),
    lr=AUTO,
    about="test loss of a GPT against bytes: AdamW and Muon, from all of the traffic to less than a thousandth",
)
PRESETS["large-batch"] = Outline(
    "Large batches",
    _large_batch,
    settings={**_SHORT, "epochs": 20, "momentum": 0.9, "weight_decay": 1e-4, "lr_schedule": "cosine", "warmup": 5.0},
    workers=(1, 4, 16, 64),
    lr=0.01,
    about="bulk with more and more workers, so with larger batches: scaling, warm-up, decay, LARS and LAMB, each with and without",
)
PRESETS = {name: replace(outline, preset=name) for name, outline in PRESETS.items()}
