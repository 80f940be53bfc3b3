"""Experts: the grouped products equal the loop one reads, all gradients exist, blocks of experts can be cut out."""

import pytest
import torch

from lightninglm.modeling.experts import Experts, shard_experts
from lightninglm.modeling.moe import build_experts
from lightninglm.modeling.quantized_experts import QuantizedExperts, quantize_experts
from tests.modeling.mixers import H
from tests.modeling.moe_configs import F, moe_config, quantized_config

COUNTS = {
    "mixed": [3, 0, 7, 1, 0, 12, 5, 4],
    "one expert": [0, 0, 32, 0, 0, 0, 0, 0],
    "no rows": [0] * 8,
}


def make_experts(backend="torch", **changes):
    torch.manual_seed(0)
    experts = Experts(moe_config(experts_backend=backend, **changes))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def run(experts, counts, frozen=()):
    counts = torch.tensor(counts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(int(counts.sum()), H, generator=generator).requires_grad_()
    for name in frozen:
        experts.get_parameter(name).requires_grad_(False)
    y = experts(x, counts)
    y.backward(torch.randn(y.shape, generator=generator))
    return y.detach(), x.grad, {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("backend", ["torch", "grouped_mm"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_grouped_products_equal_the_naive_loop(backend, counts):
    y, grad_x, grads = run(make_experts(backend), counts)
    expected_y, expected_grad_x, expected_grads = run(make_experts("naive"), counts)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(grad_x, expected_grad_x)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name])


@pytest.mark.parametrize("backend", ["torch", "grouped_mm"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_experts_without_tokens_get_zero_gradients(backend, counts):
    _, _, grads = run(make_experts(backend), counts)
    assert len(grads) == 3
    for name, grad in grads.items():
        used = grad.abs().sum((1, 2)) > 0
        assert used.tolist() == [count > 0 for count in counts], name


def test_the_recompute_is_bitwise_the_forward_pass():
    experts = make_experts()
    counts = torch.tensor(COUNTS["mixed"])
    x = torch.randn(32, H)
    with torch.no_grad():
        expected = experts(x, counts)
    assert torch.equal(experts(x.clone().requires_grad_(), counts), expected)


def test_frozen_weights_get_no_gradient_and_do_not_stop_the_others():
    _, grad_x, grads = run(make_experts(), COUNTS["mixed"], frozen=["up_proj.weight", "down_proj.weight"])
    _, expected_grad_x, expected = run(make_experts(), COUNTS["mixed"])
    assert grads["up_proj.weight"] is None and grads["down_proj.weight"] is None
    torch.testing.assert_close(grads["gate_proj.weight"], expected["gate_proj.weight"])
    torch.testing.assert_close(grad_x, expected_grad_x)


def test_only_inputs_and_two_products_are_kept_for_the_backward_pass():
    experts = make_experts()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(torch.randn(32, H, requires_grad=True), torch.tensor(COUNTS["mixed"]))
    weights = {p.data_ptr() for p in experts.parameters()}
    assert sorted(t.numel() for t in saved if t.data_ptr() not in weights) == [32 * F, 32 * F, 32 * H]


def test_sizes_that_grouped_mm_cannot_align_are_refused_or_looped():
    with pytest.raises(ValueError, match=r"moe_intermediate_size = 12.*'grouped_mm' needs a multiple of 8"):
        make_experts("grouped_mm", moe_intermediate_size=12)
    assert make_experts("auto", moe_intermediate_size=12).backend == "torch"


@pytest.mark.parametrize("kind", [None, "int8", "int4", "codebook"])
@pytest.mark.parametrize(("start", "count", "padded"), [(0, 3, 3), (3, 2, 3), (7, 1, 4), (8, 0, 2)])
def test_shards_compute_what_their_experts_computed(kind, start, count, padded):
    config = moe_config() if kind is None else quantized_config(kind)
    torch.manual_seed(0)
    whole, shard = Experts(config), Experts(config)
    shard.load_state_dict(whole.state_dict())
    if kind is not None:
        whole, shard = (quantize_experts(e, config, 0) for e in (whole, shard))
        for a, b in zip(whole.parameters(), shard.parameters(), strict=True):
            b.data.copy_(a.data.normal_(std=0.3))
    shard_experts(shard, start, count, padded)
    assert (shard.expert_start, shard.expert_count, shard.num_local_experts) == (start, count, padded)
    assert shard.num_experts == 8
    local = [2 + i for i in range(count)]
    x = torch.randn(sum(local), H)
    y = shard(x, torch.tensor(local + [0] * (padded - count)))
    expected = whole(x, torch.tensor([0] * start + local + [0] * (8 - start - count)))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for stack in (shard.gate_proj, shard.up_proj, shard.down_proj):
        for name, tensor in stack.state_dict().items():
            assert tensor.shape[0] == padded and tensor[count:].count_nonzero() == 0, name
    y.sum().backward()
    assert all(p.grad is not None for p in shard.parameters())


@pytest.mark.parametrize("kind", [None, "int8", "int4", "codebook"])
def test_experts_are_sharded_on_the_meta_device(kind):
    config = moe_config() if kind is None else quantized_config(kind)
    with torch.device("meta"):
        experts = build_experts(config, layer_idx=0)
    assert isinstance(experts, Experts if kind is None else QuantizedExperts)
    shard_experts(experts, 2, 3, 4)
    for stack in (experts.gate_proj, experts.up_proj, experts.down_proj):
        for tensor in stack.state_dict().values():
            assert tensor.is_meta and tensor.shape[0] == 4
        assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in stack.parameters())


def test_impossible_shards_are_refused():
    for block in [(0, 9, 9), (-1, 2, 2), (6, 3, 3), (0, 3, 2)]:
        with pytest.raises(ValueError, match="cannot keep experts"):
            shard_experts(make_experts(), *block)
    experts = make_experts()
    shard_experts(experts, 0, 4, 4)
    with pytest.raises(ValueError, match="sharded already"):
        shard_experts(experts, 0, 2, 2)
