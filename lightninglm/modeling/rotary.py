"""Rotary position embedding (Su et al., 2021) over interleaved pairs, angles and rotation in fp32."""

import torch
from torch import nn


def rotary_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """omega_j = theta^(-2j / head_dim) for j < head_dim / 2, [head_dim / 2] fp32."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / -head_dim)


def apply_rotary(x_BTJD: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """
    Rotates the pairs (2j, 2j + 1) of every head by position * omega_j; the result has x's dtype.

    Args:
        x_BTJD: [B, T, J, D] queries or keys.
        table: (cos, sin), each [B, T, D / 2] fp32, as `RotaryEmbedding` builds them. None leaves x as it is.
    """
    if table is None:
        return x_BTJD
    cos_BTP, sin_BTP = table
    # A pair is a complex number, so the rotation is one product (and its gradient another).
    turn = torch.complex(cos_BTP, sin_BTP).unsqueeze(2)
    pairs = torch.view_as_complex(x_BTJD.to(cos_BTP.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x_BTJD.dtype)


class RotaryEmbedding(nn.Module):
    """
    Builds the tables that all layers share, one per head dim of the mixers.

    With `rope_source = "config"` the frequencies follow from `rope_theta` at every call: nothing is stored, so nothing
    can be cast or overwritten. With `"checkpoint"` they are the persistent buffers `inv_freq_{head_dim}`, because the
    published ones were rounded to bf16 and the weights were trained with them.

    Args:
        config: reads rope_enabled, rope_source, rope_theta, linear_head_dim, head_dim.
    """

    def __init__(self, config):
        super().__init__()
        self.theta = config.rope_theta
        self.enabled = config.rope_enabled
        self.head_dims = sorted({config.linear_head_dim, config.head_dim})
        self.stored = config.rope_source == "checkpoint"
        if self.stored:
            for head_dim in self.head_dims:
                rounded = rotary_frequencies(head_dim, self.theta).bfloat16().float()
                self.register_buffer(f"inv_freq_{head_dim}", rounded)

    def forward(self, position_ids: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """
        Args:
            position_ids: [B, T] int64.
        Returns:
            head_dim -> (cos, sin), each [B, T, head_dim / 2] fp32; empty when rotary embedding is off.
        """
        if not self.enabled:
            return {}
        tables = {}
        for head_dim in self.head_dims:
            if self.stored:
                frequencies = getattr(self, f"inv_freq_{head_dim}").float()
            else:
                frequencies = rotary_frequencies(head_dim, self.theta).to(position_ids.device)
            angles = position_ids.unsqueeze(-1).float() * frequencies
            tables[head_dim] = (angles.cos(), angles.sin())
        return tables
