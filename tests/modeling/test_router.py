"""Routers: picks and weights by definition, ties, fp32 throughout, null slots, and the exactness of the grouped one."""

import pytest
import torch

from lightninglm.modeling.layer_context import LayerContext
from lightninglm.modeling.moe import MoEBlock
from lightninglm.modeling.router import FlatRouter, GroupedRouter, build_router, top_k
from tests.modeling.mixers import H
from tests.modeling.moe_configs import grouped_config, moe_config


def softmax_config(**changes):
    return moe_config(router_scoring="softmax", balance="aux", num_null_experts=8, null_renorm=True, **changes)


def tokens(count=64, seed=0):
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def randomize(router, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in router.state_dict().items():
            if "usage" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return router


def test_top_k_is_a_stable_descending_sort():
    scores = torch.randint(-3, 4, (200, 37), generator=torch.Generator().manual_seed(0)) / 2
    scores[0, :3] = torch.tensor([0.0, -0.0, 0.0])
    scores[1, 5], scores[1, 7] = torch.inf, -torch.inf
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(top_k(scores, 37), expected)
    assert torch.equal(top_k(scores, 6), expected[:, :6])


@pytest.mark.parametrize("make_config", [moe_config, grouped_config])
def test_ties_go_to_the_lower_index(make_config):
    router = build_router(make_config())
    for parameter in router.parameters():
        torch.nn.init.zeros_(parameter)
    routing = router(tokens(3), None, record_statistics=False)
    expected = [0, 1] if make_config is moe_config else [0, 1, 2, 5, 6, 7]
    assert routing.experts.tolist() == [expected] * 3
    torch.testing.assert_close(routing.weights.float(), torch.full((3, len(expected)), 1 / len(expected)))


def test_sigmoid_router_by_hand():
    router = randomize(FlatRouter(moe_config(router_z_loss_weight=0.1)))
    x = tokens()
    routing = router(x, None, record_statistics=False)
    logits = x @ router.weight.T
    scores = logits.sigmoid()
    for t in range(x.shape[0]):
        picks = sorted(range(8), key=lambda e: -(scores[t, e] + router.logit_bias[e]).item())[:2]
        assert routing.experts[t].tolist() == picks
        torch.testing.assert_close(routing.weights[t].float(), scores[t, picks] / scores[t, picks].sum())
    torch.testing.assert_close(routing.aux, 0.1 * logits.logsumexp(-1).square().mean())


def test_grouped_router_by_hand():
    router = randomize(GroupedRouter(grouped_config(groups=4, members=5, groups_per_token=2, members_per_group=3)))
    x = tokens()
    routing = router(x, None, record_statistics=False)
    scores = (x @ router.group.weight.T).sigmoid()
    members = (x @ router.member.weight.T).view(-1, 4, 5)
    for t in range(x.shape[0]):
        groups = sorted(range(4), key=lambda g: -(scores[t, g] + router.group_bias[g]).item())[:2]
        experts, weights = [], []
        for g in groups:
            chosen = sorted(range(5), key=lambda m: -(members[t, g, m] + router.member_bias[g, m]).item())[:3]
            experts += [g * 5 + m for m in chosen]
            weights.append(scores[t, g] / scores[t, groups].sum() * members[t, g, chosen].softmax(-1))
        assert routing.experts[t].tolist() == experts
        torch.testing.assert_close(routing.weights[t].float(), torch.cat(weights))


@pytest.mark.parametrize("make_config", [moe_config, grouped_config])
def test_weights_are_positive_and_sum_to_one(make_config):
    router = randomize(build_router(make_config()))
    routing = router(tokens(), None, record_statistics=False)
    assert routing.weights.dtype == torch.float64 and routing.weights.min() > 0
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(64, dtype=torch.float64))
    assert all(len(set(picks)) == len(picks) for picks in routing.experts.tolist())


