"""The gated feed-forward network (SwiGLU; Shazeer, 2020): dense layers and the shared expert."""

import torch
from torch import nn

from .layer_context import LayerContext


class SwiGLU(nn.Module):
    """
    y = W_down(SiLU(W_gate x) * W_up x), no biases.

    Args:
        hidden: width of input and output (H).
        intermediate: width in between (F).
    """

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [..., H] to [..., H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DenseFeedForward(SwiGLU):
    """The SwiGLU as the second sublayer of a dense decoder layer."""

    def forward(self, x: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, None]:
        """Maps x [B, T, H] to [B, T, H]; there is no auxiliary loss."""
        return super().forward(x), None
