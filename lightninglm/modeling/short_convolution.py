"""The short causal convolution in front of the delta rule: depthwise over time, with bias, then SiLU."""

import torch
from torch import nn


class ShortConvolution(nn.Module):
    """
    y_t = SiLU(bias + sum_i weight_i * x_{t - K + 1 + i}), i < K = kernel_size, separately for every channel.

    Args:
        channels: C.
        kernel_size: K; the last tap is the token itself.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.channels, self.kernel_size = channels, kernel_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels))
        nn.init.uniform_(self.weight, -0.5, 0.5)
        nn.init.uniform_(self.bias, -0.5, 0.5)

    def forward(
        self, x_BTC: torch.Tensor, tail: torch.Tensor | None = None, reach: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Args:
            x_BTC: inputs.
            tail: [B, K - 1, C], the inputs before the first; zeros if None.
            reach: [B, T, K] bool, False where a tap would read another document; None: no tap does.
        Returns:
            [B, T, C], computed and returned in fp32 (fp64 if x is).
        """
        dtype = torch.promote_types(x_BTC.dtype, torch.float32)
        if tail is None:
            padded = nn.functional.pad(x_BTC.to(dtype), (0, 0, self.kernel_size - 1, 0))
        else:
            padded = torch.cat([tail, x_BTC], dim=1).to(dtype)
        return _ShiftedSum.apply(padded, self.weight.squeeze(1).t().to(dtype), self.bias.to(dtype), reach)

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"


class _ShiftedSum(torch.autograd.Function):
    """
    SiLU(bias + the sum of K shifted products), without a copy of the input per tap.

    Faster than `conv1d` with as many groups as channels, which is slow on a CPU.
    """

    @staticmethod
    def forward(ctx, padded, weight_KC, bias_C, reach):
        K = weight_KC.shape[0]
        T = padded.shape[1] - K + 1
        y = bias_C.expand(padded.shape[0], T, -1).clone()
        for i in range(K):
            tap = padded[:, i : i + T]
            y.addcmul_(tap if reach is None else tap * reach[..., i : i + 1], weight_KC[i])
        ctx.save_for_backward(padded, weight_KC, y, reach)
        return nn.functional.silu(y)

    @staticmethod
    def backward(ctx, grad):
        padded, weight_KC, y, reach = ctx.saved_tensors
        K, T = weight_KC.shape[0], y.shape[1]
        grad = torch.ops.aten.silu_backward(grad, y)
        d_padded, d_weight = torch.zeros_like(padded), torch.empty_like(weight_KC)
        for i in range(K):
            d_tap = grad if reach is None else grad * reach[..., i : i + 1]
            d_padded[:, i : i + T].addcmul_(d_tap, weight_KC[i])
            torch.sum(d_tap * padded[:, i : i + T], dim=(0, 1), out=d_weight[i])
        return d_padded, d_weight, grad.sum((0, 1)), None
