"""Named configurations: the four published stages and a tiny model of each, in published and in default mode."""

from .configuration_lightninglm import LightningLMConfig

_EXPERTS = {"num_experts": 20, "num_experts_per_tok": 2}
_GROUPED = {"router_layout": "grouped", "num_expert_groups": 20, "groups_per_token": 2, "members_per_group": 6}

# Sizes per stage, and what the published stage does besides `mode="published"`.
_STAGES = {
    "2b": (
        {"num_hidden_layers": 8, "max_position_embeddings": 4096},
        {"stack": "sequential", "mtp_stack": "sequential"},
        {},
    ),
    "5b": ({"num_hidden_layers": 8, "max_position_embeddings": 4096, **_EXPERTS}, {}, {}),
    "9b": ({"num_hidden_layers": 20, "max_position_embeddings": 8192, **_EXPERTS}, {}, {}),
    "120b": (
        {"num_hidden_layers": 20, "max_position_embeddings": 8192, "num_experts": 460, "num_experts_per_tok": 12}
        | {"balance": "banded", "mtp_num_experts": 20},
        {"router_scoring": "sigmoid", "num_null_experts": 0, "balance_speed": 5e-5, "mtp_num_experts_per_tok": 12},
        {**_GROUPED, "mtp_num_experts_per_tok": 2},
    ),
}

_TINY_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "linear_num_heads": 4, "linear_head_dim": 16,
    "num_attention_heads": 2, "head_dim": 32, "sparse_key_budget": 16, "sparse_min_keys": 8, "sparse_max_keys": 32,
    "indexer_num_heads": 2, "indexer_head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
}  # fmt: skip
_TINY_STAGES = {
    "2b": ({}, {}),
    "5b": ({"num_experts": 4}, {"num_null_experts": 4}),
    "9b": ({"num_experts": 4, "num_hidden_layers": 8}, {"num_null_experts": 4}),
    "120b": (
        {"num_experts": 12, "num_experts_per_tok": 4, "num_hidden_layers": 8, "mtp_num_experts": 4},
        {"mtp_num_experts_per_tok": 4},
    ),
}

PRESETS = tuple(f"lightninglm-{stage}{tiny}" for stage in _STAGES for tiny in ("", "-tiny"))


def preset(name: str, mode: str = "default", **overrides) -> LightningLMConfig:
    """
    The configuration of a stage, second-token layer included.

    Args:
        name: one of `PRESETS`, e.g. `"lightninglm-120b"` or `"lightninglm-120b-tiny"`.
        mode: `"default"` for new runs, `"published"` to load published weights.
        overrides: any field of LightningLMConfig.
    Raises:
        ValueError: unknown name, or a field that cannot work.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: must be one of {', '.join(PRESETS)}")
    stage = name.removeprefix("lightninglm-").removesuffix("-tiny")
    sizes, published, default = _STAGES[stage]
    fields = {"mode": mode, "num_nextn_predict_layers": 1} | sizes | (published if mode == "published" else default)
    if name.endswith("-tiny"):
        tiny, tiny_published = _TINY_STAGES[stage]
        fields |= _TINY_SIZES | tiny | (tiny_published if mode == "published" else {})
        if "num_expert_groups" in fields:
            fields |= {"num_expert_groups": 4, "members_per_group": 2}
    return LightningLMConfig(**fields | overrides)
