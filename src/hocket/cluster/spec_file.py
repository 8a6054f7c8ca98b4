"""Cluster files: a few lines of TOML as a :class:`~hocket.cluster.spec.ClusterSpec`, and back.

What is wrong in a file is said with the line, the name and what was probably meant.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hocket.cluster.spec import ClusterSpec
from hocket.errors import HocketError, nearest

PRESET_FOLDER = Path(__file__).parent / "presets"
PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in PRESET_FOLDER.glob("*.toml")))
"""The clusters that are known by name."""
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*"


def read(text: str | Path) -> ClusterSpec:
    """A preset's name or a file."""
    path = PRESET_FOLDER / f"{text}.toml" if str(text) in PRESETS else Path(text)
    if not path.is_file():
        hint = nearest(str(text), PRESETS)
        raise HocketError(f"There is no cluster '{text}' among {', '.join(PRESETS)}, and no such file{hint or '.'}")
    try:
        written = path.read_text()
        content = tomllib.loads(written)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HocketError(f"{path} is not a TOML file: {error}.") from None
    return spec_of(content, path.stem, str(path), written)


def spec_of(content: Mapping[str, Any], name: str = "custom", where: str = "cluster", written: str = "") -> ClusterSpec:
    """The cluster of a file's tables; ``written`` is its text, for the lines of errors."""
    values: dict[str, Any] = {"name": name}
    for table, entries in content.items():
        at = f"{where}{_line(written, table)}"
        if table not in FIELDS or not isinstance(entries, Mapping):
            raise HocketError(f"{at}: unknown table '{table}'{nearest(table, FIELDS) or '.'} Known are {', '.join(FIELDS)}.")
        for key in _REQUIRED.get(table, ()):
            if key not in entries:
                raise HocketError(f"{at}: [{table}] needs '{key}', {_REQUIRED[table][key]}.")
        if table == "coding":
            values["coding"] = {
                k: _coding(v, f"{where}{_line(written, table, k)}: [coding] {k} = {v!r}") for k, v in entries.items()
            }
            continue
        if table == "sources":
            values["sources"] = {k: _source(k, v, f"{where}{_line(written, table, k)}: [sources] {k}") for k, v in entries.items()}
            continue
        for key, value in entries.items():
            at = f"{where}{_line(written, table, key)}"
            if key not in FIELDS[table]:
                hint = nearest(key, FIELDS[table]) or "."
                raise HocketError(f"{at}: [{table}] has no '{key}'{hint} It takes {', '.join(FIELDS[table])}.")
            entry = FIELDS[table][key]
            values[entry.field] = entry.read(value, f"{at}: [{table}] {key} = {value!r}")
    return _built(values, where)


def _built(values: dict[str, Any], where: str) -> ClusterSpec:
    ratio = values.pop("oversubscription", None)
    try:
        spec = ClusterSpec(**values)
    except HocketError as error:
        raise HocketError(f"{where}: {str(error).removeprefix('cluster: ')}") from None
    if ratio is None:
        return spec
    if "trunk_bandwidth" in values:
        raise HocketError(f"{where}: [trunk] has a bandwidth and an oversubscription; give one of them.")
    hosts = (spec.trunk_hosts or 1) * (1 if spec.shared_links else spec.host_size or 1)
    return ClusterSpec(**values, trunk_bandwidth=spec.bandwidth * spec.links * hosts / ratio)


def text_of(spec: ClusterSpec, comments: Mapping[str, str] | None = None) -> str:
    """A file that reads as ``spec``; ``comments`` by table, or by ``table.key``.

    >>> print(text_of(ClusterSpec(step_s=0.02, bandwidth=125e6, latency_s=1e-4)))
    [compute]
    step = "20ms"
    <BLANKLINE>
    [link]
    bandwidth = "1Gbit"
    latency = "100us"
    <BLANKLINE>
    """
    usual, comments = vars(ClusterSpec()), comments or {}
    lines: list[str] = []
    for table, entries in FIELDS.items():
        own = [(key, entry.write(getattr(spec, entry.field))) for key, entry in entries.items() if _differs(spec, entry, usual)]
        if table == "coding":
            own = [(_key(name), f'["{_time(fixed)}", "{_time(each)}"]') for name, (fixed, each) in spec.coding.items()]
        if table == "sources":
            own = [(_key(name), f'"{text}"') for name, text in spec.sources.items()]
        if not own:
            continue
        lines += [f"[{table}]" + (f"  # {comments[table]}" if table in comments else "")]
        said = {key: comments.get(f"{table}.{key.strip(chr(34))}") for key, _ in own}
        lines += [f"{key} = {value}" + (f"  # {said[key]}" if said[key] else "") for key, value in own]
        lines.append("")
    return "\n".join(lines)


