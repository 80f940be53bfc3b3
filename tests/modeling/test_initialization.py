"""Initial values: by name and seed alone, on any rank, once; and the roles of parameters."""

import math

import pytest
import torch

from lightninglm.modeling import (
    LightningLMForCausalLM,
    LightningLMModel,
    initial_tensor,
    initialization,
    initialize_model,
    role,
)
from lightninglm.modeling.experts import shard_experts
from lightninglm.modeling.initialization import canonical_tensors
from lightninglm.modeling.quantized_experts import quantize_experts
from tests.modeling.tiny_models import INT8, ROUTERS, TOKENS, random_ids, tiny_config, tiny_model

KINDS = [*ROUTERS, "quantized"]


def config_of(kind):
    return tiny_config("grouped", expert_quantization=INT8) if kind == "quantized" else tiny_config(kind)


def draw(name, shape=(64, 64), seed=0, **fields):
    return initial_tensor(name, shape, torch.float32, tiny_config("flat", **fields), seed)


def on_meta(config):
    with torch.device("meta"):
        return LightningLMForCausalLM(config)


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def test_values_depend_on_name_and_seed_only():
    name = "model.layers.0.mixer.q_proj.weight"
    torch.manual_seed(1)
    first = draw(name)
    torch.manual_seed(2)
    assert torch.equal(first, draw(name))
    assert not torch.equal(first, draw(name, seed=1))
    assert not torch.equal(first, draw("model.layers.1.mixer.q_proj.weight"))


@pytest.mark.parametrize(
    "name, shape, std",
    [
        ("lm_head.weight", (256, 256), 0.02),
        ("model.layers.0.mlp_connection.phi_res.weight", (16, 4096), 0.02),
        ("model.layers.1.mlp.experts.7.down_proj.weight", (256, 256), 0.02),
        ("model.layers.1.mlp.router.member.weight", (256, 256), 0.02),
        ("model.layers.3.mixer.indexer.w_proj.weight", (256, 256), 0.02),
        ("model.layers.3.mixer.gv_proj.weight", (256, 256), 0.02),
        ("model.memory.gate.weight", (1, 65536), 0.02),
        ("mtp.fusion_proj.weight", (256, 256), 0.02),
        ("model.embed_tokens.proj.weight", (16, 8192), 0.02 / math.sqrt(8192)),
        ("model.layers.1.mlp.experts.7.up_proj.B", (64, 1024), 1 / 32),
        ("model.layers.0.mixer.k_conv1d.weight", (16384, 1, 4), 1 / math.sqrt(12)),
        ("model.layers.0.mixer.dt_bias", (65536,), 0.01 / math.sqrt(3)),
    ],
)
def test_spread_of_the_random_tensors(name, shape, std):
    values = draw(name, shape)
    assert values.shape == shape
    assert values.std().item() == pytest.approx(std, rel=0.03)
    assert abs(values.mean().item()) < 0.03 * std


@pytest.mark.parametrize(
    "name, shape, value",
    [
        ("model.layers.0.mixer.D", (4,), 1.0),
        ("model.layers.0.mixer.o_norm.weight", (16,), 1.0),
        ("model.layers.0.mixer.b_proj.bias", (4,), 0.0),
        ("model.layers.0.mixer_connection.alpha_res", (), 0.1),
        ("model.layers.0.mlp_connection.b_post", (4,), 0.0),
        ("model.layers.3.mixer.indexer.gate_bias", (4,), 0.0),
        ("model.layers.3.mixer.variance_ema", (), 1.0),
        ("model.memory.scale", (), -2.5),
        ("model.memory.norm.bias", (64,), 0.0),
        ("model.layers.0.mlp.router.logit_bias", (20,), 0.0),
        ("model.layers.0.mlp.router.usage_ema", (20,), 0.05),
        ("model.layers.0.mlp.router.member_usage_ema", (20, 25), 0.04),
        ("model.layers.0.mlp.router.null_bias", (), -5.0),
        ("model.layers.0.mlp.experts.3.gate_proj.A", (32, 4), 0.0),
    ],
)
def test_values_of_the_constant_tensors(name, shape, value):
    assert torch.equal(draw(name, shape), torch.full(shape, value))


def test_identity_start_of_the_mixing_matrix_and_the_coefficients_of_the_stack():
    assert torch.equal(draw("model.layers.0.mixer_connection.b_res", (4, 4)), 4 * torch.eye(4))
    assert torch.equal(draw("model.step_size", (4,)), torch.tensor([0.125, 0.25, 0.25, 0.25]))
    assert torch.equal(draw("model.blend", (4,), mode="published"), torch.full((4,), 0.5))


