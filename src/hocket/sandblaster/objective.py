"""A portion's share of the batch's loss and of its gradient, at any point of the parameters' flat vector.

    f(x) = mean over all samples = Σ_p (b_p / B) · mean over portion p        ∇f likewise

so the loss must be a mean over samples, and nothing may couple samples of different portions or be drawn at random: batch
statistics and dropout are refused.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hocket.data.base import Pair
from hocket.errors import HocketError
from hocket.train.engines.base import Loss
from hocket.train.engines.loop import random_modules


class Objective:
    """The mean loss of ``model`` over a batch, cut into portions."""

    def __init__(
        self, model: nn.Module, loss: Loss, batch: Pair, portions: Sequence[slice], prepare: Callable[[Tensor], Tensor]
    ) -> None:
        check(model)
        self.model, self.loss, self.portions, self.prepare = model, loss, portions, prepare
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.inputs, self.targets = (part.to(self.parameters[0].device) for part in batch)
        self._at: Tensor | None = None

    @property
    def point(self) -> Tensor:
        """The model's parameters as one vector."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def move(self, point: Tensor) -> None:
        """Make ``point`` the model's parameters."""
        offset = 0
        with torch.no_grad():
            for p in self.parameters:
                p.copy_(point[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        self._at = point

    def share(self, portion: int) -> float:
        """The portion's part of all samples."""
        part = self.portions[portion]
        return (part.stop - part.start) / len(self.inputs)

    def portion(self, point: Tensor, portion: int) -> tuple[float, Tensor]:
        """The portion's share of the loss and of the gradient at ``point``, which must not be changed in place between calls."""
        if self._at is not point:
            self.move(point)
        loss = self._loss(self.portions[portion]) * self.share(portion)
        grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, grads, strict=True)]
        return loss.item(), torch.cat([g.flatten() for g in flat])

    def flops(self) -> float:
        """Floating point operations of one sample's gradient: those of matrix products and convolutions."""
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(self._loss(slice(0, 1)), self.parameters, allow_unused=True)
        return float(counter.get_total_flops())

    def _loss(self, part: slice) -> Tensor:
        with torch.enable_grad():
            value = self.loss(self.model(self.prepare(self.inputs[part])), self.targets[part])
        if value.dim():
            raise HocketError(f"The loss must be one number, the mean over samples; got shape {list(value.shape)}: use its mean.")
        return value


def check(model: nn.Module) -> None:
    """Refuse models whose gradient is not a sum over portions, or whose parameters do not make one vector."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise HocketError(
                f"Sandblaster sums gradients of portions, and '{name}' ({type(module).__name__}) uses statistics of each portion, "
                "which give another gradient: put it into eval mode, or use GroupNorm or LayerNorm instead."
            )
    active = [m for m in random_modules(model) if m.training]
    if active:
        raise HocketError(
            f"L-BFGS compares losses at several points, and {type(active[0]).__name__} draws new random numbers each time: "
            "remove dropout or put the model into eval mode."
        )
    kinds = sorted({f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in model.parameters() if p.requires_grad})
    if len(kinds) != 1 or not kinds[0].startswith(("float32", "float64")):
        raise HocketError(
            "Sandblaster needs trainable parameters of one type, float32 or float64, on one device; "
            + (f"got {', '.join(kinds)}: convert the model with .to(…)." if kinds else "the model has none.")
        )
