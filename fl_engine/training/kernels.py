"""Replaces PyTorch operations that are slow on a CPU, or whose results depend on how many clients train in parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_MAP = 16
"""Maximum number of pixels per output channel for which a convolution is computed as one matrix product."""
WIDE = 2**14
"""Minimum product of input and output channels for which a convolution is computed as one matrix product."""


def batched_linear(x_bf: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the linear layers of n lanes: (B, n*F), (n, O, F), (n, O) -> (B, n*O). For n > 1, the result of a lane
    does not depend on the other lanes, bit for bit."""
    half = _half(x_bf)
    if half is None:
        return _apply(_BatchedLinear, x_bf, weight, bias)
    with torch.autocast(x_bf.device.type, enabled=False):
        return _apply(_BatchedLinear, x_bf.to(half), weight.to(half), None if bias is None else bias.to(half))


def suits_unfolding(x_bchw: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    """Return True if `unfolded_conv2d` is faster than torch's convolution. Return False in half precision, because
    `unfolded_conv2d` would accumulate gradients in half precision."""
    o, c, *kernel = weight.shape
    if x_bchw.device.type != "cpu" or _half(x_bchw) is not None or c * o < WIDE or max(kernel) == 1:
        return False
    h, w = ((x_bchw.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2))
    return h * w <= SMALL_MAP


def unfolded_conv2d(
    x_bchw: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """Compute the result of `torch.nn.functional.conv2d` as one matrix product of all input windows and the weights."""
    out = _apply(_UnfoldedConv2d, x_bchw, weight, stride, padding)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _half(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _BatchedLinear(torch.autograd.Function):
    """Linear layers of all lanes as a batched matrix product, in memory layouts that BLAS reads without copies. The
    gradient of the bias is a product with a vector of ones, because the summation order of a plain sum depends on n."""

    @staticmethod
    def forward(ctx: Any, x_bf: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        n, b = len(weight), len(x_bf)
        x_nbf = x_bf.reshape(b, n, -1).transpose(0, 1)
        ctx.save_for_backward(x_nbf, weight)
        out_nbo = torch.bmm(x_nbf, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x_nbf, weight.mT)
        return out_nbo.transpose(0, 1).reshape(b, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_nbf, weight = ctx.saved_tensors
        n, b, _ = x_nbf.shape
        g_bo = gradients[0].contiguous()
        g_nbo = g_bo.view(b, n, -1).transpose(0, 1)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        g_x = torch.bmm(g_nbo, weight).transpose(0, 1).reshape(b, -1) if needs_x else None
        g_weight = torch.bmm(g_nbo.mT, x_nbf) if needs_weight else None
        g_bias = torch.bmm(g_bo.new_ones(1, 1, b).expand(n, 1, b), g_nbo).squeeze(1) if needs_bias else None
        return g_x, g_weight, g_bias


class _UnfoldedConv2d(torch.autograd.Function):
    """Convolution as one matrix product. All tensors have the memory format channels_last. The backward pass
    accumulates the input's gradient one kernel position at a time."""

    @staticmethod
    def forward(ctx: Any, x_bchw: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        o, _, kh, kw = weight.shape
        padded = F.pad(x_bchw.permute(0, 2, 3, 1), (0, 0, padding[1], padding[1], padding[0], padding[0]))
        windows = padded.unfold(1, kh, stride[0]).unfold(2, kw, stride[1])  # shape (B, H', W', C, kh, kw)
        b, h, w = windows.shape[:3]
        rows = windows.permute(0, 1, 2, 4, 5, 3).reshape(b * h * w, -1)
        weight_of = weight.permute(0, 2, 3, 1).reshape(o, -1)
        ctx.save_for_backward(rows, weight_of)
        ctx.shapes = (padded.shape, weight.shape, stride, padding)
        return (rows @ weight_of.T).view(b, h, w, o).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight_of = ctx.saved_tensors
        padded, (o, c, kh, kw), (down, right), (top, left) = ctx.shapes
        g_bhwo = gradients[0].permute(0, 2, 3, 1)
        b, h, w, _ = g_bhwo.shape
        g_rows = g_bhwo.reshape(-1, o)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        g_weight = (g_rows.T @ rows).view(o, kh, kw, c).permute(0, 3, 1, 2) if needs_weight else None
        if not needs_x:
            return None, g_weight, None, None
        g_windows = (g_rows @ weight_of).view(b, h, w, kh, kw, c)
        g_padded = g_rows.new_zeros(padded)
        for i in range(kh):
            for j in range(kw):
                g_padded[:, i : i + h * down : down, j : j + w * right : right] += g_windows[:, :, :, i, j]
        g_x = g_padded[:, top : padded[1] - top, left : padded[2] - left]
        return g_x.permute(0, 3, 1, 2), g_weight, None, None
