"""The mixture-of-experts block: a shared expert for every token and routed experts for the picks of the router."""

import torch
from torch import nn

from .configuration_lightninglm import LightningLMConfig
from .experts import Experts
from .feed_forward import SwiGLU
from .layer_context import LayerContext
from .quantized_experts import QuantizedExperts
from .router import build_router
from .token_dispatch import LocalDispatcher


class MoEBlock(nn.Module):
    """
    y = shared(x) + sum over the picks e of x of w_e * expert_e(x): no gate on the shared expert, no capacity, no drops.

    Args:
        config: a configuration with num_experts > 0.
        layer_idx: number of the decoder layer (L for the layer of multi-token prediction).

    Attributes:
        dispatcher: the `TokenDispatcher` between tokens and experts. Local here; expert parallelism replaces it.
    """

    def __init__(self, config: LightningLMConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.shared_expert = SwiGLU(config.hidden_size, config.intermediate_size)
        self.router = build_router(config)
        self.experts = build_experts(config, layer_idx)
        self.dispatcher = LocalDispatcher(config.num_experts, null_picks=config.num_null_experts > 0)

    def forward(self, x_BTH: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (y [B, T, H] in x's dtype, the router's auxiliary loss or None)."""
        x_TH = x_BTH.flatten(0, 1)
        keep_T = None if ctx.keep_mask is None else ctx.keep_mask.flatten()
        noise = None if ctx.selection_noise is None else ctx.selection_noise.for_layer(self.layer_idx)
        routing = self.router(x_TH, keep_T, ctx.record_statistics, noise)
        state = self.dispatcher.dispatch(x_TH, routing.experts)
        shared_TH = self.shared_expert(x_TH)  # while the rows are on their way
        rows_RH, tokens_per_expert = self.dispatcher.receive(state)
        routed_TH = self.dispatcher.combine(self.experts(rows_RH, tokens_per_expert), routing.weights, state)
        y_TH = (shared_TH + routed_TH).to(x_BTH.dtype)
        return y_TH.unflatten(0, x_BTH.shape[:2]), routing.aux


def build_experts(config: LightningLMConfig, layer_idx: int) -> Experts | QuantizedExperts:
    """The experts of one layer: quantized with adapters when `config.expert_quantization` is given."""
    return Experts(config) if config.expert_quantization is None else QuantizedExperts(config, layer_idx)
