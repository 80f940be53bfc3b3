"""
What a training step keeps in memory besides weights and their state: bytes per token of every layer, and per phase.

Read off the modules, tensor by tensor: what autograd saves, and what is alive beside it when a backward pass needs the
most. `tests/test_plan.py` counts the live bytes of the real stack and holds these sums to them at 8, 20 and 40 layers.

N streams, H hidden size, T tokens of a rank's micro-batch, c bytes of the compute dtype (2 in bf16, 4 in fp32). One
state of the streams is S = 4 N H bytes per token.
"""

from dataclasses import dataclass

from lightninglm.modeling.configuration_lightninglm import INDEXED_ATTENTION, LightningLMConfig
from lightninglm.modeling.delta_rule import CHUNK_LENGTH
from lightninglm.modeling.losses import CHUNK_ELEMENTS
from lightninglm.modeling.multi_token_prediction import second_token_config
from lightninglm.modeling.sparse_attention import BLOCK_LENGTH, MAX_STORED_KEYS

REVERSIBLE_STATES = 8
"""States alive while a layer of the reversible stack is evaluated again: the int32 pair, and the gradients of two
states with what is added to them."""
CHECKPOINTED_STATES = 2  # the same under activation checkpointing, beside one state per layer
PLAIN_STATES = 7  # beside all graphs: the int32 pair, and what the last layer's step is made of
CONNECTION_STATES = 2  # of a hyper-connection's backward pass


@dataclass(frozen=True)
class LayerBytes:
    """
    Bytes per token of one decoder layer with its graph, its input and its output included.

    Attributes:
        saved: what autograd keeps of it for its backward pass, its input included.
        peak: the most that is alive while it is evaluated and differentiated.
    """

    saved: int
    peak: int


def state_bytes(config: LightningLMConfig) -> int:
    """S, one fp32 or int32 state of the streams, per token."""
    return 4 * config.num_streams * config.hidden_size


def connection_bytes(config: LightningLMConfig, c: int) -> int:
    """Saved by the two hyper-connections of a layer: streams, norm in and out, sublayer in and out, coefficients."""
    N, H = config.num_streams, config.hidden_size
    coefficients = N * N + N * (2 * config.sinkhorn_iterations + 1) + 5 * (N * N + 2 * N)
    return 2 * (state_bytes(config) + 12 * H + c * H + 4 * coefficients)


