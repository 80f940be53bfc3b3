"""The mixture-of-experts block: the formula, gradients everywhere, repeatable, and any dispatcher or routing."""

import pytest
import torch

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.router import Routing
from lightninglm.modeling.token_dispatch import LocalDispatcher
from tests.modeling.moe_configs import H, grouped_config, moe_config, quantized_config

B, T = 2, 24

CONFIGS = {
    "sigmoid": moe_config(),
    "grouped": grouped_config(),
    "null slots": moe_config(num_null_experts=4),
    "published softmax": moe_config(router_scoring="softmax", balance="aux", num_null_experts=8, null_renorm=True),
    "int8": quantized_config("int8"),
    "int4": quantized_config("int4"),
    "codebook": quantized_config("codebook"),
}


def make_block(config):
    torch.manual_seed(0)
    block = MoEBlock(config, layer_idx=1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in block.named_buffers():
        if name.endswith("codes"):
            buffer.random_(0, 100)
        elif name.endswith("scales"):
            buffer.uniform_(0.001, 0.01)
        elif name.endswith("null_bias"):
            buffer.zero_()
    return block


def inputs(**changes):
    x = torch.randn(B, T, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return x, LayerContext(position_ids=torch.arange(T).expand(B, T), **changes)


def every(configs):
    return pytest.mark.parametrize("config", configs.values(), ids=configs.keys())


def test_the_output_is_the_shared_expert_plus_the_weighted_picks():
    block = make_block(moe_config())
    x, ctx = inputs()
    y, aux = block(x, ctx)
    routing = block.router(x.flatten(0, 1), None, False)
    gate, up, down = (getattr(block.experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
    expected = block.shared_expert(x).flatten(0, 1).clone()
    for t, token in enumerate(x.flatten(0, 1)):
        for e, w in zip(routing.experts[t], routing.weights[t], strict=True):
            hidden = torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token)
            expected[t] = expected[t] + w * (down[e] @ hidden)
    torch.testing.assert_close(y, expected.view(B, T, H))
    assert aux is None


@every(CONFIGS)
def test_every_parameter_and_the_input_have_gradients(config):
    block = make_block(config)
    x, ctx = inputs()
    y, aux = block(x, ctx)
    ((y * torch.randn_like(y)).sum() + (0 if aux is None else aux)).backward()
    assert x.grad.abs().sum() > 0
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@every(CONFIGS)
def test_the_recompute_is_bitwise_the_forward_pass(config):
    block = make_block(config)
    x, ctx = inputs()
    with torch.no_grad():
        expected, _ = block(x, ctx)
    for _ in range(2):
        y, _ = block(x.detach().requires_grad_(), ctx)
        assert torch.equal(y, expected)


@every(CONFIGS)
def test_gradients_are_bitwise_repeatable(config):
    block = make_block(config)

    def gradients():
        x, ctx = inputs()
        block.zero_grad()
        block(x, ctx)[0].sin().sum().backward()
        return [x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


@every(CONFIGS)
def test_picks_are_counted_when_asked(config):
    block = make_block(config)
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[1, -7:] = False
    x, ctx = inputs(keep_mask=keep)
    block(x, ctx)
    assert block.router.pick_counts.sum() == 0
    x, ctx = inputs(keep_mask=keep, record_statistics=True)
    block(x, ctx)
    assert block.router.pick_counts.sum() == keep.sum() * config.num_experts_per_tok


class FixedRouter(torch.nn.Module):
    """Sends every token to the same experts."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x_TH, keep_T, record_statistics):
        experts = torch.tensor(self.experts).expand(x_TH.shape[0], -1)
        return Routing(experts, torch.full(experts.shape, 1 / experts.shape[1]), None)


@pytest.mark.parametrize("config", [moe_config(), quantized_config("int8"), quantized_config("int4")])
@pytest.mark.parametrize("picks", [[5, 2], [7, -1], [-1, -1]])
def test_adversarial_routing_gives_gradients_where_tokens_went(config, picks):
    block = make_block(config)
    block.router = FixedRouter(picks)
    block.dispatcher = LocalDispatcher(config.num_experts)
    x, ctx = inputs()
    y, _ = block(x, ctx)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    if picks == [-1, -1]:
        torch.testing.assert_close(y, block.shared_expert(x))
    for name, parameter in block.experts.named_parameters():
        moved = parameter.grad.abs().sum((1, 2)) > 0
        assert moved.nonzero().flatten().tolist() == sorted(e for e in picks if e >= 0), name


def test_the_layer_does_not_know_where_its_experts_are():
    """A dispatcher that keeps the experts in another order and pads them gives the same output."""

    class Reordering(LocalDispatcher):
        slot_of_expert = torch.tensor([9, 3, 0, 4, 8, 1, 5, 7])

        def dispatch(self, x_TH, experts_TK):
            return super().dispatch(x_TH, self.slot_of_expert[experts_TK])

    block = make_block(moe_config())
    x, ctx = inputs()
    expected, _ = block(x, ctx)
    for stack in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj):
        weight = torch.zeros(10, *stack.weight.shape[1:])
        weight[Reordering.slot_of_expert] = stack.weight.detach()
        stack.weight = torch.nn.Parameter(weight)
    block.dispatcher = Reordering(10)
    torch.testing.assert_close(block(x, ctx)[0], expected)


def test_a_bf16_block_returns_bf16_and_keeps_its_router():
    block = make_block(moe_config()).bfloat16()
    x, ctx = inputs()
    y, _ = block(x.bfloat16(), ctx)
    assert y.dtype == torch.bfloat16
    assert block.router.weight.dtype == torch.float32
    assert block.experts.gate_proj.weight.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_padding_does_not_change_real_tokens():
    block = make_block(moe_config())
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[0, 10:] = False
    x, ctx = inputs(keep_mask=keep)
    other = torch.where(keep[..., None], x, torch.randn_like(x))
    torch.testing.assert_close(block(x, ctx)[0][keep], block(other, ctx)[0][keep])
