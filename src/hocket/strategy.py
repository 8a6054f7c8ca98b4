"""Where the axes meet: a strategy is *when* × *whom* × *what*, and what is exchanged.

A :class:`Strategy` is frozen data. Its constructor refuses combinations that make no sense, with the reason and what to use
instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hocket import compression, sync, topology
from hocket.compression import DGC, Compressor, NoCompression, chained
from hocket.errors import HocketError, nearest
from hocket.notation import Term, read, shortened, write
from hocket.sync import Bulk, Moment, Sync
from hocket.synonyms import meant, meant_by_text
from hocket.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Strategy:
    """One way to train in parallel.

    >>> s = Strategy.parse("topk(0.01) | qsgd(4) + local(4)")
    >>> str(s), s.weights
    ('local(4) + allreduce + topk(0.01) | qsgd(4)', True)
    >>> Strategy.parse(str(s)) == s
    True
    """

    sync: Sync = field(default_factory=Bulk)
    topology: Topology = None  # type: ignore[assignment]
    """None: the default of the synchronisation, all-reduce or a server."""
    compression: Compressor = field(default_factory=NoCompression)
    exchange: str | None = None
    """``"weights"`` or ``"gradients"``; None: gradients for bulk+allreduce, weights for local steps and for gossip."""

    def __post_init__(self) -> None:
        if self.topology is None:
            name = self.sync.default_topology if isinstance(self.sync, Sync) else "allreduce"
            object.__setattr__(self, "topology", topology.METHODS[name]())
        for what, kind in (("sync", Sync), ("topology", Topology), ("compression", Compressor)):
            if not isinstance(part := getattr(self, what), kind):
                raise HocketError(f"Strategy({what}={part!r}): expected a {kind.__name__}; for text use Strategy.parse.")
        if self.exchange not in (None, "weights", "gradients"):
            words = nearest(str(self.exchange), ("weights", "gradients"))
            raise HocketError(f"exchange={self.exchange}: use weights or gradients{words}.")
        if reason := self._refusal():
            raise HocketError(f"{self}: {reason}.")

    @property
    def runtime(self) -> str:
        """Which program runs it: ``collective`` (all workers take part in every exchange), ``server`` or ``peers`` (messages)."""
        if not self.sync.asynchronous and not self.topology.has_servers:
            return "collective"
        return "peers" if self.topology.peer_to_peer else "server"

    @property
    def weights(self) -> bool:
        """Whether weights are exchanged (otherwise gradients)."""
        if self.exchange is not None:
            return self.exchange == "weights"
        return self.sync.default_weights if self.topology.uniform else True

    @classmethod
    def parse(cls, text: str | Strategy) -> Strategy:
        """Read the notation, for example ``"local(16) + gossip + threshold(keep=0.05)"``."""
        if isinstance(text, Strategy):
            return text
        if not isinstance(text, str):
            raise HocketError(
                f"A strategy is text or a hocket.Strategy, not {type(text).__name__}; for example 'local(4) + gossip'."
            )
        parts: dict[str, Any] = {}
        for chain in _read(text):
            axis, spec = _axis_and_spec(chain)
            if axis in parts:
                both = f"{_text(parts[axis])} and {_text(spec)}"
                raise HocketError(f"{shortened(text, 80)} names two methods of one kind ({axis}): {both}; keep one.")
            parts[axis] = spec
        return cls(**parts)

    def __str__(self) -> str:
        parts = [write(self.sync), write(self.topology)]
        if self.compression.compresses:
            parts.append(_text(self.compression))
        if self.exchange is not None:
            parts.append(f"exchange={self.exchange}")
        return " + ".join(parts)

    def citation(self) -> list[str]:
        """The papers behind this strategy.

        >>> len(Strategy.parse("local(4) + gossip + topk(0.01)").citation())
        3
        """
        papers = (self.sync.paper, self.topology.paper, *(link.paper for link in self.compression.links))
        return list(dict.fromkeys(paper for paper in papers if paper))

    def moment(self, step: int) -> Moment:
        """When in step ``step`` (from 1) workers exchange; printable and testable without running anything.

        >>> [Strategy.parse("local(2)").moment(t).value for t in (1, 2, 3, 4)]
        ['never', 'before', 'never', 'before']
        """
        return self.sync.moment(step, self.weights, self.topology.uniform)

    def _refusal(self) -> str | None:
        """Why this combination makes no sense and what to use instead, or None; the specs declare what they can do."""
        compressor = self.compression
        if reason := self.sync.refusal(self.topology, compressor, self.exchange, self.weights):
            return reason
        if compressor.for_gradients_only and self.weights:
            instead = f"use bulk, exchange=gradients, or topk({DGC().density})"
            return f"{compressor.name} accumulates gradients and cannot carry weights; {instead}"
        if compressor.uses_error_feedback and not compressor.biased:
            return f"{compressor.name} is unbiased, and error feedback makes unbiased methods diverge; leave feedback out"
        return self.topology.refusal(compressor, self.weights)


def _read(text: str) -> list[list[Term]]:
    try:
        return read(text)
    except HocketError as error:
        if hint := meant_by_text(text, tuple(_KNOWN)):
            raise HocketError(f"{str(error).removesuffix('.')}{hint}.") from None
        raise


def _axis_and_spec(chain: list[Term]) -> tuple[str, Any]:
    first = chain[0]
    if len(chain) == 1 and first in (Term("weights"), Term("gradients")):
        return "exchange", first.name
    if any(term.name == "exchange" for term in chain):
        for what in ("weights", "gradients"):
            if chain in ([Term("exchange", ([Term(what)],), options)] for options in ((), (("=", True),))):
                return "exchange", what
        raise HocketError("exchange is a term of its own, exchange=weights or exchange=gradients: 'gossip + exchange=weights'.")
    specs = [_spec(term) for term in chain]
    for axis, kind in (("sync", Sync), ("topology", Topology)):
        if isinstance(specs[0], kind):
            if len(specs) > 1:
                raise HocketError(f"{first.name} | …: only compressions are chained; join the axes with +.")
            return axis, specs[0]
    return "compression", chained(specs)


_ALIASES = {"local": {"rest": "residual"}, "server": {"rate": "lr"}}
_ALIASES |= {name: {"share": "density"} for name in ("topk", "randomk", "dgc")}
"""Older names of arguments, which the notation still reads; the canonical text has the new names."""
_KNOWN: dict[str, type] = {**sync.METHODS, **topology.METHODS, **compression.METHODS}


def _spec(term: Term) -> Any:
    if term.name not in _KNOWN:
        known = (*_KNOWN, "exchange")
        raise HocketError(f"Unknown method '{term.name}'{meant(term.name, known) or '.'} Known are {', '.join(sorted(_KNOWN))}.")
    kind = _KNOWN[term.name]
    names = [f.name for f in fields(kind) if f.name != "precision"]
    if ("=", True) in term.options:
        raise HocketError(f"{term.name}=…: write {term.name}(…) with its arguments in parentheses.")
    if len(term.arguments) > len(names):
        raise HocketError(f"{term.name} takes at most {len(names)} arguments ({', '.join(names)}), got {len(term.arguments)}.")
    values = dict(zip(names, term.arguments, strict=False))
    aliases = _ALIASES.get(term.name, {})
    for given, value in term.options:
        name = aliases.get(given, given)
        if name not in names:
            takes = f"It takes {', '.join(names)}" if names else "It takes none"
            raise HocketError(f"{term.name} has no argument '{name}'{nearest(name, names) or '.'} {takes}.")
        if name in values:
            raise HocketError(f"{term.name} is given {name} twice.")
        values[name] = value
    return kind(**{name: _argument(term.name, name, value) for name, value in values.items()})


def _argument(method: str, name: str, value: Any) -> Any:
    if isinstance(value, tuple) and name != "matrix":
        raise HocketError(f"{method}({name}=[…]): expected one value, not a list.")
    if not isinstance(value, list):
        return value
    if method == "hierarchical" and name in ("inner", "outer"):
        return chained([_spec(t) for t in value])
    if len(value) == 1 and value[0] == Term(value[0].name):
        return value[0].name
    raise HocketError(f"{method}({name}=…): expected a plain value, not a method with arguments.")


def _text(spec: Any) -> str:
    if isinstance(spec, Compressor):
        return " | ".join(write(link) for link in spec.links)
    return write(spec) if hasattr(spec, "__dataclass_fields__") else str(spec)
