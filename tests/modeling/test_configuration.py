"""The configuration: what cannot work is refused by the name of its field, with the reason."""

import pytest

from lightninglm.modeling import LightningLMConfig
from lightninglm.modeling.configuration_lightninglm import PUBLISHED_SWITCHES
from tests.modeling.moe_configs import grouped_config, moe_config, quantized_config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"step_sizes": [0.125, 0.25, 0.0, 0.25]},
            "step_sizes: 1 zero-step layer.* at 2..2; .* must have an even length",
        ),
        ({"step_sizes": [0.125, 0.0, 0.0, 0.0]}, "step_sizes: 3 zero-step layer.* at 1..3"),
        ({"step_sizes": [0.125, 0.0, 0.0, 0.25], "blends": [1, 1, 0.5, 1]}, r"step_sizes\[2\] = 0 .* needs blend 1"),
        ({"step_sizes": [0.125, -0.25, 0.25, 0.25]}, r"step_sizes\[1\] = -0.25: must be finite and not negative"),
        ({"step_sizes": [0.125, 0.25, 0.25]}, "step_sizes has 3 entries: must be num_hidden_layers = 4"),
        ({"blends": [1.0, 0.75, 1.0, 1.0]}, r"blends\[1\] = 0.75: must be 1 or 0.5, only these invert exactly"),
        ({"hidden_dropout": 0.1}, "hidden_dropout = 0.1: must be 0, .* could not be rebuilt in the backward pass"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: must be 0"),
        ({"frac_bits": 30}, "frac_bits = 30: must be between 8 and 24"),
        ({"linear_head_dim": 12}, r"linear_num_heads \* config.linear_head_dim = 4 \* 12: must equal hidden_size = 32"),
        ({"num_attention_heads": 3}, r"num_attention_heads \* config.head_dim = 3 \* 16: must equal hidden_size"),
        ({"num_attention_heads": 32, "head_dim": 1}, "head_dim = 1: must be even"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types = 'full_attention': must be one of"),
        ({"sparse_min_keys": 300}, "sparse_min_keys = 300: above sparse_max_keys = 12"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True: the byte embedding has no table"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2: must be 0 or 1"),
        ({"sinkhorn_iterations": 0}, "sinkhorn_iterations = 0: must be at least 1"),
        ({"logit_softcap": -1.0}, "logit_softcap = -1.0: must not be negative"),
        ({"stack_backend": "reversable"}, "stack_backend = 'reversable': must be one of 'reversible', 'stored'"),
        ({"experts_backend": "cutlass"}, "experts_backend = 'cutlass': must be one of"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be .* at most the 8 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1: must be at least 2 .*trains no router"),
        ({"num_nextn_predict_layers": 1, "mtp_num_experts_per_tok": 9}, "mtp_num_experts_per_tok = 9"),
        ({"balance_band": [1.5, 2.0]}, "balance_band .* needs 0 < lo < 1 < hi"),
        ({"balance": "aux"}, "balance = 'aux' with router_scoring = 'sigmoid'"),
        (
            {"num_experts": 0, "expert_quantization": {}},
            "expert_quantization is set, but num_experts = 0: a dense model has no experts",
        ),
        ({"expert_quantization": {"kind": "int8"}}, r"expert_quantization has keys \['kind'\]: needs"),
    ],
)
def test_values_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=rf"config\.{message}"):
        moe_config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 14}, "num_expert_groups = 4: must divide the 14 experts"),
        ({"num_experts_per_tok": 5}, r"groups_per_token \* members_per_group = 2 \* 2: must equal .* = 5"),
        ({"groups_per_token": 1, "num_experts_per_tok": 2}, "groups_per_token = 1: must be between 2 and 4"),
        ({"members_per_group": 4, "num_experts_per_tok": 8}, "members_per_group = 4: must be between 2 and 3"),
        ({"num_null_experts": 4}, "num_null_experts: null slots need router_layout = 'flat'"),
        ({"router_scoring": "softmax", "balance": "aux"}, "router_scoring = 'softmax': .* 'grouped' needs 'sigmoid'"),
    ],
)
def test_groups_that_do_not_tile_the_experts_are_refused(fields, message):
    tiles = {"num_expert_groups": 4, "groups_per_token": 2, "members_per_group": 2, "num_experts_per_tok": 4}
    with pytest.raises(ValueError, match=rf"config\.{message}"):
        moe_config(**{"router_layout": "grouped", "num_experts": 12} | tiles | fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 12}, "group_size = 12: must divide hidden_size = 32"),
        ({"rank": 17}, "rank = 17: must be between 1 and 16"),
        ({"kind": "nf4"}, "kind = 'nf4': must be one of 'int8', 'int4', 'codebook'"),
    ],
)
def test_quantization_that_does_not_fit_is_refused(changes, message):
    quantization = quantized_config("int8").expert_quantization
    with pytest.raises(ValueError, match=rf"config\.expert_quantization\.{message}"):
        moe_config(expert_quantization=quantization | changes)


def test_the_mode_sets_what_is_not_given():
    published = moe_config(mode="published", router_scoring="sigmoid", balance="sign")
    given = {"router_scoring": "sigmoid", "balance": "sign"}
    assert all(getattr(published, name) == given.get(name, value) for name, value in PUBLISHED_SWITCHES.items())
    assert published.blends == [0.5] * 4 and moe_config().blends == [1.0] * 4
    with pytest.raises(ValueError, match=r"config\.mode = 'publshed': must be one of 'default', 'published'"):
        moe_config(mode="publshed")


def test_a_configuration_survives_its_json():
    for config in (grouped_config(), quantized_config("int4"), moe_config(mode="published", default_blend=1.0)):
        assert LightningLMConfig(**config.to_dict()).to_dict() == config.to_dict()
