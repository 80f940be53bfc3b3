"""Dispatch: every pick reaches its expert and comes back, the gradients are autograd's, all of it bit for bit again."""

import pytest
import torch

from lightninglm.modeling.token_dispatch import LocalDispatcher, gather_tokens, permute_rows, sort_picks, weighted_sum

T, K, E, H = 40, 3, 7, 5


def random_picks(null_share=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(T, E, generator=generator).argsort(-1)[:, :K]
    return picks.masked_fill(torch.rand(T, K, generator=generator) < null_share, -1)


CASES = {
    "all real": random_picks(),
    "some null": random_picks(0.4),
    "all null": torch.full((T, K), -1),
    "one expert": torch.full((T, K), 4),
}


@pytest.mark.parametrize("experts", CASES.values(), ids=CASES.keys())
def test_rows_are_sorted_by_expert_then_token(experts):
    picks = sort_picks(experts, E)
    flat = experts.flatten()
    expected = [i for e in range(E) for i in range(T * K) if flat[i] == e]
    assert picks.order.tolist() == expected
    assert picks.counts.tolist() == [(flat == e).sum().item() for e in range(E)]
    for row, pick in enumerate(expected):
        assert picks.rows.flatten()[pick] == row


@pytest.mark.parametrize("experts", CASES.values(), ids=CASES.keys())
def test_round_trip_equals_the_sum_over_picks(experts):
    x = torch.randn(T, H, dtype=torch.float64).float().requires_grad_()
    weights = (torch.rand(T, K) * (experts >= 0)).requires_grad_()
    matrices = torch.randn(E, H, H)
    grad = torch.randn(T, H)

    dispatcher = LocalDispatcher(E)
    state = dispatcher.dispatch(x, experts)
    rows, counts = dispatcher.receive(state)
    outputs = torch.cat([r @ m for r, m in zip(rows.split(counts.tolist()), matrices, strict=True)])
    y = dispatcher.combine(outputs, weights, state)
    actual = torch.autograd.grad(y, (x, weights), grad)

    terms = torch.einsum("th,tkhg->tkg", x, matrices[experts.clamp(min=0)])
    expected_y = (terms * (weights * (experts >= 0))[..., None]).sum(1)
    expected = torch.autograd.grad(expected_y, (x, weights), grad)
    torch.testing.assert_close(y, expected_y)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_pass_a_finite_difference_check():
    picks = sort_picks(random_picks(0.3), E)
    rows = picks.order.numel()
    x = torch.randn(T, 2, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(T)
    assert torch.autograd.gradcheck(permute_rows, (x, order, order.argsort()))
    y = torch.randn(rows, 2, requires_grad=True)
    weights = (torch.rand(T, K) * (~picks.is_null)).requires_grad_()
    options = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-3}  # the sums are fp32, and linear in each input
    single = x.detach().float().requires_grad_()
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(lambda x: gather_tokens(x, picks), (single,), **options)
        assert torch.autograd.gradcheck(lambda y: weighted_sum(y, weights.detach(), picks), (y,), **options)


def test_sums_run_in_pick_order():
    """1e8 - 1e8 + 1 is 1 in this order, and 0 in the order of the experts or backwards."""
    experts = torch.tensor([[2, 0, 1]])
    picks = sort_picks(experts, 3)
    value_of_expert = torch.tensor([[-1e8], [1.0], [1e8]])
    assert weighted_sum(value_of_expert, torch.ones(1, 3), picks).item() == 1.0
    x = torch.zeros(1, 1, requires_grad=True)
    gather_tokens(x, picks).backward(value_of_expert)
    assert x.grad.item() == 1.0


def test_both_passes_repeat_bit_for_bit():
    torch.manual_seed(0)
    experts, weights = random_picks(), torch.rand(T, K)

    def run(grad_enabled):
        x = torch.arange(T * H).float().view(T, H).sin().requires_grad_()
        with torch.set_grad_enabled(grad_enabled):
            state = LocalDispatcher(E).dispatch(x, experts)
            rows, _ = LocalDispatcher(E).receive(state)
            y = LocalDispatcher(E).combine(rows.tanh(), weights, state)
        if grad_enabled:
            y.cos().sum().backward()
        return y.detach(), x.grad

    first, again, without = run(True), run(True), run(False)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and torch.equal(first[0], without[0])


def test_bf16_rows_are_summed_in_fp32():
    experts = random_picks()
    picks = sort_picks(experts, E)
    y = torch.randn(T * K, H).bfloat16().requires_grad_()
    weights = torch.rand(T, K)
    out = weighted_sum(y, weights, picks)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, weighted_sum(y.float(), weights, picks))
    out.sum().backward()
    assert y.grad.dtype == torch.bfloat16


def test_a_dispatcher_without_null_slots_needs_no_row_count_from_the_device():
    experts = random_picks()
    for a, b in zip(sort_picks(experts, E), sort_picks(experts, E, null_picks=False), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
