"""
Floating-point operations of one token, from the sizes of the modules; a product of [m, k] and [k, n] counts 2 m k n.

Norms, activations, rotations by RoPE, softmax and the optimizer are not counted: they move bytes, they do not compute.
"""

from dataclasses import dataclass

from lightninglm.modeling.configuration_lightninglm import INDEXED_ATTENTION, LightningLMConfig
from lightninglm.modeling.delta_rule import CHUNK_LENGTH
from lightninglm.modeling.multi_token_prediction import second_token_config
from lightninglm.modeling.quantizers import hadamard_block
from lightninglm.modeling.sparse_attention import BLOCK_LENGTH, MAX_STORED_KEYS


@dataclass(frozen=True)
class Flops:
    """
    Per token of a training step.

    Attributes:
        forward: one forward pass, second-token layer and both heads included.
        model: forward and backward as written down: the number that "model flops utilisation" goes by.
        hardware: what is executed, evaluations of layers a second time included.
    """

    forward: int
    model: int
    hardware: int


@dataclass(frozen=True)
class _Part:
    """Forward flops of a module: of trained products, of products with frozen weights, and of recomputed attention."""

    trained: int
    frozen: int = 0
    attention: int = 0

    @property
    def forward(self) -> int:
        return self.trained + self.frozen + self.attention

    @property
    def backward(self) -> int:
        """Two products per trained one (for the input and for the weight), one where the weight is frozen."""
        return 2 * self.trained + self.frozen + 2 * self.attention


def training_flops(config: LightningLMConfig, length: int) -> Flops:
    """Flops per token at sequences of `length` tokens."""
    parts = [_layer(config, kind, length) for kind in config.layer_types]
    head = _Part(2 * config.hidden_size * config.vocab_size * (1 + config.num_nextn_predict_layers))
    again = 0 if config.stack == "sequential" or config.stack_backend == "stored" else sum(p.forward for p in parts)
    if config.num_nextn_predict_layers:
        layer = _layer(second_token_config(config), INDEXED_ATTENTION, length)
        again += layer.forward  # checkpointed, or reversible
        parts += [layer, _Part(4 * config.hidden_size**2)]
    if length > MAX_STORED_KEYS:
        again += sum(part.attention for part in parts)
    parts.append(head)
    forward = sum(part.forward for part in parts)
    model = forward + sum(part.backward for part in parts)
    return Flops(forward, model, model + again)


def _layer(config: LightningLMConfig, kind: str, length: int) -> _Part:
    mixer, attention = _delta_net(config), 0
    if kind == INDEXED_ATTENTION:
        mixer, attention = _sparse_attention(config, length)
    ffn, frozen = _feed_forward(config)
    return _Part(_connections(config) + mixer + ffn, frozen, attention)


def _connections(config: LightningLMConfig) -> int:
    """Two hyper-connections: coefficients, reading and mixing the streams, Sinkhorn."""
    N, H = config.num_streams, config.hidden_size
    coefficients = 2 * (N * N + 2 * N) * N * H
    streams = 2 * (N + 1) * N * H + 2 * N * H
    return 2 * (coefficients + streams + 4 * N * N * config.sinkhorn_iterations)


def _delta_net(config: LightningLMConfig) -> int:
    H, J, D, C = config.hidden_size, config.linear_num_heads, config.linear_head_dim, CHUNK_LENGTH
    projections = 2 * (5 * H * H + 2 * H * J)
    convolutions = 2 * 3 * config.linear_conv_kernel_dim * H
    # per head: five products inside of a chunk, the triangular solve, three products with the state
    recurrence = J * (10 * C * D + C * C + 6 * D * D)
    return projections + convolutions + recurrence


def _sparse_attention(config: LightningLMConfig, length: int) -> tuple[int, int]:
    """(projections, attention with the indexer's scores): every key up to the end of a query's block is computed."""
    H, I, U = config.hidden_size, config.indexer_num_heads, config.indexer_head_dim
    keys = (length + BLOCK_LENGTH) // 2
    return 2 * (6 * H * H + H * (I * U + U + I)), keys * (4 * H + 2 * I * (U + 1))


def _feed_forward(config: LightningLMConfig) -> tuple[int, int]:
    """(with trained weights, with frozen ones)."""
    H, F, K = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    trained = 6 * H * config.intermediate_size
    if config.num_experts == 0:
        return trained, 0
    rows = config.num_experts + (config.num_expert_groups if config.router_layout == "grouped" else 0)
    trained += 2 * H * rows
    quantization = config.expert_quantization
    if quantization is None:
        return trained + K * 6 * H * F, 0
    adapters = 2 * 3 * quantization["rank"] * (H + F)
    return trained + K * adapters, K * (6 * H * F + sum(_rotation(config, size) for size in (H, F)))


def _rotation(config: LightningLMConfig, size: int) -> int:
    """One row times a Hadamard matrix by its two factors."""
    quantization = config.expert_quantization
    block = hadamard_block(size, size if quantization["kind"] == "codebook" else quantization["group_size"])
    a = 1 << ((block.bit_length() - 1) // 2)
    return 2 * size * (a + block // a)
