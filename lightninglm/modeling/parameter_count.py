"""How many parameters a configuration has: stored and active, from the modules themselves, built on the meta device."""

import re
from collections import Counter
from dataclasses import dataclass

import torch

from .configuration_lightninglm import LightningLMConfig
from .modeling_lightninglm import LightningLMForCausalLM

BLOCKS = (
    ("routed_experts", r"\.mlp\.experts\..*\.(weight|codes)"),
    ("adapters", r"\.mlp\.experts\..*\.[AB]"),
    ("router", r"\.mlp\.router\."),
    ("shared_expert", r"\.mlp\.shared_expert\."),
    ("feed_forward", r"\.mlp\."),
    ("mixer", r"\.mixer\."),
    ("hyper_connections", r"_connection\."),
    ("fusion", r"^mtp\.fusion_proj\."),
    ("embedding", r"\.embed_tokens\."),
    ("memory", r"\.memory\."),
    ("head", r"^(model\.norm|lm_head)\."),
)


@dataclass(frozen=True)
class ParameterCount:
    """
    Parameters of a model. Buffers do not count, except the codes of quantized experts: they stand for the weights.

    Attributes:
        stored: all parameters, each once.
        active: what one token uses: all but the routed experts (and their adapters) that it does not pick.
        adapters: the trained low-rank adapters of quantized experts, part of `stored`.
        blocks: stored parameters by part of the model; those of the second-token layer begin with "mtp.".
    """

    stored: int
    active: int
    adapters: int
    blocks: dict[str, int]


def count_parameters(config: LightningLMConfig) -> ParameterCount:
    """Counts the parameters of `LightningLMForCausalLM(config)` without allocating them."""
    with torch.device("meta"):
        model = LightningLMForCausalLM(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    if config.expert_quantization is not None:  # packed codes hold two weights a byte: take the matrices' sizes
        matrix = config.hidden_size * config.moe_intermediate_size
        sizes |= {name: len(codes) * matrix for name, codes in model.named_buffers() if name.endswith("_proj.codes")}
    blocks = Counter()
    for name, size in sizes.items():
        block = next(block for block, pattern in BLOCKS if re.search(pattern, name))
        blocks[f"mtp.{block}" if name.startswith("mtp.") else block] += size
    idle = 0
    if config.num_experts:
        for prefix, experts, picks in (
            ("", config.num_experts, config.num_experts_per_tok),
            ("mtp.", config.mtp_num_experts, config.mtp_num_experts_per_tok),
        ):
            routed = blocks[f"{prefix}routed_experts"] + blocks[f"{prefix}adapters"]
            idle += routed // experts * (experts - min(picks, experts))
    stored = sum(sizes.values())
    adapters = blocks["adapters"] + blocks["mtp.adapters"]
    return ParameterCount(stored, stored - idle, adapters, {name: size for name, size in blocks.items() if size})
