"""Presets: parameter counts of the published sizes, tiny models of each that train."""

import pytest
import torch

from lightninglm.modeling import PRESETS, LightningLMForCausalLM, count_parameters, preset
from tests.modeling.tiny_models import INT8, TOKENS, random_ids, tiny_config

# (stored, stored with the second-token layer, active, active with it)
COUNTS = {
    ("2b", "published"): (1_490_253_946, 1_653_102_772, 1_490_253_946, 1_653_102_772),
    ("5b", "published"): (3_504_175_394, 3_918_764_401, 1_692_236_066, 1_880_332_657),
    ("9b", "published"): (7_904_769_746, 8_319_358_753, 3_374_921_426, 3_563_018_017),
    ("120b", "published"): (118_670_439_746, 119_085_028_733, 5_927_548_226, 6_241_473_917),
    ("2b", "default"): (1_490_253_946, 1_653_102_772, 1_490_253_946, 1_653_102_772),
    ("5b", "default"): (3_504_175_226, 3_918_764_212, 1_692_235_898, 1_880_332_468),
    ("9b", "default"): (7_904_769_326, 8_319_358_312, 3_374_921_006, 3_563_017_576),
    ("120b", "default"): (118_672_078_126, 119_086_667_112, 5_929_186_606, 6_117_283_176),
}


@pytest.mark.parametrize("stage, mode", COUNTS)
def test_parameter_counts_of_the_stages(stage, mode):
    alone = count_parameters(preset(f"lightninglm-{stage}", mode, num_nextn_predict_layers=0))
    whole = count_parameters(preset(f"lightninglm-{stage}", mode))
    assert (alone.stored, whole.stored, alone.active, whole.active) == COUNTS[stage, mode]
    assert sum(whole.blocks.values()) == whole.stored and alone.adapters == 0


def test_adapters_of_the_largest_stage():
    quantization = {"kind": "int4", "group_size": 128, "rank": 16, "seed": 0}
    alone = count_parameters(preset("lightninglm-120b", expert_quantization=quantization, num_nextn_predict_layers=0))
    whole = count_parameters(preset("lightninglm-120b", expert_quantization=quantization))
    assert alone.adapters == alone.blocks["adapters"] == 2_260_992_000
    assert whole.adapters == 2_260_992_000 + 4_915_200
    assert alone.stored == COUNTS["120b", "default"][0] + alone.adapters
    assert alone.active == COUNTS["120b", "default"][2] + alone.adapters * 12 // 460


def test_blocks_have_the_sizes_of_the_specification():
    blocks = count_parameters(preset("lightninglm-120b", "published")).blocks
    assert blocks == {
        "embedding": 33_558_528,
        "head": 536_875_008,
        "memory": 12_290,
        "mixer": 15 * 84_209_952 + 5 * 103_301_124,
        "hyper_connections": 20 * 827_446,
        "shared_expert": 20 * 25_165_824,
        "router": 20 * (1_884_160 + 1),
        "routed_experts": 20 * 460 * 12_582_912,
        "mtp.fusion": 33_554_432,
        "mtp.mixer": 103_301_124,
        "mtp.hyper_connections": 827_446,
        "mtp.shared_expert": 25_165_824,
        "mtp.router": 81_920 + 1,
        "mtp.routed_experts": 20 * 12_582_912,
    }


def test_counting_allocates_nothing_and_counts_a_real_model_right():
    for quantization in (None, INT8, INT8 | {"kind": "int4"}):
        config = tiny_config("grouped", expert_quantization=quantization)
        model, count = LightningLMForCausalLM(config), count_parameters(config)
        frozen = 0 if quantization is None else count.blocks["routed_experts"] + count.blocks["mtp.routed_experts"]
        assert count.stored == sum(p.numel() for p in model.parameters()) + frozen


@pytest.mark.parametrize("mode", ["default", "published"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
def test_tiny_presets_train(name, mode):
    config = preset(name, mode)
    full = preset(name.removesuffix("-tiny"), mode)
    for field in ("mode", "stack", "mtp_stack", "router_layout", "router_scoring", "balance", "blends", "layer_types"):
        ours, theirs = getattr(config, field), getattr(full, field)
        assert ours == (theirs[: len(ours)] if isinstance(ours, list) else theirs), field
    assert (config.num_null_experts > 0) == (full.num_null_experts > 0)
    torch.manual_seed(0)
    model = LightningLMForCausalLM(config)
    model.set_token_bytes(TOKENS)
    ids = random_ids(2, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_optimizer_step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


def test_what_no_preset_can_be_is_refused():
    with pytest.raises(ValueError, match="unknown preset 'lightninglm-3b': must be one of lightninglm-2b"):
        preset("lightninglm-3b")
    with pytest.raises(ValueError, match=r"config\.num_experts_per_tok"):
        preset("lightninglm-5b", num_experts_per_tok=1)
