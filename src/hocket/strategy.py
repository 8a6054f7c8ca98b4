"""Where the axes meet: a strategy is *when* × *whom* × *what*, and what is exchanged.

A :class:`Strategy` is frozen data. Combinations that make no sense are refused here, when it is built, with the reason and what to
use instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from hocket import compression, sync, topology
from hocket.compression import DGC, Chain, Compressor, NoCompression, Precision
from hocket.errors import HocketError, nearest
from hocket.notation import Term, read, write
from hocket.sync import Async, Bulk, Local, Moment, PostLocal, Stale, Sync
from hocket.topology import AllReduce, Gossip, Server, Topology
from hocket.topology.base import plain

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
    """All-reduce unless told otherwise; a server where nobody waits for everybody."""
    compression: Compressor = field(default_factory=NoCompression)
    exchange: str | None = None
    """``"weights"`` or ``"gradients"``; None: gradients for bulk+allreduce, weights for local steps and for gossip."""

    def __post_init__(self) -> None:
        if self.topology is None:
            waits = not (isinstance(self.sync, Sync) and self.sync.asynchronous) or isinstance(self.sync, Stale)
            object.__setattr__(self, "topology", AllReduce() if waits else Server())
        for part, kind, what in (
            (self.sync, Sync, "sync"),
            (self.topology, Topology, "topology"),
            (self.compression, Compressor, "compression"),
        ):
            if not isinstance(part, kind):
                raise HocketError(f"Strategy({what}={part!r}): expected a {kind.__name__}; to write it as text use Strategy.parse.")
        if self.exchange not in (None, "weights", "gradients"):
            words = nearest(str(self.exchange), ("weights", "gradients"))
            raise HocketError(f"exchange={self.exchange}: what is exchanged is weights or gradients{words}.")
        if reason := self._refusal():
            raise HocketError(f"{self}: {reason}.")

    @property
    def runtime(self) -> str:
        """What carries it out: ``collective`` (all workers take part in every exchange), ``server`` or ``peers`` (messages)."""
        if not self.sync.asynchronous and not self.topology.has_servers:
            return "collective"
        return "peers" if self.topology.peer_to_peer else "server"

    @property
    def weights(self) -> bool:
        """Whether weights are exchanged (otherwise gradients)."""
        if self.exchange is not None:
            return self.exchange == "weights"
        if self.topology.uniform:
            return self.sync.default_weights
        return True

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
        for chain in read(text):
            axis, spec = _axis_and_spec(chain)
            if axis in parts:
                raise HocketError(
                    f"{_short(text)} names two of one kind ({axis}): {_text(parts[axis])} and {_text(spec)}; keep one."
                )
            parts[axis] = spec
        return cls(**parts)

    def __str__(self) -> str:
        parts = [write(self.sync), write(self.topology)]
        if not isinstance(self.compression, NoCompression):
            parts.append(_text(self.compression))
        if self.exchange is not None:
            parts.append(f"exchange={self.exchange}")
        return " + ".join(parts)

    def citation(self) -> list[str]:
        """The papers behind this strategy.

        >>> len(Strategy.parse("local(4) + gossip + topk(0.01)").citation())
        3
        """
        links = [self.compression.first, self.compression.second] if isinstance(self.compression, Chain) else [self.compression]
        return list(dict.fromkeys(p for p in (self.sync.paper, self.topology.paper, *(c.paper for c in links)) if p))

    def moment(self, step: int) -> Moment:
        """When in step ``step`` (from 1) workers exchange; printable and testable without running anything.

        >>> [Strategy.parse("local(2)").moment(t).value for t in (1, 2, 3, 4)]
        ['never', 'before', 'never', 'before']
        """
        moment = self.sync.moment(step, self.weights)
        if moment is Moment.GRADIENTS and isinstance(self.sync, PostLocal) and not self.topology.uniform and self.weights:
            return Moment.BEFORE  # gossip of weights in the bulk phase, too
        return moment

    def _refusal(self) -> str | None:
        """Why this combination makes no sense and what to use instead, or None."""
        compressor = self.compression
        if isinstance(self.topology, Gossip) and self.topology.kind == "pushsum" and not self.sync.asynchronous:
            return "push-sum is for workers that do not go in step; use async + gossip(pushsum), or gossip(exponential)"
        if self.runtime != "collective" and (reason := self._refusal_of_messages()):
            return reason
        if self.sync.only_weights and self.exchange == "gradients":
            return (
                f"{self.sync.name} exchanges weights by definition; leave exchange=gradients out, or use local({self.sync.period})"
            )
        if isinstance(self.sync, Local) and self.sync.mean == "after" and not self.weights:
            return "mean=after is about weights; leave it out, or use exchange=weights"
        if self.sync.residual_stays and not (self.weights and self.topology.uniform and compressor.residual_stays):
            return (
                "residual=weights is about what a code with feedback, such as topk, holds back of weights under allreduce; "
                "leave it out"
            )
        if compressor.for_gradients_only and self.weights:
            instead = f"use bulk, exchange=gradients, or topk({DGC().density})"
            return f"{compressor.name} accumulates gradients and cannot carry weights; {instead}"
        feedback = getattr(compressor, "feedback", None)
        if feedback is True and not compressor.biased:
            return f"{compressor.name} is unbiased, and feedback makes unbiased codes diverge; leave feedback out"
        return self.topology.refusal(compressor, self.weights)

    def _refusal_of_messages(self) -> str | None:
        """The same where workers are programs that send messages."""
        when, whom = self.sync, self.topology
        if isinstance(whom, Server) and whom.sums_on_servers:
            return f"servers that only sum are for those who wait for everybody; leave role=sum out of {when.name}, or use bulk"
        if isinstance(when, Stale):
            if isinstance(whom, Server) and whom != Server(whom.shards):
                return "under stale the workers keep their optimisers and whole weights travel; say only server(shards=n)"
            if not isinstance(whom, (AllReduce, Server)):
                return "all synchronise when the first has used its steps up, so it needs allreduce or server"
            if not plain(self.compression):
                return "stale exchanges whole weights of steps that differ from worker to worker; leave the compression out"
            return None
        if isinstance(whom, Gossip) and isinstance(when, Async):
            if self.exchange == "gradients":
                return "partners that meet average their weights; leave exchange=gradients out"
            if not plain(self.compression):
                return "partners that meet average whole weights; leave the compression out, or use bulk + gossip"
            if whom.matrix is not None or whom.kind == "exponential":
                return "callers reach answerers, every other worker; use gossip, gossip(ring), gossip(random) or gossip(pushsum)"
            if when != Async():
                return "between partners there is no old gradient to compensate and no fetch to overlap; write async + gossip"
            return None
        if not isinstance(whom, Server):
            instead = f"{when.name} + server or async + gossip" if isinstance(when, Async) else f"{when.name} + server"
            why = (
                "an all-reduce waits for everybody" if isinstance(whom, AllReduce) else f"{whom.name} goes step by step with others"
            )
            return f"{why}, and {when.name} is there not to wait; use {instead}"
        if not (isinstance(when, Bulk) or when.asynchronous):
            period = when.period
            return f"a server takes gradients; for steps of one's own in between use downpour(push={period}, fetch={period})"
        if self.exchange == "weights":
            return "gradients are pushed and weights are fetched; leave exchange=weights out"
        return None


def _axis_and_spec(chain: list[Term]) -> tuple[str, Any]:
    first = chain[0]
    if len(chain) == 1 and first in (Term("weights"), Term("gradients")):
        return "exchange", first.name
    if any(term.name == "exchange" for term in chain):
        if len(chain) == 1:
            for what in ("weights", "gradients"):
                if first.arguments == ([Term(what)],) and first.options in ((), (("=", True),)):
                    return "exchange", what
        raise HocketError("exchange stands alone, as exchange=weights or exchange=gradients: 'bulk + gossip + exchange=gradients'.")
    specs = [_spec(term) for term in chain]
    for axis, kind in (("sync", Sync), ("topology", Topology)):
        if isinstance(specs[0], kind):
            if len(specs) > 1:
                raise HocketError(f"{first.name} | …: only compressions are chained; join the axes with +.")
            return axis, specs[0]
    return "compression", _chained(specs)


def _chained(specs: list[Any]) -> Compressor:
    if len(specs) == 1:
        return specs[0]
    if len(specs) > 2:
        raise HocketError("A chain has two links, what and how precisely, for example topk(0.01) | qsgd(4).")
    first, second = specs
    if isinstance(first, DGC) and isinstance(second, Precision):
        return DGC(first.density, first.warmup, first.momentum, first.clip, second)
    return Chain(first, second)


_ALIASES = {
    "local": {"rest": "residual"},
    "server": {"rate": "lr"},
    "topk": {"share": "density"},
    "randomk": {"share": "density"},
    "dgc": {"share": "density"},
}
"""Older names of arguments, which are still read; the canonical text has the new ones."""
_KNOWN: dict[str, type] = {**sync.METHODS, **topology.METHODS, **compression.METHODS}


def _spec(term: Term) -> Any:
    """The spec that a term names."""
    if term.name not in _KNOWN:
        known = (*_KNOWN, "exchange")
        raise HocketError(f"Unknown method '{term.name}'{nearest(term.name, known) or '.'} Known are {', '.join(sorted(_KNOWN))}.")
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
        return _chained([_spec(t) for t in value]) if len(value) > 1 else _spec(value[0])
    if len(value) == 1 and value[0] == Term(value[0].name):
        return value[0].name
    raise HocketError(f"{method}({name}=…): expected a plain value, not a method with arguments.")


def _text(spec: Any) -> str:
    if isinstance(spec, Chain):
        return f"{write(spec.first)} | {write(spec.second)}"
    if isinstance(spec, DGC) and spec.precision is not None:
        return f"{write(DGC(spec.density, spec.warmup, spec.momentum, spec.clip))} | {write(spec.precision)}"
    return write(spec) if hasattr(spec, "__dataclass_fields__") else str(spec)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…")
