"""Convolutions with one set of weights per row: all tensors are logically ``[rows, …]``, results lie channels-last.

Under ``vmap`` with per-row weights a convolution becomes a grouped one, which cuDNN does slowly, its gradients above all. These
are Triton kernels (implicit matrix products, one group per worker), at the precision that ``torch.backends.cudnn.allow_tf32`` asks
for; their plain torch reference is what runs without Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

triton: Any = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl: Any = importlib.import_module("triton.language") if triton else None


class RowConv2d(nn.Conv2d):
    """A convolution that, under vmap with per-row weights, runs as one kernel over all rows."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _conv2d(*cast(input, weight, bias), _padding(self), list(self.stride))


def cast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same as autocast would have them, where that is on."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return input, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def has_row_kernel(m: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Whether a module is a convolution that :class:`RowConv2d` computes, and faster, in ``dtype`` (None: that of its weights)."""
    if type(m) is not nn.Conv2d or m.groups != 1 or m.dilation != (1, 1) or m.padding_mode != "zeros":
        return False
    dtype = dtype or m.weight.dtype
    # In full float32 cuDNN's grouped convolutions are the faster ones (3.7 against 4.4 ms for 16 workers on an H200).
    fast = dtype in (torch.float16, torch.bfloat16) or (dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    fits = m.padding != "same" or all(k % 2 for k in m.kernel_size)
    inside = fits and all(p < k for p, k in zip(_padding(m), m.kernel_size, strict=True))
    return triton is not None and m.weight.is_cuda and fast and inside


def _padding(m: nn.Conv2d) -> list[int]:
    if isinstance(m.padding, str):
        return [0, 0] if m.padding == "valid" else [k // 2 for k in m.kernel_size]
    return list(m.padding)


def _conv2d_plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], stride: Sequence[int]) -> Tensor:
    return F.conv2d(x, weight, bias, list(stride), list(padding))


def _rows_conv2d_any(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], stride: Sequence[int]) -> Tensor:
    """``[R,B,C,H,W]`` with weights ``[R,O,C,KH,KW]`` to ``[R,B,O,OH,OW]``: Triton on CUDA, else the torch reference."""
    if x.is_cuda and triton is not None:
        return _launch_forward(x, weight, bias, padding, stride)
    pairs = enumerate(zip(x, weight, strict=True))
    y = torch.stack([_conv2d_plain(a, w, None if bias is None else bias[i], padding, stride) for i, (a, w) in pairs])
    return _channels_last(y)


