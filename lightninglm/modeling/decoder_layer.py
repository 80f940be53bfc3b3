"""One decoder layer: a token mixer and a feed-forward sublayer, each between the streams by a hyper-connection."""

import torch
from torch import nn

from .configuration_lightninglm import INDEXED_ATTENTION, LightningLMConfig
from .feed_forward import DenseFeedForward
from .gated_deltanet import GatedDeltaNet
from .hyper_connections import HyperConnection
from .layer_context import LayerContext
from .moe import MoEBlock
from .sparse_attention import GatedSparseAttention


def build_mixer(config: LightningLMConfig, layer_idx: int, layer_type: str | None = None) -> nn.Module:
    """The mixer of layer `layer_idx`, of the kind config.layer_types says unless `layer_type` is given."""
    kind = layer_type or config.layer_types[layer_idx]
    return (GatedSparseAttention if kind == INDEXED_ATTENTION else GatedDeltaNet)(config, layer_idx)


def build_mlp(config: LightningLMConfig, layer_idx: int) -> nn.Module:
    """The feed-forward sublayer: a mixture of experts if the config has experts, else dense."""
    if config.num_experts:
        return MoEBlock(config, layer_idx)
    return DenseFeedForward(config.hidden_size, config.intermediate_size)


class DecoderLayer(nn.Module):
    """
    streams -> hyper-connection(mixer) -> hyper-connection(mlp).

    Args:
        config: the model's configuration.
        layer_idx: position in the stack; the decoding cache goes by it.
        layer_type: the mixer's kind where config.layer_types has no entry for this layer (the second-token block).
    """

    def __init__(self, config: LightningLMConfig, layer_idx: int, layer_type: str | None = None):
        super().__init__()
        self.mixer_connection = HyperConnection(config)
        self.mixer = build_mixer(config, layer_idx, layer_type)
        self.mlp_connection = HyperConnection(config)
        self.mlp = build_mlp(config, layer_idx)

    def forward(self, streams: torch.Tensor, ctx: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps streams [B, T, N, H] fp32 to the same shape; also returns the sum of the auxiliary losses, a scalar."""
        streams, mixer_aux = self.mixer_connection(streams, lambda x: self.mixer(x, ctx))
        streams, mlp_aux = self.mlp_connection(streams, lambda x: self.mlp(x, ctx))
        aux = streams.new_zeros(())
        for term in (mixer_aux, mlp_aux):
            if term is not None:
                aux = aux + term
        return streams, aux
