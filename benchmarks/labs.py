"""The labs in which predictions and advice are compared with measurements, and the check that nothing else runs meanwhile.

A lab is some hosts of netlab.py with links of one rate, a model, and strategies. *Looked at* are those on whose errors the cost
model and the probe were improved; *held out* are all others: nobody may look at their errors and then change the model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SETS = {
    "a": ("bulk", "local(4)", "bulk + gossip", "bulk + topk(0.01)", "local(4) + sign", "async + server"),
    "b": ("bulk + cast(bf16)", "diloco(8)", "local(4) + gossip", "bulk + qsgd(4)", "bulk + lowrank(2)", "bulk + server(2)"),
    "c": (
        "bulk",
        "local(8, mean=after)",
        "local(2) + cast(bf16)",
        "bulk + gossip + exchange=gradients",
        "bulk + gossip + topk(0.05)",
    ),
    "d": ("bulk", "local(4) + topk(0.05)", "bulk + gossip(ring)", "diloco(8) + sign", "bulk + server", "async + server(2)"),
    "e": ("bulk + sign", "local(2)", "bulk + gossip", "bulk + bins(2)", "ssp(2) + server", "diloco(4)"),
    "p": ("bulk", "local(4)", "diloco(8)", "bulk + gossip", "bulk + lowrank(2)"),
}


class LabPlan(NamedTuple):
    """A lab and what is compared in it; ``slow``: the last worker's mini-batches are three times as large."""

    hosts: int
    rate: str | None
    model: str
    strategies: tuple[str, ...]
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {self.rate or 'unlimited'}, {self.model}{', one slow' * self.slow}"


LOOKED_AT = (
    LabPlan(2, "20mbit", "tiny", SETS["a"]),
    LabPlan(2, None, "deep", (*SETS["p"], "pipeline=2")),
    LabPlan(4, "100mbit", "cnn", SETS["a"]),
    LabPlan(2, "1gbit", "cnn", SETS["b"]),
    LabPlan(6, None, "tiny", SETS["b"]),
    LabPlan(2, "100mbit", "cnn", SETS["a"], slow=True),
    LabPlan(3, "300mbit", "mlp", SETS["c"]),
    LabPlan(4, None, "cnn", SETS["b"]),
    LabPlan(2, "1gbit", "deep", ("local(4) + sign", "local(4) + gossip", "bulk + cast(bf16)", "bulk + topk(0.01)", "pipeline=2")),
)
HELD_OUT = (
    LabPlan(6, "50mbit", "tiny", SETS["c"]),
    LabPlan(3, None, "cnn", SETS["c"], slow=True),
    LabPlan(5, "200mbit", "cnn", SETS["b"]),
    LabPlan(3, "50mbit", "cnn", SETS["d"]),
    LabPlan(4, "1gbit", "deep", ("bulk", "local(4) + topk(0.05)", "bulk + gossip", "diloco(8)", "pipeline=4")),
    LabPlan(
        2, "300mbit", "deep", ("bulk + qsgd(4)", "local(8, mean=after)", "async + server", "bulk + gossip(ring)", "pipeline=2")
    ),
    LabPlan(2, "200mbit", "cnn", SETS["e"], slow=True),
    LabPlan(3, "1gbit", "tiny", SETS["d"]),
    LabPlan(4, "300mbit", "mlp", ("bulk", "bulk + topk(0.01)", "local(4)", "bulk + server(4)", "bulk + gossip + topk(0.05)")),
    LabPlan(6, "100mbit", "cnn", SETS["e"]),
    LabPlan(2, None, "mlp", SETS["d"]),
    LabPlan(4, "20mbit", "tiny", SETS["e"]),
)
LABS = (*LOOKED_AT, *HELD_OUT)


def chosen(words: Sequence[str]) -> list[LabPlan]:
    """Labs by number (from 1), by a part of their names, or by ``looked-at`` and ``held-out``; all without words.

    >>> [plan.name for plan in chosen(["3", "5 hosts"])]
    ['4 hosts, 100mbit, cnn', '5 hosts, 200mbit, cnn']
    """
    found = [plan for word in words for plan in _named(word)] if words else list(LABS)
    return list(dict.fromkeys(found))


def _named(word: str) -> tuple[LabPlan, ...]:
    if word in ("looked-at", "held-out"):
        return LOOKED_AT if word == "looked-at" else HELD_OUT
    plans = LABS[int(word) - 1 : int(word)] if word.isdigit() and int(word) else tuple(p for p in LABS if word in p.name)
    if not plans:
        raise SystemExit(f"no lab '{word}': give a number up to {len(LABS)}, a part of a name (--list), looked-at or held-out")
    return plans


# --- an idle machine ---------------------------------------------------------------------------------------------------------

BUSY = 0.1
"""A machine on which other work takes so large a share of all cores is not idle."""
_LOOK_S, _AGAIN_S = 3.0, 15.0


def busy_share(seconds: float = _LOOK_S, read: Callable[[], str] = lambda: Path("/proc/stat").read_text()) -> float:
    """The share of all cores' time that something runs, or that the machine's host takes, while this process sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in read().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # idle, and waiting for disks

    (before, idle_before), _ = ticks(), time.sleep(seconds)
    total, idle = ticks()
    return 1 - (idle - idle_before) / max(1, total - before)


def wait_until_idle(minutes: float, look: Callable[[], float] = busy_share, pause_s: float = _AGAIN_S) -> float | None:
    """The share of the cores that was busy when the machine was idle enough; None where it did not become so in time."""
    ends, told = time.monotonic() + 60 * minutes, False
    while (share := look()) > BUSY:
        if time.monotonic() > ends:
            return None
        if not told:
            cores = os.cpu_count()
            print(
                f"Other work takes {share:.0%} of {cores} cores: waiting for at most {minutes:g} min.", file=sys.stderr, flush=True
            )
            told = True
        time.sleep(pause_s)
    return share