@pytest.mark.parametrize("make_config", [moe_config, grouped_config, softmax_config])
def test_every_router_parameter_has_a_gradient(make_config):
    router = randomize(build_router(make_config()))
    routing = router(tokens(), None, record_statistics=False)
    loss = (routing.weights * torch.randn_like(routing.weights)).sum()
    (loss if routing.aux is None else loss + routing.aux).backward()
    for name, parameter in router.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_group_weights_are_those_of_the_flat_router():
    """What growth rests on: the same operations, hence the same picks and, up to nothing, the same weights."""
    parent = randomize(FlatRouter(moe_config()))
    router = GroupedRouter(grouped_config())
    router.group.weight.data.copy_(parent.weight)
    router.group_bias.copy_(parent.logit_bias)
    x = tokens(500)
    flat, grouped = parent(x, None, False), router(x, None, False)
    assert torch.equal(grouped.experts[:, ::3] // 5, flat.experts)
    torch.testing.assert_close(grouped.weights.view(-1, 2, 3).sum(-1), flat.weights)


@pytest.mark.parametrize("member_std", [0.02, 3.0])
def test_identical_clones_compute_what_the_parent_computed(member_std):
    torch.manual_seed(0)
    parent, grown = MoEBlock(moe_config(), 0), MoEBlock(grouped_config(), 0)
    randomize(parent.router)
    grown.shared_expert.load_state_dict(parent.shared_expert.state_dict())
    grown.router.group.weight.data.copy_(parent.router.weight)
    grown.router.group_bias.copy_(parent.router.logit_bias)
    torch.nn.init.normal_(grown.router.member.weight, std=member_std)
    torch.nn.init.normal_(grown.router.member_bias, std=member_std)
    for name, parameter in parent.experts.named_parameters():
        parameter.data.normal_(std=0.3)
        grown.experts.get_parameter(name).data.copy_(parameter.repeat_interleave(5, dim=0))
    x = tokens(256).view(4, 64, H)
    ctx = LayerContext(position_ids=torch.arange(64).expand(4, 64))
    expected, _ = parent(x, ctx)
    actual, _ = grown(x, ctx)
    assert expected.abs().max() > 1
    assert (actual - expected).norm() < 1e-6 * expected.norm()


def test_published_softmax_router_by_hand():
    router = randomize(FlatRouter(softmax_config()))
    x, keep = tokens(), torch.arange(64) < 50
    routing = router(x, keep, record_statistics=True)
    logits = x @ router.weight.T + router.logit_bias
    slots = torch.cat((logits, router.null_logit.expand(64, 8)), 1)
    real_picks = torch.zeros(8)
    null_picks = 0
    for t in range(64):
        picks = sorted(range(16), key=lambda s: -slots[t, s].item())[:2]
        assert routing.experts[t].tolist() == [e if e < 8 else -1 for e in picks]
        weights = slots[t, picks].softmax(-1) * torch.tensor([float(e < 8) for e in picks])
        torch.testing.assert_close(routing.weights[t].float(), weights / weights.sum().clamp(min=1e-6))
        for e in picks if keep[t] else ():
            if e < 8:
                real_picks[e] += 1
            else:
                null_picks += 1
    balance = 8 * (real_picks / real_picks.sum() * logits[keep].softmax(-1).mean(0)).sum()
    z = slots[keep].logsumexp(-1).square().mean()
    null = (null_picks / 100 - 0.5) ** 2
    torch.testing.assert_close(routing.aux, 0.02 * balance + 0.001 * z + 0.01 * null)
    assert router.pick_counts.tolist() == [*real_picks.int().tolist(), null_picks]
    assert (routing.experts == -1).any() and (routing.experts >= 0).any()
    counts = (routing.experts >= 0).sum(-1)
    assert torch.equal(routing.weights.sum(-1) > 0, counts > 0)
    assert isinstance(router.logit_bias, torch.nn.Parameter)


def test_null_slots_of_the_sigmoid_router():
    """A token with one real pick keeps a weight below 1, so that it trains the router; the null rate is controlled."""
    router = randomize(FlatRouter(moe_config(num_null_experts=4)))
    router.null_bias.fill_(0.1)
    x = tokens()
    routing = router(x, None, record_statistics=True)
    null = routing.experts == -1
    one_real = null.sum(-1) == 1
    assert one_real.any()
    weight = routing.weights[one_real].sum(-1).float()
    score = (x @ router.weight.T).sigmoid()[one_real].gather(1, routing.experts[one_real].amax(-1, keepdim=True))[:, 0]
    torch.testing.assert_close(weight, score / (score + router.null_logit.sigmoid()))
    assert routing.weights[null].abs().max() == 0

    router.after_optimizer_step(update=True)
    expected = 0.1 - 0.1 * (null.float().mean() - 0.5)
    torch.testing.assert_close(router.null_bias, expected)
    torch.testing.assert_close(FlatRouter(moe_config(num_null_experts=4)).null_bias, torch.tensor(-5.0))


@pytest.mark.parametrize("make_config", [moe_config, grouped_config, softmax_config])
def test_a_bf16_model_routes_in_fp32(make_config):
    router = randomize(build_router(make_config()))
    expected = router(tokens().bfloat16().float(), None, False)
    state = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    model = torch.nn.ModuleDict({"router": router, "other": torch.nn.Linear(2, 2)}).bfloat16()
    assert model["other"].weight.dtype == torch.bfloat16
    for name, tensor in router.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = router(tokens().bfloat16(), None, False)
    assert torch.equal(actual.experts, expected.experts)
    assert torch.equal(actual.weights, expected.weights)


def test_a_router_forced_to_bf16_is_refused():
    router = build_router(moe_config())
    router.weight.data = router.weight.data.bfloat16()
    with pytest.raises(ValueError, match="float32"):
        router(tokens(), None, False)


@pytest.mark.parametrize(
    ("make_config", "changes"),
    [
        (moe_config, {"router_scoring": "softmax", "balance": "sign"}),
        (moe_config, {"balance": "aux"}),
        (grouped_config, {"router_scoring": "softmax", "balance": "aux"}),
        (grouped_config, {"balance": "aux"}),
    ],
)
def test_contradictory_settings_are_refused(make_config, changes):
    with pytest.raises(ValueError, match="router_scoring"):
        make_config(**changes)
