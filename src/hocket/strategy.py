"""Where the axes meet: a strategy is *when* × *whom* × *what*, and what is exchanged.

A :class:`Strategy` is frozen data. Its constructor refuses combinations that make no sense, with the reason and what to use
instead.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from hocket import compression, sync, topology
from hocket.compression import DGC, Compressor, NoCompression, chained
from hocket.errors import HocketError, nearest
from hocket.notation import Ratio, Term, read, shortened, write
from hocket.notebook import table
from hocket.sync import Bulk, Moment, Sync
from hocket.synonyms import meant, meant_by_text
from hocket.topology import Topology

T = TypeVar("T")
EXCHANGES = ("gradients", "weights", "updates", "momentum")
"""What workers may exchange."""


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
    """One of :data:`EXCHANGES`; None: gradients for bulk+allreduce, weights for local steps and for gossip.

    ``"updates"``: each worker steps with its own gradient, then the displacement of the weights is exchanged. ``"momentum"``:
    gradients until :class:`hocket.OneBitAdam` has a fixed variance, then each worker's momentum. Under both replicas are equal
    after every exchange.
    """

    def __post_init__(self) -> None:
        if self.topology is None:
            name = self.sync.default_topology if isinstance(self.sync, Sync) else "allreduce"
            object.__setattr__(self, "topology", topology.METHODS[name]())
        for what, kind in (("sync", Sync), ("topology", Topology), ("compression", Compressor)):
            if not isinstance(part := getattr(self, what), kind):
                raise HocketError(f"Strategy({what}={part!r}): expected a {kind.__name__}; for text use Strategy.parse.")
        if self.exchange not in (None, *EXCHANGES):
            raise HocketError(f"exchange={self.exchange}: use {', '.join(EXCHANGES)}{nearest(str(self.exchange), EXCHANGES)}.")
        if reason := self._refusal():
            raise HocketError(f"{self}: {reason}.")

    @property
    def runtime(self) -> str:
        """Which program runs it: ``collective`` (all workers take part in every exchange), ``server`` or ``peers`` (messages)."""
        if not self.sync.asynchronous and not self.topology.has_servers:
            return "collective"
        return "peers" if self.topology.peer_to_peer else "server"

    @property
    def can_be_elastic(self) -> bool:
        """Whether its workers may come and go during a run."""
        collective = self.runtime == "collective" and not self.topology.sums_on_servers
        return collective and self.exchanged != "momentum" and not self.sync.predicts

    @property
    def exchanged(self) -> str:
        """What workers exchange, of :data:`EXCHANGES`."""
        return self._default_exchange if self.exchange is None else self.exchange

    @property
    def _default_exchange(self) -> str:
        return "weights" if self.sync.default_weights or not self.topology.uniform else "gradients"

    @property
    def weights(self) -> bool:
        """Whether weights, or their updates, are exchanged (otherwise gradients, or momentum made of them)."""
        return self.exchanged in ("weights", "updates")

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether all replicas have the same weights after every step."""
        return self.sync.keeps_replicas_equal and self.topology.uniform and self.exchanged != "weights"

    @property
    def meaning(self) -> str:
        """Its text without an ``exchange=`` that says the default: two strategies that train alike have the same.

        >>> Strategy.parse("bulk + sign + exchange=gradients").meaning
        'bulk + allreduce + sign'
        """
        return str(self).removesuffix(f" + exchange={self._default_exchange}")

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

    def _repr_html_(self) -> str:
        codes = [("what", link) for link in self.compression.links]
        specs: list[tuple[str, Any]] = [("when", self.sync), ("whom", self.topology), *codes]
        about = [str(sys.modules[type(spec).__module__].__doc__).split("\n")[0].replace("``", "") for _, spec in specs]
        rows = [(axis, _text(spec), title, spec.paper or "") for (axis, spec), title in zip(specs, about, strict=True)]
        return table(str(self), ["axis", "method", "what it is", "paper"], rows, [f"Workers exchange {self.exchanged}."], words=4)

    def moment(self, step: int) -> Moment:
        """When in step ``step`` (from 1) workers exchange; printable and testable without running anything.

        >>> [Strategy.parse("local(2)").moment(t).value for t in (1, 2, 3, 4)]
        ['never', 'before', 'never', 'before']
        """
        if self.exchange == "updates":
            return Moment.AFTER
        return self.sync.moment(step, self.weights, self.topology.uniform)

    def exchanges_after(self, step: int) -> bool:
        """Whether updated weights are exchanged after ``step``."""
        return step > 0 and self.moment(step) is Moment.AFTER

    def _refusal(self) -> str | None:
        """Why this combination makes no sense and what to use instead, or None; the specs declare what they can do."""
        compressor = self.compression
        collective = self.topology.uniform and self.runtime == "collective"
        if self.exchange == "updates" and not (collective and self.sync.keeps_replicas_equal):
            return "exchange=updates is for bulk + allreduce, under which all replicas are equal; leave it out"
        if self.exchange == "momentum" and not (collective and self.sync.accumulates_momentum):
            return "exchange=momentum is for bulk and local(p) with allreduce; leave it out"
        if reason := self.sync.refusal(self.topology, compressor, self.exchange, self.weights):
            return reason
        if compressor.for_gradients_only and self.exchanged != "gradients":
            instead = f"use bulk, exchange=gradients, or topk({DGC().density})"
            return f"{compressor.name} accumulates gradients and cannot carry {self.exchanged}; {instead}"
        if compressor.uses_error_feedback and not compressor.biased:
            return f"{compressor.name} is unbiased, and error feedback makes unbiased methods diverge; leave feedback out"
        if compressor.sends_differences and not collective:
            return (
                "feedback=ef21 adds up what all workers send, and here they do not all receive it; use allreduce, or leave it out"
            )
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
    if len(chain) == 1 and first in [Term(what) for what in EXCHANGES]:
        return "exchange", first.name
    if any(term.name == "exchange" for term in chain):
        for what in EXCHANGES:
            if chain in ([Term("exchange", ([Term(what)],), options)] for options in ((), (("=", True),))):
                return "exchange", what
        known = " or ".join(f"exchange={what}" for what in EXCHANGES)
        raise HocketError(f"exchange is a term of its own, {known}: 'gossip + exchange=weights'.")
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
    names = [f.name for f in fields(kind) if not f.kw_only]
    if ("=", True) in term.options:
        raise HocketError(f"{term.name}=…: write {term.name}(…) with its arguments in parentheses.")
    if len(term.arguments) > len(names):
        raise HocketError(f"{term.name} takes at most {len(names)} arguments ({', '.join(names)}), got {len(term.arguments)}.")
    values = dict(zip(names, term.arguments, strict=False))
    term, aliases = _with_outer_settings(term), _ALIASES.get(term.name, {})
    for given, value in term.options:
        name = aliases.get(given, given)
        if name not in names:
            takes = f"It takes {', '.join(names)}" if names else "It takes none"
            raise HocketError(f"{term.name} has no argument '{name}'{nearest(name, names) or '.'} {takes}.")
        if name in values:
            raise HocketError(f"{term.name} is given {name} twice.")
        values[name] = value
    return kind(**{name: _argument(term.name, name, value) for name, value in values.items()})


def _with_outer_settings(term: Term) -> Term:
    """``diloco(outer=nesterov(0.7, 0.9))`` as ``diloco(outer=nesterov, lr=0.7, momentum=0.9)``."""
    options: list[tuple[str, Any]] = []
    for name, value in term.options:
        if term.name == "diloco" and name == "outer" and isinstance(value, list) and value[0].arguments + value[0].options:
            outer = value[0]
            if len(value) > 1 or len(outer.arguments) > 2:
                raise HocketError("diloco(outer=…): an outer optimiser takes a rate and a momentum, such as nesterov(0.7, 0.9).")
            options += [*zip(("lr", "momentum"), outer.arguments, strict=False), *outer.options]
            value = [Term(outer.name)]
        options.append((name, value))
    return replace(term, options=tuple(options))


def _argument(method: str, name: str, value: Any) -> Any:
    if isinstance(value, tuple) and name != "matrix":
        raise HocketError(f"{method}({name}=[…]): expected one value, not a list.")
    if isinstance(value, Ratio) and (method, name) != ("topk", "density"):
        raise HocketError(f"{method}({name}={value}): expected one number, such as {float(value):g}; a ratio is for topk(64/4096).")
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