def _differs(spec: ClusterSpec, entry: Field, usual: Mapping[str, Any]) -> bool:
    if entry.field == "oversubscription" or (entry.field == "flops" and spec.step_s is not None and spec.flops == usual["flops"]):
        return False
    return getattr(spec, entry.field) != usual[entry.field]


def _line(written: str, table: str, key: str | None = None) -> str:
    """Where a table, or a key of it, stands in the text: ``, line 3``."""
    inside = False
    for number, line in enumerate(written.splitlines(), 1):
        head = re.match(r"\s*\[\s*\"?([^\]\"]+?)\"?\s*\]", line)
        if head:
            inside = head[1] == table
            if inside and key is None:
                return f", line {number}"
        elif inside and key is not None and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
            return f", line {number}"
    return ""


# --- values ----------------------------------------------------------------------------------------------------------------


def _plain(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise HocketError(f"{where}: expected a number.")
    return float(value)


def _positive(value: Any, where: str, read: Callable[[Any, str], float]) -> float:
    found = read(value, where)
    if not found > 0:
        raise HocketError(f"{where}: it must be above 0; leave the line out where there is no limit.")
    return found


def amount(value: Any, where: str = "amount") -> float:
    """``50e9`` or ``"50G"``.

    >>> amount("124M"), amount("50G")
    (124000000.0, 50000000000.0)
    """
    if not isinstance(value, str):
        return _positive(value, where, _plain)
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(?:flops|flop/s|b)?", value, re.IGNORECASE)
    if match is None:
        raise HocketError(f"{where}: expected a number such as 50e9 or '50G'.")
    return float(match[1]) * _PREFIX[match[2].lower()]


def bytes_per_second(value: Any, where: str = "bandwidth") -> float:
    """``"1Gbit"``, ``"100 Mbit/s"`` or ``"12MB/s"``; a number is bytes per second.

    >>> bytes_per_second("1Gbit"), bytes_per_second("12 MB/s")
    (125000000.0, 12000000.0)
    """
    if not isinstance(value, str):
        return _positive(value, where, _plain)
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(bit|bits|bps|b|byte|bytes)(?:/s)?", value, re.IGNORECASE)
    if match is None:
        raise HocketError(f"{where}: expected a rate such as '1Gbit' or '12MB/s'.")
    unit = match[3]
    size = 1.0 if unit == "B" or unit.lower().startswith("byte") else 0.125
    return _positive(float(match[1]) * _PREFIX[match[2].lower()] * size, where, _plain)


def seconds(value: Any, where: str = "time") -> float:
    """``"0.1ms"``; a number is seconds."""
    if not isinstance(value, str):
        return _plain(value, where)
    match = re.fullmatch(_NUMBER + r"([a-zµ]+)", value)
    if match is None or match[2] not in _SECONDS:
        raise HocketError(f"{where}: expected a time such as '0.1ms' or '20us'.")
    return float(match[1]) * _SECONDS[match[2]]


def _pause(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise HocketError(f"{where}: expected how long all workers pause for a failure, such as '1s'; leave it out of other runs.")
    return seconds(value, where)


def _coding(value: Any, where: str) -> tuple[float, float]:
    parts = value if isinstance(value, list) else ["0s", value]
    if len(parts) != 2:
        raise HocketError(f"{where}: expected a time per value, or two times: per exchange and per value.")
    fixed, each = (seconds(part, where) for part in parts)
    return fixed, each


def _source(name: str, value: Any, where: str) -> str:
    table, _, key = name.partition(".")
    if table not in FIELDS or (key and table != "coding" and key not in FIELDS[table]):
        known = [*FIELDS, *(f"{t}.{k}" for t, keys in FIELDS.items() for k in keys)]
        raise HocketError(
            f"{where}: there is no such table or key{nearest(name, known) or '.'} Write for example link or link.latency."
        )
    if not isinstance(value, str) or not value.strip() or '"' in value:
        raise HocketError(f"{where}: expected where the figure is from, in words without quotation marks, or 'assumed'.")
    return value


def _slowdown(value: Any, where: str) -> tuple[float, ...]:
    return tuple(_plain(v, where) for v in (value if isinstance(value, list) else [value]))


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HocketError(f"{where}: expected a whole number of at least 1.")
    return value


def _duplex(value: Any, where: str) -> float:
    if value in ("full", "half"):
        return float(value == "half")
    if isinstance(value, str):
        raise HocketError(f"{where}: expected full, half, or a number between 0 (full) and 1 (half).")
    return _plain(value, where)


def _pairs(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise HocketError(f"{where}: expected pairs of shares such as [[0.1, 0.5], [1, 1]].")
    return tuple((_plain(a, where), _plain(b, where)) for a, b in value)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise HocketError(f"{where}: expected true or false.")
    return value


def _word(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise HocketError(f"{where}: expected a word.")
    return value


def _place(value: Any, where: str) -> bool:
    if value not in ("own", "workers"):
        raise HocketError(f"{where}: expected own (machines of their own) or workers (the workers' machines).")
    return bool(value == "workers")


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    unit, scale = next(((u, s) for u, s in reversed(units) if value >= s), units[0])
    return f"{value / scale:.4g}{unit}"


def _time(value: float) -> str:
    return _scaled(value, [(u, s) for u, s in _SECONDS.items() if u != "µs"]) if value else "0s"


def _rate(value: float) -> str:
    return _scaled(value * 8, [("bit", 1.0), ("kbit", 1e3), ("Mbit", 1e6), ("Gbit", 1e9), ("Tbit", 1e12)])


def _size(value: float) -> str:
    return _scaled(value, [("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _quoted(write: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: f'"{write(value)}"'


def _list(value: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in value) + "]"


class Field(NamedTuple):
    """A key of a file: the spec's field, how it is read and how it is written."""

    field: str
    read: Callable[[Any, str], Any]
    write: Callable[[Any], str]


def _times(field: str, read: Callable[[Any, str], Any] = seconds) -> Field:
    return Field(field, read, _quoted(_time))


def _rates(field: str) -> Field:
    return Field(field, bytes_per_second, _quoted(_rate))


def _numbers(field: str, read: Callable[[Any, str], Any] = _plain) -> Field:
    return Field(field, read, lambda value: f"{value:.4g}")


FIELDS: dict[str, dict[str, Field]] = {
    "cluster": {"workers": _numbers("workers", _whole)},
    "compute": {
        "flops": Field("flops", amount, _quoted(_size)),
        "step": _times("step_s"),
        "fixed": _times("fixed_s"),
        "slowdown": Field("slowdown", _slowdown, _list),
        "jitter": _numbers("jitter"),
        "stragglers": _numbers("stragglers"),
        "straggle": _numbers("straggle"),
        "update": _times("update_s"),
        "load": _times("load_s"),
        "exchange": _times("exchange_s"),
        "contention": _numbers("contention"),
        "alone": _times("alone_s"),
        "ready": Field("ready", _pairs, lambda value: "[" + ", ".join(_list(pair) for pair in value) + "]"),
        "memory": Field("memory_bytes", amount, _quoted(_size)),
    },
    "coding": {},
    "link": {
        "bandwidth": _rates("bandwidth"),
        "latency": _times("latency_s"),
        "message": _times("message_s"),
        "duplex": _numbers("half_duplex", _duplex),
        "pairs": _numbers("pairs_half_duplex", _duplex),
        "pieces": _numbers("pieces_half_duplex", _duplex),
        "jitter": _numbers("link_jitter"),
        "contention": _numbers("link_contention"),
        "pairs_contention": _numbers("pairs_contention"),
        "shared": Field("shared_links", _switch, lambda value: str(value).lower()),
        "count": _numbers("links", _whole),
    },
    "host": {"size": _numbers("host_size", _whole), "bandwidth": _rates("host_bandwidth"), "latency": _times("host_latency_s")},
    "servers": {
        "place": Field("servers_on_workers", _place, lambda value: '"workers"' if value else '"own"'),
        "message": _times("server_message_s"),
        "byte": _times("server_byte_s"),
    },
    "trunk": {
        "hosts": _numbers("trunk_hosts", _whole),
        "bandwidth": _rates("trunk_bandwidth"),
        "oversubscription": _numbers("oversubscription", lambda value, where: _positive(value, where, _plain)),
        "latency": _times("trunk_latency_s"),
    },
    "storage": {
        "bandwidth": _rates("storage_bandwidth"),
        "latency": _times("storage_latency_s"),
        "cache": Field("cache_bytes", amount, _quoted(_size)),
    },
    "checkpoints": {"every": _times("checkpoint_every_s"), "takes": _times("checkpoint_s")},
    "failures": {"every": _times("failure_every_s"), "restart": _times("restart_s"), "elastic": _times("elastic_pause_s", _pause)},
    "price": {"hour": _numbers("price"), "currency": Field("currency", _word, lambda value: f'"{value}"')},
    "sources": {},
}
"""The tables of a file and their keys."""
_REQUIRED: dict[str, dict[str, str]] = {
    "host": {"size": "how many workers share a host"},
    "trunk": {"hosts": "how many hosts are behind one switch"},
    "checkpoints": {"every": "the time between two", "takes": "what one takes"},
    "failures": {"every": "the mean time between two failures of one worker"},
    "price": {"hour": "what one worker costs for an hour"},
}
