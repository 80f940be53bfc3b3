"""
Second-token prediction: one more layer that reads a token's hidden state and the next token's embedding and predicts
the token after that. It shares the model's final norm and head. (DeepSeek-V3's multi-token prediction, depth 1.)
"""

import copy
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_lightninglm import INDEXED_ATTENTION, LightningLMConfig
from .decoder_layer import DecoderLayer
from .layer_context import LayerContext
from .reversible import ReversibilityReport, checkpointed_layer, reversible_stack

MIDPOINT_STEPS, MIDPOINT_BLENDS = [0.125, 0.25], [1.0, 0.5]  # the published two-block stack


def split_streams(x_BTH: torch.Tensor, num_streams: int) -> torch.Tensor:
    """The streams [B, T, N, H] in fp32 that enter a stack: stream 0 is x, the others are zero."""
    return F.pad(x_BTH.float().unsqueeze(2), (0, 0, 0, num_streams - 1))


def second_token_config(config: LightningLMConfig) -> LightningLMConfig:
    """The model's config with the expert counts of the second-token layer, whose router is always flat."""
    config = copy.deepcopy(config)
    if config.num_experts:
        config.num_experts, config.num_experts_per_tok = config.mtp_num_experts, config.mtp_num_experts_per_tok
        config.router_layout = "flat"
    return config


class MultiTokenPrediction(nn.Module):
    """
    [h_t ; E_{t+1}] -> linear -> streams -> hyper-connection(sparse attention), hyper-connection(mlp) -> stream mean.

    The layer runs under activation checkpointing (`mtp_stack="sequential"`) or, as published for the mixture-of-experts
    stages, as a midpoint stack of its two halves.

    Args:
        config: reads hidden_size, num_streams, num_hidden_layers, mtp_*, and what a decoder layer reads.

    Attributes:
        reversibility: the `ReversibilityReport` of the midpoint stack.
    """

    def __init__(self, config: LightningLMConfig):
        super().__init__()
        self.config = config
        self.fusion_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(second_token_config(config), config.num_hidden_layers, INDEXED_ATTENTION)
        self.reversibility = ReversibilityReport()

    def forward(
        self, hidden_BTH: torch.Tensor, embeds_BTH: torch.Tensor, ctx: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_BTH: h_t, the model's hidden states after the final norm.
            embeds_BTH: E_t, the embeddings of the same tokens.
            ctx: the context that the model's own layers got.
        Returns:
            The mean over the streams [B, T, H] fp32, before the final norm, and the layer's auxiliary loss. A token
            without a next token in its document is masked like padding.
        """
        keep_BT = next_token_mask(ctx)
        next_BTH = F.pad(embeds_BTH[:, 1:], (0, 0, 0, 1)) * keep_BT.unsqueeze(-1)
        ctx = replace(ctx, keep_mask=keep_BT, cache=None)
        streams = split_streams(self.fusion_proj(torch.cat((hidden_BTH, next_BTH), dim=-1)), self.config.num_streams)
        if self.config.mtp_stack == "midpoint":
            streams, aux = reversible_stack(
                (self._mixer_half, self._mlp_half),
                streams,
                ctx,
                MIDPOINT_STEPS,
                MIDPOINT_BLENDS,
                frac_bits=self.config.frac_bits,
                backend=self.config.stack_backend,
                report=self.reversibility,
            )
        else:
            streams, aux = checkpointed_layer(self.layer, streams, ctx)
        return streams.mean(2), aux

    def _mixer_half(self, streams: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        streams, aux = self.layer.mixer_connection(streams, lambda x: self.layer.mixer(x, ctx))
        return streams, streams.new_zeros(()) if aux is None else aux

    def _mlp_half(self, streams: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        streams, aux = self.layer.mlp_connection(streams, lambda x: self.layer.mlp(x, ctx))
        return streams, streams.new_zeros(()) if aux is None else aux


def next_token_mask(ctx: LayerContext) -> torch.Tensor:
    """[B, T] bool: tokens that are real and followed by a real token of their document."""
    keep_BT = torch.ones_like(ctx.position_ids, dtype=torch.bool) if ctx.keep_mask is None else ctx.keep_mask
    follows_BT = F.pad(keep_BT[:, 1:], (0, 1))
    if ctx.document_ids is not None:
        follows_BT = follows_BT & F.pad(ctx.document_ids[:, 1:] == ctx.document_ids[:, :-1], (0, 1))
    return keep_BT & follows_BT
