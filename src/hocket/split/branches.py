"""Parallel branches: several modules on one input, joined; under a tensor axis each process computes only its own.

It is faster where a network is wide by design (Inception, ensembles) and branches are long: there is no exchange
inside a branch, one of the joined output on the way forward, and one of the input's gradient on the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.errors import HocketError, nearest
from hocket.split.axis import Axis, copied, gathered, summed
from hocket.split.parts import Part

_JOINS = ("sum", "mean", "cat")


class Branches(nn.Module):
    """The sum, the mean or the concatenation (along ``dim``) of the outputs of all branches for one input.

    >>> Branches(nn.Linear(4, 2), nn.Linear(4, 3), join="cat")(torch.zeros(1, 4)).shape
    torch.Size([1, 5])
    """

    whole = True

    def __init__(self, *branches: nn.Module, join: str = "sum", dim: int = 1) -> None:
        super().__init__()
        if join not in _JOINS:
            raise HocketError(f"Branches(join={join!r}): choose one of {', '.join(_JOINS)}{nearest(str(join), _JOINS)}.")
        if not branches:
            raise HocketError("Branches() got no branch: give it at least one module.")
        self.join, self.dim, self.count = join, dim, len(branches)
        self.axis = Axis("tensor")
        self.widths: list[int] = []
        for i, branch in enumerate(branches):
            self.add_module(str(i), branch)

    def forward(self, x: Tensor) -> Tensor:
        x = copied(x, self.axis)
        outputs = [branch(x) for branch in self.children()]
        if self.join == "cat":
            own = torch.cat(outputs, self.dim)
            return gathered(own, self.axis, self.dim, self._widths(own))
        total = summed(sum(outputs[1:], outputs[0]), self.axis)
        return total / self.count if self.join == "mean" else total

    def split(self, axis: Axis, name: str = "branches") -> dict[int, Part]:
        """Keep only the branches of this process: branch ``i`` of ``n`` stays on process ``⌊i·P/n⌋``.

        Returns the parts of the parameters kept, by their ``id``: each is the whole parameter, which no other process has.
        """
        if self.count < axis.size:
            raise HocketError(
                f"'{name}' has {self.count} branches for {axis.size} processes: every process needs one; use at most {self.count}."
            )
        owners: dict[int, int] = {}
        for i, branch in list(enumerate(self.children())):
            owner = i * axis.size // self.count
            if any(owners.setdefault(id(p), owner) != owner for p in branch.parameters()):
                raise HocketError(f"'{name}': branch {i} shares a parameter with another process's: give each its own.")
            if owner != axis.place:
                delattr(self, str(i))
        self.axis, self.widths = axis, []
        return {id(p): Part(tuple(p.shape), 0, ((0, p.shape[0]),)) for p in self.parameters() if p.dim()}

    def _widths(self, own: Tensor) -> list[int]:
        if not self.widths:  # they are those of the layers, the same at every call
            width = torch.tensor([own.shape[self.dim]], device=own.device)
            self.widths = self.axis.all_gather(width, 0).tolist()
        return self.widths

    def extra_repr(self) -> str:
        return f"join={self.join}, {self.count} branches, {self.axis.place} of {self.axis.size}"
