"""The description of a cluster for virtual time: the speed of its workers and links.

    [compute]
    flops = "50G"                 # of one worker, per second; or step = "20ms", whatever the model
    slowdown = [1, 1, 1, 4]       # worker i takes so many times as long (repeated over all workers)
    jitter = 0.1                  # every step's time varies by a log-normal factor of this width
    stragglers = 0.01             # this share of all steps …
    straggle = 10                 # … takes so many times as long

    [link]                        # of each worker and of each server, in each direction
    bandwidth = "1Gbit"           # per second
    latency = "0.1ms"

    [host]                        # workers that share a host, if they do
    size = 4
    bandwidth = "50Gbit"
    latency = "10us"

Presets are such descriptions by name. The seconds of a virtual run are a prediction for the cluster described here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError, nearest
from hocket.noise import bits, fold, uniform

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"


@dataclass(frozen=True)
class ClusterSpec:
    """One cluster; see the module's docstring. Bandwidths are bytes per second."""

    name: str = "custom"
    flops: float = 50e9
    step_s: float | None = None
    slowdown: tuple[float, ...] = (1.0,)
    jitter: float = 0.0
    stragglers: float = 0.0
    straggle: float = 1.0
    bandwidth: float = math.inf
    latency_s: float = 0.0
    host_size: int | None = None
    host_bandwidth: float = math.inf
    host_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "host_bandwidth"):
            _above(name, getattr(self, name), 0.0)
        if self.step_s is not None:
            _above("step", self.step_s, 0.0)
        for name in ("jitter", "stragglers", "latency_s", "host_latency_s"):
            _above(name, getattr(self, name), 0.0, equal=True)
        if self.stragglers > 1:
            raise HocketError(f"cluster: stragglers = {self.stragglers:g} is a share of steps; it lies between 0 and 1.")
        if not self.straggle >= 1 or self.straggle == math.inf:
            raise HocketError(f"cluster: straggle = {self.straggle:g}: a straggling step takes at least as long as any other.")
        if not self.slowdown or not all(0 < s < math.inf for s in self.slowdown):
            raise HocketError(f"cluster: slowdown = {list(self.slowdown)} needs at least one number, all of them above 0.")

    def seconds(self, flops: float) -> float:
        """One undisturbed step of ``flops`` floating point operations, of a worker without slowdown."""
        return self.step_s if self.step_s is not None else flops / self.flops

    def factors(self, workers: int) -> Tensor:
        """How many times as long each worker takes as the fastest kind: float64 ``[workers]``.

        >>> ClusterSpec(slowdown=(1, 4)).factors(3).tolist()
        [1.0, 4.0, 1.0]
        """
        return torch.tensor([self.slowdown[i % len(self.slowdown)] for i in range(workers)], dtype=torch.float64)

    def disturbance(self, workers: int, step: int, seed: int = 0) -> Tensor:
        """The factor of jitter and stragglers on step ``step`` of each worker: a function of the arguments and the spec.

        >>> ClusterSpec(stragglers=1.0, straggle=3).disturbance(2, 5).tolist()
        [3.0, 3.0]
        """
        return self.disturbances(workers, range(step, step + 1), seed)[0]

    def disturbances(self, workers: int, steps: range, seed: int = 0) -> Tensor:
        """The same for several steps at once, which is faster than step by step: float64 ``[steps, workers]``."""
        factor = torch.ones(len(steps), workers, dtype=torch.float64)
        if not self.jitter and not self.stragglers:
            return factor
        keys = bits(torch.tensor([fold(seed, step, 0xC10C) for step in steps]), workers).to(torch.int64)
        u = uniform(keys.flatten(), 3).to(torch.float64).view(len(steps), workers, 3)
        if self.jitter:
            normal = torch.sqrt(-2 * torch.log(1 - u[..., 0])) * torch.cos(2 * math.pi * u[..., 1])
            factor = torch.exp(self.jitter * normal - self.jitter**2 / 2)  # its mean is 1
        return torch.where(u[..., 2] < self.stragglers, factor * self.straggle, factor)

    def slowed(self, slowdown: Sequence[float]) -> ClusterSpec:
        """The same cluster with these workers slow."""
        return replace(self, slowdown=tuple(float(s) for s in slowdown))

    @classmethod
    def parse(cls, text: str | Path | ClusterSpec) -> ClusterSpec:
        """A preset's name or a TOML file.

        >>> ClusterSpec.parse("1gbit").bandwidth
        125000000.0
        """
        if isinstance(text, ClusterSpec):
            return text
        if str(text) in PRESETS:
            return PRESETS[str(text)]
        path = Path(text)
        if not path.is_file():
            hint = nearest(str(text), PRESETS)
            raise HocketError(f"There is no cluster '{text}' among {', '.join(PRESETS)}, and no such file{hint or '.'}")
        try:
            content = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise HocketError(f"{path} is not a TOML file: {error}.") from None
        return cls.of(content, path.stem, str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], name: str = "custom", where: str = "cluster") -> ClusterSpec:
        """From the tables of a file.

        >>> ClusterSpec.of({"link": {"bandwidth": "100Mbit", "latency": "1ms"}}).latency_s
        0.001
        """
        values: dict[str, Any] = {"name": name}
        for table, entries in content.items():
            if table not in _FIELDS or not isinstance(entries, Mapping):
                raise HocketError(
                    f"{where}: unknown table '{table}'{nearest(table, _FIELDS) or '.'} Known are {', '.join(_FIELDS)}."
                )
            for key, value in entries.items():
                if key not in _FIELDS[table]:
                    hint = nearest(key, _FIELDS[table]) or "."
                    raise HocketError(f"{where}: [{table}] has no '{key}'{hint} It takes {', '.join(_FIELDS[table])}.")
                field, read = _FIELDS[table][key]
                values[field] = read(value, f"{where}: [{table}] {key} = {value!r}")
        return cls(**values)

    def describe(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else None if v == math.inf else v for k, v in vars(self).items()}


