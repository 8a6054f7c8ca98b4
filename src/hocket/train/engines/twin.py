"""The twin of a model for all rows at once: the same tensors, in layers that ``vmap`` computes well.

| layer | what stands for it |
|---|---|
| ``Conv2d`` | a kernel over all rows (:mod:`hocket.train.engines.convolution`), or a product of matrices where windows lie apart |
| ``BatchNorm`` | its equations, in any memory format; PyTorch's own wants contiguous tensors |
| ``LSTM``, ``GRU``, ``RNN`` | one product of matrices per time step (:mod:`hocket.train.engines.recurrent`) |
| ``AdaptiveAvgPool2d(1)`` | the mean over each image, in any memory format |
| other convolutions | themselves; under autocast with their tensors cast, which vmap leaves out on a CPU |
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.train.engines import convolution
from hocket.train.engines.recurrent import RowRecurrence, has_row_recurrence


def row_twin(model: nn.Module, autocast: torch.dtype | None = None) -> nn.Module:
    """A copy of the module tree with the same tensors and with layers for all rows; the model itself if it has none of them."""
    if not any(_row_class(m, autocast) for m in model.modules()):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    try:
        twin = copy.deepcopy(model, {id(t): t for t in tensors})
    except Exception:  # a module that cannot be copied is used as it is
        return model
    for m in twin.modules():
        m.__class__ = _row_class(m, autocast) or m.__class__
    return twin


def _row_class(m: nn.Module, autocast: torch.dtype | None) -> type[nn.Module] | None:
    if type(m) is nn.Conv2d and convolution.has_row_kernel(m, autocast):
        return convolution.RowConv2d
    if type(m) is nn.Conv2d and _has_patches(m):
        return _PatchConv2d
    if autocast is not None and type(m) in _CAST:
        return _CAST[type(m)]
    if type(m) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return _RowBatchNorm
    if type(m) is nn.AdaptiveAvgPool2d and m.output_size in (1, (1, 1)):
        return _GlobalAverage
    return RowRecurrence if has_row_recurrence(m) else None


def _has_patches(m: nn.Conv2d) -> bool:
    """Whether its windows do not overlap, so that it is a product of matrices."""
    apart = m.kernel_size in ((1, 1), m.stride)
    return apart and m.groups == 1 and m.dilation == (1, 1) and m.padding in (0, (0, 0), "valid")


class _PatchConv2d(nn.Conv2d):
    """A convolution whose windows do not overlap: one row of values for each of them, times the weights."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        if (kh, kw) == (1, 1):
            patches = input[:, :, ::sh, ::sw].movedim(1, -1)
        else:
            high, wide = input.shape[2] // kh, input.shape[3] // kw
            x = input[:, :, : high * kh, : wide * kw].unflatten(3, (wide, kw)).unflatten(2, (high, kh))
            patches = x.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, weight.flatten(1), bias).movedim(-1, 1)


class _Cast:
    """A convolution in the precision of autocast."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(*convolution.cast(input, weight, bias))  # type: ignore[misc]


_CAST: dict[type, type[nn.Module]] = {
    kind: type(f"_Cast{kind.__name__}", (_Cast, kind), {}) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
}


class _RowBatchNorm(nn.modules.batchnorm._BatchNorm):
    """``(x − mean) / √(var + eps) · weight + bias``; statistics in at least float32, as torch's own."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        shape = (1, -1, *(1,) * (x.dim() - 2))
        mean, var = self.running_mean, self.running_var
        if self.training or mean is None or var is None:
            fresh_var, fresh_mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
            if self.training and mean is not None and var is not None:
                self._track(mean, var, fresh_mean.detach(), fresh_var.detach(), x.numel() // x.shape[1])
            mean, var = fresh_mean, fresh_var
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        out = (x - mean.view(shape)) * scale.view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor, fresh_mean: Tensor, fresh_var: Tensor, count: int) -> None:
        """Moves the running statistics, the variance without bias."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        mean.add_((fresh_mean - mean) * rate)
        var.add_((fresh_var * (count / max(count - 1, 1)) - var) * rate)


class _GlobalAverage(nn.AdaptiveAvgPool2d):
    """The mean over each image; torch's own cannot take channels-last tensors under vmap."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1), keepdim=True)
