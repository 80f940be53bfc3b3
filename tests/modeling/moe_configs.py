"""Tiny configurations for the tests of experts and their routers."""

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from tests.modeling.mixers import mixer_config

F = 16


def moe_config(**changes) -> LightningLMConfig:
    """Eight experts of width 16 behind a flat sigmoid router, two per token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": F}
    return mixer_config(**experts | changes)


def grouped_config(groups=8, members=5, groups_per_token=2, members_per_group=3, **changes) -> LightningLMConfig:
    """The grouped router over groups * members experts."""
    return moe_config(
        router_layout="grouped",
        num_experts=groups * members,
        num_expert_groups=groups,
        groups_per_token=groups_per_token,
        members_per_group=members_per_group,
        num_experts_per_tok=groups_per_token * members_per_group,
        **changes,
    )


def quantized_config(kind: str, **changes) -> LightningLMConfig:
    """Quantized experts in groups of 16 weights with adapters of rank 8."""
    quantization = {"kind": kind, "group_size": 16, "rank": 8, "seed": 1}
    return moe_config(expert_quantization=quantization, **changes)
