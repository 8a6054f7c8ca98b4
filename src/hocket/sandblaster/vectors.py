"""A shard's vectors: it holds a slice of every vector by name, and carries out orders on them.

An order is plain data, ``(verb, operands …)``, so that it can travel as a message:

    ("copy", a, b)        a ← b              ("dot", a, b)   → Σ a·b
    ("scale", a, k, b)    a ← k·b            ("sum", a)      → Σ |a|
    ("axpy", a, k, b)     a ← a + k·b        ("max", a)      → max |a|
    ("minus", a, b, c)    a ← b − c

and four for the sum of portions, whose slices come from workers by :meth:`VectorShard.stage` (see ``portions`` for the whole):

    ("begin", e, a)       evaluation e starts at vector a: forget what was staged or counted before
    ("count", w, n, p)    worker w's bundle n counts; p is the first portion in it
    ("discard", w, n)     it never will
    ("total", a)          a ← the sum of all that counted

Answers are short lists of numbers (*terms*): :func:`combine` makes one scalar of all shards' answers. Sums of products are taken in
float64. With ``exact`` the terms hold a shard's sum without any rounding, so that the scalar does not depend on the cuts at all.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from hocket.errors import HocketError

Order = tuple[str | int | float, ...]
Terms = list[float]


class VectorShard:
    """One slice of every vector.

    >>> import torch
    >>> shard = VectorShard(torch.tensor([3.0, 4.0]))
    >>> shard.obey([("scale", "d", -1.0, "x"), ("axpy", "x", 0.5, "d"), ("dot", "x", "d"), ("max", "x")])
    [[], [], [-12.5], [2.0]]
    """

    def __init__(self, x: Tensor, exact: bool = False) -> None:
        self.vectors: dict[str, Tensor] = {"x": x.clone()}
        self.exact = exact
        self.forget()

    def forget(self, evaluation: int = -1, at: str = "x") -> None:
        """Begin ``evaluation`` at vector ``at``: nothing is staged or counted."""
        self.evaluation, self.point = evaluation, self.vectors[at].clone()
        self._staged: dict[tuple[int, int], Tensor] = {}
        self._sum = Tree() if self.exact else Sum()

    def obey(self, orders: Sequence[Order]) -> list[Terms]:
        """Carry out ``orders`` one after another; one answer each, empty where nothing was asked."""
        return [self._obey(*order) for order in orders]

    def stage(self, evaluation: int, worker: int, bundle: int, values: Tensor) -> bool:
        """Keep a worker's slice until it is told to count; False when that evaluation is not this shard's any more.

        ValueError where it is no slice of this shard's.
        """
        if evaluation != self.evaluation:
            return False
        if values.shape != self.point.shape or values.dtype != self.point.dtype:
            raise ValueError(f"{values.numel()} values of {values.dtype} instead of {len(self.point)} of {self.point.dtype}")
        self._staged[worker, bundle] = values
        return True

    def _obey(self, verb: str | int | float, *o: str | int | float) -> Terms:
        v = self.vectors
        match verb, o:
            case "copy", (str(a), str(b)):
                v[a] = v[b].clone()
            case "scale", (str(a), k, str(b)):
                v[a] = v[b] * float(k)
            case "axpy", (str(a), k, str(b)):
                v[a].add_(v[b], alpha=float(k))
            case "minus", (str(a), str(b), str(c)):
                v[a] = v[b] - v[c]
            case "dot", (str(a), str(b)):
                return self._add_up(v[a].double() * v[b].double())
            case "sum", (str(a),):
                return self._add_up(v[a].double().abs())
            case "max", (str(a),):
                return [v[a].abs().max().item()] if len(v[a]) else [0.0]
            case "begin", (int(e), str(a)):
                self.forget(e, a)
            case "count", (int(w), int(n), int(p)):
                self._sum.add(p, self._staged.pop((w, n)))
            case "discard", (int(w), int(n)):
                self._staged.pop((w, n), None)
            case "total", (str(a),):
                v[a] = self._sum.total()
            case _:
                raise HocketError(f"A shard has no command {verb!r} with {o!r}: see hocket.sandblaster.vectors for those it has.")
        return []

    def _add_up(self, values: Tensor) -> Terms:
        return unrounded(values.tolist()) if self.exact else [values.sum().item()]


class Sum:
    """A running sum: one slice of memory; its rounding depends on the order of arrival."""

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def add(self, portion: int, values: Tensor) -> None:
        self._value = values.clone() if self._value is None else self._value.add_(values)

    def total(self) -> Tensor:
        assert self._value is not None
        return self._value


class Tree:
    """A sum over a fixed binary tree of portions: the same bits in whatever order they arrive.

    Two complete siblings become their parent at once, so what is held is at most one slice per level of the tree for each gap in
    the portions that have arrived: about (workers + 1) · log₂ portions, however many portions there are.

    >>> import torch
    >>> tree = Tree()
    >>> for p in (2, 0, 1): tree.add(p, torch.tensor([10.0**p]))
    >>> tree.total(), len(tree)
    (tensor([111.]), 2)
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, portion: int, values: Tensor) -> None:
        """One more; ``portion`` is its place among the leaves."""
        level, node = 0, portion
        while (sibling := self._held.pop((level, node ^ 1), None)) is not None:
            values = values + sibling
            level, node = level + 1, node >> 1
        self._held[level, node] = values

    def total(self) -> Tensor:
        """All of them, small subtrees first."""
        first, *rest = (self._held[key] for key in sorted(self._held))
        return sum(rest, first.clone())


def combine(order: Order, answers: Sequence[Terms]) -> float:
    """One scalar out of all shards' answers to an order."""
    terms = [term for answer in answers for term in answer]
    if not terms:
        return 0.0
    if order[0] == "max":
        return math.nan if any(map(math.isnan, terms)) else max(terms)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def unrounded(values: Sequence[float]) -> Terms:
    """Few numbers whose sum is exactly that of ``values``.

    >>> unrounded([1e16, 1.0, -1e16, 2.0**-60]), unrounded([])
    ([1.0, 8.673617379884035e-19], [])
    """
    if not all(map(math.isfinite, values)):
        return [sum(values)]
    terms: Terms = []
    while rest := math.fsum([*values, *(-term for term in terms)]):
        terms.append(rest)
    return terms


def cuts(values: int, shards: int) -> list[slice]:
    """Shard i's part of a vector: consecutive, as equal as can be.

    >>> cuts(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    size, more = divmod(values, shards)
    ends = [i * size + min(i, more) for i in range(shards + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]
