"""The memory stream: one vector that a sequence hands to the next, injected into every token through a gate."""

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_lightninglm import LightningLMConfig


class MemoryStream(nn.Module):
    """
    x + softplus(scale) * sigmoid(gate x) * LayerNorm(memory), the memory detached.

    Args:
        config: reads hidden_size.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(-2.5))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.gate = nn.Linear(config.hidden_size, 1)

    def forward(
        self, x_BTH: torch.Tensor, memory_BH: torch.Tensor, reached_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Injects the memory.

        Args:
            x_BTH: embedded tokens.
            memory_BH: what `last_real_token` read from the previous chunk.
            reached_BT: bool, tokens of the document that the previous chunk began (`continued_document`); None: all.
        """
        memory_B1H = self.norm(memory_BH.detach().to(self.norm.weight.dtype)).unsqueeze(1)
        strength = F.softplus(self.scale) * torch.sigmoid(self.gate(x_BTH))
        if reached_BT is not None:
            strength = strength * reached_BT.unsqueeze(-1)
        return x_BTH + strength * memory_B1H


def continued_document(document_ids: torch.Tensor, keep_mask: torch.Tensor | None) -> torch.Tensor:
    """[B, T] bool: the tokens of the document of each row's first real token."""
    if keep_mask is None:
        return document_ids == document_ids[:, :1]
    return document_ids == document_ids.gather(1, keep_mask.int().argmax(1, keepdim=True))


def last_real_token(hidden_BTH: torch.Tensor, keep_mask: torch.Tensor | None) -> torch.Tensor:
    """The memory for the next chunk [B, H], detached: the hidden state at the last token that is not padding."""
    if keep_mask is None:
        return hidden_BTH[:, -1].detach()
    last_B = keep_mask.shape[1] - 1 - keep_mask.flip(1).int().argmax(1)
    return hidden_BTH[torch.arange(len(last_B), device=last_B.device), last_B].detach()