def _rows_conv2d_fake(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], stride: Sequence[int]) -> Tensor:
    rows, batch = x.shape[:2]
    sizes = zip(x.shape[3:], weight.shape[3:], padding, stride, strict=True)
    shape = (rows, batch, *((size + 2 * p - k) // s + 1 for size, k, p, s in sizes), weight.shape[1])
    return x.new_empty(shape).permute(0, 1, 4, 2, 3)


def _rows_weight_any(
    dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of the weights ``[R,O,C,KH,KW]`` and of the bias ``[R,O]``."""
    if x.is_cuda and triton is not None:
        return _launch_weight(dy, x, kernel, padding, stride)
    shape = (dy.shape[2], x.shape[2], *kernel)
    pairs = zip(x, dy, strict=True)
    dw = torch.stack([conv2d_weight(a, shape, d, list(stride), list(padding)) for a, d in pairs])
    return dw.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3), dy.sum((1, 3, 4))


def _rows_weight_fake(
    dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[Tensor, Tensor]:
    rows, out, channels = dy.shape[0], dy.shape[2], x.shape[2]
    return x.new_empty(rows, out, *kernel, channels).permute(0, 1, 4, 2, 3), x.new_empty(rows, out)


_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int[] padding, int[] stride) -> Tensor"
_conv2d = torch.library.custom_op("hocket::conv2d", _conv2d_plain, mutates_args=(), schema=_SCHEMA)
_conv2d.register_fake(_conv2d_plain)
_rows_conv2d = torch.library.custom_op("hocket::rows_conv2d", _rows_conv2d_any, mutates_args=(), schema=_SCHEMA)
_rows_conv2d.register_fake(_rows_conv2d_fake)
_rows_weight = torch.library.custom_op(
    "hocket::rows_conv2d_weight",
    _rows_weight_any,
    mutates_args=(),
    schema="(Tensor dy, Tensor x, int[] kernel, int[] padding, int[] stride) -> (Tensor, Tensor)",
)
_rows_weight.register_fake(_rows_weight_fake)


@_conv2d.register_vmap
def _conv2d_vmap(
    info: Any,
    dims: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
) -> tuple[Tensor, int]:
    """Rows with their own weights go to the row kernel; rows that share frozen weights are one larger batch."""
    rows = info.batch_size
    x = x.expand(rows, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
    if dims[1] is None and (bias is None or dims[2] is None):
        return _conv2d_plain(x.flatten(0, 1), weight, bias, padding, stride).unflatten(0, (rows, -1)), 0
    weight = weight.expand(rows, *weight.shape) if dims[1] is None else weight.movedim(dims[1], 0)
    if bias is not None:
        bias = bias.expand(rows, *bias.shape) if dims[2] is None else bias.movedim(dims[2], 0)
    return _rows_conv2d(x, weight, bias, padding, stride), 0


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.padding, ctx.stride = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None, None]:
    """dx is the convolution of dy, with zeros between its pixels for a stride, with the flipped, transposed weights."""
    x, weight = ctx.saved_tensors
    kernel = list(weight.shape[3:])
    dx = None
    if ctx.needs_input_grad[0]:
        around = [k - 1 - p for k, p in zip(kernel, ctx.padding, strict=True)]
        spread = _spread(dy, [n - k + 1 + 2 * p for n, k, p in zip(x.shape[3:], kernel, ctx.padding, strict=True)], ctx.stride)
        dx = _rows_conv2d(spread, weight.flip(3, 4).transpose(1, 2), None, around, [1, 1])
    dw, db = _rows_weight(dy, x, kernel, ctx.padding, ctx.stride)
    return dx, dw, db if ctx.has_bias else None, None, None


def _spread(dy: Tensor, size: list[int], stride: Sequence[int]) -> Tensor:
    """``dy`` at every ``stride``-th pixel of an image of ``size``, zeros elsewhere."""
    if list(stride) == [1, 1]:
        return dy
    rows, batch, channels = dy.shape[:3]
    wide = dy.new_zeros(rows, batch, *size, channels).permute(0, 1, 4, 2, 3)
    wide[..., :: stride[0], :: stride[1]] = dy
    return wide


_rows_conv2d.register_autograd(_backward, setup_context=_save)


def _channels_last(t: Tensor) -> Tensor:
    """The same values, with the channels innermost in memory."""
    return t.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _precision(x: Tensor) -> dict[str, Any]:
    """TF32 where torch's own convolutions would use it."""
    single = x.dtype == torch.float32
    tf32 = single and torch.backends.cudnn.allow_tf32
    return {"PRECISION": "tf32" if tf32 or not single else "ieee", "ROUND": tf32}


def _sizes(x: Tensor, y: Tensor, *pairs: Sequence[int]) -> dict[str, Any]:
    """The compile-time sizes of a convolution from ``x`` to ``y`` with this kernel, padding and stride."""
    names = ("C", "H", "W", "OUT", "OH", "OW", "KH", "KW", "PH", "PW", "SH", "SW")
    return dict(zip(names, (*x.shape[2:], *y.shape[2:], *(n for pair in pairs for n in pair)), strict=True))


def _forward_tiles(out: int, depth: int) -> dict[str, int]:
    """Tile sizes measured on an H200; two warps, because four make Triton use Hopper's wgmma, which gains nothing here."""
    tile = {"BN": min(64, max(16, triton.next_power_of_2(out))), "BK": 32}
    return tile | ({"BM": 128, "num_warps": 4, "num_stages": 1} if depth <= 32 else {"BM": 64, "num_warps": 2, "num_stages": 3})


def _weight_tiles(out: int, depth: int) -> dict[str, int]:
    """Likewise; with four warps the transposed operand would make wgmma three times slower."""
    high, wide = min(64, max(16, triton.next_power_of_2(out))), min(128, max(16, triton.next_power_of_2(depth)))
    return {"BM": 32, "BN": high, "BK": wide, "num_warps": 1 if high * wide <= 1024 else 2, "num_stages": 3}


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int], stride: Sequence[int]) -> Tensor:
    rows, batch, channels = x.shape[:3]
    out, (kh, kw) = weight.shape[1], weight.shape[3:]
    y = _rows_conv2d_fake(x, weight, bias, padding, stride)
    packed = weight.permute(0, 1, 3, 4, 2).contiguous()  # [R, O, KH, KW, C]: a tile's depth is contiguous
    values = batch * y.shape[3] * y.shape[4]
    tiles = _forward_tiles(out, kh * kw * channels)
    grid = (triton.cdiv(values, tiles["BM"]), triton.cdiv(out, tiles["BN"]), rows)
    options = _sizes(x, y, (kh, kw), padding, stride) | _precision(x) | tiles | {"HAS_BIAS": bias is not None}
    bias = packed if bias is None else bias
    _forward_kernel[grid](x, packed, bias, y, *x.stride(), bias.stride(0), bias.stride(1), values, **options)
    return y


def _launch_weight(
    dy: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[Tensor, Tensor]:
    rows, batch, channels = x.shape[:3]
    out, (kh, kw) = dy.shape[2], kernel
    dy = _channels_last(dy)
    depth, values = kh * kw * channels, batch * dy.shape[3] * dy.shape[4]
    tiles = _weight_tiles(out, depth)
    across = triton.cdiv(out, tiles["BN"]) * triton.cdiv(depth, tiles["BK"])
    splits = max(1, min(_PROGRAMS // (rows * across), values // (16 * tiles["BM"])))
    share = triton.cdiv(triton.cdiv(values, splits), tiles["BM"]) * tiles["BM"]
    splits = triton.cdiv(values, share)
    dw = torch.empty(splits, rows, out, depth, dtype=torch.float32, device=x.device)
    db = torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    options = _sizes(x, dy, kernel, padding, stride) | _precision(x) | tiles
    _weight_kernel[splits, across, rows](dy, x, dw, db, *x.stride(), values, share, **options)
    dw, db = (dw[0], db[0]) if splits == 1 else (dw.sum(0), db.sum(0))
    return dw.to(x.dtype).view(rows, out, kh, kw, channels).permute(0, 1, 4, 2, 3), db.to(x.dtype)


_PROGRAMS = 132 * 8  # about eight programs for each of a large GPU's multiprocessors keep it busy


if triton is not None:

    @triton.jit
    def _operand(t, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rounds to nearest TF32; the tensor cores alone would cut the low bits off."""
        if ROUND:
            t = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1)
        return t

    @triton.jit
    def _forward_kernel(  # type: ignore[no-untyped-def]
        x, w, bias, y, sxr, sxb, sxc, sxh, sxw, sbr, sbo, values,
        C: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
        HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """y[pixels, out] = patches[pixels, depth] @ w[out, depth].T + bias, for one row per program_id(2)."""
        row = tl.program_id(2).to(tl.int64)
        depth: tl.constexpr = KH * KW * C
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        oh, ow, b = (m // OW) % OH * SH - PH, m % OW * SW - PW, m // (OW * OH)
        start = x + row * sxr + b * sxb + oh * sxh + ow * sxw
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k0 in range(0, depth, BK):
            k = k0 + tl.arange(0, BK)
            c, kh, kw = k % C, (k // C) // KW, (k // C) % KW
            ih, iw = oh[:, None] + kh[None, :], ow[:, None] + kw[None, :]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < values)[:, None] & (k < depth)[None, :]
            patch = tl.load(start[:, None] + (kh * sxh + kw * sxw + c * sxc)[None, :], mask=inside, other=0.0)
            weights = tl.load(
                w + row * (OUT * depth) + o[None, :] * depth + k[:, None], mask=(k < depth)[:, None] & (o < OUT)[None, :], other=0.0
            )
            acc = tl.dot(_operand(patch, ROUND), _operand(weights, ROUND), acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + row * sbr + o * sbo, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
        tl.store(y + row * values * OUT + m[:, None] * OUT + o[None, :], acc, mask=(m < values)[:, None] & (o < OUT)[None, :])

    @triton.jit
    def _weight_kernel(  # type: ignore[no-untyped-def]
        dy, x, dw, db, sxr, sxb, sxc, sxh, sxw, values, share,
        C: tl.constexpr, OUT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
        KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
        PRECISION: tl.constexpr, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        """dw[out, depth] = dy[pixels, out].T @ patches[pixels, depth], over one share of the pixels of one row."""
        part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
        depth: tl.constexpr = KH * KW * C
        across: tl.constexpr = (depth + BK - 1) // BK
        ko = tl.program_id(1) % across
        o = (tl.program_id(1) // across) * BN + tl.arange(0, BN)
        k = ko * BK + tl.arange(0, BK)
        c, kh, kw = k % C, (k // C) // KW, (k // C) % KW
        shift = kh * sxh + kw * sxw + c * sxc
        acc = tl.zeros((BN, BK), dtype=tl.float32)
        total = tl.zeros((BN,), dtype=tl.float32)
        for m0 in range(part * share, tl.minimum(part * share + share, values), BM):
            m = m0 + tl.arange(0, BM)
            oh, ow, b = (m // OW) % OH * SH - PH, m % OW * SW - PW, m // (OW * OH)
            ih, iw = oh[:, None] + kh[None, :], ow[:, None] + kw[None, :]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (m < values)[:, None] & (k < depth)[None, :]
            start = x + row * sxr + b * sxb + oh * sxh + ow * sxw
            patch = tl.load(start[:, None] + shift[None, :], mask=inside, other=0.0)
            here = (m < values)[:, None] & (o < OUT)[None, :]
            d = tl.load(dy + row * values * OUT + m[:, None] * OUT + o[None, :], mask=here, other=0.0)
            acc = tl.dot(tl.trans(_operand(d, ROUND)), _operand(patch, ROUND), acc, input_precision=PRECISION)
            total += tl.sum(d.to(tl.float32), 0)
        at = (part * tl.num_programs(2) + row) * OUT + o
        tl.store(dw + at[:, None] * depth + k[None, :], acc, mask=(o < OUT)[:, None] & (k < depth)[None, :])
        if ko == 0:
            tl.store(db + at, total, mask=o < OUT)
