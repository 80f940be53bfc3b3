"""The mixture-of-experts block: the formula, gradients everywhere, repeatable, and any dispatcher or routing."""

import pytest
import torch

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.quantized_experts import QuantizedExperts
from lightninglm.modeling.router import GroupedRouter, Routing
from lightninglm.modeling.token_dispatch import LocalDispatcher
from tests.modeling.mixers import H
from tests.modeling.moe_configs import grouped_config, moe_config, quantized_config

B, T = 2, 24

CONFIGS = {
    "sigmoid": moe_config(),
    "grouped": grouped_config(),
    "null slots": moe_config(num_null_experts=4),
    "published softmax": moe_config(mode="published", num_null_experts=8),
    "published sigmoid": moe_config(mode="published", router_scoring="sigmoid", balance="banded", num_null_experts=0),
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


def weights_by_definition(router, x_TH, picks_TK):
    """docs/model.md, "Routers and experts": the weights of given picks (-1: a null slot), from the formulas."""
    if isinstance(router, GroupedRouter):
        groups = picks_TK[:, :: router.members_per_group] // router.group_size
        omega = (x_TH @ router.group.weight.T).sigmoid().gather(1, groups)
        pi = (x_TH @ router.member.weight.T).gather(1, picks_TK).unflatten(1, (router.groups_per_token, -1)).softmax(-1)
        return ((omega / omega.sum(1, keepdim=True)).unsqueeze(-1) * pi).flatten(1)
    scores = x_TH @ router.weight.T
    scores = scores + router.logit_bias if router.softmax else scores.sigmoid()
    if router.num_null:
        null = router.null_logit if router.softmax else router.null_logit.sigmoid()
        scores = torch.cat([scores, null.expand(len(scores), 1)], dim=1)
    picked = scores.gather(1, picks_TK % scores.shape[1])  # -1 is the last column
    weights = picked.softmax(1) if router.softmax else picked / picked.sum(1, keepdim=True)
    if router.num_null:
        weights = weights * (picks_TK >= 0)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-6) if router.null_renorm else weights
    return weights


def by_definition(block, x_TH):
    """y = shared expert + sum over the picks of w_e expert_e(x), token by token; the picks are the block's."""
    picks = block.router(x_TH, None, False).experts
    experts = block.experts
    if isinstance(experts, QuantizedExperts):
        gate, up, down = (experts.merged()[f"{name}_proj"] for name in ("gate", "up", "down"))
    else:
        gate, up, down = (getattr(experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
    rows = []
    for token, tops, weights in zip(x_TH, picks, weights_by_definition(block.router, x_TH, picks), strict=True):
        y = block.shared_expert(token)
        for e, w in zip(tops, weights, strict=True):
            if e >= 0:
                y = y + w * (down[e] @ (torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token)))
        rows.append(y)
    return torch.stack(rows)


@every(CONFIGS)
def test_values_and_gradients_equal_the_definition(config):
    block = make_block(config)
    x, ctx = inputs()
    grad = torch.randn(B, T, H, generator=torch.Generator().manual_seed(2))
    results = []
    for y in (block(x, ctx)[0].flatten(0, 1), by_definition(block, x.flatten(0, 1))):
        wanted = {"x": x} | {name: p for name, p in block.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(y, wanted.values(), grad.flatten(0, 1), allow_unused=True)
        results.append({"y": y} | dict(zip(wanted, grads, strict=True)))
    for name, found in results[0].items():
        expected = results[1][name]
        assert (found is None) == (expected is None), name
        assert found is None or (found - expected).norm() <= 1e-5 * max(expected.norm(), 1e-6), name


@every(CONFIGS)
def test_every_parameter_and_the_input_have_gradients(config):
    block = make_block(config)
    x, ctx = inputs()
    y, aux = block(x, ctx)
    ((y * torch.randn_like(y)).sum() + (0 if aux is None else aux)).backward()
    assert x.grad.abs().sum() > 0
    for name, parameter in block.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().sum() > 0, name


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

    def forward(self, x_TH, keep_T, record_statistics, noise=None):
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