def _above(name: str, value: float, low: float, equal: bool = False) -> None:
    if not (value >= low if equal else value > low):
        raise HocketError(f"cluster: {name} = {value:g} must be {'at least' if equal else 'above'} {low:g}.")


def _plain(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise HocketError(f"{where}: expected a number.")
    return float(value)


def _amount(value: Any, where: str) -> float:
    """``50e9`` or ``"50G"``."""
    if not isinstance(value, str):
        return _plain(value, where)
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(?:flops|flop/s)?", value, re.IGNORECASE)
    if match is None:
        raise HocketError(f"{where}: expected operations per second, such as 50e9 or '50G'.")
    return float(match[1]) * _PREFIX[match[2].lower()]


def bytes_per_second(value: Any, where: str = "bandwidth") -> float:
    """``"1Gbit"``, ``"100 Mbit/s"`` or ``"12MB/s"``; a number is bytes per second.

    >>> bytes_per_second("1Gbit"), bytes_per_second("12 MB/s")
    (125000000.0, 12000000.0)
    """
    if not isinstance(value, str):
        return _plain(value, where)
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(bit|bits|bps|b|byte|bytes)(?:/s)?", value, re.IGNORECASE)
    if match is None:
        raise HocketError(f"{where}: expected a rate such as '1Gbit' or '12MB/s'.")
    unit = match[3]
    size = 1.0 if unit == "B" or unit.lower().startswith("byte") else 0.125
    return float(match[1]) * _PREFIX[match[2].lower()] * size


def seconds(value: Any, where: str = "time") -> float:
    """``"0.1ms"``; a number is seconds."""
    if not isinstance(value, str):
        return _plain(value, where)
    match = re.fullmatch(_NUMBER + r"([a-zµ]+)", value)
    if match is None or match[2] not in _SECONDS:
        raise HocketError(f"{where}: expected a time such as '0.1ms' or '20us'.")
    return float(match[1]) * _SECONDS[match[2]]


def _slowdown(value: Any, where: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_plain(v, where) for v in values)


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HocketError(f"{where}: expected a whole number of at least 1.")
    return value


_FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
    "compute": {
        "flops": ("flops", _amount),
        "step": ("step_s", seconds),
        "slowdown": ("slowdown", _slowdown),
        "jitter": ("jitter", _plain),
        "stragglers": ("stragglers", _plain),
        "straggle": ("straggle", _plain),
    },
    "link": {"bandwidth": ("bandwidth", bytes_per_second), "latency": ("latency_s", seconds)},
    "host": {
        "size": ("host_size", _whole),
        "bandwidth": ("host_bandwidth", bytes_per_second),
        "latency": ("host_latency_s", seconds),
    },
}

PRESETS: dict[str, ClusterSpec] = {
    spec.name: spec
    for spec in (
        ClusterSpec("internet", bandwidth=100e6 / 8, latency_s=50e-3, jitter=0.1),
        ClusterSpec("100mbit", bandwidth=100e6 / 8, latency_s=0.2e-3, jitter=0.05),
        ClusterSpec("1gbit", bandwidth=1e9 / 8, latency_s=0.1e-3, jitter=0.05),
        ClusterSpec("10gbit", flops=5e12, bandwidth=10e9 / 8, latency_s=50e-6, jitter=0.05),
        ClusterSpec("100gbit", flops=50e12, bandwidth=100e9 / 8, latency_s=10e-6, jitter=0.05),
    )
}
"""Workers of 50 GFLOP/s (a CPU core or two) on slow links, of 5 and 50 TFLOP/s (GPUs) on fast ones."""