def test_decay_starts():
    rate = draw("model.layers.0.mixer.A_log", (20000,)).exp()
    assert rate.min() >= 1e-4 and rate.max() <= 16 and rate.mean().item() == pytest.approx(8, rel=0.02)
    slow = draw("model.layers.0.mixer.A_log", (20000,), decay_init="slow").exp()
    assert slow.min() >= 1 - 1e-5 and slow.max() <= 16 + 1e-4
    step = torch.nn.functional.softplus(draw("model.layers.0.mixer.dt_bias", (20000,), decay_init="slow")).log()
    assert math.log(1e-3) - 1e-3 <= step.min() and step.max() <= math.log(1e-1) + 1e-3
    assert step.mean().item() == pytest.approx((math.log(1e-3) + math.log(1e-1)) / 2, abs=0.05)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mixer.r_proj.scale", "model.layers.0.mlp.experts.2.gate_proj.weight2", "x"]
)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=f"no initial values are known for a tensor named '{name}'"):
        draw(name)


def test_a_stack_of_experts_has_no_values_of_its_own():
    with pytest.raises(ValueError, match="stacks the experts of a layer"):
        draw("model.layers.0.mlp.experts.gate_proj.weight", (4, 32, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_models_get_the_values_of_real_ones(kind):
    config = config_of(kind)
    direct, from_meta = LightningLMForCausalLM(config), on_meta(config)
    for model in (direct, from_meta):
        initialize_model(model, seed=3)
    assert not [name for name, t in [*from_meta.named_parameters(), *from_meta.named_buffers()] if t.is_meta]
    assert_same(direct.state_dict(), from_meta.state_dict())
    for (name, a), (_, b) in zip(direct.named_buffers(), from_meta.named_buffers(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, name
    from_meta.set_token_bytes(TOKENS)
    assert from_meta(random_ids(1, 8)).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["flat", "quantized"])
def test_ranks_with_a_block_of_the_experts_get_the_rows_of_the_whole(kind):
    config = config_of(kind)
    whole = LightningLMForCausalLM(config)
    initialize_model(whole, seed=3)
    for start, count, padded in ((0, 2, 2), (2, 1, 2), (4, 0, 2)):
        part = on_meta(config)
        for module in part.modules():
            if hasattr(module, "expert_start"):
                shard_experts(module, start, count, padded)
        initialize_model(part, seed=3)
        expected = whole.state_dict()
        for name, module, leaf, stacked in canonical_tensors(part):
            tensor, full = getattr(module, leaf), expected[name]
            if stacked:
                assert torch.equal(tensor[:count], full[start : start + count]) and not tensor[count:].any(), name
            else:
                assert torch.equal(tensor, full), name


def test_quantized_start_is_the_dense_start_quantized():
    dense, quantized = (LightningLMForCausalLM(config) for config in (tiny_config("grouped"), config_of("quantized")))
    for model in (dense, quantized):
        initialize_model(model, seed=3)
    block = quantized.model.layers[2].mlp.experts
    expected = quantize_experts(dense.model.layers[2].mlp.experts, quantized.config, layer_idx=2)
    for name, tensor in expected.state_dict().items():
        if not name.endswith(".B"):
            assert torch.equal(block.state_dict()[name], tensor), name


def test_attributes_set_on_meta_parameters_survive():
    model = on_meta(tiny_config("flat"))
    model.lm_head.weight.group_name = "ep_size_2"
    model.lm_head.weight.requires_grad_(False)
    initialize_model(model, seed=0)
    assert model.lm_head.weight.group_name == "ep_size_2" and not model.lm_head.weight.requires_grad


def test_model_without_head_gets_the_same_values():
    config = tiny_config("flat")
    body, whole = LightningLMModel(config), LightningLMForCausalLM(config)
    for model in (body, whole):
        initialize_model(model, seed=3)
    assert_same(body.state_dict(), whole.model.state_dict())


def test_construction_visits_each_tensor_once_and_follows_the_global_seed(monkeypatch):
    visited = []

    def record(name, *args):
        visited.append(name)
        return initial_tensor(name, *args)

    monkeypatch.setattr(initialization, "initial_tensor", record)
    first = tiny_model("flat", seed=5).state_dict()
    assert len(visited) == len(set(visited))
    assert_same(first, tiny_model("flat", seed=5).state_dict())
    other = tiny_model("flat", seed=6).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_initializing_again_keeps_the_byte_table_and_clears_counters():
    model, ids = tiny_model("flat").train(), random_ids(2, 16)
    model(ids, labels=ids)
    initialize_model(model, seed=0)
    assert not any(count.any() for count in model.after_optimizer_step())
    assert torch.equal(model.model.embed_tokens.token_bytes[65, :2], torch.tensor([65, 0], dtype=torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_roles(kind):
    roles = {name: role(name) for name, _ in LightningLMForCausalLM(config_of(kind)).named_parameters()}
    assert {name for name, r in roles.items() if r == "router"} == {name for name in roles if ".router." in name}
    adapters = {name for name in roles if name.endswith((".A", ".B"))}
    assert {name for name, r in roles.items() if r == "adapters"} == adapters
    assert bool(adapters) == (kind == "quantized")
    assert role("mtp.layer.mlp.experts.17.down_proj.A") == "adapters"
    assert role("model.layers.0.mlp.experts.3.up_proj.weight") == "rest"
