"""The blocks of a model: the modules whose weights are gathered, or fetched from slow memory, one after another.

Blocks are the children of the outermost ``nn.Sequential`` and ``nn.ModuleList`` modules, such as the layers of a perceptron or the
blocks of a transformer. Their weights are used in their own forward pass alone; everything else (embeddings, a last norm, weights
that several modules share) stays in memory.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name, in the order of registration.

    >>> list(blocks_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))))
    ['0', '2']
    >>> blocks_of(nn.Linear(4, 3))
    {}
    """
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and not any(_inside(name, block) for block in found):
            for child, block in module.named_children():
                params = list(block.parameters())
                if params and all(holders[id(p)] == 1 for p in params) and block not in found.values():
                    found[f"{name}.{child}".lstrip(".")] = block
    return found


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")
