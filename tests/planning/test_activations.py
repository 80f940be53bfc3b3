"""The planned activations are those of the real stack and model: live bytes counted through forward and backward."""

import re

import pytest
import torch

from lightninglm.modeling.configuration_lightninglm import LightningLMConfig
from lightninglm.modeling.decoder_layer import DecoderLayer
from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.modeling_lightninglm import LightningLMForCausalLM
from lightninglm.modeling.reversible import reversible_stack
from lightninglm.modeling.rotary import RotaryEmbedding
from lightninglm.planning.activations import activation_bytes, stack_bytes
from tests.planning.live_bytes import LiveBytes

H, T = 128, 512
MOE = {"num_experts": 8, "num_experts_per_tok": 4}
INT8 = MOE | {"expert_quantization": {"kind": "int8", "group_size": 32, "rank": 8, "seed": 0}}
ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2}
BACKENDS = {"reversible": "reversible", "checkpointed": "checkpointed", "plain": "stored"}


def small_config(**changes):
    """The widths of the large model divided by 32, its ratios kept."""
    values = {
        "vocab_size": 512, "hidden_size": H, "num_hidden_layers": 4, "intermediate_size": H // 2,
        "moe_intermediate_size": H // 4, "linear_num_heads": 2, "linear_head_dim": 64, "num_attention_heads": 2,
        "head_dim": 64, "indexer_num_heads": 2, "indexer_head_dim": 32, "max_token_bytes": 4,
    }  # fmt: skip
    return LightningLMConfig(**values | changes)


def as_trained(module, dtype):
    """Parameters in the dtypes of a run, their gradients there already."""
    keeps_fp32 = re.compile("|".join(LightningLMForCausalLM._keep_in_fp32_modules_strict))
    for name, parameter in module.named_parameters():
        if not keeps_fp32.search(f".{name}"):
            parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.zeros_like(parameter)
    return module.train()


def held(module):
    return [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]


def measured_stack(config, way, dtype, length=T):
    """Most bytes alive while the stack is trained on one sequence."""
    torch.manual_seed(0)
    layers = [as_trained(DecoderLayer(config, i), dtype) for i in range(config.num_hidden_layers)]
    positions = torch.arange(length)[None]
    ctx = LayerContext(position_ids=positions, rotary=RotaryEmbedding(config)(positions))
    x = torch.randn(1, length, H, requires_grad=True)
    x.grad = torch.zeros_like(x)
    with LiveBytes([x, x.grad, *(tensor for layer in layers for tensor in held(layer))]) as live:
        out, aux = reversible_stack(
            layers,
            torch.nn.functional.pad(x.unsqueeze(2), (0, 0, 0, config.num_streams - 1)),
            ctx,
            config.step_sizes,
            config.blends,
            backend=BACKENDS[way],
        )
        loss = out.mean(2).sum() + aux
        del out
        loss.backward()
    return live.peak


def test_reversible_activations_are_as_planned_and_flat_at_8_20_and_40_layers():
    planned, measured = [], []
    for depth in (8, 20, 40):
        config = small_config(num_hidden_layers=depth)
        planned.append(stack_bytes(config, 4, 256, 1)["reversible"])
        measured.append(measured_stack(config, "reversible", torch.float32, length=256))
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned[0] == planned[1] == planned[2]
    assert max(measured) <= 1.01 * min(measured)


def test_residual_bits_grow_by_one_per_element_and_layer():
    shallow, deep = (stack_bytes(small_config(num_hidden_layers=n, default_blend=0.5), 2, T, 1) for n in (8, 40))
    assert deep["reversible"] - shallow["reversible"] == 32 * T * 4 * H // 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [{}, MOE, INT8], ids=["dense", "moe", "int8"])
def test_every_way_to_train_the_stack_is_as_planned(experts, dtype):
    config = small_config(**experts)
    planned = stack_bytes(config, ITEM_BYTES[dtype], T, 1)
    measured = {way: measured_stack(config, way, dtype) for way in planned}
    assert planned == pytest.approx(measured, rel=0.1)
    assert planned["reversible"] < planned["plain"]


def test_long_sequences_are_as_planned():
    config = small_config(layer_types=["indexed_attention"] * 2, num_hidden_layers=2)
    measured = measured_stack(config, "reversible", torch.bfloat16, length=1280)
    assert stack_bytes(config, 2, 1280, 1)["reversible"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({}, "stack"),
        ({"vocab_size": 8192}, "loss"),
        (MOE | {"mode": "published", "num_null_experts": 8}, "stack"),
        ({"stack": "sequential"}, "second_token"),
    ],
    ids=["stack", "loss", "published", "sequential"],
)
def test_the_whole_model_is_as_planned(changes, phase):
    config = small_config(num_nextn_predict_layers=1, **changes)
    torch.manual_seed(0)
    model = as_trained(LightningLMForCausalLM(config), torch.float32)
    model.set_token_bytes([bytes([i % 256, i // 256]) for i in range(config.vocab_size)])
    ids = torch.randint(0, config.vocab_size, (1, T))
    with LiveBytes([ids, *held(model)]) as live:
        model(ids, labels=ids).loss.backward()
    planned = activation_bytes(config, 4, T, 1)
    assert planned.peak == pytest.approx(live.peak, rel=0.1)
    assert planned.peak == getattr(planned, phase)


def test_planned_bytes_are_proportional_to_the_micro_batch_but_for_the_loss():
    config = small_config(**MOE)
    one, four = (activation_bytes(config, 2, T, n) for n in (1, 4))
    assert four.stack == 4 * one.stack and four.dispatch == 4 * one.dispatch
    assert four.loss < 4 * one.loss
