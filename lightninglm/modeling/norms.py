"""RMSNorm in fp32 (Zhang and Sennrich, 2019)."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """
    y = x * (mean(x^2) + eps)^(-1/2) * weight over the last dimension, computed in fp32 and cast once at the end.

    Args:
        size: length of the last dimension.
        eps: added to the mean square, inside the root.
    """

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x [..., size]; the result has x's dtype."""
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