def delta_net_bytes(config: LightningLMConfig, c: int) -> int:
    """Saved by a gated DeltaNet mixer with the chunked torch recurrence; flash-linear-attention keeps less."""
    H, J, D = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    convolutions = 24 * H  # padded inputs and sums of q, k, v
    unit_queries = 8 * H + 8 * D  # q and k before they are normalized, rotary table
    recurrence = 4 * (8 * H + 4 * J * CHUNK_LENGTH + H * D // CHUNK_LENGTH + 4 * J)
    skip = 16 * H  # q, k, v and the product with D
    gate = 16 * H + c * H  # norm in and out, gate, o_proj's input
    return convolutions + unit_queries + recurrence + skip + gate


def sparse_attention_bytes(config: LightningLMConfig, c: int, length: int) -> int:
    """Saved by a sparse-attention mixer on sequences of `length`; above MAX_STORED_KEYS its blocks are recomputed."""
    H, J = config.hidden_size, config.num_attention_heads
    I, U = config.indexer_num_heads, config.indexer_head_dim
    linear = 8 * c * H + 8 * config.head_dim + 4 * (I * (U + 1) + U + I)
    if length > MAX_STORED_KEYS:
        return linear
    keys = (length + BLOCK_LENGTH) // 2  # a block of queries sees the keys up to its end
    per_key = 4 * J + (c * J if c != 4 else 0) + 4 * I + (4 if config.indexer_kl_weight > 0 else 0)
    return linear + keys * per_key


def block_bytes(config: LightningLMConfig, length: int) -> int:
    """Most that one recomputed block of queries needs, per sequence (not per token): fp32 per head, query and key for
    the attention weights and their gradient, and the indexer's scores."""
    if length <= MAX_STORED_KEYS:
        return 0
    return BLOCK_LENGTH * length * (8 * config.num_attention_heads + 6 * config.indexer_num_heads + 8)


def feed_forward_bytes(config: LightningLMConfig, c: int) -> int:
    """Saved by the FFN: of the dense or shared expert, and with experts those of the rows that the picks make."""
    H, K = config.hidden_size, config.num_experts_per_tok
    saved = 4 * c * config.intermediate_size
    if config.num_experts == 0:
        return saved
    router = (4 * H if c != 4 else 0) + 24 * K + 4 * config.num_experts
    return saved + router + K * (c * H + _expert_row_bytes(config, c))


def _expert_row_bytes(config: LightningLMConfig, c: int) -> int:
    """Saved per row by the experts themselves: input, gate and up; with adapters also what feeds them."""
    H, F = config.hidden_size, config.moe_intermediate_size
    if config.expert_quantization is None:
        return c * (H + 2 * F)
    return c * (H + 4 * F + 3 * config.expert_quantization["rank"])


def dispatch_bytes(config: LightningLMConfig, c: int, expert_parallel: int) -> int:
    """Rows of the picks, per token: at the experts and back from them, and over ranks those of one all-to-all."""
    copies = 3 if expert_parallel > 1 else 2
    return copies * config.num_experts_per_tok * c * config.hidden_size if config.num_experts else 0


def layer_bytes(config: LightningLMConfig, kind: str, c: int, length: int, expert_parallel: int = 1) -> LayerBytes:
    """
    One decoder layer in training.

    Args:
        kind: an entry of `config.layer_types`.
        c: bytes of the compute dtype.
        length: tokens of a sequence.
        expert_parallel: ranks that share the experts; picks are taken to be balanced over them.
    """
    H, S = config.hidden_size, state_bytes(config)
    mixer = delta_net_bytes(config, c)
    if kind == INDEXED_ATTENTION:
        mixer = sparse_attention_bytes(config, c, length)
    ffn = feed_forward_bytes(config, c)
    saved = connection_bytes(config, c) + mixer + ffn
    forward = saved - ffn - 4 * H + S * (config.num_streams + 1) // config.num_streams
    backward = saved + S  # the output
    if config.num_experts:
        ahead, back = _routed_working_bytes(config, c, expert_parallel)
        forward, backward = forward + 4 * c * config.intermediate_size + ahead, backward + back
    backward = max(backward, saved + S + CONNECTION_STATES * S)
    if kind == INDEXED_ATTENTION:
        attending = saved - ffn + CONNECTION_STATES * S + block_bytes(config, length) // length
        backward = max(backward, attending)
    return LayerBytes(saved, max(forward, backward))


def _routed_working_bytes(config: LightningLMConfig, c: int, expert_parallel: int) -> tuple[int, int]:
    """Per token, beside the saved tensors: the most that the experts' forward and backward passes need."""
    H, F, K = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    on_the_way = c * H if expert_parallel > 1 else 0
    combine = H * (4 + (c if c != 4 else 0)) + on_the_way  # gradients of the outputs, in fp32 and in c
    if config.expert_quantization is None:
        row = _expert_row_bytes(config, c)
        return K * (row + c * F + c * H + on_the_way), K * max(combine, c * (H + 3 * F))
    rotation = c * H + 12 * H  # of the rows: signs, and the two factors of the Hadamard matrix, in fp32
    down = _expert_row_bytes(config, c) + c * (4 * H + F)  # base, adapters and their sum beside the rotated inputs
    return K * max(rotation, down), K * combine


@dataclass(frozen=True)
class Activations:
    """
    Bytes of one rank for one micro-batch, by how the stack is trained and by phase of the step.

    Attributes:
        reversible, checkpointed, plain: the stack's peak in its backward pass, each way.
        stack: the one that the configuration trains with.
        second_token: peak while the second-token layer is differentiated.
        loss: peak of the head's cross-entropies; nothing of the layers but the last states is alive then.
        dispatch: rows on their way between tokens and experts, part of `stack`.
        peak: the largest phase.
    """

    reversible: int
    checkpointed: int
    plain: int
    stack: int
    second_token: int
    loss: int
    dispatch: int

    @property
    def peak(self) -> int:
        return max(self.stack, self.second_token, self.loss)


def stack_bytes(
    config: LightningLMConfig, c: int, length: int, sequences: int, expert_parallel: int = 1
) -> dict[str, int]:
    """Peak bytes of the stack's backward pass: {"reversible", "checkpointed", "plain"}."""
    S, tokens, depth = state_bytes(config), length * sequences, config.num_hidden_layers
    kinds = {kind: layer_bytes(config, kind, c, length, expert_parallel) for kind in set(config.layer_types)}
    layer = max(kind.peak for kind in kinds.values())
    beside = max(kind.peak - kind.saved for kind in kinds.values())
    halves = sum(blend != 1 for blend in config.blends[1:])
    bits = config.num_streams * config.hidden_size * halves // 8
    states = REVERSIBLE_STATES + (1 if halves else 0)
    saved = sum(kinds[kind].saved for kind in config.layer_types)
    return {
        "reversible": tokens * (states * S + bits + layer),
        "checkpointed": tokens * ((depth - 1 + CHECKPOINTED_STATES) * S + layer),
        "plain": tokens * (saved + max(PLAIN_STATES * S, beside + S)),
    }


def loss_bytes(config: LightningLMConfig, c: int, tokens: int) -> int:
    """
    Peak of the cross-entropies (`modeling/losses.py`): each keeps the fp32 gradient of the head and that of its input;
    a chunk of logits is there twice in fp32 and once in c, and the product that adds to the head's gradient once in c.
    """
    head = config.vocab_size * config.hidden_size
    heads = 1 + config.num_nextn_predict_layers
    kept = heads * (4 * head + c * config.hidden_size * tokens)
    rows = min(tokens, max(1, CHUNK_ELEMENTS // config.vocab_size))
    product = c * head if c != 4 else 0
    chunk = rows * config.vocab_size * (8 + (c if c != 4 else 0)) + product
    gradient = 4 * head + product  # in the backward pass: scaled, then in the head's dtype
    return kept + max(chunk, gradient)


def ends_bytes(config: LightningLMConfig, c: int) -> int:
    """Per token, outside of the stack: byte codes, the embedding's norm, rotary tables, the final norm, hidden."""
    H = config.hidden_size
    return 4 * config.max_token_bytes + 16 * H + 3 * c * H + 4 * (config.head_dim + config.linear_head_dim)


def activation_bytes(
    config: LightningLMConfig, c: int, length: int, sequences: int, expert_parallel: int = 1
) -> Activations:
    """
    Peak of a micro-batch of `sequences` of `length` tokens on one rank.

    Args:
        c: bytes of the compute dtype, 2 in bf16.
        expert_parallel: ranks that share the experts.
    """
    tokens, S = length * sequences, state_bytes(config)
    ways = stack_bytes(config, c, length, sequences, expert_parallel)
    trained = {"reversible": "reversible", "checkpointed": "checkpointed", "stored": "plain"}[config.stack_backend]
    if config.stack == "sequential":  # under ordinary autograd, whatever the backend
        trained = "plain"
    ends = tokens * ends_bytes(config, c)
    left = {
        "reversible": 2 * S,
        "checkpointed": config.num_hidden_layers * S,
        "plain": sum(layer_bytes(config, kind, c, length, expert_parallel).saved for kind in config.layer_types),
    }[trained]
    second = 0
    if config.num_nextn_predict_layers:
        layer = layer_bytes(second_token_config(config), INDEXED_ATTENTION, c, length, expert_parallel)
        states = REVERSIBLE_STATES if config.mtp_stack == "midpoint" else CHECKPOINTED_STATES
        second = tokens * (left + layer.peak + states * S) + ends
    return Activations(
        **{way: ends + peak for way, peak in ways.items()},
        stack=ends + ways[trained],
        second_token=second,
        loss=tokens * (left + (S if second else 0)) + ends + loss_bytes(config, c, tokens),
        dispatch=tokens * dispatch_bytes(config, c, expert_parallel),
    )
